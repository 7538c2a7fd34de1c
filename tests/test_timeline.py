"""The form of a timeline: there and back, and what is refused in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from timelines import TWO_PARTS, TWO_STAGES

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.timelines.action_name import ActionName, action_name
from ds_vpipe.timelines.timeline import MemorySample, Span, Timeline


def test_file_of_the_docstring() -> None:
    timeline = Timeline("a", "plan", 1, 2, (Span(0, "F0", 0.0, 0.5, 0, 3),), (MemorySample(0, 0.5, 7),))
    assert timeline.to_json() == {
        "format": "ds_vpipe.timelines.timeline",
        "version": 1,
        "title": "a",
        "source": "plan",
        "num_ranks": 1,
        "micro_batches": 2,
        "spans": [[0, "F0", 0.0, 0.5, 0, 3]],
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
    assert [span.action for span in TWO_STAGES.by_rank()[1]] == [
        "WAITRECV_ACT0", "RECV_ACT0", "F0", "B0", "SEND_GRAD0", "STEP0",
    ]  # fmt: skip
    assert (TWO_STAGES.holds_parts, TWO_STAGES.rank_word) == (False, "stage")
    assert (TWO_PARTS.holds_parts, TWO_PARTS.rank_word) == (True, "rank")
    assert Timeline("empty", "plan", 1, 1, ()).duration == 0.0


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("F7", ActionName(False, None, "F", 7)),
        ("12SEND_ACT0", ActionName(False, 12, "SEND_ACT", 0)),
        ("WAITRECV_GRAD3", ActionName(True, None, "RECV_GRAD", 3)),
        ("WAIT5RECV_ACT10", ActionName(True, 5, "RECV_ACT", 10)),
    ],
)
def test_pieces_of_an_action(text: str, name: ActionName) -> None:
    assert action_name(text) == name


@given(st.sampled_from(Kind), st.integers(0, 10**6), st.none() | st.integers(0, 500), st.booleans())
def test_every_action_is_understood(kind: Kind, index: int, part: int | None, waiting: bool) -> None:
    text = ("WAIT" if waiting else "") + str(Action(kind, index, part))
    assert action_name(text) == ActionName(waiting, part, kind.value, index)


@pytest.mark.parametrize("text", ["", "F", "7", "f7", "WAIT", "F7 ", "F-1"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected the text of an action"):
        action_name(text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "x"}, 'timeline.format: got "x"'),
        ({"version": 2}, "timeline.version: got 2; allowed: 1"),
        ({"source": "guess"}, 'timeline.source: got "guess"; allowed: plan, simulation, recording'),
        ({"num_ranks": 0}, "timeline.num_ranks: got 0"),
        ({"micro_batches": 0}, "timeline.micro_batches: got 0"),
        ({"spans": [[2, "F0", 0, 1, 0]]}, "timeline.spans[0]: got [2,"),
        ({"spans": [[0, "F0", 0, 1, 0], [0, "F0", 2, 1, 0]]}, "timeline.spans[1]"),
        ({"spans": [[0, "F0", 0, float("inf"), 0]]}, "0 <= start <= end"),
        ({"spans": [[0, "F0", "0", 1, 0]]}, "0 <= start <= end"),
        ({"spans": [[0, "what", 0, 1, 0]]}, "the text of an action"),
        ({"spans": [[0, "F0"]]}, "missing 3 required"),
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
    with pytest.raises(VPipeConfigError, match="allowed: a JSON file"):
        Timeline.load(tmp_path / "t.json")
    (tmp_path / "t.json").write_text(json.dumps([1]), encoding="utf-8")
    with pytest.raises(VPipeConfigError, match=r"timeline\.format"):
        Timeline.load(tmp_path / "t.json")
