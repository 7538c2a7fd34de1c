"""Layers that are run again in the backward pass: what they find, and whether they compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ds_vpipe.errors import VPipeError
from ds_vpipe.splitting.module_numbers import ModuleNumbers

_SMALL_BYTES = 4096

Remembered = list[tuple[dict[str, Any], str, Any, int | None]]
"""Buffers, frozen weights and numbers, each with the dict and the key where a module has it.

The last one is autograd's count of changes of what is not copied.
"""


class ModuleMemory:
    """Buffers and numbers that recomputed layers change, such as counters, and weights that are not trained.

    The recomputation finds them as its forward pass did, and leaves nothing behind. Of the buffers, which may be large,
    those are copied that the first forward pass in training mode has changed, and small ones, in which evaluations may
    count; the others may only be replaced, and so may frozen weights.

    Args:
        modules: that have them.
        copies_all: copy all buffers, where the first forward pass does not run all modules.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], copies_all: bool = False) -> None:
        parts = list(modules)
        self._numbers = ModuleNumbers(parts)
        self._copied = [(part._buffers, key) for part in parts for key in part._buffers]
        self._others: list[tuple[dict[str, Any], str]] = []
        self._weights = [(part._parameters, key) for part in parts for key in part._parameters]
        self._known = copies_all  # which of them need no copies

    def read(self) -> Remembered:
        """Their present values."""
        copied = ((*place, place[0].get(place[1])) for place in self._copied)
        others = ((*place, place[0].get(place[1])) for place in chain(self._others, self._weights))
        return [
            *((place, key, value, None) for _, place, key, value in self._numbers.read()),
            *((place, key, value.detach().clone(), None) for place, key, value in copied if value is not None),
            *(
                (place, key, value, None if value is None else value._version)
                for place, key, value in others
                if value is None or not (value.requires_grad or value.is_inference())
            ),
        ]

    def note_changes(self, before: Remembered, training: bool) -> None:
        """Compare with the values that a forward pass has found.

        Raises:
            VPipeError: one has changed in place that the first forward pass left alone; its old value is lost.
        """
        for _, key, value, version in before:
            if version is not None and value._version != version:
                raise VPipeError(
                    f"vpipe.recompute_ratio: got a layer whose {key!r} changes in place in a forward pass, allowed are "
                    f"buffers that change in the first too, and no frozen weights; write 0 for this stage"
                )
        if training and not self._known:
            self._known = True
            copied = {
                (id(place), key)
                for place, key, value, version in before
                if version is None and (_is_small(value) or not _same(place.get(key), value))
            }
            self._others = [(place, key) for place, key in self._copied if (id(place), key) not in copied]
            self._copied = [(place, key) for place, key in self._copied if (id(place), key) in copied]


class Anew(AbstractContextManager[None]):
    """Context that is made each time that it is entered.

    A layer that differentiates may be run again twice.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


@contextmanager
def as_remembered(remembered: Remembered, knows_modules: bool) -> Iterator[None]:
    """Context in which modules have what they had, and after which they have what they have now."""
    present = [(place, key, place.get(key)) for place, key, *_ in remembered]
    for place, key, value, version in remembered:
        if knows_modules and version is not None and value._version != version:
            raise VPipeError(changed_meanwhile(f"{key!r} of recomputed layers"))
        if value is not place.get(key):
            place[key] = value.clone() if isinstance(value, torch.Tensor) else value
    try:
        yield
    finally:
        for place, key, value in present:
            place[key] = value


def _is_small(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() * value.element_size() <= _SMALL_BYTES


def _same(value: Any, before: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
        return value.shape == before.shape and torch.equal(value.nan_to_num(), before.nan_to_num())
    return False


class OutputCheck:
    """The output of one micro-batch, for comparison with that of its recomputation."""

    def __init__(self, report: Callable[[float], None]) -> None:
        self._report = report
        self._outputs: list[torch.Tensor] | None = None

    def run(self, function: Callable[[Any], Any], value: Any) -> Any:
        """Run ``function``, the first time in the forward pass and the second time in the backward pass."""
        result = function(value)
        outputs = [leaf.detach() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if self._outputs is None:
            self._outputs = [output.clone() for output in outputs]
        elif self._outputs:
            before, self._outputs = self._outputs, []
            alike = len(before) == len(outputs)
            self._report(max(map(_difference, before, outputs), default=0.0) if alike else math.inf)
        return result


def _difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """Norm of the difference as a part of the norm. 0 if the order of sums on the device may be the reason."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return math.inf
    if torch.equal(first, second):  # with no temporary, or a byte per number, for which a plan has no room
        return 0.0
    if not torch.equal(*(value.masked_fill(value.isfinite(), 0).nan_to_num(1.0) for value in (first, second))):
        return math.inf  # no order of sums makes an infinity of a number
    before, again = (value.nan_to_num(0.0, 0.0, 0.0) for value in (first, second))
    if torch.equal(before, again):
        return 0.0
    if not first.is_floating_point():
        return math.inf
    part = float((before.double() - again.double()).norm() / before.double().norm())
    tolerated = 0.0 if first.device.type == "cpu" else max(4 * torch.finfo(first.dtype).eps, 1e-4)
    return 0.0 if part <= tolerated else part


def changed_meanwhile(what: str) -> str:
    """The line of an error where ``what`` is not what the forward pass has found."""
    return (
        f"backward pass: got {what} that a layer or the script has changed in place since the forward pass, allowed is "
        f"to change buffers and weights in an empty pipeline; call engine.quiesce() before, or engine.drain() if the "
        f"script calls engine(...), on every rank, or put another tensor in the place"
    )
