"""One timeline of all ranks' recordings. Messages relate their clocks.

No message arrives before it was sent. With offsets o that make the clocks agree, a message from a to b says
``end of receive + o_b >= start of send + o_a``, so ``o_b - o_a`` is at least the largest ``start - end`` of all
messages from a to b, and likewise at most the smallest ``end - start`` of those from b to a. The estimate is the
middle of these bounds, which is exact if the quickest messages of both directions take equally long; the truth is
never further off than half their distance. Clocks that share no messages are related through others, along the
tightest bounds.

Source: the two-way exchange of Cristian, "Probabilistic clock synchronization" (Distributed Computing, 1989), with
the quickest of many messages taken as in Mills' NTP clock filter. Drift during the recording is not estimated.
"""

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ds_vpipe.errors import Refusal
from ds_vpipe.schedules.actions import Action, Category, Kind
from ds_vpipe.schedules.dry_run import received_as
from ds_vpipe.timelines.timeline import Recording, Span, Timeline

_NANO = 1e-9


class Message(NamedTuple):
    """Send and receive of one activation or gradient."""

    send: Span
    receive: Span


class ClockOffset(NamedTuple):
    """Seconds from a clock to the reference, and their largest error."""

    seconds: float
    uncertainty: float


def messages(spans: Iterable[Span]) -> Iterator[Message]:
    """Pair the sends of activations and gradients among ``spans`` with their receives.

    Sends whose other end is not among the spans are left out.
    """
    sends: dict[Action, list[Span]] = defaultdict(list)  # by the kind and part of their receives
    receives: dict[Action, list[Span]] = defaultdict(list)
    for span in sorted(spans, key=lambda span: span.start):
        kind = Kind.RECV_GRAD if span.kind is Kind.DROP_GRAD else span.kind
        action = Action(kind, 0, span.part)
        if kind in (Kind.SEND_ACT, Kind.SEND_GRAD):
            sends[received_as(action)].append(span)
        elif span.category is Category.WAIT:
            receives[action].append(span)
    for action, sent in sends.items():
        yield from _paired(sent, receives[action])


def _paired(sends: Sequence[Span], receives: Sequence[Span]) -> Iterator[Message]:
    """The messages of one direction between two parts, the last one first.

    Numbers rise by one, and fall where the pipeline has been emptied. Of what is sent between two falls the first ones
    are received, the others withdrawn. A receive that finds the end of the data has no send.
    """
    end = len(sends)
    for receive in reversed(receives):
        at = end - 1 - (sends[end - 1].action.index - receive.action.index) if end else -1
        if 0 <= at < end and sends[at].action.index == receive.action.index:
            yield Message(sends[at], receive)
            end = at


def estimate_offsets(found: Iterable[Message], clock_of_rank: Mapping[int, str]) -> dict[str, ClockOffset]:
    """Offsets of all clocks in ``clock_of_rank``, relative to that of the lowest rank.

    The times of each end of a message are on the clock of its rank.

    Raises:
        VPipeConfigError: a clock is connected to the others by messages in one direction only, or not at all.
    """
    lower: dict[tuple[str, str], float] = {}  # of offset(second) - offset(first)
    for send, receive in found:
        pair = clock_of_rank[send.rank], clock_of_rank[receive.rank]
        if pair[0] != pair[1]:
            lower[pair] = max(send.start - receive.end, lower.get(pair, -math.inf))

    known = {clock_of_rank[min(clock_of_rank)]: ClockOffset(0.0, 0.0)}
    while unknown := set(clock_of_rank.values()) - known.keys():
        edges = []
        for (source, target), low in lower.items():
            if source in known and target in unknown and (target, source) in lower:
                high = -lower[target, source]
                edges.append((abs(high - low) / 2, target, source, (low + high) / 2))
        if not edges:
            reason = "no messages to and from the other ranks' clocks are in the recordings"
            allowed, remedy = "a clock with messages in both directions", "record all ranks over the same time"
            raise Refusal("clock", min(unknown), allowed, remedy, reason).error()
        half, target, source, difference = min(edges)
        before = known[source]
        known[target] = ClockOffset(before.seconds + difference, before.uncertainty + half)
    return known


