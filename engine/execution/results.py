"""Means of whatever a model returns in an evaluation."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ds_vpipe.engine.links.message import Tree
from ds_vpipe.errors import VPipeError


def map_tree(function: Callable[[torch.Tensor], torch.Tensor], tree: Tree) -> Tree:
    """The tree with ``function`` applied to its tensors; None stays."""
    if isinstance(tree, list):
        return [map_tree(function, item) for item in tree]
    if isinstance(tree, tuple):
        return tuple(map_tree(function, item) for item in tree)
    return None if tree is None else function(tree)


def mean_of_trees(trees: Sequence[Tree]) -> Tree:
    """The mean of trees of one form, tensor by tensor: summed in order, then divided.

    Raises:
        VPipeError: shapes differ, or the trees are of different forms.
    """
    first = trees[0]
    if first is None:
        return None
    if isinstance(first, (tuple, list)):
        if any(len(tree) != len(first) for tree in trees):
            raise VPipeError(_different("numbers of tensors", [len(tree) for tree in trees]))
        means = [mean_of_trees(items) for items in zip(*trees, strict=True)]
        return means if isinstance(first, list) else tuple(means)
    if any(tree.shape != first.shape for tree in trees):
        raise VPipeError(_different("shapes", [tuple(tree.shape) for tree in trees]))
    return sum(trees) / len(trees)


def _different(what: str, given: object) -> str:
    return (
        f"eval_batch(reduce_output='avg'): got outputs with {what} {given}, allowed are equal ones; "
        f"take reduce_output=None, which returns the outputs one by one"
    )
