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

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ds_vpipe.planning.layer_profile import ModelProfile
from ds_vpipe.planning.memory import Activations, ActivationSums, Ints
from ds_vpipe.planning.optimizer_bytes import OptimizerBytes
from ds_vpipe.planning.pace import pace
from ds_vpipe.schedules.counts import StageLoad

Floats = npt.NDArray[np.float64]

UNLIMITED = 1 << 60
_CLOSE = 1e-12  # paces that differ by less are the same


@dataclass(frozen=True)
class CandidateTable:
    """Candidate stages: tables ``[stage, stop, length - 1]`` for layers ``stop - length`` to ``stop - 1``.

    Attributes:
        seconds: forward and backward pass and recomputation; infinite where it does not fit or was not looked at.
        recomputed: layers to recompute.
        excess: bytes over the budget at the best number of layers; negative if it fits, infinite if not looked at.
    """

    seconds: npt.NDArray[np.float64]
    recomputed: Ints
    excess: npt.NDArray[np.float64]


class Candidates:
    """Candidates for the stages of one model on given devices.

    Args:
        profile: the model's layers.
        loads: most that the schedule holds on each stage.
        budgets: bytes of each stage's device.
        optimizer: what training needs per byte of weights.
        ratios: recompute ratio of each stage, or None to find the smallest that fits.
        partition: layer counts, or None for any.
    """

    def __init__(
        self,
        profile: ModelProfile,
        loads: Sequence[StageLoad],
        budgets: Sequence[int],
        optimizer: OptimizerBytes,
        ratios: Sequence[float] | None = None,
        partition: Sequence[int] | None = None,
    ) -> None:
        self.profile = profile
        self._loads, self._budgets, self._optimizer = loads, budgets, optimizer
        self._ratios = ratios
        self._stops = None if partition is None else np.cumsum(partition)
        self._counts = partition
        self._sums = ActivationSums(profile)
        self.forward = _prefix([layer.forward_s for layer in profile.layers])
        self.passes = _prefix([layer.forward_s + layer.backward_s for layer in profile.layers])
        weights = [layer.parameter_bytes for layer in profile.layers]
        self._weights = np.concatenate([[0], np.cumsum(weights, dtype=np.int64)])
        trained = [layer.parameter_bytes - layer.frozen_bytes for layer in profile.layers]
        self._trained = np.concatenate([[0], np.cumsum(trained, dtype=np.int64)])
        self._largest = np.array([layer.largest_weight_bytes for layer in profile.layers], dtype=np.int64)

    def table(self, longest_s: float) -> CandidateTable:
        """Table of all stages whose passes take at most ``longest_s`` seconds.

        With a partition given, just its stages, however long they take.
        """
        n, num_stages = len(self.profile), len(self._loads)
        lows = np.searchsorted(self.passes, self.passes - longest_s * (1 + 1e-9), side="left")
        if self._counts is not None:
            lows = np.zeros(n + 1, dtype=np.int64)
        lows = np.minimum(lows, np.maximum(0, np.arange(n + 1) - 1))
        width = max(1, int((np.arange(n + 1) - lows).max()))
        shape = (num_stages, n + 1, width)
        seconds, excess = np.full(shape, np.inf), np.full(shape, np.inf)
        recomputed = np.zeros(shape, dtype=np.int64)
        for stop in range(1, n + 1):
            if self._stops is not None and stop not in self._stops:
                continue
            starts = np.arange(int(lows[stop]), stop)
            table = self._sums.alternatives(starts, stop, self._optimizer.gradient)
            cuts = np.arange(starts[0], stop + 1)
            inside = cuts >= starts[:, None]
            weights = self._weights[stop] - self._weights[starts]
            trained = self._trained[stop] - self._trained[starts]
            lengths = stop - starts
            # Every stage before and after has at least one layer.
            for stage in range(max(0, stop + num_stages - 1 - n), min(stop, num_stages)):
                if self._counts is not None and self._stops is not None and self._stops[stage] != stop:
                    continue
                over = self._over(stage, starts, stop, weights, trained, table)
                if self._ratios is None:
                    fits = inside & (over <= 0)
                    last = fits[:, ::-1].argmax(axis=1)  # from no segment on
                    found = fits.any(axis=1)
                    best = np.where(inside, over, UNLIMITED).min(axis=1)
                else:
                    last = np.array([int(self._ratios[stage] * length) for length in lengths])
                    best = over[np.arange(len(starts)), stop - last - starts[0]]
                    found = best <= 0
                if self._counts is not None:
                    found &= lengths == self._counts[stage]
                    best = np.where(lengths == self._counts[stage], best, np.inf)
                cost = self.passes[stop] - self.passes[starts] + self.forward[stop] - self.forward[stop - last]
                seconds[stage, stop, lengths - 1] = np.where(found, cost, np.inf)
                recomputed[stage, stop, lengths - 1] = last
                excess[stage, stop, lengths - 1] = best
        return CandidateTable(seconds, recomputed, excess)

    def _over(self, stage: int, starts: Ints, stop: int, weights: Ints, trained: Ints, table: Activations) -> Ints:
        """Bytes over the budget, ``[start, cut]``; the same sum as :func:`ds_vpipe.planning.memory.stage_memory`."""
        load, optimizer, inputs = self._loads[stage], self._optimizer, self._sums.inputs
        static = weights + (load.versions - 1) * trained
        static = static + _scaled(trained, optimizer.gradient) + _scaled(trained, optimizer.held)
        static = static + load.input_buffers * inputs[starts] + load.output_buffers * inputs[stop]
        largest = np.maximum.accumulate(self._largest[starts[0] : stop][::-1])[::-1]
        update = _scaled(trained, optimizer.update) + _scaled(largest, optimizer.temporary) + optimizer.bucket_bytes
        over: Ints = (static - self._budgets[stage])[:, None] + load.in_flight * table.kept
        return np.asarray(over + table.beyond(load, update[:, None]))


