"""Steady-state pace of a pipeline, in closed form.

In steady state a stage of depth W_s runs F(j + W_s), B(j) in turn; F(j) of a stage needs F(j) of the one before it
and B(j) needs B(j) of the one after it. These are all the constraints there are, so the seconds per micro-batch are the
largest mean of any of their cycles, which are: from the forward pass of stage s on to that of stage t, there to the
backward pass, and back to s. Such a cycle takes the passes of stages s to t and the transfers between them, both ways,
and advances by W_s - W_t + 1 micro-batches:

    pace = max over s <= t of (compute_s + ... + compute_t + round_trip_s + ... + round_trip_(t-1)) / (W_s - W_t + 1)

With s = t this is the slowest stage. With default depths the denominator is the number of stages in the cycle, so that
transfers are on the way; every extra forward of depth hides some of them. A link carries one transfer at a time each
way, so that half a round trip is the least, whatever the depths. (Cycle means of event graphs: Baccelli et
al., Synchronization and Linearity, 1992, chapter 2.) A gpipe schedule has no such cycles within its batch but the
stages themselves.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction


@dataclass(frozen=True)
class LinkCost:
    """Latency and bandwidth of transfers between two stages."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def seconds(self, size: int) -> float:
        """One transfer of ``size`` bytes."""
        return self.latency_s + size / self.bytes_per_s

    def round_trip(self, size: int) -> float:
        """An activation there and its gradient back."""
        return 2 * self.seconds(size)


FREE_LINK = LinkCost()  # transfers that take no time


def pace(compute: Sequence[float], round_trips: Sequence[float], depths: Sequence[int] | None) -> float:
    """Seconds per micro-batch in steady state.

    Given are the seconds of the passes and the recomputation of each stage, of a round trip over each boundary, and W_s
    of each stage, or None for gpipe.
    """
    slowest = max(compute)
    if depths is None:
        return slowest
    slowest = max(slowest, _busiest_link(round_trips))
    for first in range(len(compute)):
        total = compute[first]
        for last in range(first + 1, len(compute)):
            total += round_trips[last - 1] + compute[last]
            slowest = max(slowest, total / (depths[first] - depths[last] + 1))
    return slowest


def _busiest_link(round_trips: Sequence[float]) -> float:
    """Seconds of the longest transfer one way."""
    return max(round_trips, default=0.0) / 2


def batch_seconds(
    forward: Sequence[float],
    backward: Sequence[float],
    round_trips: Sequence[float],
    depths: Sequence[int] | None,
    micro_batches: int,
) -> float:
    """Seconds of a synchronous batch, with filling and draining.

    Exact for gpipe, whose two halves are flow shops. For 1F1B one micro-batch goes through everything and the others
    follow at the pace, which is exact for even stages with free transfers and close for others; the simulator knows.
    """
    through = sum(forward) + sum(backward) + sum(round_trips)
    if depths is None:
        link = _busiest_link(round_trips)
        return through + (micro_batches - 1) * (max(link, *forward) + max(link, *backward))
    compute = [one + other for one, other in zip(forward, backward, strict=True)]
    return through + (micro_batches - 1) * pace(compute, round_trips, depths)


def hiding_depths(compute: Sequence[float], round_trips: Sequence[float]) -> tuple[int, ...]:
    """Smallest depths that hide all transfers: the pace is that of the slowest stage, or of a link that is slower.

    From the last stage on, each stage runs ahead of the next by the fewest micro-batches, at least one, for which no
    cycle that begins there is slower than that. A deeper choice further back never saves more than it costs, so every
    depth is as small as it can be.
    """
    limit = max(_busiest_link(round_trips), *compute)
    depths, reach = [0], compute[-1]
    for stage in range(len(compute) - 2, -1, -1):
        excess = reach + round_trips[stage] + compute[stage] - limit
        ahead = max(1, math.ceil(excess / limit * (1 - 1e-12))) if limit > 0 else 1
        reach = compute[stage] + max(0.0, reach + round_trips[stage] - limit * ahead)
        depths.append(depths[-1] + ahead)
    return tuple(reversed(depths))


def micro_batches_for(num_stages: int, idle: float, virtual_stages: int = 1) -> int:
    """The fewest micro-batches per batch with which a synchronous pipeline idles for at most ``idle`` of the time.

    With even stages and free transfers it idles for ``b / (M + b)`` of a batch, ``b = (K - 1) / v``, in every order;
    the interleaved one needs M >= K for it. (Huang et al., "GPipe", NeurIPS 2019, section 2.3; Narayanan et al., SC
    2021, section 2.2.)
    """
    wanted = Fraction(str(idle))  # as written: 0.1 is no binary fraction
    least = num_stages if virtual_stages > 1 else 1
    return max(least, math.ceil(Fraction(num_stages - 1, virtual_stages) * (1 - wanted) / wanted))
