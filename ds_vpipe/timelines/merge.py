"""One timeline out of the recordings of all ranks, whose clocks are related by the messages between them.

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
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ds_vpipe.errors import Refusal
from ds_vpipe.schedules.actions import Category, Kind
from ds_vpipe.timelines.timeline import MemorySample, Recording, Span, Timeline

_NANO = 1e-9
_RECEIVED_AS = {Kind.SEND_ACT: (Kind.RECV_ACT, 1), Kind.SEND_GRAD: (Kind.RECV_GRAD, -1)}


class Message(NamedTuple):
    """Send and receive of one activation or gradient."""

    send: Span
    receive: Span


class ClockOffset(NamedTuple):
    """Seconds to add to the times of a clock to have them on the reference's.

    Attributes:
        seconds: The offset.
        uncertainty: Largest error of it in seconds; None if the offset was given.
    """

    seconds: float
    uncertainty: float | None


def messages(spans: Iterable[Span]) -> Iterator[Message]:
    """Pair the sends of activations and gradients among ``spans`` with their receives.

    Part p sends an activation that part p+1 receives and a gradient that part p-1 receives. A message is known by the
    receiving part, its kind and its micro-batch, and as the first or a later one of these: where the data end inside a
    batch, its numbers are given again. Sends whose other end is not among the spans are left out.
    """
    sends: dict[tuple[int, Kind, int], list[Span]] = defaultdict(list)
    receives: dict[tuple[int, Kind, int], list[Span]] = defaultdict(list)
    for span in spans:
        if span.kind in _RECEIVED_AS:
            kind, step = _RECEIVED_AS[span.kind]
            sends[span.part + step, kind, span.action.index].append(span)
        elif span.category is Category.WAIT:
            kind = Kind.RECV_GRAD if span.kind is Kind.DROP_GRAD else span.kind
            receives[span.part, kind, span.action.index].append(span)
    for key, sent in sends.items():
        yield from map(Message, sent, receives[key])


def estimate_offsets(found: Iterable[Message], clock_of_rank: Mapping[int, str]) -> dict[str, ClockOffset]:
    """Offsets of all clocks in ``clock_of_rank``, relative to that of the lowest rank.

    Args:
        found: Messages, with the times of each end on the clock of its rank.
        clock_of_rank: Name of the clock of every rank.

    Raises:
        VPipeConfigError: A clock is connected to the others by messages in one direction only, or not at all.
    """
    lower: dict[tuple[str, str], float] = {}  # of offset(second) - offset(first)
    for send, receive in found:
        pair = clock_of_rank[send.rank], clock_of_rank[receive.rank]
        if pair[0] != pair[1]:
            lower[pair] = max(send.start - receive.end, lower.get(pair, -math.inf))

    known = {clock_of_rank[min(clock_of_rank)]: ClockOffset(0.0, 0.0)}
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
        known[target] = ClockOffset(before.seconds + difference, (before.uncertainty or 0.0) + half)
    return known


def read_recordings(folder: str | os.PathLike[str]) -> list[Recording]:
    """Recordings of all ranks in ``folder``: the files whose names the recorder gives, ``*rank*.json``.

    Raises:
        VPipeConfigError: There is none, or a file is not a recording of one rank.
    """
    recordings = []
    for path in sorted(Path(folder).glob("*rank*.json")):
        recording = Timeline.load(path)
        if not isinstance(recording, Recording):
            raise Refusal("recording", str(path), "the recording of one rank", "move it out of the folder").error()
        recordings.append(recording)
    if not recordings:
        allowed = "a folder with recordings, *rank*.json"
        raise Refusal("recording", str(folder), allowed, "correct the path, or record anew").error()
    return recordings


def merge(recordings: Sequence[Recording], offsets: Sequence[float] | None = None, replica: int = 0) -> Timeline:
    """Bring the ranks' times onto one clock, let them begin at 0 and put them together.

    A rank whose ring buffer has lost spans knows nothing of the time before its oldest one, so that the timeline begins
    where all such ranks begin.

    Args:
        recordings: One per rank of each replica, in any order.
        offsets: Seconds to add to each rank's times. If not given, they are estimated from messages.
        replica: Which data-parallel replica of the pipeline to take.

    Returns:
        The timeline. Its ``meta`` has that of the lowest rank, ``clock_offsets_s`` and ``clock_uncertainty_s`` per
        rank (the latter None where offsets were given), and ``dropped`` spans per rank.

    Raises:
        VPipeConfigError: A rank is missing or there twice, sizes differ, or clocks cannot be related.
    """
    ranks = _one_per_rank(recordings, replica)
    origin: dict[str, int] = {}  # of each clock, so that differences of large numbers are taken in whole nanoseconds
    for rank in ranks:
        origin[rank.clock] = min(rank.origin_ns, origin.get(rank.clock, rank.origin_ns))
    ranks = [_shifted(rank, (rank.origin_ns - origin[rank.clock]) * _NANO) for rank in ranks]
    if offsets is None:
        spans = (span for rank in ranks for span in rank.spans)
        by_clock = estimate_offsets(messages(spans), {rank.rank: rank.clock for rank in ranks})
        found = [by_clock[rank.clock] for rank in ranks]
    elif len(offsets) == len(ranks):
        base = min(origin.values())
        pairs = zip(ranks, offsets, strict=True)
        found = [ClockOffset(offset + (origin[rank.clock] - base) * _NANO, None) for rank, offset in pairs]
    else:
        raise Refusal("offsets", list(offsets), f"one per rank, {len(ranks)}", "give all of them").error()
    ranks = [_shifted(rank, offset.seconds) for rank, offset in zip(ranks, found, strict=True)]
    first = ranks[0]
    lossy = [min(span.start for span in rank.spans) for rank in ranks if rank.dropped and rank.spans]
    if lossy:
        ranks = [_cut(rank, max(lossy)) for rank in ranks]
    times = [span.start for rank in ranks for span in rank.spans] + [m.time for rank in ranks for m in rank.memory]
    ranks = [_shifted(rank, -min(times, default=0.0)) for rank in ranks]
    staleness = tuple(pair for rank in ranks for pair in rank.staleness)
    timeline = Timeline(
        title=first.title,
        source="recording",
        num_ranks=len(ranks),
        micro_batches=first.micro_batches,
        spans=tuple(span for rank in ranks for span in rank.spans),
        memory=tuple(sample for rank in ranks for sample in rank.memory),
        losses=tuple(sorted({pair for rank in ranks for pair in rank.losses})),
        staleness=staleness if len(staleness) == len(ranks) else (),
        meta={
            **first.meta,
            "clock_offsets_s": [offset.seconds for offset in found],
            "clock_uncertainty_s": [offset.uncertainty for offset in found],
            "dropped": [rank.dropped for rank in ranks],
        },
    )
    timeline.check()
    return timeline


def _one_per_rank(recordings: Sequence[Recording], replica: int) -> list[Recording]:
    """The recordings of a replica by rank, after checking that they make one pipeline."""
    replicas = sorted({recording.replica for recording in recordings})
    if replica not in replicas:
        raise Refusal("replica", replica, f"one of {replicas}", "choose one of them").error()
    chosen = sorted((one for one in recordings if one.replica == replica), key=lambda one: one.rank)
    ranks, expected = [one.rank for one in chosen], chosen[0].num_ranks
    if ranks != list(range(expected)):
        allowed = f"one recording of each rank from 0 to {expected - 1}"
        raise Refusal("recordings of ranks", ranks, allowed, "give all of them once").error()
    for name in ("num_ranks", "micro_batches"):
        values = sorted({getattr(one, name) for one in chosen})
        if len(values) > 1:
            raise Refusal(name, values, "the same in all recordings", "give recordings of one run").error()
    return chosen


def _shifted(recording: Recording, seconds: float) -> Recording:
    spans = [Span(s.rank, s.action, s.start + seconds, s.end + seconds, s.version) for s in recording.spans]
    memory = [MemorySample(m.rank, m.time + seconds, m.bytes) for m in recording.memory]
    return replace(recording, spans=spans, memory=memory)


def _cut(recording: Recording, begin: float) -> Recording:
    """Leave out everything that ended before ``begin``; no memory is known before its first sample after that."""
    spans = [span._replace(start=max(span.start, begin)) for span in recording.spans if span.end > begin]
    return replace(recording, spans=spans, memory=[m for m in recording.memory if m.time >= begin])
