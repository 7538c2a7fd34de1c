"""State of the process that a forward in pieces looks after: random generators, grad mode, saved tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from ds_vpipe.splitting.meta_tensor import SplitError


def random_states() -> tuple[Any, ...]:
    """States of the generators of torch, the device, numpy and Python."""
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return torch.get_rng_state(), device, numpy.random.get_state(), random.getstate()


def drawn_between(one: tuple[Any, ...], other: tuple[Any, ...], torch_too: bool = True) -> bool:
    """Whether numbers have been drawn between two states."""
    tensors = zip(one[:2], other[:2], strict=True) if torch_too else ()
    same = all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in tensors)
    same = same and one[2][2:] == other[2][2:] and bool((one[2][1] == other[2][1]).all())
    return not same or one[3] != other[3]


def restore(state: tuple[Any, ...]) -> None:
    """Go back to a state of the random generators."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
    numpy.random.set_state(state[2])
    random.setstate(state[3])


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Numbers drawn inside are drawn again afterwards."""
    state = random_states()
    try:
        yield
    finally:
        restore(state)


@contextmanager
def saving_nothing() -> Iterator[None]:
    """Inside, graphs save nothing where a checkpointed function counts what they save.

    Pieces are recomputed there, and code before them need not run alike twice: specs of blocks are known the second
    time.
    """
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: None):  # type: ignore[arg-type,return-value]
        yield


class GradModeGuard:
    """Refusal of blocks called inside a checkpointed function, where no boundary between stages can be.

    A reentrant one switches gradients off, as a ``no_grad`` region does, where a boundary may be.
    """

    def __init__(self) -> None:
        self._enabled = torch.is_grad_enabled()
        self.move()

    def move(self) -> None:
        """See that :func:`saving_nothing` has begun or ended."""
        self._hooks = _saved_tensors_hook()

    def check(self, name: str) -> None:
        """Compare with where the forward began.

        Raises:
            SplitError: block ``name`` cannot be called here.
        """
        if _saved_tensors_hook() != self._hooks or (torch.is_grad_enabled() != self._enabled and _in_a_function()):
            raise SplitError(
                f"{name}: called inside a checkpointed function or one with its own backward, allowed are blocks "
                f"that are called directly; switch the model's own activation checkpointing of several blocks off and "
                f"use vpipe.recompute_ratio"
            )


def _saved_tensors_hook() -> int:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return id(hooks[0]) if hooks else 0


def _in_a_function() -> bool:
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.autograd.function.__file__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
