"""Gates in the places of a model's blocks, which pass calls of them on while the user's forward is run in pieces."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from ds_vpipe.splitting.absent import SplitError


class Conductor(Protocol):
    """Decides what the call of a block is."""

    def call(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the block's outputs, or end the forward."""


class Finished(BaseException):
    """Ends the user's forward early; carries what the next stage needs. No error, hence no ``Exception``."""

    def __init__(self, activations: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.activations = activations


class Gate(nn.Module):
    """In the place of a block during one forward; whatever is asked of it but a call, the block answers."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        del self.__dict__["training"]  # the block's
        self.__dict__["conductor"] = None
        self._modules["block"] = block

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The block's, for forwards that ask what a block is."""
        return type(self.__dict__["_modules"]["block"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["conductor"].call(self.__dict__["_modules"]["block"], args, kwargs)

    forward = __call__

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.__dict__["_modules"]["block"])

    def __len__(self) -> int:
        return len(self.__dict__["_modules"]["block"])

    def __getitem__(self, index: Any) -> Any:
        return self.__dict__["_modules"]["block"][index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_modules"]["block"], name)


class Gates:
    """Gates for some modules of a model.

    Args:
        model: that contains them.
        blocks: the modules.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._gates = {id(block): Gate(block) for block in blocks}
        self._places = [
            (module._modules, key, child)
            for module in model.modules()
            for key, child in module._modules.items()
            if child is not None and id(child) in self._gates
        ]

    @contextmanager
    def closed(self, conductor: Conductor) -> Iterator[None]:
        """Inside, calls of the blocks go to ``conductor``."""
        for gate in self._gates.values():
            gate.__dict__["conductor"] = conductor
        for modules, key, block in self._places:
            modules[key] = self._gates[id(block)]
        try:
            yield
        finally:
            for modules, key, block in self._places:
                modules[key] = block
            for gate in self._gates.values():
                gate.__dict__["conductor"] = None


@contextmanager
def saving_nothing() -> Iterator[None]:
    """Inside, graphs save nothing where a checkpointed function counts what they save.

    Pieces are recomputed there, and code before them need not run alike twice: outlines are known the second time.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: None):  # type: ignore[arg-type,return-value]
        yield


class Surroundings:
    """Refuses blocks that are called where a boundary between stages cannot be: inside a checkpointed function.

    One that is reentrant switches gradients off, as a ``no_grad`` region does, where a boundary may be.
    """

    def __init__(self) -> None:
        self._expected = _autograd_state()

    def move(self) -> None:
        """See that :func:`saving_nothing` has begun or ended."""
        self._expected = self._expected[0], _autograd_state()[1]

    def check(self, name: str) -> None:
        """Compare with where the forward began.

        Raises:
            SplitError: they differ.
        """
        (enabled, hooks), (was_enabled, had_hooks) = _autograd_state(), self._expected
        if hooks != had_hooks or (enabled != was_enabled and _inside_a_function()):
            raise SplitError(
                f"{name}: called inside a checkpointed function or one with its own backward, allowed are blocks "
                f"that are called directly; switch the model's own activation checkpointing of several blocks off and "
                f"use vpipe.recompute_ratio"
            )


def _inside_a_function() -> bool:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.autograd.function.__file__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


def _autograd_state() -> tuple[bool, int]:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return torch.is_grad_enabled(), id(hooks[0]) if hooks else 0
