"""States of the generators of random numbers: torch's, numpy's and Python's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch


def states() -> tuple[Any, ...]:
    """All states, to be compared with :func:`alike` or set with :func:`restore`."""
    device = torch.cuda.get_rng_state() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return torch.get_rng_state(), device, numpy.random.get_state(), random.getstate()


def alike(one: tuple[Any, ...], other: tuple[Any, ...]) -> bool:
    """Whether no number has been drawn between two states."""
    tensors = all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one[:2], other[:2], strict=True)
    )
    return tensors and one[2][2:] == other[2][2:] and bool((one[2][1] == other[2][1]).all()) and one[3] == other[3]


def restore(state: tuple[Any, ...]) -> None:
    """Go back to a state."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
    numpy.random.set_state(state[2])
    random.setstate(state[3])


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Numbers drawn inside are drawn again afterwards."""
    state = states()
    try:
        yield
    finally:
        restore(state)