def read_recordings(folder: str | os.PathLike[str]) -> list[Recording]:
    """Recordings of all ranks in ``folder``: the files whose names the recorder gives, ``*rank*.json``.

    Raises:
        VPipeConfigError: there is none, or a file is not a recording of one rank.
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


def merge(recordings: Sequence[Recording], replica: int = 0) -> Timeline:
    """Timeline of all ranks on one clock that begins at 0.

    There has to be one per rank of the ``replica``. A rank whose ring buffer has lost spans knows nothing of the time
    before its oldest one, so that the timeline begins where all such ranks begin. Of a batch that was trained again the
    last loss counts.

    Its ``meta`` has that of the lowest rank, and ``clock_offsets_s``, ``clock_uncertainty_s`` and ``dropped`` spans per
    rank.

    Raises:
        VPipeConfigError: a rank is missing or there twice, sizes differ, or clocks cannot be related.
    """
    ranks = _one_per_rank(recordings, replica)
    origin: dict[str, int] = {}  # of each clock, so that differences of large numbers are taken in whole nanoseconds
    for rank in ranks:
        origin[rank.clock] = min(rank.origin_ns, origin.get(rank.clock, rank.origin_ns))
    ranks = [_placed(rank, (rank.origin_ns - origin[rank.clock]) * _NANO) for rank in ranks]
    spans = (span for rank in ranks for span in rank.spans)
    offsets = estimate_offsets(messages(spans), {rank.rank: rank.clock for rank in ranks})
    ranks = [_placed(rank, offsets[rank.clock].seconds) for rank in ranks]
    lossy = [min(span.start for span in rank.spans) for rank in ranks if rank.dropped and rank.spans]
    if lossy:
        ranks = [_placed(rank, begin=max(lossy)) for rank in ranks]
    times = [span.start for rank in ranks for span in rank.spans] + [m.time for rank in ranks for m in rank.memory]
    ranks = [_placed(rank, -min(times, default=0.0)) for rank in ranks]
    staleness = tuple(pair for rank in ranks for pair in rank.staleness)
    timeline = Timeline(
        title=ranks[0].title,
        source="recording",
        num_ranks=len(ranks),
        micro_batches=ranks[0].micro_batches,
        spans=tuple(span for rank in ranks for span in rank.spans),
        memory=tuple(sample for rank in ranks for sample in rank.memory),
        losses=tuple(sorted({batch: loss for rank in ranks for batch, loss in rank.losses}.items())),
        staleness=staleness if len(staleness) == len(ranks) else (),
        meta={
            **ranks[0].meta,
            "clock_offsets_s": [offsets[rank.clock].seconds for rank in ranks],
            "clock_uncertainty_s": [offsets[rank.clock].uncertainty for rank in ranks],
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
        reason = "a rank that is killed writes none"
        raise Refusal("recordings of ranks", ranks, allowed, "give all of them once", reason).error()
    for name in ("num_ranks", "micro_batches"):
        values = sorted({getattr(one, name) for one in chosen})
        if len(values) > 1:
            raise Refusal(name, values, "the same in all recordings", "give recordings of one run").error()
    return chosen


def _placed(recording: Recording, shift: float = 0.0, begin: float = -math.inf) -> Recording:
    """``recording`` without what ended before ``begin``, and then later by ``shift``, both in seconds.

    No memory is known before its first sample after that.
    """
    spans = [
        span._replace(start=max(span.start, begin) + shift, end=span.end + shift)
        for span in recording.spans
        if span.end > begin
    ]
    memory = [sample._replace(time=sample.time + shift) for sample in recording.memory if sample.time >= begin]
    meta = dict(recording.meta)
    if "events" in meta:
        meta["events"] = [[at + shift, event] for at, event in meta["events"] if at >= begin]
    return replace(recording, spans=spans, memory=memory, meta=meta)
