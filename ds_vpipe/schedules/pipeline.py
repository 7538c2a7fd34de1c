"""The shape of a pipeline: its schedule, its ranks, the parts of the model they hold, its micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from ds_vpipe.errors import Refusal
from ds_vpipe.schedules.interleaved import warm_up
from ds_vpipe.schedules.schedule import default_depths

Schedule = Literal["asp", "1f1b", "gpipe", "interleaved"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True)
class Pipeline:
    """A schedule and its sizes. Everything a rank does follows from this and the data.

    Attributes:
        schedule: ``"asp"`` never drains while there are data; ``"1f1b"``, ``"gpipe"`` and ``"interleaved"`` drain in
            every batch.
        num_stages: ranks in the pipeline, ``K``.
        micro_batches: micro-batches per batch, ``M``.
        depth_map: warm-up depth of every rank, for ``"asp"`` only; None for the default. See :attr:`depths`.
        virtual_stages: parts of the model on every rank, ``v``; more than one for ``"interleaved"`` only.
        vertical: all ranks use the version for a micro-batch that rank 0 used, for ``"asp"`` only.

    Raises:
        VPipeConfigError: a value is not allowed, or not with this schedule.
    """

    schedule: Schedule
    num_stages: int
    micro_batches: int
    depth_map: tuple[int, ...] | None = None
    virtual_stages: int = 1
    vertical: bool = False

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
            if self.vertical:
                reason = f'schedule "{self.schedule}" uses one version at a time'
                raise Refusal("vertical", True, 'false, or schedule "asp"', "remove it", reason).error()
        elif self.depth_map is not None:
            self._check_depth_map(self.depth_map)

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
