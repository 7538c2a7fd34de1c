"""Exact search for the split of a model that runs fastest.

Candidates first. For each stage, stop and length: the smallest number k of last layers to recompute for which the stage
fits its budget, the seconds of its passes and of that recomputation, and, if nothing fits, by how many bytes the best k
fails. Recomputing fewer layers is never slower, so the smallest k that fits is the best one. O(n w^2 K) vector elements
for n layers, K stages and stages of up to w layers.

Then the split. The pace of a pipeline (:mod:`.pace`) is at most L if and only if, going from the first stage to the
last,

    reach_0 = compute_0,   reach_t = compute_t + max(0, reach_(t-1) + round_trip_(t-1) - L * advance_(t-1))

never exceeds L. A smaller reach is never worse for what follows, so for given L a dynamic program over (stage, cut)
that keeps the smallest reach decides whether any split reaches L. L itself is found by bisection, which ends when no
split is faster than the best one found. Time O(K n w) per step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ds_vpipe.partition import bounds
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import ModelProfile
from ds_vpipe.planning.memory import Ints, MemoryModel
from ds_vpipe.planning.pace import pace
from ds_vpipe.schedules.pipeline import Pipeline

Floats = npt.NDArray[np.float64]

_UNLIMITED = 1 << 60
_CLOSE = 1e-12  # paces that differ by less are the same


@dataclass(frozen=True)
class CandidateTable:
    """Candidate stages: tables ``[stage, stop, length - 1]`` for layers ``stop - length`` to ``stop - 1``."""

    seconds: Floats  # forward and backward pass and recomputation; infinite where it does not fit or was not looked at
    recomputed: Ints  # layers to recompute
    excess: Floats  # bytes over the budget at the best number of layers; negative if it fits, infinite if not looked at


class Candidates:
    """Candidates for the stages of one model on given devices; any, where the pipeline leaves a choice."""

    def __init__(self, profile: ModelProfile, pipeline: Pipeline, devices: Devices) -> None:
        self._size, self._partition, self._ratios = len(profile), pipeline.partition, pipeline.recompute_ratio
        self._loads, self._memory = devices.loads(pipeline), MemoryModel(profile, devices.optimizer)
        self._budgets = [_UNLIMITED if budget is None else budget for budget in devices.budgets(pipeline)]
        self.forward = _prefix([layer.forward_s for layer in profile.layers])
        self.passes = _prefix([layer.forward_s + layer.backward_s for layer in profile.layers])

    def table(self, longest_s: float) -> CandidateTable:
        """Table of all stages whose passes take at most ``longest_s`` seconds.

        With a partition given, just its stages, however long they take.
        """
        found = list(self._stops(longest_s))
        shape = len(self._loads), self._size + 1, max(stop - int(starts[0]) for stop, starts, _ in found)
        seconds, excess = np.full(shape, np.inf), np.full(shape, np.inf)
        recomputed = np.zeros(shape, dtype=np.int64)
        for stop, starts, stages in found:
            memory = self._memory.alternatives(starts, stop)
            inside = np.arange(starts[0], stop + 1) >= starts[:, None]
            lengths = stop - starts
            for stage in stages:
                over = memory(self._loads[stage]).total - self._budgets[stage]
                if self._ratios is None:
                    fits = inside & (over <= 0)
                    last = fits[:, ::-1].argmax(axis=1)  # from no segment on
                    found_one = fits.any(axis=1)
                    best = np.where(inside, over, _UNLIMITED).min(axis=1)
                else:
                    last = np.array([int(self._ratios[stage] * length) for length in lengths])
                    best = over[np.arange(len(starts)), stop - last - starts[0]]
                    found_one = best <= 0
                cost = self.passes[stop] - self.passes[starts] + self.forward[stop] - self.forward[stop - last]
                seconds[stage, stop, lengths - 1] = np.where(found_one, cost, np.inf)
                recomputed[stage, stop, lengths - 1] = last
                excess[stage, stop, lengths - 1] = best
        return CandidateTable(seconds, recomputed, excess)

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
    """Layer counts of a split with the smallest pace, or None if no split is allowed.

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
    """A split with a pace of at most ``limit``, or None; ``even``: one that is even, if it is easily found."""
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
            carried[possible] = np.maximum(0.0, more)
    if not np.isfinite(reach[-1]):
        return None
    counts, stop = [], size - 1
    for choice in reversed(choices):
        counts.append(int(choice[stop]) + 1)
        stop -= counts[-1]
    return tuple(reversed(counts))


def _prefix(values: Sequence[float]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
