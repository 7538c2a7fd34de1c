"""One rank's file: as the docstring says, there and back, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.timelines.recording import RankRecording, read_recording, recording_files
from ds_vpipe.timelines.timeline import MemorySample, Span

RECORDING = RankRecording(
    rank=1,
    num_ranks=4,
    micro_batches=2,
    clock="node7",
    origin_ns=81234567890,
    spans=(Span(1, "F7", 1200e-9, 45300e-9, 1, 3), Span(1, "WAITRECV_GRAD7", 0.5, 1.0, 1)),
    memory=(MemorySample(1, 45300e-9, 1048576),),
    losses=((0, 6.93),),
    staleness=(1.5, 2),
    title="bert_large",
)
LINES = """\
{"format":"ds_vpipe.timelines.recording","version":1,"rank":1,"num_ranks":4,"micro_batches":2,"clock":"node7",\
"origin_ns":81234567890,"clock_offset_s":null,"replica":0,"dropped":0,"title":"bert_large","meta":{}}
["span","F7",1200,45300,1,3]
["span","WAITRECV_GRAD7",500000000,1000000000,1,null]
["memory",45300,1048576]
["loss",0,6.93]
["staleness",1.5,2]
"""


def test_file_in_literals(tmp_path: Path) -> None:
    RECORDING.save(tmp_path / "rank1.jsonl")
    assert (tmp_path / "rank1.jsonl").read_text(encoding="utf-8") == LINES


def test_there_and_back(tmp_path: Path) -> None:
    full = replace(RECORDING, clock_offset_s=-0.25, replica=2, dropped=9, meta={"host": "a"})
    full.save(tmp_path / "r.jsonl")
    read = read_recording(tmp_path / "r.jsonl")
    assert replace(read, spans=()) == replace(full, spans=())
    for span, written in zip(read.spans, full.spans, strict=True):
        assert (span.start, span.end) == pytest.approx((written.start, written.end), abs=1e-9)


def test_what_a_killed_rank_left_behind_is_read(tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(LINES + '["span","B7",12', encoding="utf-8")
    assert len(read_recording(tmp_path / "r.jsonl").spans) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", 'expected an object with "format"'),
        ("{}\n", 'expected an object with "format"'),
        (LINES.replace('"version":1', '"version":2'), '"version": 1'),
        (LINES.replace('"rank":1,', ""), "KeyError: 'rank'"),
        (LINES.replace('["loss"', '["lost"'), "'lost'"),
        (LINES.replace('["memory",45300', '["memory"'), "not enough values"),
        (LINES.replace('["memory",45300', '["memory",'), "line 4: JSONDecodeError"),
    ],
)
def test_wrong_files_are_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "r.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(VPipeConfigError) as caught:
        read_recording(tmp_path / "r.jsonl")
    assert message in str(caught.value)
    assert "r.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_of_folders(tmp_path: Path) -> None:
    with pytest.raises(VPipeConfigError, match=r"a folder with \*.jsonl files"):
        recording_files([tmp_path])
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (tmp_path / name).touch()
    assert [path.name for path in recording_files([tmp_path, "x.jsonl"])] == ["a.jsonl", "b.jsonl", "x.jsonl"]
    with pytest.raises(VPipeConfigError, match="No such file"):
        read_recording("x.jsonl")
