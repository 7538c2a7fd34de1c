"""Exact search for the split of a model that runs fastest.

Candidates first. For each stage, stop and length: the number k of last layers to recompute and the number of first
layers to swap for which the stage fits its budget in the fewest seconds of passes, recomputation and swap, and, if
nothing fits, by how many bytes the best choice fails. Swapping fewer layers is never slower, so that for each k the
smallest number that fits is the best one, which bisection finds. O(n w^2 K log w) vector elements for n layers, K
stages and stages of up to w layers.

Then the split. The pace of a pipeline (:mod:`.pace`) is at most L if and only if, going from the first stage to the
last,

    reach_0 = compute_0,   reach_t = compute_t + max(0, reach_(t-1) + round_trip_(t-1) - L * advance_(t-1))

never exceeds L. A smaller reach is never worse for what follows, so for given L a dynamic program over (stage, cut)
that keeps the smallest reach decides whether any split reaches L. L itself is found by bisection, which ends when no
split is faster than the best one found. Time O(K n w) per step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_vpipe.partition import bounds
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import ModelProfile
from ds_vpipe.planning.memory import Ints, MemoryModel, StageMemory
from ds_vpipe.planning.pace import pace
from ds_vpipe.schedules.counts import StageLoad
from ds_vpipe.schedules.pipeline import Pipeline

Floats = npt.NDArray[np.float64]

_UNLIMITED = 1 << 60
_CLOSE = 1e-12  # paces that differ by less are the same


@dataclass(frozen=True)
class CandidateTable:
    """Candidate stages: tables ``[stage, stop, length - 1]`` for layers ``stop - length`` to ``stop - 1``."""

    seconds: Floats  # passes, recomputation and reduction; infinite where it does not fit or was not looked at
    recomputed: Ints  # layers to recompute
    swapped: Ints  # layers to swap
    excess: Floats  # bytes over the budget at the best number of layers; negative if it fits, infinite if not looked at


class Candidates:
    """Candidates for the stages of one model on given devices. All, where the pipeline leaves a choice."""

    def __init__(self, profile: ModelProfile, pipeline: Pipeline, devices: Devices) -> None:
        self._size, self._partition, self._ratios = len(profile), pipeline.partition, pipeline.recompute_ratio
        self._devices, self._swaps = devices, may_swap(pipeline)
        chosen = pipeline.swap_ratio is None and devices.host_bandwidth is not None
        self._swap_ratios = None if chosen else pipeline.swap_ratio or (0.0,) * pipeline.num_parts
        self._loads, self._memory = devices.loads(pipeline), MemoryModel(profile, devices.optimizer)
        self._slowness = [devices.slowness_of(pipeline.rank_of(part)) for part in range(pipeline.num_parts)]
        self._budgets = [min(_UNLIMITED, budget or _UNLIMITED) for budget in devices.budgets(pipeline)]
        self.forward = _prefix([layer.forward_s for layer in profile.layers])
        self.passes = _prefix([layer.forward_s + layer.backward_s for layer in profile.layers])
        reduced = devices.reduction_s / pipeline.micro_batches if pipeline.schedule == "asp" else 0.0
        self._reductions = _prefix([reduced * layer.trained_bytes for layer in profile.layers])

    def table(self, longest_s: float) -> CandidateTable:
        """Table of all stages whose passes take at most ``longest_s`` seconds.

        With a partition given, just its stages, however long they take.
        """
        found = list(self._stops(longest_s))
        shape = len(self._loads), self._size + 1, max(stop - int(starts[0]) for stop, starts, _ in found)
        seconds, excess = np.full(shape, np.inf), np.full(shape, np.inf)
        recomputed, swapped = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for stop, starts, stages in found:
            memory = self._memory.alternatives(starts, stop)
            cuts = np.arange(starts[0], stop + 1)
            inside = cuts >= starts[:, None]
            lengths, rows = stop - starts, np.arange(len(starts))
            for stage in stages:
                over, ends = self._least_swapped(stage, starts, cuts, memory)
                allowed = inside
                if self._ratios is not None:
                    last = np.array([int(self._ratios[stage] * length) for length in lengths])
                    allowed = cuts == (stop - last)[:, None]
                cost = self._seconds(stage, starts, stop, cuts, ends)
                cost = cost + (self._reductions[stop] - self._reductions[starts])[:, None]
                cost = np.where(allowed & (over <= 0), cost, np.inf)
                column = len(cuts) - 1 - cost[:, ::-1].argmin(axis=1)  # of the fastest the one that recomputes least
                if self._ratios is not None:
                    column = stop - last - starts[0]
                seconds[stage, stop, lengths - 1] = cost[rows, column]
                recomputed[stage, stop, lengths - 1] = stop - cuts[column]
                swapped[stage, stop, lengths - 1] = ends[rows, column] - starts
                excess[stage, stop, lengths - 1] = np.where(allowed, over, _UNLIMITED).min(axis=1)
        return CandidateTable(seconds, recomputed, swapped, excess)

    def _least_swapped(
        self, stage: int, starts: Ints, cuts: Ints, memory: Callable[[StageLoad, Any], StageMemory]
    ) -> tuple[Ints, Ints]:
        """Bytes over the budget and where the swapped layers end, ``[start, cut]``.

        If it is to be chosen, that is the earliest end that fits, or else the last.
        """
        load, budget, begin = self._loads[stage], self._budgets[stage], starts[:, None]
        latest = np.maximum(begin, cuts)

        def over(ends: Ints) -> Ints:
            found: Ints = memory(load, self._memory.swapped(begin, ends)).total - budget
            return found

        if not self._swaps[stage]:
            ends = np.broadcast_to(begin, latest.shape)
        elif self._swap_ratios is not None:
            lengths = [int(self._swap_ratios[stage] * (cuts[-1] - start)) for start in starts]
            ends = np.minimum(begin + np.array(lengths)[:, None], latest)
        else:
            low, ends = np.broadcast_to(begin, latest.shape), latest
            while (low < ends).any():
                middle = (low + ends) // 2
                fits = over(middle) <= 0
                low, ends = np.where(fits, low, np.minimum(middle + 1, ends)), np.where(fits, middle, ends)
        return over(ends), ends

    def _seconds(self, stage: int, starts: Ints, stop: int, cuts: Ints, ends: Ints) -> Floats:
        """Seconds of passes, recomputation and swap, ``[start, cut]``. A slow device copies as fast as others."""
        slowness, backward = self._slowness[stage], self.passes - self.forward
        again = self.forward[stop] - self.forward[cuts]
        hidden = slowness * (backward[stop] - backward[ends] + again)
        swap = swap_seconds(self._devices, self._memory.swapped(starts[:, None], ends), hidden)
        return slowness * ((self.passes[stop] - self.passes[starts])[:, None] + again) + swap

    def _stops(self, longest_s: float) -> Iterator[tuple[int, Ints, Sequence[int]]]:
        """Ends of stages with the starts and the stages that they may have."""
        n, num_stages = self._size, len(self._loads)
        if self._partition is not None:
            for stage, (start, stop) in enumerate(pairwise(bounds(self._partition))):
                yield stop, np.array([start]), [stage]
            return
        lows = np.searchsorted(self.passes, self.passes - longest_s * (1 + 1e-9), side="left")
        for stop in range(1, n + 1):
            # Every stage before and after has at least one layer.
            stages = range(max(0, stop + num_stages - 1 - n), min(stop, num_stages))
            yield stop, np.arange(min(int(lows[stop]), stop - 1), stop), stages


@dataclass(frozen=True)
class SplitCosts:
    """Seconds of all stages, as in :class:`CandidateTable`, and cuts that a search may choose.

    ``round_trips`` are those over the cut before each layer, and after the last, ``[n + 1]``. ``depths`` are None if
    transfers and depths do not matter.
    """

    seconds: Floats
    round_trips: Floats
    depths: Sequence[int] | None

    def pace_of(self, counts: Sequence[int]) -> float:
        """Pace of a split: seconds per micro-batch."""
        stops = bounds(counts)[1:]
        compute = [float(self.seconds[stage, stop, counts[stage] - 1]) for stage, stop in enumerate(stops)]
        return pace(compute, [float(self.round_trips[stop]) for stop in stops[:-1]], self.depths)


def fastest_split(costs: SplitCosts) -> tuple[int, ...] | None:
    """Layer counts of the fastest split. None if no split is allowed.

    Among the fastest it looks for one with a small sum of squared costs, so that stages which do not set the pace are
    even and recompute little.
    """
    counts = _split_within(costs, np.inf)
    if counts is None:
        return None
    high, low = costs.pace_of(counts), 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        better = _split_within(costs, middle)
        if better is None:
            low = middle
        else:  # its pace may be rounded up beyond what was asked for
            counts, high = better, min(middle, costs.pace_of(better))
    while (better := _split_within(costs, high * (1 - _CLOSE))) is not None:
        pace_there = costs.pace_of(better)
        if pace_there >= high:
            break
        counts, high = better, pace_there
    even = _split_within(costs, high * (1 + _CLOSE), even=True)
    return even if even is not None and costs.pace_of(even) <= high * (1 + _CLOSE) else counts


def _split_within(costs: SplitCosts, limit: float, even: bool = False) -> tuple[int, ...] | None:
    """Split with a pace of at most ``limit``, or None.

    Every cut keeps the choice with the least reach. With ``even`` it keeps that with the least sum of squared costs,
    whose reach may be larger: then a split may be missed.
    """
    num_stages, size, width = costs.seconds.shape
    starts = np.arange(size)[:, None] - 1 - np.arange(width)
    carried = np.full(size, np.inf)  # what the stages so far add to the reach of one that begins at each cut
    carried[0] = 0.0
    squares = carried
    choices = []
    for stage in range(num_stages):
        table = np.where(starts >= 0, costs.seconds[stage] + carried[starts], np.inf)
        table = np.where(table <= limit, table, np.inf)
        order = table
        if even:
            cost = np.where(np.isfinite(table), costs.seconds[stage], np.inf)
            order = cost**2 + squares[starts]
        choice = order.argmin(axis=1)
        choices.append(choice)
        rows = np.arange(size)
        reach, squares = table[rows, choice], order[rows, choice]
        possible = np.isfinite(reach)
        if not possible.any():
            return None
        carried = np.where(possible, 0.0, np.inf)
        if costs.depths is not None and stage < num_stages - 1 and np.isfinite(limit):
            advance = costs.depths[stage] - costs.depths[stage + 1]
            more = reach[possible] + costs.round_trips[possible] - limit * advance
            carries = costs.round_trips[possible] / 2 <= limit  # a link that is slower makes no split of this pace
            carried[possible] = np.where(carries, np.maximum(0.0, more), np.inf)
    if not np.isfinite(reach[-1]):
        return None
    counts, stop = [], size - 1
    for choice in reversed(choices):
        counts.append(int(choice[stop]) + 1)
        stop -= counts[-1]
    return tuple(reversed(counts))


def may_swap(pipeline: Pipeline) -> list[bool]:
    """For each virtual stage, whether it swaps if it is asked to: not with one micro-batch in flight on its rank."""
    return [pipeline.in_flight(pipeline.rank_of(part)) > 1 for part in range(pipeline.num_parts)]


def swap_seconds(devices: Devices, swapped: Any, hidden_s: Any) -> Floats:
    """Seconds that swapping ``swapped`` bytes adds to a micro-batch's passes.

    An accelerator copies them out while it goes on, and back during the ``hidden_s`` seconds of the backward pass
    before they are needed. The CPU copies both ways itself.
    """
    one_way = np.asarray(swapped) / (devices.host_bandwidth or np.inf)
    return 2 * one_way if devices.host_transfers else np.maximum(0.0, one_way - hidden_s)


def _prefix(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
