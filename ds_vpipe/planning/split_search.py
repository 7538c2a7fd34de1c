"""Exact search for the split of a model that runs fastest, given what every possible stage costs.

The pace of a pipeline (:mod:`.pace`) is at most L if and only if, going from the first stage to the last,

    reach_0 = compute_0,   reach_t = compute_t + max(0, reach_(t-1) + round_trip_(t-1) - L * advance_(t-1))

never exceeds L. A smaller reach is never worse for what follows, so for given L a dynamic program over (stage, cut)
that keeps the smallest reach decides whether any split reaches L. L itself is found by bisection, which ends when no
split is faster than the best one found. Time O(K n w) per step for n layers, K stages and stages of up to w layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ds_vpipe.planning.pace import pace

Floats = npt.NDArray[np.float64]

_CLOSE = 1e-12  # paces that differ by less are the same


@dataclass(frozen=True)
class Band:
    """Costs of all stages that a search may choose.

    Attributes:
        costs: ``[stage, stop, length - 1]``, infinite where not allowed: layers ``stop - length`` to ``stop - 1``.
        round_trips: seconds of a round trip over the cut before each layer, and after the last; ``[n + 1]``.
        advances: W_s - W_(s+1) of each boundary between stages, or None if transfers and depths do not matter.
    """

    costs: Floats
    round_trips: Floats
    advances: Sequence[int] | None

    def pace_of(self, counts: Sequence[int]) -> float:
        """Seconds per micro-batch of a split."""
        compute, trips, stop = [], [], 0
        for stage, count in enumerate(counts):
            stop += count
            compute.append(float(self.costs[stage, stop, count - 1]))
            trips.append(float(self.round_trips[stop]))
        if self.advances is None:
            return pace(compute, trips, None)
        depths = [sum(self.advances[stage:]) for stage in range(len(counts))]
        return pace(compute, trips[:-1], depths)


def fastest_split(band: Band) -> tuple[int, ...] | None:
    """Layer counts of a split with the smallest pace, or None if no split is allowed.

    Among the fastest it looks for one with a small sum of squared costs, so that stages which do not set the pace are
    even and recompute little.
    """
    counts = _split_within(band, np.inf)
    if counts is None:
        return None
    high, low = band.pace_of(counts), 0.0
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        better = _split_within(band, middle)
        if better is None:
            low = middle
        else:  # its pace may be rounded up beyond what was asked for
            counts, high = better, min(middle, band.pace_of(better))
    while (better := _split_within(band, high * (1 - _CLOSE))) is not None:
        pace_there = band.pace_of(better)
        if pace_there >= high:
            break
        counts, high = better, pace_there
    even = _split_within(band, high * (1 + _CLOSE), even=True)
    return even if even is not None and band.pace_of(even) <= high * (1 + _CLOSE) else counts


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


def _split_within(band: Band, limit: float, even: bool = False) -> tuple[int, ...] | None:
    """A split with a pace of at most ``limit``, or None; ``even``: one that is even, if it is easily found."""
    num_stages, size, width = band.costs.shape
    starts = np.arange(size)[:, None] - 1 - np.arange(width)
    carried = np.full(size, np.inf)  # what the stages so far add to the reach of one that begins at each cut
    carried[0] = 0.0
    squares = carried
    choices = []
    for stage in range(num_stages):
        table = np.where(starts >= 0, band.costs[stage] + carried[starts], np.inf)
        table = np.where(table <= limit, table, np.inf)
        order = table
        if even:
            cost = np.where(np.isfinite(table), band.costs[stage], np.inf)
            order = cost**2 + squares[starts]
        choice = order.argmin(axis=1)
        choices.append(choice)
        rows = np.arange(size)
        reach, squares = table[rows, choice], order[rows, choice]
        possible = np.isfinite(reach)
        if not possible.any():
            return None
        carried = np.where(possible, 0.0, np.inf)
        if band.advances is not None and stage < num_stages - 1 and np.isfinite(limit):
            more = reach[possible] + band.round_trips[possible] - limit * band.advances[stage]
            carried[possible] = np.maximum(0.0, more)
    return _follow(choices, size - 1) if np.isfinite(reach[-1]) else None


def _follow(choices: Sequence[npt.NDArray[np.intp]], stop: int) -> tuple[int, ...]:
    counts = []
    for choice in reversed(choices):
        counts.append(int(choice[stop]) + 1)
        stop -= counts[-1]
    return tuple(reversed(counts))
