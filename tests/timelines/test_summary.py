"""Numbers of timelines, by hand and against the closed form of the bubble."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from timelines import TWO_STAGES, span

from ds_vpipe.commands.arguments import planned_timeline
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload
from ds_vpipe.timelines.summary import steady_window, summarize
from ds_vpipe.timelines.timeline import Timeline


def test_by_hand() -> None:
    summary = summarize(TWO_STAGES)
    first, second = summary.ranks
    assert first.seconds == {
        "forward": 1.0,
        "backward": 3.0,
        "update": 0.5,
        "wait": 4.0,  # transfers go on beside it
    }
    assert first.idle_s == 0.0
    assert first.busy == pytest.approx(4.5 / 8.5)
    assert first.wait_s == {"RECV_GRAD": 4.0}
    assert (first.peak_bytes, first.staleness) == (300, (1.0, 1))
    assert second.idle_s == pytest.approx(8.5 - 5.0)
    assert second.wait_s == {"RECV_ACT": 1.5}
    assert summary.micro_batches == 1
    assert summary.throughput == pytest.approx(1 / 8.5)
    assert summary.bubble == pytest.approx(1 - (4.5 + 3.5) / 2 / 8.5)


def test_window_cuts_spans() -> None:
    summary = summarize(TWO_STAGES, (0.5, 2.0))
    assert summary.ranks[0].seconds == {"forward": 0.5, "wait": 1.0}
    assert summary.ranks[1].seconds == {"forward": 0.5, "wait": 1.0}
    assert summary.micro_batches == 0
    assert summarize(TWO_STAGES, (7.0, 8.0)).micro_batches == 1
    assert summarize(TWO_STAGES, (8.0, 8.5)).micro_batches == 0  # it belongs to the window that it ended in


def test_micro_batches_whose_numbers_are_given_again() -> None:
    """Two in a batch, of which one is trained without an update where the data end; then one in a batch."""
    actions = ["B0", "B1", "STEP0", "B2", "B3", "STEP1", "B4", "B4", "B5", "STEP2", "B3", "STEP3", "B4"]
    spans = tuple(span(0, action, at, at + 1) for at, action in enumerate(actions))
    assert summarize(Timeline("t", "recording", 1, 1, spans)).micro_batches == 7
    assert summarize(Timeline("t", "recording", 1, 1, spans), (5.0, 10.0)).micro_batches == 2


def test_transfers_count_where_nothing_else_is_known() -> None:
    spans = (span(0, "SEND_ACT0", 0, 2), span(0, "F0", 1, 4))
    summary = summarize(Timeline("t", "recording", 1, 1, spans))
    assert summary.ranks[0].seconds == {"forward": 3.0, "transfer": 1.0}


@pytest.mark.parametrize(("stages", "micro_batches", "share"), [(4, 8, 3 / 11), (4, 16, 3 / 19), (8, 16, 7 / 23)])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_bubble_of_synchronous_pipelines(schedule: str, stages: int, micro_batches: int, share: float) -> None:
    timeline = planned_timeline(Pipeline(schedule, stages, micro_batches), Workload(3))  # type: ignore[arg-type]
    summary = summarize(timeline)
    assert summary.bubble == pytest.approx(share)
    assert summary.micro_batches == 3 * micro_batches
    assert summary.throughput == pytest.approx(micro_batches / (3 * (micro_batches + stages - 1)))


def test_an_asynchronous_pipeline_has_no_bubble_while_it_is_full() -> None:
    timeline = planned_timeline(Pipeline("asp", 4, 2), Workload(8))
    window = steady_window(timeline)
    assert window == (12.0, 45.0)  # stage 0 ends B0 at 12; F4 starts there and F15 eleven columns of three later
    assert summarize(timeline, window).bubble == pytest.approx(0.0)
    assert summarize(timeline).bubble > 0.1


def test_no_steady_window_without_passes() -> None:
    assert steady_window(Timeline("t", "plan", 2, 1, (span(0, "F0", 0, 1),))) is None
    assert steady_window(planned_timeline(Pipeline("gpipe", 4, 4), Workload(1))) is None


def test_empty_timeline() -> None:
    summary = summarize(Timeline("t", "plan", 2, 1, ()))
    assert (summary.throughput, summary.bubble) == (0.0, 1.0)


def test_json() -> None:
    content = json.loads(json.dumps(asdict(summarize(TWO_STAGES))))
    assert content["ranks"][0]["seconds"] == {
        "forward": 1.0, "backward": 3.0, "update": 0.5, "wait": 4.0,
    }  # fmt: skip
    assert content["ranks"][1]["staleness"] == [0.0, 0]


def test_a_recorded_receive_is_waiting() -> None:
    spans = (
        span(0, "F0", 0.0, 1.0),
        span(0, "SEND_ACT0", 1.0, 1.5),
        span(0, "RECV_GRAD0", 1.5, 4.0),
        span(0, "B0", 4.0, 6.0),
        span(0, "RECV_GRAD1", 6.0, 8.5),
    )
    rank = summarize(Timeline("t", "recording", 1, 1, spans)).ranks[0]
    assert rank.wait_s == {"RECV_GRAD": 5.0}
    assert rank.seconds["wait"] == 5.0
    assert rank.seconds["transfer"] == 0.5
