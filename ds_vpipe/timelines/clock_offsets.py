"""How far the clocks of ranks on different machines are apart, from the messages that they sent each other.

No message arrives before it was sent. With offsets o that make the clocks agree, a message from a to b says
``end of receive + o_b >= start of send + o_a``, so ``o_b - o_a`` is at least the largest ``start - end`` of all
messages from a to b, and likewise at most the smallest ``end - start`` of those from b to a. The estimate is the
middle of these bounds, which is exact if the quickest messages of both directions take equally long; the truth is
never further off than half their distance. Clocks that share no messages are related through others, along the
tightest bounds.

Source: the two-way exchange of Cristian, "Probabilistic clock synchronization" (Distributed Computing, 1989), with
the quickest of many messages taken as in Mills' NTP clock filter. Drift during the recording is not estimated.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ds_vpipe.errors import Refusal
from ds_vpipe.timelines.messages import Message


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Seconds to add to the times of a clock to have them on the reference's.

    Attributes:
        seconds: The offset.
        uncertainty: It may be off by that many seconds at most.
    """

    seconds: float
    uncertainty: float


def estimate_offsets(messages: Iterable[Message], clock_of_rank: Mapping[int, str]) -> dict[str, ClockOffset]:
    """Offsets of all clocks in ``clock_of_rank``, relative to that of the lowest rank.

    Args:
        messages: With the times of each end on the clock of its rank. Only exact arrivals are used.
        clock_of_rank: Name of the clock of every rank.

    Raises:
        VPipeConfigError: A clock is connected to the others by messages in one direction only, or not at all.
    """
    lower: dict[tuple[str, str], float] = {}  # of offset(second) - offset(first)
    for message in messages:
        source, target = clock_of_rank[message.send.rank], clock_of_rank[message.receive.rank]
        if message.exact and source != target:
            bound = message.send.start - message.receive.end
            lower[source, target] = max(bound, lower.get((source, target), -math.inf))

    reference = clock_of_rank[min(clock_of_rank)]
    known = {reference: ClockOffset(0.0, 0.0)}
    clocks = set(clock_of_rank.values())
    while len(known) < len(clocks):
        edges = []
        for source, target in lower:
            if source in known and target not in known and (target, source) in lower:
                low, high = lower[source, target], -lower[target, source]
                edges.append((abs(high - low) / 2, target, source, (low + high) / 2))
        if not edges:
            lost = sorted(clocks - known.keys())
            reason = "no messages to and from the other ranks' clocks are in the recordings"
            remedy = "record all ranks over the same time, or give the offsets"
            raise Refusal("clock", lost[0], "a clock with messages in both directions", remedy, reason).error()
        half, target, source, difference = min(edges)
        before = known[source]
        known[target] = ClockOffset(before.seconds + difference, before.uncertainty + half)
    return known
