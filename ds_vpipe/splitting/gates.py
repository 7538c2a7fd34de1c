"""Blocks of a chain behind gates, which skip them, run them, or end the user's forward after one of them.

The gates take the blocks' places in the model only while the user's forward runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from ds_vpipe.splitting.absent import Absent, SplitError
from ds_vpipe.splitting.chain import Chain


class Conductor(Protocol):
    """Decides what the call of a block is."""

    def block(self, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the block's outputs, or end the forward."""


class Finished(BaseException):
    """Ends the user's forward early; carries what the next stage needs. No error, hence no ``Exception``."""

    def __init__(self, activations: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.activations = activations


class Gate(nn.Module):
    """In the place of a block during one forward; whatever is asked of it but a call, the block answers."""

    def __init__(self, index: int, block: nn.Module, conductor: Conductor) -> None:
        super().__init__()
        self.training = block.training
        self.__dict__["_index"], self.__dict__["_conductor"] = index, conductor
        self._modules["block"] = block

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        block = self._modules["block"]
        assert block is not None
        return self._conductor.block(self._index, block, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_modules"]["block"], name)


@contextmanager
def gated(chain: Chain, conductor: Conductor) -> Iterator[None]:
    """Inside, calls of the chain's blocks go to ``conductor``."""
    modules = chain.container._modules
    blocks = {key: modules[key] for key in chain.keys}
    for index, (key, block) in enumerate(blocks.items()):
        assert block is not None
        modules[key] = Gate(index, block, conductor)
    try:
        yield
    finally:
        modules.update(blocks)


class Surroundings:
    """Refuses blocks that are called where a boundary between stages cannot be: inside a checkpointed function."""

    def __init__(self) -> None:
        self._expected = _autograd_state()

    def check(self, name: str) -> None:
        """Compare with where the forward began.

        Raises:
            SplitError: they differ.
        """
        if _autograd_state() != self._expected:
            raise SplitError(
                f"{name}: called inside a checkpointed function or with gradients switched off, allowed are blocks "
                f"that are called directly; switch the model's own activation checkpointing of several blocks off and "
                f"use vpipe.recompute_ratio"
            )


def _autograd_state() -> tuple[bool, int]:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return torch.is_grad_enabled(), id(hooks[0]) if hooks else 0


class Outlines:
    """What blocks return for arguments of given shapes, without values."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[list[Any], Any]] = {}

    def outputs(self, index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's outputs with absent tensors; it is run on absent values the first time.

        It is run every time if somebody listens inside of it, such as code that collects all attention weights, which
        would else miss entries without noticing.
        """
        watched = any(module._forward_hooks or module._forward_pre_hooks for module in block.modules())
        leaves, spec = tree_flatten((args, kwargs))
        key = (index, block.training, repr(spec), *(_outline(leaf) for leaf in leaves))
        if key not in self._known or watched:
            with torch.no_grad(), _untouched_generators():
                outputs, out_spec = tree_flatten(block(*args, **kwargs))
            if any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, Absent) for leaf in outputs):
                outputs = [_Passed.of(leaf, leaves) for leaf in outputs]
            self._known[key] = outputs, out_spec
        outputs, out_spec = self._known[key]
        if any(isinstance(leaf, torch.Tensor) and not isinstance(leaf, Absent) for leaf in outputs):
            del self._known[key]  # computed from this call's inputs
        name = f"the output of block {index}"
        made = [leaf.handed_on(name) if isinstance(leaf, Absent) else leaf for leaf in outputs]
        return tree_unflatten([leaves[leaf.index] if isinstance(leaf, _Passed) else leaf for leaf in made], out_spec)


@dataclass(frozen=True)
class _Passed:
    """An output that is one of the arguments, such as a mask that travels along."""

    index: int

    @classmethod
    def of(cls, leaf: Any, arguments: list[Any]) -> Any:
        """It, if ``leaf`` is an argument with a value; else ``leaf``."""
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, Absent):
            return leaf
        return next((cls(index) for index, argument in enumerate(arguments) if argument is leaf), leaf)


def _outline(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (*leaf.shape, leaf.dtype, isinstance(leaf, Absent))
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)


@contextmanager
def _untouched_generators() -> Iterator[None]:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield
