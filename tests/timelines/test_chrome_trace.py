"""Traces: the form that viewers demand, slices that nest, arrows inside slices."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest
from timelines import TWO_PARTS, TWO_STAGES

from ds_vpipe.commands.arguments import planned_timeline
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload
from ds_vpipe.timelines.chrome_trace import Event, chrome_trace
from ds_vpipe.timelines.timeline import Timeline

REQUIRED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    "C": {"name", "pid", "tid", "ts", "args"},
}


def events(timelines: list[Timeline], phase: str) -> list[Event]:
    return [event for event in chrome_trace(timelines)["traceEvents"] if event["ph"] == phase]


def test_every_event_has_what_its_phase_needs() -> None:
    trace = chrome_trace([TWO_STAGES, TWO_PARTS])
    assert json.loads(json.dumps(trace)) == trace
    assert {event["ph"] for event in trace["traceEvents"]} == set(REQUIRED)
    for event in trace["traceEvents"]:
        assert set(event) == REQUIRED[event["ph"]] | {"ph"}


def test_slices_in_microseconds() -> None:
    found = {(e["tid"], e["name"]): e for e in events([TWO_STAGES], "X")}
    assert len(found) == len(TWO_STAGES.spans)
    backward = found[0, "B0"]
    assert (backward["ts"], backward["dur"], backward["cat"]) == (5e6, 3e6, "backward")
    assert backward["args"] == {"part": 0, "micro_batch": 0, "version": 0}
    assert found[1, "STEP0"]["args"] == {"part": 1, "batch": 0}
    assert found[2, "SEND_ACT0"]["cat"] == "transfer"  # the first lane of transfers of rank 0 of 2


def test_threads_are_named() -> None:
    names = {e["tid"]: e["args"]["name"] for e in events([TWO_STAGES], "M") if e["name"] == "thread_name"}
    assert names == {0: "stage 0", 1: "stage 1", 2: "stage 0 transfers", 3: "stage 1 transfers"}
    processes = [e["args"]["name"] for e in events([TWO_STAGES, TWO_PARTS], "M") if e["name"] == "process_name"]
    assert processes == ["recording: two <stages> & all", "plan: two parts per rank"]


@pytest.mark.parametrize("transfer", [0.25, 3.0])
def test_slices_of_a_thread_nest_and_arrows_begin_and_end_in_them(transfer: float) -> None:
    timeline = planned_timeline(Pipeline("asp", 4, 2), Workload(4), transfer=transfer, update=0.5)
    slices: dict[int, list[tuple[float, float]]] = defaultdict(list)
    by_name: dict[tuple[int, str], tuple[float, float]] = {}
    for event in events([timeline], "X"):
        assert event["tid"] % 4 in range(4)
        slices[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        by_name[event["tid"], event["name"]] = slices[event["tid"]][-1]
    for thread in slices.values():
        open_ends: list[float] = []
        for start, end in sorted(thread, key=lambda ends: (ends[0], -ends[1])):
            while open_ends and open_ends[-1] <= start + 1e-6:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1] + 1e-6
            open_ends.append(end)
    begins = {event["id"]: event for event in events([timeline], "s")}
    ends = {event["id"]: event for event in events([timeline], "f")}
    sends = sum("SEND" in span.kind.value for span in timeline.spans)
    assert len(begins) == sends == 2 * 3 * 8
    assert begins.keys() == ends.keys()
    for number, begin in begins.items():
        end = ends[number]
        assert begin["ts"] <= end["ts"]
        assert abs(begin["tid"] % 4 - end["tid"] % 4) == 1
        start, stop = by_name[begin["tid"], begin["name"]]
        assert start <= begin["ts"] <= stop
        kind = "ACT" if "ACT" in begin["name"] else "GRAD"
        number = begin["name"].removeprefix(f"SEND_{kind}")
        start, stop = by_name[end["tid"], f"RECV_{kind}{number}"]
        assert start <= end["ts"] <= stop
        assert end["ts"] == pytest.approx(stop)


def test_memory_is_a_counter_per_rank() -> None:
    found = [(e["name"], e["ts"], e["args"]) for e in events([TWO_STAGES], "C")]
    assert found == [
        ("memory, stage 0", 0.0, {"bytes": 100}),
        ("memory, stage 0", 1e6, {"bytes": 300}),
        ("memory, stage 0", 8e6, {"bytes": 100}),
        ("memory, stage 1", 0.0, {"bytes": 50}),
    ]
