"""Recordings on different clocks become one timeline: offsets are found where they can be and bounded elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timelines import TWO_PARTS, TWO_STAGES, shifted, span

from ds_vpipe.commands.arguments import planned_timeline
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.schedules.actions import Category, Kind
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload
from ds_vpipe.timelines.merge import Message, estimate_offsets, merge, messages, read_recordings
from ds_vpipe.timelines.timeline import MemorySample, Recording, Timeline

MICRO = 1e-6


def recordings_of(timeline: Timeline, offsets: Sequence[float], origins: Sequence[int]) -> list[Recording]:
    """What each rank would have written if its clock read ``origins[rank]`` ns plus its time minus its offset."""
    result = []
    for rank, (offset, origin) in enumerate(zip(offsets, origins, strict=True)):
        moved = shifted(timeline, rank, -offset)
        result.append(
            Recording(
                title=timeline.title,
                source="recording",
                rank=rank,
                num_ranks=timeline.num_ranks,
                micro_batches=timeline.micro_batches,
                clock=f"host{rank}",
                origin_ns=origin,
                spans=moved.by_rank()[rank],
                memory=tuple(sample for sample in moved.memory if sample.rank == rank),
                staleness=timeline.staleness[rank : rank + 1],
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
    found = [(str(m.send.action), str(m.receive.action), m.receive.rank) for m in messages(TWO_STAGES.spans)]
    assert found == [("SEND_ACT0", "RECV_ACT0", 1), ("SEND_GRAD0", "RECV_GRAD0", 0)]


def test_numbers_that_are_given_again_after_a_data_end() -> None:
    sends = span(1, "SEND_GRAD4", 1, 2), span(1, "SEND_GRAD4", 5, 6)
    receives = span(0, "DROP_GRAD4", 3, 4), span(0, "RECV_GRAD4", 7, 8)
    found = {(m.send.start, str(m.receive.action)) for m in messages((*sends, *receives))}
    assert found == {(1, "DROP_GRAD4"), (5, "RECV_GRAD4")}


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        # number and time; a pipeline that is emptied at 2: activation 3 is withdrawn
        ([(1, 1), (2, 2), (3, 3), (2, 4), (3, 5), (4, 6)], [(1, 1), (2, 2), (2, 4), (3, 5)]),
        # the data end before 3, and their batch has begun at 2
        ([(1, 1), (2, 2), (2, 4), (3, 5)], [(1, 1), (2, 2), (3, 3), (2, 4), (3, 5)]),
        # with other micro-batches per batch numbers go on at 1; activation 2 is not received before the end
        ([(1, 1), (2, 2), (3, 3), (1, 4), (2, 5)], [(1, 1), (2, 2), (1, 4)]),
    ],
)
def test_a_message_is_received_once_and_not_before_it_is_sent(
    sent: list[tuple[int, int]], received: list[tuple[int, int]]
) -> None:
    sends = [span(0, f"SEND_ACT{number}", at, at) for number, at in sent]
    receives = [span(1, f"RECV_ACT{number}", at, at) for number, at in received]
    found = sorted((m.send.start, m.receive.start) for m in messages((*sends, *receives)))
    assert found == [(at, at) for number, at in received if (number, at) in sent]


def test_messages_go_from_part_to_part() -> None:
    sends = (span(0, "0SEND_ACT0", 1, 1), span(1, "1SEND_ACT0", 2, 2), span(1, "3SEND_GRAD0", 6, 6))
    receives = (span(0, "2RECV_ACT0", 2, 2), span(1, "1RECV_ACT0", 1, 1))
    found = {(str(m.send.action), str(m.receive.action)) for m in messages((*TWO_PARTS.spans, *sends, *receives))}
    assert found == {("0SEND_ACT0", "1RECV_ACT0"), ("1SEND_ACT0", "2RECV_ACT0")}  # nobody is known to take the last


# Offsets


def test_offset_is_the_middle_of_its_bounds() -> None:
    there = Message(span(0, "SEND_ACT0", 1.0, 1.1), span(1, "RECV_ACT0", 10.0, 11.3))
    back = Message(span(1, "SEND_GRAD0", 12.0, 12.1), span(0, "RECV_GRAD0", 2.0, 2.5))
    slow = there._replace(receive=there.receive._replace(end=20.0))
    found = estimate_offsets([there, back, slow], {0: "a", 1: "b"})
    # the message there says o_b >= 1.0 - 11.3, the one back o_b <= 2.5 - 12.0
    assert found["b"].seconds == pytest.approx((-10.3 - 9.5) / 2)
    assert found["b"].uncertainty == pytest.approx(0.4)
    assert (found["a"].seconds, found["a"].uncertainty) == (0.0, 0.0)


def test_clocks_without_messages_both_ways_are_refused() -> None:
    there = Message(span(0, "SEND_ACT0", 1.0, 1.1), span(1, "RECV_ACT0", 10.0, 11.3))
    with pytest.raises(VPipeConfigError, match=r'clock: got "b".*over the same time'):
        estimate_offsets([there], {0: "a", 1: "b"})


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
        for s in timeline.spans:
            for sent, made, last in ((Kind.SEND_ACT, Kind.FORWARD, 3), (Kind.SEND_GRAD, Kind.BACKWARD, 0)):
                if s.kind is made and s.rank != last:
                    spans.append(span(s.rank, f"{sent.value}{s.action.index}", s.end, s.end))
    timeline = replace(timeline, spans=tuple(spans), meta={})
    merged = merge(recordings_of(timeline, [0.0, *offsets], origins))
    assert same_times(merged, timeline, 20 * MICRO)
    uncertainty = merged.meta["clock_uncertainty_s"]
    assert uncertainty == pytest.approx([0, transfer, 2 * transfer, 3 * transfer], abs=20 * MICRO)


# Merging


def test_ranks_of_one_machine_need_no_messages() -> None:
    parts = recordings_of(TWO_STAGES, [0, 0], [5_000_000_000, 7_000_000_000])
    parts = [replace(part, clock="one") for part in parts]
    parts[1] = replace(shift(parts[1], -2.0), memory=())
    parts = [replace(part, spans=tuple(s for s in part.spans if s.category is not Category.TRANSFER)) for part in parts]
    merged = merge(parts)
    assert merged.by_rank()[1][0] == span(1, "RECV_ACT0", 0.0, 1.5)
    assert merged.meta["clock_offsets_s"] == [0.0, 0.0]


def shift(recording: Recording, seconds: float) -> Recording:
    spans = tuple(s._replace(start=s.start + seconds, end=s.end + seconds) for s in recording.spans)
    return replace(recording, spans=spans)


def test_everything_is_kept() -> None:
    merged = merge(recordings_of(TWO_STAGES, [0.0, 3.0], [10**12, 10**11]))
    assert same_times(merged, TWO_STAGES, MICRO)
    assert [(m.rank, m.bytes) for m in merged.memory] == [(0, 100), (0, 300), (0, 100), (1, 50)]
    assert merged.losses == TWO_STAGES.losses
    assert merged.staleness == TWO_STAGES.staleness
    assert merged.source == "recording"
    assert merged.meta["dropped"] == [0, 0]


def test_events_are_on_the_clock_of_the_spans_and_a_loss_is_the_last() -> None:
    parts = [shift(part, 3.0) for part in recordings_of(TWO_STAGES, [0.0, 0.0], [0, 0])]
    meta, losses = {"events": [[3.5, "early"], [11.5, "late"]]}, ((0, 6.5), (1, 6.25), (0, 5.5))
    parts = [replace(part, clock="one", meta=meta, memory=(), losses=losses) for part in parts]
    merged = merge(parts)
    assert merged.meta["events"] == [[0.5, "early"], [8.5, "late"]]
    assert merged.losses == ((0, 5.5), (1, 6.25)), "trained anew from an earlier checkpoint"
    parts[1] = replace(parts[1], spans=[s for s in parts[1].spans if s.start >= 5.5], dropped=3)
    assert merge(parts).meta["events"] == [[6.0, "late"]]


def test_begins_where_every_ring_buffer_begins() -> None:
    parts = recordings_of(TWO_STAGES, [0.0, 0.0], [0, 0])
    parts = [replace(part, clock="one") for part in parts]
    late = tuple(one for one in parts[1].spans if one.start >= 2.5)
    merged = merge([parts[0], replace(parts[1], spans=late, dropped=3)])
    assert [(str(s.action), s.start, s.end) for s in merged.by_rank()[0]][:2] == [
        ("RECV_GRAD0", 0.0, 2.5),
        ("B0", 2.5, 5.5),
    ]
    assert [m for m in merged.memory if m.rank == 0] == [MemorySample(0, 5.5, 100)]
    assert merged.meta["dropped"] == [0, 3]
    later = tuple(one for one in parts[0].spans if one.start >= 5.0)
    both = merge([replace(parts[0], spans=later, dropped=1), replace(parts[1], spans=late, dropped=3)])
    first = both.by_rank()[0][0]
    assert (str(first.action), first.start) == ("B0", 0.0), "the later of both"
    assert min(one.start for one in both.spans) == 0.0


def test_what_does_not_belong_together_is_refused(tmp_path: Path) -> None:
    parts = recordings_of(TWO_STAGES, [0.0, 0.0], [0, 0])
    with pytest.raises(VPipeConfigError, match=r"recordings of ranks: got \[0\]; a rank that is killed writes none"):
        merge(parts[:1])
    with pytest.raises(VPipeConfigError, match=r"recordings of ranks: got \[0, 0, 1\]"):
        merge([*parts, parts[0]])
    with pytest.raises(VPipeConfigError, match=r"micro_batches: got \[1, 8\]"):
        merge([parts[0], replace(parts[1], micro_batches=8)])
    for number, part in enumerate([*parts, *(replace(part, replica=1) for part in parts)]):
        part.save(tmp_path / f"rank{number}.json")
    assert same_times(merge(read_recordings(tmp_path), replica=1), TWO_STAGES, MICRO)
    with pytest.raises(VPipeConfigError, match=r"replica: got 2; allowed: one of \[0, 1\]"):
        merge(read_recordings(tmp_path), replica=2)


def test_folders_without_recordings_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VPipeConfigError, match="a folder with recordings"):
        read_recordings(tmp_path)
    TWO_STAGES.save(tmp_path / "merged.json")  # not one of the names that the recorder gives
    with pytest.raises(VPipeConfigError, match="a folder with recordings"):
        read_recordings(tmp_path)
    TWO_STAGES.save(tmp_path / "rank0.json")
    with pytest.raises(VPipeConfigError, match="allowed: the recording of one rank; move it out"):
        read_recordings(tmp_path)