@dataclass(frozen=True)
class SplitCosts:
    """Seconds of all stages and cuts that a search may choose.

    Attributes:
        seconds: ``[stage, stop, length - 1]``, infinite where not allowed: layers ``stop - length`` to ``stop - 1``.
        round_trips: seconds of a round trip over the cut before each layer, and after the last; ``[n + 1]``.
        advances: W_s - W_(s+1) of each boundary between stages, or None if transfers and depths do not matter.
    """

    seconds: Floats
    round_trips: Floats
    advances: Sequence[int] | None

    def pace_of(self, counts: Sequence[int]) -> float:
        """Pace of a split: seconds per micro-batch."""
        compute, trips, stop = [], [], 0
        for stage, count in enumerate(counts):
            stop += count
            compute.append(float(self.seconds[stage, stop, count - 1]))
            trips.append(float(self.round_trips[stop]))
        if self.advances is None:
            return pace(compute, trips, None)
        depths = [sum(self.advances[stage:]) for stage in range(len(counts))]
        return pace(compute, trips[:-1], depths)


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


def smallest_maximum(values: Floats) -> tuple[int, ...]:
    """Layer counts of a split whose largest entry of ``values`` (``[stage, stop, length - 1]``) is smallest."""
    finite = np.where(np.isfinite(values), values, np.inf)
    num_stages, size, width = finite.shape
    starts = np.arange(size)[:, None] - 1 - np.arange(width)
    best = np.full(size, np.inf)
    best[0] = -np.inf
    choices = []
    for stage in range(num_stages):
        table = np.where(starts >= 0, np.maximum(finite[stage], best[starts]), np.inf)
        choices.append(table.argmin(axis=1))
        best = table.min(axis=1)
    return _follow(choices, size - 1)


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
        if costs.advances is not None and stage < num_stages - 1 and np.isfinite(limit):
            more = reach[possible] + costs.round_trips[possible] - limit * costs.advances[stage]
            carried[possible] = np.maximum(0.0, more)
    return _follow(choices, size - 1) if np.isfinite(reach[-1]) else None


def _follow(choices: Sequence[npt.NDArray[np.intp]], stop: int) -> tuple[int, ...]:
    counts = []
    for choice in reversed(choices):
        counts.append(int(choice[stop]) + 1)
        stop -= counts[-1]
    return tuple(reversed(counts))


def _scaled(amounts: Ints, ratio: Fraction) -> Ints:
    result: Ints = -(-amounts * ratio.numerator // ratio.denominator)
    return result


def _prefix(values: Sequence[float]) -> npt.NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
