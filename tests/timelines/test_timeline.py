"""The form of a timeline: there and back, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from timelines import TWO_PARTS, TWO_STAGES, span

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.timelines.timeline import MemorySample, Recording, Timeline


def test_file_of_the_docstring() -> None:
    timeline = Timeline("a", "plan", 1, 2, (span(0, "F0", 0.0, 0.5, 3),), (MemorySample(0, 0.5, 7),))
    assert json.loads(json.dumps(timeline.to_json())) == {
        "format": "ds_vpipe.timelines.timeline",
        "version": 2,
        "title": "a",
        "source": "plan",
        "num_ranks": 1,
        "micro_batches": 2,
        "spans": [[0, "F0", 0.0, 0.5, 3]],
        "memory": [[0, 0.5, 7]],
        "losses": [],
        "staleness": [],
        "meta": {},
    }


@pytest.mark.parametrize("timeline", [TWO_STAGES, TWO_PARTS])
def test_there_and_back(timeline: Timeline, tmp_path: Path) -> None:
    timeline.save(tmp_path / "t.json")
    assert Timeline.load(tmp_path / "t.json") == timeline


def test_duration_rows_and_words() -> None:
    assert TWO_STAGES.duration == 8.5
    assert [str(one.action) for one in TWO_STAGES.by_rank()[1]] == [
        "RECV_ACT0", "F0", "B0", "SEND_GRAD0", "STEP0",
    ]  # fmt: skip
    assert (TWO_STAGES.holds_parts, TWO_STAGES.rank_word) == (False, "stage")
    assert (TWO_PARTS.holds_parts, TWO_PARTS.rank_word) == (True, "rank")
    assert Timeline("empty", "plan", 1, 1, ()).duration == 0.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, 'timeline.format: got "x"'),
        ({"version": 1}, "timeline.version: got 1; allowed: 2"),
        ({"source": "guess"}, 'timeline.source: got "guess"; allowed: plan, simulation, recording'),
        ({"num_ranks": 0}, "timeline.num_ranks: got 0"),
        ({"micro_batches": 0}, "timeline.micro_batches: got 0"),
        ({"spans": [[2, "F0", 0, 1]]}, "timeline.spans[0]: got [2,"),
        ({"spans": [[0, "F0", 0, 1], [0, "F0", 2, 1]]}, "timeline.spans[1]"),
        ({"spans": [[0, "F0", 0, float("inf")]]}, "0 <= start <= end"),
        ({"spans": [[0, "F0", "0", 1]]}, 'timeline.spans.0.start: got "0"; allowed: Input should be a valid number'),
        ({"spans": [[0, "what", 0, 1]]}, "expected a kind and an index"),
        ({"spans": [[0, "F0"]]}, "missing 2 required"),
        ({"spans": [[]]}, "IndexError"),
        ({"num_ranks": "2"}, 'timeline.num_ranks: got "2"; allowed: Input should be a valid integer'),
        ({"memory": [[0, 1.0, -1]]}, "timeline.memory[0]"),
        ({"staleness": [[1.0, 1]]}, "one pair per rank, 2"),
    ],
)
def test_wrong_timelines_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(VPipeConfigError) as caught:
        Timeline.from_json({**TWO_STAGES.to_json(), **change})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(VPipeConfigError, match="No such file"):
        Timeline.load(tmp_path / "none.json")
    (tmp_path / "t.json").write_text("{", encoding="utf-8")
    with pytest.raises(VPipeConfigError, match=r"it is not JSON.*allowed: a JSON file"):
        Timeline.load(tmp_path / "t.json")
    (tmp_path / "t.json").write_text(json.dumps([1]), encoding="utf-8")
    with pytest.raises(VPipeConfigError, match="it holds no object"):
        Timeline.load(tmp_path / "t.json")


# One rank's file

RECORDING = Recording(
    title="bert_large",
    source="recording",
    num_ranks=4,
    micro_batches=2,
    spans=(span(1, "F7", 1200e-9, 45300e-9, 3), span(1, "RECV_GRAD7", 0.5, 1.0)),
    memory=(MemorySample(1, 45300e-9, 1048576),),
    losses=((0, 6.93),),
    staleness=((1.5, 2),),
    rank=1,
    clock="node7",
    origin_ns=81234567890,
    replica=2,
    dropped=9,
)


def test_a_recording_is_a_timeline_with_five_keys_more(tmp_path: Path) -> None:
    RECORDING.save(tmp_path / "rank1.json")
    written = json.loads((tmp_path / "rank1.json").read_text(encoding="utf-8"))
    keys = {"rank": 1, "clock": "node7", "origin_ns": 81234567890, "replica": 2, "dropped": 9}
    assert {key: written[key] for key in written.keys() - TWO_STAGES.to_json().keys()} == keys
    read = Timeline.load(tmp_path / "rank1.json")
    assert isinstance(read, Recording)
    assert read == RECORDING
    assert not isinstance(Timeline.from_json(TWO_STAGES.to_json()), Recording)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 4}, "timeline.spans[0]: got [1,"),
        ({"spans": [[0, "F0", 0, 1]]}, "timeline.spans[0]: got [0,"),
        ({"staleness": [[0, 0], [1, 1]]}, "one pair per rank, 1"),
        ({"rank": "1"}, 'timeline.rank: got "1"; allowed: Input should be a valid integer'),
    ],
)
def test_wrong_recordings_are_refused_in_one_line(change: dict[str, Any], message: str) -> None:
    with pytest.raises(VPipeConfigError) as caught:
        Timeline.from_json({**RECORDING.to_json(), **change})
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
