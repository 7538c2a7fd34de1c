"""A pipeline: its schedule, its sizes, and its share of the model on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from ds_vpipe.errors import Refusal
from ds_vpipe.schedules.interleaved import warm_up
from ds_vpipe.schedules.one_f_one_b import default_depths

Schedule = Literal["asp", "1f1b", "gpipe", "interleaved"]
WeightSync = Literal["stash", "vertical", "none"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True)
class Pipeline:
    """A schedule, its sizes, and the split of the model: what runs.

    Everything a rank does follows from this and the data. While a planner is still to choose, the partition or the
    ratios are None.

    Attributes:
        schedule: ``"asp"`` never drains while there are data; ``"1f1b"``, ``"gpipe"`` and ``"interleaved"`` drain in
            every batch.
        num_stages: ranks in the pipeline, ``K``.
        micro_batches: micro-batches per batch, ``M``.
        depth_map: warm-up depth of every rank, for ``"asp"`` only; None for the default. See :attr:`depths`.
        virtual_stages: parts of the model on every rank, ``v``; more than one for ``"interleaved"`` only.
        weight_sync: weights of a backward pass, for ``"asp"`` only: those of its forward pass (``"stash"``), the same
            with the version index of rank 0 everywhere (``"vertical"``), or the newest (``"none"``).
        partition: layers of each of the ``K * v`` parts; None if they are not known here.
        recompute_ratio: share of the layers of each part that it recomputes, in [0, 1]; None if not known here.

    Raises:
        VPipeConfigError: a value is not allowed, or not with this schedule.
    """

    schedule: Schedule
    num_stages: int
    micro_batches: int
    depth_map: tuple[int, ...] | None = None
    virtual_stages: int = 1
    weight_sync: WeightSync = "stash"
    partition: tuple[int, ...] | None = None
    recompute_ratio: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            names = ", ".join(f'"{name}"' for name in SCHEDULES)
            raise Refusal("schedule", self.schedule, names, "choose one of them").error()
        for name, least in (("num_stages", 1), ("micro_batches", 1), ("virtual_stages", 1)):
            value = getattr(self, name)
            if not _is_int(value) or value < least:
                raise Refusal(name, value, f"a whole number >= {least}", "change it").error()
        if (self.schedule == "interleaved") != (self.virtual_stages > 1):
            allowed = '2 or more with schedule "interleaved", 1 with every other'
            reason = f'schedule is "{self.schedule}"'
            raise Refusal("virtual_stages", self.virtual_stages, allowed, "change one of them", reason).error()
        if self.schedule != "asp":
            if self.depth_map is not None:
                reason = f'schedule "{self.schedule}" has depths of its own'
                raise Refusal("depth_map", self.depth_map, 'none, or schedule "asp"', "remove it", reason).error()
            if self.weight_sync != "stash":
                reason = f'schedule "{self.schedule}" uses one version at a time'
                given, remedy = self.weight_sync, "remove it"
                raise Refusal("weight_sync", given, '"stash", or schedule "asp"', remedy, reason).error()
        elif self.depth_map is not None:
            self._check_depth_map(self.depth_map)
        ratios = self.recompute_ratio
        if self.partition is not None and (len(self.partition) != self.num_parts or min(self.partition) < 1):
            allowed = f"{self.num_parts} counts >= 1"
            raise Refusal("partition", list(self.partition), allowed, "correct the counts").error()
        if ratios is not None and (len(ratios) != self.num_parts or not all(0 <= ratio <= 1 for ratio in ratios)):
            allowed = f"{self.num_parts} numbers in [0, 1]"
            raise Refusal("recompute_ratio", list(ratios), allowed, "correct the ratios").error()

    def _check_depth_map(self, depths: tuple[int, ...]) -> None:
        falls = all(_is_int(depth) and depth >= 0 for depth in depths) and list(depths) == sorted(depths, reverse=True)
        if len(depths) != self.num_stages or not falls or depths[-1] != 0:
            allowed = f"{self.num_stages} whole numbers >= 0, each no larger than the one before, the last 0"
            example = list(default_depths(self.num_stages))
            remedy = f"change it, such as to {example if self.num_stages <= 8 else 'the default'}"
            raise Refusal("depth_map", list(depths), allowed, remedy).error()

    @property
    def synchronous(self) -> bool:
        """True if the pipeline drains at the end of every batch."""
        return self.schedule != "asp"

    @property
    def vertical(self) -> bool:
        """True if a micro-batch uses one version index on all ranks."""
        return self.schedule == "asp" and self.weight_sync == "vertical"

    @property
    def num_parts(self) -> int:
        """Contiguous parts that the model is cut into, ``P = K * v``, numbered along the model."""
        return self.num_stages * self.virtual_stages

    def parts_of(self, rank: int) -> range:
        """The parts that ``rank`` holds."""
        return range(rank, self.num_parts, self.num_stages)

    def rank_of(self, part: int) -> int:
        """The rank that holds ``part``."""
        return part % self.num_stages

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Warm-up depth of every rank: forward passes that it runs ahead of its backward passes, if the data allow.

        With gpipe a rank runs all forward passes of a batch before its backward passes.
        """
        if self.depth_map is not None:
            return self.depth_map
        if self.schedule == "gpipe":
            return (self.micro_batches - 1,) * self.num_stages
        if self.schedule == "interleaved":
            sizes = self.num_stages, self.micro_batches, self.virtual_stages
            return tuple(warm_up(rank, *sizes) for rank in range(self.num_stages))
        return default_depths(self.num_stages)

    def in_flight(self, rank: int) -> int:
        """Most micro-batches that are between their passes on ``rank``; with several parts, summed over them."""
        most = self.depths[rank] + 1
        return min(most, self.micro_batches * self.virtual_stages) if self.synchronous else most


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
