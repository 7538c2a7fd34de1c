"""The recordings of all ranks of a pipeline as one timeline."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ds_vpipe.errors import Refusal
from ds_vpipe.timelines.clock_offsets import ClockOffset, estimate_offsets
from ds_vpipe.timelines.messages import messages
from ds_vpipe.timelines.recording import RankRecording, read_recording, recording_files
from ds_vpipe.timelines.timeline import MemorySample, Span, Timeline

_NANO = 1e-9


def read_timeline(
    paths: Iterable[str | os.PathLike[str]], offsets: Mapping[int, float] | None = None, replica: int = 0
) -> Timeline:
    """Read the recordings of a pipeline's ranks and merge them with :func:`merge_recordings`.

    Args:
        paths: Files, or folders of ``*.jsonl`` files.
        offsets: As in :func:`merge_recordings`.
        replica: Which data-parallel replica of the pipeline to take.

    Raises:
        VPipeConfigError: A file is not a recording, or the recordings do not make a pipeline.
    """
    recordings = [read_recording(path) for path in recording_files(paths)]
    replicas = sorted({recording.replica for recording in recordings})
    if replica not in replicas:
        raise Refusal("replica", replica, f"one of {replicas}", "choose one of them").error()
    return merge_recordings([recording for recording in recordings if recording.replica == replica], offsets)


def merge_recordings(recordings: Sequence[RankRecording], offsets: Mapping[int, float] | None = None) -> Timeline:
    """Bring the ranks' times onto one clock, let them begin at 0 and put them together.

    A rank whose ring buffer has lost spans knows nothing of the time before its oldest one, so that the timeline begins
    where all such ranks begin.

    Args:
        recordings: One per rank, in any order.
        offsets: Seconds to add to each rank's times. If not given, those that the recordings name are used, if all do,
            and else they are estimated from messages.

    Returns:
        The timeline. Its ``meta`` has that of the lowest rank, ``clock_offsets_s`` and ``clock_uncertainty_s`` per
        rank (the latter None where offsets were given), and ``dropped`` spans per rank.

    Raises:
        VPipeConfigError: A rank is missing or there twice, sizes differ, or clocks cannot be related.
    """
    by_rank = _checked(recordings)
    origin: dict[str, int] = {}  # of each clock, so that differences of large numbers are taken in whole nanoseconds
    for recording in by_rank:
        origin[recording.clock] = min(recording.origin_ns, origin.get(recording.clock, recording.origin_ns))
    shifted = [_shifted(recording, (recording.origin_ns - origin[recording.clock]) * _NANO) for recording in by_rank]
    found = _offsets(shifted, offsets, origin)
    aligned = [_shifted(recording, found[recording.rank].seconds) for recording in shifted]

    lossy = [min(span.start for span in r.spans) for r in aligned if r.dropped and r.spans]
    if lossy:
        aligned = [_cut(recording, max(lossy)) for recording in aligned]
    times = [span.start for r in aligned for span in r.spans] + [sample.time for r in aligned for sample in r.memory]
    begin = min(times, default=0.0)
    aligned = [_shifted(recording, -begin) for recording in aligned]

    first = aligned[0]
    staleness = tuple(recording.staleness for recording in aligned if recording.staleness is not None)
    timeline = Timeline(
        title=first.title or f"{first.num_ranks} ranks, {first.micro_batches} micro-batches per batch",
        source="recording",
        num_ranks=first.num_ranks,
        micro_batches=first.micro_batches,
        spans=tuple(span for recording in aligned for span in recording.spans),
        memory=tuple(sample for recording in aligned for sample in recording.memory),
        losses=tuple(sorted({pair for recording in aligned for pair in recording.losses})),
        staleness=staleness if len(staleness) == first.num_ranks else (),
        meta={
            **first.meta,
            "clock_offsets_s": [found[recording.rank].seconds for recording in aligned],
            "clock_uncertainty_s": [_or_none(found[recording.rank].uncertainty) for recording in aligned],
            "dropped": [recording.dropped for recording in aligned],
        },
    )
    timeline.check()
    return timeline


def _checked(recordings: Sequence[RankRecording]) -> list[RankRecording]:
    """The recordings by rank; exactly one per rank, of one and the same pipeline."""
    by_rank = sorted(recordings, key=lambda recording: recording.rank)
    ranks = [recording.rank for recording in by_rank]
    expected = by_rank[0].num_ranks if by_rank else 1
    if ranks != list(range(expected)):
        allowed = f"one recording of each rank from 0 to {expected - 1}"
        raise Refusal("recordings of ranks", ranks, allowed, "give all of them once").error()
    for name in ("num_ranks", "micro_batches"):
        values = sorted({getattr(recording, name) for recording in by_rank})
        if len(values) > 1:
            raise Refusal(name, values, "the same in all recordings", "give recordings of one run").error()
    return by_rank


def _offsets(
    recordings: Sequence[RankRecording], given: Mapping[int, float] | None, origin: Mapping[str, int]
) -> dict[int, ClockOffset]:
    """Offset of each rank after its clock's times begin at ``origin``."""
    base = min(origin.values())
    named = {r.rank: r.clock_offset_s for r in recordings if r.clock_offset_s is not None}
    exact = named if given is None else given
    if given is not None and sorted(given) != [recording.rank for recording in recordings]:
        raise Refusal("offsets", sorted(given), f"one per rank, 0 to {len(recordings) - 1}", "give all of them").error()
    if len(exact) == len(recordings):
        return {r.rank: ClockOffset(exact[r.rank] + (origin[r.clock] - base) * _NANO, float("nan")) for r in recordings}
    clocks = {recording.rank: recording.clock for recording in recordings}
    spans = [span for recording in recordings for span in recording.spans]
    by_clock = estimate_offsets(messages(spans), clocks)
    return {rank: by_clock[clock] for rank, clock in clocks.items()}


def _or_none(value: float) -> float | None:
    return value if value == value else None


def _shifted(recording: RankRecording, seconds: float) -> RankRecording:
    spans = tuple(
        Span(s.rank, s.action, s.start + seconds, s.end + seconds, s.part, s.version) for s in recording.spans
    )
    memory = tuple(MemorySample(m.rank, m.time + seconds, m.bytes) for m in recording.memory)
    return replace(recording, spans=spans, memory=memory)


def _cut(recording: RankRecording, begin: float) -> RankRecording:
    """Leave out what ended before ``begin``; what runs then starts then, but no memory is known before its sample."""
    spans = tuple(replace(span, start=max(span.start, begin)) for span in recording.spans if span.end > begin)
    return replace(recording, spans=spans, memory=tuple(m for m in recording.memory if m.time >= begin))
