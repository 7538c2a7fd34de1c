"""A plan: the split, recomputation and depths of a pipeline, with predicted seconds and bytes.

Plans are kept as data, written as the partition file that training reads, and printed as a table.
"""

import json
import math
from dataclasses import asdict, dataclass, replace
from operator import mul
from pathlib import Path
from typing import Any

from ds_vpipe.planning.memory import StageMemory
from ds_vpipe.schedules.counts import rank_counts
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.tables import aligned, show_bytes

_COLUMNS = {"recompute": "recomputed"}  # of the table, where a use of memory and a number of layers have one name


@dataclass(frozen=True)
class StagePlan:
    """One virtual stage, layers ``start`` to ``stop - 1``, with predicted seconds and peak bytes.

    The last ``recomputed`` layers are recomputed, which ``backward_s`` does not count, and what the first ``swapped``
    keep is on the host, ``host_bytes`` at most; ``transit_bytes`` of it are on the device at once. ``swap_s`` is what
    that adds. ``transfer_s`` is a round trip over the cut after the stage, ``reduction_s`` a micro-batch's share of the
    reduction over replicas. Without a budget there is no limit.
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
    swapped: int = 0
    swap_s: float = 0.0
    host_bytes: int = 0
    transit_bytes: int = 0
    reduction_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of computation per micro-batch."""
        return self.forward_s + self.backward_s + self.recompute_s + self.swap_s

    @property
    def busy_s(self) -> float:
        """Seconds per micro-batch in which the stage does nothing else."""
        return self.compute_s + self.reduction_s


@dataclass(frozen=True)
class Plan:
    """A pipeline with predicted seconds and bytes."""

    pipeline: Pipeline  # with partition, ratios and depths
    stages: tuple[StagePlan, ...]  # its virtual stages, in the order of the model
    pace_s: float  # seconds per micro-batch in steady state
    seconds_per_micro_batch: float  # the same with filling and draining, where the schedule does that
    notes: tuple[str, ...] = ()  # lines about the numbers

    @property
    def depths(self) -> tuple[int, ...]:
        """Warm-up depths of an asynchronous schedule, else none."""
        return self.pipeline.depths if self.pipeline.schedule == "asp" else ()

    def rank_memory(self) -> tuple[StageMemory, ...]:
        """Memory of every rank. Virtual stages of a rank hold most at different times, and work one at a time."""
        if self.pipeline.virtual_stages == 1:
            return tuple(stage.memory for stage in self.stages)
        return tuple(map(self._rank_memory, range(self.pipeline.num_stages)))

    def _rank_memory(self, rank: int) -> StageMemory:
        parts = [self.stages[part] for part in self.pipeline.parts_of(rank)]
        own, transit = [part.memory for part in parts], [part.transit_bytes for part in parts]
        counts = rank_counts(self.pipeline, rank)
        kept = [
            (part.activations - there) // count
            for part, there, count in zip(own, transit, counts.in_flight, strict=True)
        ]
        working = max(own, key=lambda part: part.recompute + part.workspace)
        return replace(
            sum(own, StageMemory()),
            activations=max(sum(map(mul, moment, kept)) for moment in counts.moments) + max(transit),
            recompute=working.recompute,
            workspace=working.workspace,
        )

    def budget_of(self, rank: int) -> float:
        """Memory budget of a rank in bytes: the sum over its virtual stages; infinite if none has one."""
        budgets = [budget for part in self.pipeline.parts_of(rank) if (budget := self.stages[part].budget) is not None]
        return sum(budgets) if budgets else math.inf

    def fits_on(self, rank: int) -> bool:
        """Whether a rank's memory is within its budget."""
        return self.rank_memory()[rank].total <= self.budget_of(rank)

    @property
    def fits(self) -> bool:
        """Whether every rank's memory is within its budget."""
        return all(map(self.fits_on, range(self.pipeline.num_stages)))

    def split(self) -> dict[str, Any]:
        """Content of a partition file, see :mod:`ds_vpipe.config.partition_file`."""
        pipeline = self.pipeline
        swap = {"swap_ratio": pipeline.swap_ratio} if any(pipeline.swap_ratio or ()) else {}
        return {"partition": pipeline.partition, "recompute_ratio": pipeline.recompute_ratio, **swap}

    def save_split(self, path: str | Path) -> None:
        """Write a file for ``"partition": "PATH.json"``."""
        Path(path).write_text(json.dumps(self.split()) + "\n", encoding="utf-8")

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON types."""
        pipeline = {name: getattr(self.pipeline, name) for name in ("schedule", "micro_batches", "virtual_stages")}
        seconds = {"pace_s": self.pace_s, "seconds_per_micro_batch": self.seconds_per_micro_batch}
        stages = [asdict(stage) | {"memory": stage.memory.to_json()} for stage in self.stages]
        return {**self.split(), **pipeline, **seconds, "stages": stages, "depths": self.depths, "notes": self.notes}

    def table(self) -> str:
        """Stages as rows: layers, seconds, bytes; for a terminal."""
        pipeline = self.pipeline
        swaps, reduces = (any(getattr(s, name) for s in self.stages) for name in ("swapped", "reduction_s"))
        kinds = [name for name in StageMemory.__dataclass_fields__ if any(getattr(s.memory, name) for s in self.stages)]
        rows = []
        for number, stage in enumerate(self.stages):
            row = {
                "part" if pipeline.virtual_stages > 1 else "stage": number,
                "layers": f"{stage.start}-{stage.stop - 1}",
                "recompute": f"{stage.recomputed}/{stage.stop - stage.start}",
                **({"swap": f"{stage.swapped}/{stage.stop - stage.start}"} if swaps else {}),
                "compute ms": f"{stage.compute_s * 1e3:.2f}",
                "transfer ms": f"{stage.transfer_s * 1e3:.2f}",
                **({"reduction ms": f"{stage.reduction_s * 1e3:.2f}"} if reduces else {}),
                **({"depth": self.depths[number]} if self.depths else {}),
                **{_COLUMNS.get(kind, kind): show_bytes(getattr(stage.memory, kind)) for kind in kinds},
                "peak": show_bytes(stage.memory.total),
                "budget": "-" if stage.budget is None else show_bytes(stage.budget),
                **({"on host": show_bytes(stage.host_bytes)} if swaps else {}),
            }
            rows.append(row)
        per_micro_batch, pace = self.seconds_per_micro_batch * 1e3, self.pace_s * 1e3
        summary = f"{pipeline.schedule}, M = {pipeline.micro_batches}: {per_micro_batch:.2f} ms per micro-batch"
        return "\n".join([aligned(rows), f"{summary}; pace {pace:.2f} ms", *self.notes])


def ratio_for(recomputed: int, num_layers: int) -> float:
    """The shortest decimal r for which int(r * num_layers) is ``recomputed``, 0 to ``num_layers``."""
    for digits in range(1, 10):
        scale = 10**digits
        above = -(-recomputed * scale // num_layers)
        for ratio in (above / scale, (above + 1) / scale):  # the product of the first may be rounded down
            if ratio <= 1 and int(ratio * num_layers) == recomputed:
                return ratio
    return math.nextafter(recomputed / num_layers, 2)
