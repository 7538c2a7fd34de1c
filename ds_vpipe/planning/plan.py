"""What a planner decides and predicts, as data, as the JSON that training reads, and as a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from operator import mul
from pathlib import Path
from typing import Any

from ds_vpipe.planning.memory import StageMemory
from ds_vpipe.planning.recompute_choice import ratio_for
from ds_vpipe.schedules.in_flight import in_flight
from ds_vpipe.schedules.pipeline import Pipeline, Schedule

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def show_bytes(size: float) -> str:
    """Bytes with three digits and a unit of a thousand, such as ``1.35 GB``."""
    for scale, unit in _UNITS:
        if abs(size) >= scale * 0.9995:
            return f"{size / scale:.3g} {unit}" if abs(size) < 999.5 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} B"


@dataclass(frozen=True)
class StagePlan:
    """One part of the model; a stage, unless the schedule is interleaved.

    Attributes:
        start: first layer.
        stop: layer after the last.
        recomputed: how many of its last layers are recomputed.
        forward_s: seconds of a forward pass.
        backward_s: seconds of a backward pass, without recomputation.
        recompute_s: seconds of recomputation.
        transfer_s: seconds of a round trip over the cut after it.
        memory: bytes at its peak.
        budget: bytes that it may need, or None.
    """

    start: int
    stop: int
    recomputed: int
    forward_s: float
    backward_s: float
    recompute_s: float
    transfer_s: float
    memory: StageMemory
    budget: int | None = None

    @property
    def compute_s(self) -> float:
        """Seconds of work per micro-batch."""
        return self.forward_s + self.backward_s + self.recompute_s


@dataclass(frozen=True)
class Plan:
    """A split with recomputation and depths.

    Attributes:
        schedule: ``asp``, ``1f1b``, ``gpipe`` or ``interleaved``.
        stages: in the order of the model.
        depths: W_s of every stage of an asynchronous schedule, else empty.
        micro_batches: M, micro-batches per batch.
        pace_s: seconds per micro-batch in steady state.
        seconds_per_micro_batch: the same with filling and draining, where the schedule does that.
        virtual_stages: parts per rank.
        notes: what to know about the numbers, one line each.
    """

    schedule: Schedule
    stages: tuple[StagePlan, ...]
    depths: tuple[int, ...]
    micro_batches: int
    pace_s: float
    seconds_per_micro_batch: float
    virtual_stages: int = 1
    notes: tuple[str, ...] = ()

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers per part."""
        return tuple(stage.stop - stage.start for stage in self.stages)

    @property
    def recompute_ratio(self) -> tuple[float, ...]:
        """Fraction of each part's layers to recompute, for which int(ratio * layers) is what was planned."""
        return tuple(ratio_for(stage.recomputed, stage.stop - stage.start) for stage in self.stages)

    def rank_memory(self) -> tuple[StageMemory, ...]:
        """Bytes per rank. Several parts of a rank hold most at different times, and work one at a time."""
        ranks = len(self.stages) // self.virtual_stages
        if self.virtual_stages == 1:
            return tuple(stage.memory for stage in self.stages)
        return tuple(self._together(rank, ranks) for rank in range(ranks))

    def _together(self, rank: int, ranks: int) -> StageMemory:
        parts = [stage.memory for stage in self.stages[rank::ranks]]
        counts = in_flight(Pipeline(self.schedule, ranks, self.micro_batches, None, self.virtual_stages), rank)
        kept = [part.activations // count for part, count in zip(parts, counts.most, strict=True)]
        working = max(parts, key=lambda part: part.recompute + part.workspace)
        return replace(
            sum(parts, StageMemory()),
            activations=max(sum(map(mul, moment, kept)) for moment in counts.moments),
            recompute=working.recompute,
            workspace=working.workspace,
        )

    def split(self) -> dict[str, Any]:
        """What a split file holds, see :mod:`ds_vpipe.split_file`."""
        return {"partition": list(self.partition), "recompute_ratio": list(self.recompute_ratio)}

    def save_split(self, path: str | Path) -> None:
        """Write a file for ``"partition": "PATH.json"``."""
        Path(path).write_text(json.dumps(self.split()) + "\n", encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON types."""
        stages = [asdict(stage) | {"memory": stage.memory.to_json()} for stage in self.stages]
        return {**self.split(), **asdict(self), "stages": stages, "depths": list(self.depths), "notes": [*self.notes]}

    def table(self) -> str:
        """Stages as rows: layers, seconds, bytes; for a terminal."""
        head = ["part" if self.virtual_stages > 1 else "stage", "layers", "recompute", "compute ms", "transfer ms"]
        kinds = [name for name in StageMemory.__dataclass_fields__ if any(getattr(s.memory, name) for s in self.stages)]
        rows = [[*head, *([] if not self.depths else ["depth"]), *kinds, "peak", "budget"]]
        for number, stage in enumerate(self.stages):
            rows.append(
                [
                    str(number),
                    f"{stage.start}-{stage.stop - 1}",
                    f"{stage.recomputed}/{stage.stop - stage.start}",
                    f"{stage.compute_s * 1e3:.2f}",
                    f"{stage.transfer_s * 1e3:.2f}",
                    *([] if not self.depths else [str(self.depths[number])]),
                    *(show_bytes(getattr(stage.memory, kind)) for kind in kinds),
                    show_bytes(stage.memory.total),
                    "-" if stage.budget is None else show_bytes(stage.budget),
                ]
            )
        per_micro_batch, pace = self.seconds_per_micro_batch * 1e3, self.pace_s * 1e3
        summary = f"{self.schedule}, M = {self.micro_batches}: {per_micro_batch:.2f} ms per micro-batch"
        return "\n".join([*_aligned(rows), f"{summary}; pace {pace:.2f} ms", *self.notes])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
