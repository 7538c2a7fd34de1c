"""Recordings on different clocks become one timeline: offsets are found where they can be and bounded elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timelines import TWO_PARTS, TWO_STAGES, shifted

from ds_vpipe.commands.inputs import planned_timeline
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.programs import Workload
from ds_vpipe.timelines.clock_offsets import estimate_offsets
from ds_vpipe.timelines.merged_recording import merge_recordings, read_timeline
from ds_vpipe.timelines.messages import Message, messages
from ds_vpipe.timelines.recording import RankRecording
from ds_vpipe.timelines.timeline import MemorySample, Span, Timeline

MICRO = 1e-6


def recordings_of(timeline: Timeline, offsets: Sequence[float], origins: Sequence[int]) -> list[RankRecording]:
    """What each rank would have written if its clock read ``origins[rank]`` ns plus its time minus its offset."""
    result = []
    for rank, (offset, origin) in enumerate(zip(offsets, origins, strict=True)):
        moved = shifted(timeline, rank, -offset)
        result.append(
            RankRecording(
                rank=rank,
                num_ranks=timeline.num_ranks,
                micro_batches=timeline.micro_batches,
                clock=f"host{rank}",
                origin_ns=origin,
                spans=moved.by_rank()[rank],
                memory=tuple(sample for sample in moved.memory if sample.rank == rank),
                staleness=timeline.staleness[rank] if timeline.staleness else None,
                losses=timeline.losses if rank == timeline.num_ranks - 1 else (),
            )
        )
    return result


def same_times(one: Timeline, other: Timeline, within: float) -> bool:
    pairs = zip(one.by_rank(), other.by_rank(), strict=True)
    return all(
        a.action == b.action and abs(a.start - b.start) <= within and abs(a.end - b.end) <= within
        for row, other_row in pairs
        for a, b in zip(row, other_row, strict=True)
    )


# Messages


def test_messages_of_two_stages() -> None:
    found = [(m.send.action, m.receive.action, m.receive.rank, m.exact) for m in messages(TWO_STAGES.spans)]
    assert found == [("SEND_ACT0", "RECV_ACT0", 1, True), ("SEND_GRAD0", "RECV_GRAD0", 0, True)]


def test_a_wait_or_a_pass_stands_for_a_receive_that_is_not_known() -> None:
    spans = [span for span in TWO_STAGES.spans if not span.action.startswith("RECV")]
    assert [(m.receive.action, m.exact) for m in messages(spans)] == [("WAITRECV_ACT0", True), ("WAITRECV_GRAD0", True)]
    spans = [span for span in spans if not span.action.startswith("WAIT")]
    assert [(m.receive.action, m.exact) for m in messages(spans)] == [("F0", False), ("B0", False)]


def test_numbers_that_are_given_again_after_a_data_end() -> None:
    sends = Span(1, "SEND_GRAD4", 1, 2, 1), Span(1, "SEND_GRAD4", 5, 6, 1)
    receives = Span(0, "DROP_GRAD4", 3, 4, 0), Span(0, "RECV_GRAD4", 7, 8, 0)
    found = [(m.send.start, m.receive.action) for m in messages((*sends, *receives))]
    assert found == [(1, "DROP_GRAD4"), (5, "RECV_GRAD4")]


def test_messages_go_from_part_to_part() -> None:
    sends = (Span(0, "0SEND_ACT0", 1, 1, 0), Span(1, "1SEND_ACT0", 2, 2, 1), Span(1, "3SEND_GRAD0", 6, 6, 3))
    found = {(m.send.action, m.receive.action) for m in messages((*TWO_PARTS.spans, *sends))}
    assert found == {("0SEND_ACT0", "1F0"), ("1SEND_ACT0", "2F0")}  # nobody is known to take the last


# Offsets


def test_offset_is_the_middle_of_its_bounds() -> None:
    there = Message(Span(0, "SEND_ACT0", 1.0, 1.1, 0), Span(1, "RECV_ACT0", 10.0, 11.3, 1), True)
    back = Message(Span(1, "SEND_GRAD0", 12.0, 12.1, 1), Span(0, "RECV_GRAD0", 2.0, 2.5, 0), True)
    slow = replace(there, receive=replace(there.receive, end=20.0))
    found = estimate_offsets([there, back, slow], {0: "a", 1: "b"})
    # the message there says o_b >= 1.0 - 11.3, the one back o_b <= 2.5 - 12.0
    assert found["b"].seconds == pytest.approx((-10.3 - 9.5) / 2)
    assert found["b"].uncertainty == pytest.approx(0.4)
    assert (found["a"].seconds, found["a"].uncertainty) == (0.0, 0.0)


def test_clocks_without_messages_both_ways_are_refused() -> None:
    there = Message(Span(0, "SEND_ACT0", 1.0, 1.1, 0), Span(1, "RECV_ACT0", 10.0, 11.3, 1), True)
    with pytest.raises(VPipeConfigError, match=r'clock: got "b".*give the offsets'):
        estimate_offsets([there], {0: "a", 1: "b"})
    passes_only = replace(there, exact=False)
    with pytest.raises(VPipeConfigError, match='clock: got "b"'):
        estimate_offsets([passes_only], {0: "a", 1: "b"})


@given(
    offsets=st.lists(st.floats(-1e4, 1e4), min_size=3, max_size=3),
    transfer=st.sampled_from([0.0, 0.125, 0.5]),
    schedule=st.sampled_from(["asp", "1f1b", "gpipe"]),
    origins=st.lists(st.integers(0, 10**13), min_size=4, max_size=4),
)
@settings(max_examples=40)
def test_offsets_are_found(offsets: list[float], transfer: float, schedule: str, origins: list[int]) -> None:
    pipeline = Pipeline(schedule, 4, 2)  # type: ignore[arg-type]
    timeline = planned_timeline(pipeline, Workload(3), transfer=transfer)
    spans = list(timeline.spans)
    if not transfer:  # the simulator draws no transfers that take no time
        spans += [
            Span(s.rank, f"{kind}{s.name.index}", s.end, s.end, s.part)
            for s in timeline.spans
            for kind, pass_kind, last in (("SEND_ACT", "F", 3), ("SEND_GRAD", "B", 0))
            if s.name.kind == pass_kind and s.rank != last
        ]
    timeline = replace(timeline, spans=tuple(spans), meta={})
    merged = merge_recordings(recordings_of(timeline, [0.0, *offsets], origins))
    assert same_times(merged, timeline, 20 * MICRO)
    uncertainty = merged.meta["clock_uncertainty_s"]
    assert uncertainty == pytest.approx([0, transfer, 2 * transfer, 3 * transfer], abs=20 * MICRO)


# Merging


def test_ranks_of_one_machine_need_no_messages() -> None:
    parts = recordings_of(TWO_STAGES, [0, 0], [5_000_000_000, 7_000_000_000])
    parts = [replace(part, clock="one") for part in parts]
    parts[1] = replace(shift(parts[1], -2.0), memory=())
    parts = [replace(part, spans=tuple(s for s in part.spans if "SEND" not in s.action)) for part in parts]
    merged = merge_recordings(parts)
    assert merged.by_rank()[1][0] == Span(1, "WAITRECV_ACT0", 0.0, 1.5, 1)
    assert merged.meta["clock_offsets_s"] == [0.0, 0.0]


def shift(recording: RankRecording, seconds: float) -> RankRecording:
    spans = tuple(replace(s, start=s.start + seconds, end=s.end + seconds) for s in recording.spans)
    return replace(recording, spans=spans)


def test_everything_is_kept() -> None:
    merged = merge_recordings(recordings_of(TWO_STAGES, [0.0, 3.0], [10**12, 10**11]))
    assert same_times(merged, TWO_STAGES, MICRO)
    assert [(m.rank, m.bytes) for m in merged.memory] == [(0, 100), (0, 300), (0, 100), (1, 50)]
    assert merged.losses == TWO_STAGES.losses
    assert merged.staleness == TWO_STAGES.staleness
    assert merged.source == "recording"
    assert merged.meta["dropped"] == [0, 0]


@pytest.mark.parametrize("by_header", [False, True])
def test_given_offsets_are_used(by_header: bool) -> None:
    # Wrong on purpose: they put rank 1 half a second too late, which messages would not allow for long.
    parts = recordings_of(TWO_STAGES, [0.0, 3.0], [0, 0])
    parts[1] = replace(shift(parts[1], -2.0), origin_ns=2_000_000_000, memory=())  # the same times, counted otherwise
    if by_header:
        merged = merge_recordings([replace(parts[0], clock_offset_s=0.0), replace(parts[1], clock_offset_s=3.5)])
    else:
        merged = merge_recordings(parts, {0: 0.0, 1: 3.5})
    assert same_times(merged, shifted(TWO_STAGES, 1, 0.5), MICRO)
    assert merged.meta["clock_uncertainty_s"] == [None, None]


def test_begins_where_every_ring_buffer_begins() -> None:
    parts = recordings_of(TWO_STAGES, [0.0, 0.0], [0, 0])
    parts = [replace(part, clock="one") for part in parts]
    late = tuple(span for span in parts[1].spans if span.start >= 2.5)
    merged = merge_recordings([parts[0], replace(parts[1], spans=late, dropped=3)])
    assert [(s.action, s.start, s.end) for s in merged.by_rank()[0]][:2] == [
        ("WAITRECV_GRAD0", 0.0, 2.5),
        ("RECV_GRAD0", 2.0, 2.5),
    ]
    assert [m for m in merged.memory if m.rank == 0] == [MemorySample(0, 5.5, 100)]
    assert merged.meta["dropped"] == [0, 3]
    later = tuple(span for span in parts[0].spans if span.start >= 2.0)
    both = merge_recordings([replace(parts[0], spans=later, dropped=1), replace(parts[1], spans=late, dropped=3)])
    first = both.by_rank()[0][0]
    assert (first.action, first.start) == ("RECV_GRAD0", 0.0), "the later of both"
    assert min(span.start for span in both.spans) == 0.0


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    parts = recordings_of(TWO_STAGES, [0.0, 0.0], [0, 0])
    with pytest.raises(VPipeConfigError, match=r"recordings of ranks: got \[0\]"):
        merge_recordings(parts[:1])
    with pytest.raises(VPipeConfigError, match=r"recordings of ranks: got \[0, 0, 1\]"):
        merge_recordings([*parts, parts[0]])
    with pytest.raises(VPipeConfigError, match=r"recordings of ranks: got \[\]"):
        merge_recordings([])
    with pytest.raises(VPipeConfigError, match=r"micro_batches: got \[1, 8\]"):
        merge_recordings([parts[0], replace(parts[1], micro_batches=8)])
    with pytest.raises(VPipeConfigError, match="one per rank, 0 to 1"):
        merge_recordings(parts, {0: 0.0})
    for number, part in enumerate([*parts, *(replace(part, replica=1) for part in parts)]):
        part.save(tmp_path / f"{number}.jsonl")
    assert same_times(read_timeline([tmp_path], replica=1), TWO_STAGES, MICRO)
    with pytest.raises(VPipeConfigError, match=r"replica: got 2; allowed: one of \[0, 1\]"):
        read_timeline([tmp_path], replica=2)
