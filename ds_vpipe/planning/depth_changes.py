"""Decisions of how far stages run ahead.

They follow from how much the times of passes vary. With default depths a stage has just the micro-batches in flight
that keep it busy if every pass takes the same time. Where times vary, one that takes longer makes the others wait, and
what they have waited is never made up for. Stages that run further ahead have work in stock. What that would gain is
simulated, in the order of :mod:`ds_vpipe.schedules.one_f_one_b`: the passes of every micro-batch are those of a
measured one, drawn by a fixed rule, so that all ranks draw the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random
from statistics import mean

from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.planner import predict
from ds_vpipe.planning.replanning import Work
from ds_vpipe.schedules.one_f_one_b import update_delay
from ds_vpipe.schedules.pipeline import Pipeline

Passes = Sequence[tuple[float, float]]  # seconds of a forward and a backward pass, of each measured micro-batch

_MOST = 3  # times the first depths are the largest that are looked at
_SIMULATED = 400  # micro-batches
_SAME = 1 / 3  # share of the threshold below which two paces are the same, so that the smaller depths are taken
_FEWEST = 8  # measured micro-batches of every stage


@dataclass(frozen=True)
class DepthDecision:
    """Outcome of one look at the depths; the same on all ranks."""

    update: int  # after which it was made
    depths: tuple[int, ...]  # at present
    better_depths: tuple[int, ...]
    seconds: float  # per micro-batch with the present depths, as simulated
    better_seconds: float
    waits: float  # measured share of the time in which the busiest stage waits
    stays: str  # why depths stay; empty if they change
    brought_nothing: bool = False  # the present depths, which were tried; seconds are measured ones then

    def line(self) -> str:
        """The decision in one line."""
        begin = f"replan at update {self.update}: depths {list(self.depths)}"
        if self.better_depths == self.depths:
            return f"{begin} stay: {self.stays}"
        known = "measured before" if self.brought_nothing else "expected"
        expected = f"{1e3 * self.seconds:.2f} -> {1e3 * self.better_seconds:.2f} ms per micro-batch {known}"
        what = f"stay: {self.stays}" if self.stays else f"the busiest stage waits {self.waits:.1%} of the time"
        return f"{begin} -> {list(self.better_depths)}, {expected}; {what}"


def varied_pace(passes: Sequence[Passes], trips: Sequence[float], depths: Sequence[int]) -> float:
    """Seconds per micro-batch of simulated passes.

    They take the times of measured ones, drawn by a fixed rule. ``trips`` are seconds to the next stage and back.
    """
    last, random = len(passes) - 1, Random(0)
    drawn = [random.choices(found, k=_SIMULATED + depths[0] + 1) for found in passes]
    now = [0.0] * len(passes)  # of every stage
    # A link carries one transfer at a time each way. When the latest activations and every micro-batch's gradients have
    # come to the next and the previous stage:
    activations, gradients = [0.0] * len(passes), [list[float]() for _ in passes]
    for index in range(_SIMULATED + depths[0] + 1):
        for stage in range(last, -1, -1):
            before = index - 1 - depths[stage]  # B(before) follows F(index - 1), which is done
            if 0 <= before < _SIMULATED:
                comes = 0.0 if stage == last else gradients[stage + 1][before]
                now[stage] = max(now[stage], comes) + drawn[stage][before][1]
                free = gradients[stage][-1] if stage and gradients[stage] else 0.0
                gradients[stage].append(max(now[stage], free) + (trips[stage - 1] / 2 if stage else 0.0))
        for stage in range(last + 1):
            comes = activations[stage - 1] if stage else 0.0
            now[stage] = max(now[stage], comes) + drawn[stage][index][0]
            if stage < last:
                activations[stage] = max(now[stage], activations[stage]) + trips[stage] / 2
    start = _SIMULATED // 4
    return (gradients[0][-1] - gradients[0][start]) / (_SIMULATED - 1 - start)


@dataclass
class DepthChoice:
    """What is known of the depths of a running pipeline.

    All ranks have the same, since all get the same measurements.
    """

    first: tuple[int, ...]  # which are the smallest
    most_late: int  # updates by which a gradient may be late
    most_apart: int  # micro-batches by which neighbours may be apart, for the links between them
    threshold: float  # least share of the time per micro-batch that deeper stages have to save

    def __post_init__(self) -> None:
        # The depths before, the measured pace that they had, and what was to run from then on.
        self.deepened: tuple[tuple[int, ...], float, Pipeline] | None = None
        self.useless: set[tuple[int, ...]] = set()  # depths that were tried and brought nothing
        self._fewer = False  # whether at the last look smaller depths would have done

    def may_be(self, depths: Sequence[int], micro_batches: int) -> bool:
        """Whether depths are within the limits of staleness."""
        deeper = all(depth >= least for depth, least in zip(depths, self.first, strict=True))
        return deeper and update_delay(depths[0], micro_batches) <= self.most_late

    def decide(
        self,
        pipeline: Pipeline,
        work: Work,
        devices: Devices,
        passes: Iterable[tuple[int, Passes]],
        *,
        update: int,
        measured_s: float,
    ) -> DepthDecision:
        """Decision on the depths of a running pipeline.

        Args:
            pipeline: what runs, with its partition.
            work: of all layers.
            devices: budgets and links.
            passes: measured on every rank, with its stage; of replicas the slowest one counts.
            update: number of updates so far.
            measured_s: seconds per micro-batch since the last look.
        """
        slowest: dict[int, Passes] = {}
        for stage, these in passes:
            slowest[stage] = max(slowest.get(stage, ()), these, key=lambda one: mean(map(sum, one)) if one else 0.0)
        measured = [slowest[stage] for stage in sorted(slowest)]
        fewest, depths, before = min(map(len, measured)), pipeline.depths, self.deepened
        if not fewest:
            return DepthDecision(update, depths, depths, 0.0, 0.0, 0.0, "nothing was measured")
        waits = max(0.0, 1 - max(mean(map(sum, these)) for these in measured) / measured_s)
        stay = DepthDecision(update, depths, depths, measured_s, measured_s, waits, "")
        if depths > self.first and not self.may_be(depths, pipeline.micro_batches):  # as batches have become smaller
            return replace(stay, better_depths=self.first)
        if fewest < _FEWEST:
            return replace(stay, stays=f"{fewest} micro-batches were measured, {_FEWEST} are needed")
        self.deepened, same = None, _SAME * self.threshold
        self._fewer, fewer = False, self._fewer
        if before is not None and before[2] == pipeline and measured_s > before[1] * (1 - same):
            self.useless.add(depths)
            return replace(stay, better_depths=before[0], better_seconds=before[1], brought_nothing=True)
        devices = replace(devices, slowness=work.slowness)
        trips = [stage.transfer_s for stage in predict(work.profile, pipeline, devices).stages]
        possible = {depths: varied_pace(measured, trips, depths)}
        for other in self._others(pipeline, work, devices):
            possible[other] = varied_pace(measured, trips, other)
        least = min(possible.values())
        better = min(one for one, seconds in possible.items() if seconds <= least * (1 + same))
        found = replace(stay, better_depths=better, seconds=possible[depths], better_seconds=possible[better])
        if better == depths:
            return replace(found, stays="no others are faster" if len(possible) > 1 else "no others are allowed")
        if better > depths:
            gain = min(waits, 1 - possible[better] / possible[depths])
            if gain <= self.threshold:
                return replace(found, stays=f"they would save {gain:.1%}, threshold {self.threshold:.1%}")
            self.deepened = depths, measured_s, replace(pipeline, depth_map=better)
        elif not fewer:
            self._fewer = True
            return replace(found, stays="one look is not enough for fewer")
        return found

    def _others(self, pipeline: Pipeline, work: Work, devices: Devices) -> Iterator[tuple[int, ...]]:
        """Other depths, within the limits of staleness, links and memory."""
        deepest = max(1, self.first[0])
        limit = min(self.most_late * pipeline.micro_batches, _MOST * deepest)
        for target in sorted({deepest, 3 * deepest // 2, 2 * deepest, _MOST * deepest, limit}):
            depths = tuple((target * depth + deepest // 2) // deepest for depth in self.first)
            near = all(one - two <= self.most_apart for one, two in pairwise(depths))
            new = near and depths not in (pipeline.depths, *self.useless)
            if not new or not self.may_be(depths, pipeline.micro_batches):
                continue
            if predict(work.profile, replace(pipeline, depth_map=depths), devices).fits:
                yield depths
