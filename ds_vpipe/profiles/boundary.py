"""What crosses the boundary between two layers, without its values: shapes, types, and what takes gradients.

A rank that profiles layers from the middle of a model needs an input for the first of them. It gets it from the rank
before it, from a file, or from running the layers before on the meta device; all of these are a
:class:`Boundary`, from which an input is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ds_vpipe.errors import Refusal

Tree = Any
"""A tensor, None, or a tuple, list or dict of those; anything else is passed on as it is."""


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """``tree`` with every tensor replaced."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    if isinstance(tree, (tuple, list)):
        items = [map_tensors(function, item) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    return tree


def tensors_in(tree: Tree) -> list[torch.Tensor]:
    """The tensors of ``tree``, in order."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, tree)
    return found


def tensor_bytes(tree: Tree) -> int:
    """Bytes of its tensors as they are sent."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(tree))


@dataclass(frozen=True)
class Boundary:
    """A tree of tensors without values.

    Attributes:
        tree: the tree with ``{"shape": [...], "dtype": "float32", "requires_grad": true}`` in place of tensors; JSON
            types only.
    """

    tree: Any

    @classmethod
    def of(cls, value: Tree) -> Boundary:
        """The boundary that ``value`` is an example of.

        Raises:
            VPipeConfigError: it holds something other than tensors, None, tuples and lists.
        """
        return cls(_describe(value))

    def example(self, device: torch.device | str) -> Tree:
        """An input like it: random numbers, true for booleans, 0 for integers, which is a valid index everywhere."""
        return _make(self.tree, torch.device(device))


def _describe(value: Tree) -> Any:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape), "dtype": dtype, "requires_grad": value.requires_grad}
    if value is None:
        return None
    if isinstance(value, (tuple, list)):
        return [_describe(item) for item in value]
    allowed = "tensors, None, and tuples or lists of them"
    raise Refusal("profile: boundary", type(value).__name__, allowed, "let the layer return those").error()


def _make(tree: Any, device: torch.device) -> Tree:
    if isinstance(tree, list):
        return tuple(_make(item, device) for item in tree)
    if tree is None:
        return None
    dtype = getattr(torch, tree["dtype"])
    if dtype.is_floating_point or dtype.is_complex:
        value = torch.randn(tree["shape"], device=device).to(dtype)
    else:
        value = torch.full(tree["shape"], dtype == torch.bool, dtype=dtype, device=device)
    return value.requires_grad_(tree["requires_grad"])
