"""A pipeline: its schedule, its sizes, and its share of the model on every rank."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from ds_vpipe.errors import Refusal
from ds_vpipe.schedules.interleaved import warm_up
from ds_vpipe.schedules.one_f_one_b import default_depths, update_delay
from ds_vpipe.tables import counted

Schedule = Literal["asp", "1f1b", "gpipe", "interleaved"]
WeightSync = Literal["stash", "vertical", "none"]
SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)


@dataclass(frozen=True)
class Pipeline:
    """A schedule, its sizes, and the split of the model: what runs.

    Everything a rank does follows from this and the data. While a planner is still to choose, the partition or the
    ratios are None.

    Raises:
        VPipeConfigError: a value is not allowed, or not with this schedule.
    """

    schedule: Schedule  # "asp" never drains while there are data, all others in every batch
    num_stages: int  # ranks in the pipeline, K
    micro_batches: int  # micro-batches per batch, M
    depth_map: tuple[int, ...] | None = None  # depths, for "asp" only; None for the default
    virtual_stages: int = 1  # parts of the model on every rank, v; more than one for "interleaved" only
    # Weights of a backward pass, for "asp" only: those of its forward pass ("stash"), the same with the version index
    # of rank 0 everywhere ("vertical"), or the newest ("none").
    weight_sync: WeightSync = "stash"
    partition: tuple[int, ...] | None = None  # layers of each of the K * v parts; None if they are not known here
    recompute_ratio: tuple[float, ...] | None = None  # share of each part's layers, in [0, 1]; None if not known here
    swap_ratio: tuple[float, ...] | None = None  # the same, of the layers whose activations are kept on the host

    def __post_init__(self) -> None:
        for name, wrong, allowed, remedy, reason in self._rules():
            if wrong:
                raise Refusal(name, getattr(self, name), allowed, remedy, reason).error()

    def _rules(self) -> Iterator[tuple[str, bool, str, str, str]]:
        """Rules for what comes from command lines and calls: attribute, whether it is wrong, allowed, remedy, why."""
        size = self.micro_batches
        yield "micro_batches", type(size) is not int or size < 1, "a whole number >= 1", "change it", ""
        allowed, why = '2 or more with schedule "interleaved", 1 with every other', f'schedule is "{self.schedule}"'
        mixed = (self.schedule == "interleaved") != (self.virtual_stages > 1)
        yield "virtual_stages", mixed, allowed, "change one of them", why
        why, depths = f'schedule "{self.schedule}" has depths of its own', self.depth_map
        yield "depth_map", self.synchronous and depths is not None, 'none, or schedule "asp"', "remove it", why
        if depths is not None:
            falls = all(type(depth) is int and depth >= 0 for depth in depths) and sorted(depths)[::-1] == list(depths)
            allowed = f"{self.num_stages} whole numbers >= 0, each no larger than the one before, the last 0"
            example = list(default_depths(self.num_stages)) if self.num_stages <= 8 else "the default"
            wrong = len(depths) != self.num_stages or not falls or depths[-1] != 0
            yield "depth_map", wrong, allowed, f"change it, such as to {example}", ""
        ratios, parts = self.recompute_ratio, self.num_parts
        wrong = ratios is not None and (len(ratios) != parts or not all(0 <= ratio <= 1 for ratio in ratios))
        yield "recompute_ratio", wrong, f"{parts} numbers in [0, 1]", "correct the ratios", ""

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of each part; empty where they are not known."""
        return self.partition or ()

    @property
    def line(self) -> str:
        """One line of all this; layers are left out where they are not known, and ratios where all are 0."""
        layers = f" of layers {list(self.partition)}" if self.partition else ""
        sizes = f"{counted(self.num_stages, 'stage')}{layers}, depths {list(self.depths)}, M = {self.micro_batches}"
        shares = {"recompute_ratio": self.recompute_ratio, "swap_ratio": self.swap_ratio}
        ratios = (f"{name} {list(share)}" for name, share in shares.items() if share and any(share))
        return ", ".join([self.schedule, sizes, *ratios])

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
        """Number of contiguous parts of the model, ``P = K * v``."""
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

    @property
    def delays(self) -> tuple[int, ...]:
        """Delay of every rank's gradients in updates; with vertical sync the first one's."""
        if self.synchronous:
            return (0,) * self.num_stages
        return tuple(update_delay(self.depths[0] if self.vertical else d, self.micro_batches) for d in self.depths)

    def in_flight(self, rank: int) -> int:
        """Most micro-batches that are between their passes on ``rank``. With several parts, summed over them."""
        most = self.depths[rank] + 1
        return min(most, self.micro_batches * self.virtual_stages) if self.synchronous else most
