"""Origin of numbers that are not finite, and norms that have grown.

From what all ranks of a replay have seen. Every rank keeps the first value that it meets which is not finite. One that
it has received has its origin elsewhere. Of the others the first in causal order is that of the smallest micro-batch,
and in one micro-batch of the earliest pass: what is computed for later micro-batches cannot have an effect on it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

PASSES = ("data", "weights", "forward", "backward", "update", "received")
"""Where a value is found, in the order of one micro-batch; ``weights`` have changed other than by an update."""
_NAMES = {"data": "data", "weights": "changed between two updates", "update": "update"}


@dataclass(frozen=True)
class Fault:
    """The first value that is not finite on a rank."""

    micro_batch: int  # since the start of training: what consumed_micro_batches is where the data begin with it
    index: int  # in the schedule, whose numbers follow from updates and the micro-batches per batch
    where: str  # one of PASSES
    stage: int
    replica: int
    layer: int | None  # in the model
    what: str
    version: int  # of the stage's weights in this pass
    micro_batches: int  # per batch
    begins: bool = False  # it was there when the replay began

    def line(self) -> str:
        """The fault in one line."""
        batch, index = divmod(self.index, self.micro_batches)
        layer = "" if self.layer is None else f", layer {self.layer}"
        replica = f" of replica {self.replica}" if self.replica else ""
        passed = "when the replay began" if self.begins else _NAMES.get(self.where, f"{self.where} pass")
        return (
            f"update {batch + 1}, micro-batch {self.micro_batch} (number {index + 1} of {self.micro_batches} of its "
            f"batch), stage {self.stage}{replica}{layer}, {passed}: {self.what}, with weights of version {self.version}"
        )


def first_fault(faults: Iterable[Fault]) -> Fault | None:
    """The first in causal order; None if all is finite."""

    def order(fault: Fault) -> tuple[bool, bool, int, int, int]:
        way = -fault.stage if fault.where == "backward" else fault.stage
        at = PASSES.index(fault.where)
        return fault.where == "received", not fault.begins, fault.micro_batch, at, way

    return min(faults, key=order, default=None)


def by_growth(ranks: Iterable[Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Norms of all layers in two batches, the layer that has grown most first.

    Args:
        ranks: what each has measured, a mapping per layer with ``layer``, ``name``, ``stage``, ``activation`` and
            ``gradient``, pairs of sums of squares in the batch before and in the batch. Replicas are added up.
    """
    layers: dict[int, dict[str, Any]] = {}
    for found in (row for rows in ranks for row in rows):
        known = layers.setdefault(found["layer"], {**found, "activation": (0.0, 0.0), "gradient": (0.0, 0.0)})
        for name in ("activation", "gradient"):
            known[name] = tuple(a + b for a, b in zip(known[name], found[name], strict=True))
    for row in layers.values():
        pairs = [tuple(value**0.5 for value in row[name]) for name in ("activation", "gradient")]
        row["activation"], row["gradient"] = pairs
        row["growth"] = max(_growth(before, now) for before, now in pairs)
    return sorted(layers.values(), key=lambda row: (-row["growth"], row["layer"]))


def _growth(before: float, now: float) -> float:
    """Growth factor: infinite if the new norm is NaN, 0 if the old one was 0 or not finite."""
    if not 0 < before < math.inf:
        return 0.0
    return math.inf if math.isnan(now) else now / before
