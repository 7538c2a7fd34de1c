"""The command line, through ``main(argv)``: what it prints and writes, its exit status, errors in one line."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from argparse import ArgumentTypeError
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from test_configured_plan import planned
from timelines import TWO_STAGES

from ds_vpipe.__main__ import COMMANDS, main
from ds_vpipe.commands import check as checks
from ds_vpipe.commands.argument_types import numbers, size, sizes
from ds_vpipe.commands.profile import setting
from ds_vpipe.config import VPipeConfig
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile
from ds_vpipe.schedules.check import ScheduleFault
from ds_vpipe.schedules.counts import kept_states
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.tables import show_bytes
from ds_vpipe.timelines.timeline import FORMAT, Recording, Timeline

CONFIG: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2}
MB = 1_000_000


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "ds_config.json"
    vpipe = {"sync_mode": "asp", "partition": [2, 2, 2, 2]}
    path.write_text(json.dumps({**CONFIG, "vpipe": vpipe}), encoding="utf-8")
    return str(path)


@pytest.fixture
def profile(tmp_path: Path) -> str:
    """Eight layers of 1 ms and 2 ms; each has 1 MB of weights and keeps 1 MB."""
    layers = tuple(LayerProfile(f"Layer{i}", 1e-3, 2e-3, MB, MB, MB // 10) for i in range(8))
    path = tmp_path / "profile.json"
    ModelProfile(layers, MB // 10, 4, "some GPU", "float32", "measured").save(path)
    return str(path)


@pytest.fixture
def recording(tmp_path: Path) -> str:
    folder = tmp_path / "timeline"
    folder.mkdir()
    for rank in range(2):
        spans = TWO_STAGES.by_rank()[rank]
        Recording("two", "recording", 2, 1, spans, rank=rank, clock="one").save(folder / f"rank{rank}.json")
    return str(folder)


def printed(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> str:
    assert main(argv) == status
    streams = capsys.readouterr()
    assert streams.err == ""
    return streams.out


def printed_json(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 0) -> Any:
    return json.loads(printed(capsys, *argv, "--json", status=status))


def refused(capsys: pytest.CaptureFixture[str], *argv: str, status: int = 2) -> str:
    assert main(argv) == status
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.count("\n") == 1, streams.err
    return streams.err


# The whole


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, command, "--help")
    assert f"  python -m ds_vpipe {command} " in text.partition("examples:")[2]
    assert "--json" in text


def test_every_command_is_in_the_overview(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "--help")
    for command in COMMANDS:
        assert f"\n    {command} " in text


@pytest.mark.parametrize("argv", [[], ["shw"], ["show", "--stages", "x"], ["profile"], ["show", "--window", "3:1"]])
def test_misuse_is_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "--help explains" in refused(capsys, *argv)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["show", "--move", "0:0:1"], '"0:0:1"; allowed: four whole numbers, LAYER:STAGE:STAGE:MICRO_BATCH'),
        (["simulate", "--slow", "1:2"], '"1:2"; allowed: three numbers, STAGE:FACTOR:UPDATE'),
        (["simulate", "--freeze", "1"], '"1"; allowed: two whole numbers, LAYERS:UPDATE'),
        (["profile", "--set", "hidden"], '"hidden"; allowed: KEY=VALUE, such as hidden=128'),
        (["show", "--depth", "3,x"], '"x"; allowed: whole numbers with commas between them, such as 3,2,1,0'),
    ],
)
def test_wrong_forms_are_told_the_right_one(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"argument {argv[1]}: got {says}; --help explains" in refused(capsys, *argv)


def test_an_output_that_nobody_reads_any_more(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w", encoding="utf-8") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert main(["show", "--stages", "2", "--micro-batches", "2"]) == 0
    assert capsys.readouterr().err == ""


def test_the_closest_key_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert 'name one of them, or none, did you mean "staleness"?' in refused(capsys, "config", "stalenes")


def test_a_profile_is_no_timeline(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "report", profile)
    assert f'input: got "{profile}"; it is a profile of layers; allowed: a DeepSpeed JSON' in line


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"partition": [1, 1]}, "a split; allowed: a DeepSpeed JSON"),
        ({"traceEvents": []}, "a trace; allowed: a DeepSpeed"),
    ],
)
def test_files_of_other_commands_are_no_timelines(
    content: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    assert f'input: got "{path}"; it is {words}' in refused(capsys, "report", str(path))


def test_options_of_plans_and_of_recordings(
    config: str, recording: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = str(tmp_path / "r.html")
    for name in ("--backward", "--transfer", "--update"):
        line = refused(capsys, "report", recording, "-o", page, name, "0")
        assert f"{name}: got 0.0; timelines are drawn as they are; allowed: the option with a DeepSpeed JSON" in line
        printed(capsys, "report", recording, config, "-o", page, name, "1")
    for plan in ([config], ["--stages", "2", "--micro-batches", "2"]):
        line = refused(capsys, "show", *plan, "--replica", "0")
        assert "--replica: got 0; nothing else has replicas; allowed: the option with a recording" in line
    printed(capsys, "report", config, recording, "-o", page, "--replica", "0")
    printed(capsys, "show", *sorted(map(str, Path(recording).iterdir())), "--replica", "0")


def test_options_of_pictures(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, value, suffix in (("window", "0:2", "json"), ("unit", "5", "svg"), ("width", "500", "txt")):
        argv = ["show", config, f"--{option}", value]
        line = refused(capsys, *argv, "-o", str(tmp_path / f"x.{suffix}"))
        assert f"--{option}: got " in line
        assert "allowed: the option with a picture in ." in line
    assert "--width: got 500" in refused(capsys, "show", config, "--width", "500")
    assert "--window: got [0.0, 2.0]; allowed: the opt" in refused(capsys, "show", config, "--window", "0:2", "--json")


def test_a_schema_is_of_all_keys(capsys: pytest.CaptureFixture[str]) -> None:
    schema = printed_json(capsys, "config")
    assert "properties" in schema
    assert {"type": "boolean"} in schema["$defs"]["Staleness"]["anyOf"][0]["properties"]["nadam"]["anyOf"]
    assert "--json: got true; the schema is of all" in refused(capsys, "config", "staleness", "--json")


def test_windows_begin_before_the_end(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for more in ([], ["-o", str(tmp_path / "x.svg")]):
        line = refused(capsys, "show", config, "--window", "1000:1001", *more)
        assert "--window: got [1000.0, 1001.0]; allowed: a window that begins before " in line


@pytest.mark.parametrize("command", [["show"], ["check", "--stages", "3", "--micro-batches", "2"]])
def test_nothing_loads_torch_or_numpy_that_needs_neither(config: str, command: list[str]) -> None:
    """A JSON is checked by DeepSpeed too, but not a schedule alone."""
    code = (
        "import sys; from ds_vpipe.__main__ import main; status = main(sys.argv[1:]);"
        "print(status, sorted({'torch', 'deepspeed', 'numpy', 'matplotlib'} & sys.modules.keys()))"
    )
    argv = [sys.executable, "-c", code, *command, *([config] if len(command) == 1 else [])]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=400).stdout.splitlines()
    assert lines[-1] == "0 []"


# show


def test_show_reads_the_deepspeed_json(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = printed(capsys, "show", config, "--batches", "5", "--window", "0:16").splitlines()
    assert lines == [
        "ds_config: asp, K = 4, M = 2",
        "stage 0 |F0 F1 F2 F3 .  .  .  .  .  .  B0 -- F4 B1 -- F5 |",
        "stage 1 |.  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- F4 B2 -- |",
        "stage 2 |.  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- F4 B3 |",
        "stage 3 |.  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 |",
    ]


def test_show_without_a_block_is_deepspeeds_own_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stock.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    lines = printed(capsys, "show", str(tmp_path / "stock.json"), "--stages", "2").splitlines()
    assert lines == [
        "stock: 1f1b, K = 2, M = 2",
        "stage 0 |F0 F1 .  .  B0 -- .  B1 -- |",
        "stage 1 |.  F0 B0 -- F1 B1 -- .  .  |",
    ]


def test_a_split_beside_a_json_without_a_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stock.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    (tmp_path / "split.json").write_text(json.dumps({"partition": [3, 1]}), encoding="utf-8")
    argv = ("show", str(tmp_path / "stock.json"), "--split", str(tmp_path / "split.json"))
    assert printed(capsys, *argv).startswith("stock with split: 1f1b, K = 2")


def test_another_schedule_leaves_out_what_it_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.json"
    block: dict[str, Any] = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}
    path.write_text(json.dumps({**CONFIG, "vpipe": block}), encoding="utf-8")
    argv = (str(path), "--stages", "2", "--schedule")
    for schedule in ("asp", "1f1b", "gpipe"):
        assert printed(capsys, "show", *argv, schedule).startswith(f"c: {schedule}, K = 2")
    assert "virtual_stages: got 3" in refused(capsys, "show", *argv, "asp", "--virtual-stages", "3")
    block = {"staleness": {"synchronous_updates": 100}, "gradient_clipping_scope": "delayed_global"}
    path.write_text(json.dumps({**CONFIG, "vpipe": block}), encoding="utf-8")
    assert "synchronous updates" not in printed(capsys, "simulate", *argv, "1f1b", "--forward", "1")


@pytest.mark.parametrize("schedule", ["asp", "1f1b", "gpipe"])
@pytest.mark.parametrize("block", [
    {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2, "partition": [1] * 4},
    {"stage_to_depth_map": [1, 0]},
])  # fmt: skip
def test_another_schedule_has_as_many_stages(
    block: dict[str, Any], schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "c.json").write_text(json.dumps({**CONFIG, "vpipe": block}), encoding="utf-8")
    (tmp_path / "split.json").write_text(json.dumps({"partition": [1] * 4}), encoding="utf-8")
    argv = ("show", str(tmp_path / "c.json"), "--schedule", schedule)
    assert printed(capsys, *argv).startswith(f"c: {schedule}, K = 2")
    if schedule != "asp" or "partition" in block:
        assert printed(capsys, *argv, "--split", str(tmp_path / "split.json")).startswith(
            f"c with split: {schedule}, K = 4"
        )


def test_show_by_options_alone(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "show", "--stages", "2", "--micro-batches", "2", "--schedule", "interleaved",
                   "--virtual-stages", "2", "--backward", "1")  # fmt: skip
    assert text.splitlines()[1:] == [
        "rank 0 |0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1 |",
        "rank 1 |.   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 .   |",
    ]


def test_entries_of_partition_are_parts(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "show", config, "--schedule", "interleaved", "--virtual-stages", "2")
    assert text.splitlines()[0] == "ds_config: interleaved, K = 2, M = 2"
    line = refused(capsys, "show", config, "--schedule", "interleaved", "--virtual-stages", "3")
    assert "number of stages: got null; neither pipeline.stages nor a list in the JSON says it" in line


def test_options_outweigh_the_json(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    title = printed(capsys, "show", config, "--depth", "3,2,1,0", "--micro-batches", "1", "--schedule", "asp")
    assert title.startswith("ds_config: asp, K = 4, M = 1\n")
    deep = printed_json(capsys, "show", config, "--depth", "7,5,2,0")
    first = [row[1] for row in deep["spans"] if row[0] == 0 and row[1][0] in "FB"]
    assert first.index("B0") == 8  # seven ahead and the one that belongs to it


def test_show_writes_pictures_and_timelines(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / f"out.{suffix}") for suffix in ("txt", "svg", "png", "json")]
    options = [part for file in files for part in ("-o", file)]
    assert printed(capsys, "show", config, *options).splitlines() == files
    assert (tmp_path / "out.txt").read_text(encoding="utf-8").startswith("stage 0 |F0")
    assert "<svg" in (tmp_path / "out.svg").read_text(encoding="utf-8")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    timeline = Timeline.load(tmp_path / "out.json")
    assert (timeline.source, timeline.meta) == ("plan", {"time_unit": "forward passes"})
    assert printed_json(capsys, "show", files[3]) == json.loads(json.dumps(timeline.to_json()))


def test_show_draws_recordings(recording: str, capsys: pytest.CaptureFixture[str]) -> None:
    by_folder = printed(capsys, "show", recording, "--unit", "1")
    assert by_folder.splitlines()[1] == "stage 0 |F0 .  .  .  .  B0 -- -- S0 |"
    files = sorted(str(path) for path in Path(recording).iterdir())
    assert printed(capsys, "show", *files, "--unit", "1") == by_folder
    line = refused(capsys, "show", *files, "--virtual-stages", "2")
    assert "--virtual-stages: got 2; timelines are drawn as they are; allowed: the option with a DeepSpeed JSON" in line
    Path(files[1]).write_text(json.dumps({"format": FORMAT, "version": 99}), encoding="utf-8")
    for paths in (files, [recording]):
        assert f"{files[1]}: timeline.version: got 99; allowed" in refused(capsys, "show", *paths)


def test_lines_are_cut_for_the_terminal_that_they_go_to(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv, long = ("show", "--stages", "2", "--micro-batches", "40"), {}
    for name in ("stdout", "stderr"):
        with monkeypatch.context() as patch:
            patch.setattr(getattr(sys, name), "isatty", lambda: True)
            long[name] = max(map(len, printed(capsys, *argv).splitlines())) > 100
    assert long == {"stdout": False, "stderr": True}


def test_outputs_that_are_closed_or_do_not_have_every_character(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["--stages", "2", "--micro-batches", "1"]
    monkeypatch.chdir(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", None)  # as Python has it where a shell has closed it
        assert main(["show", *argv]) == 0
        patch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "ascii"))
        assert main(["trace", *argv, "-o", "zwölf.json"]) == 0
        sys.stdout.seek(0)
        assert sys.stdout.read().startswith("zw\\xf6lf.json")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nowhere.json"], "No such file"),
        ([], "input: got null; allowed: a DeepSpeed JSON, or --stages K with --micro-batches M"),
        (["--stages", "4"], "input: got null"),
        (["--stages", "4", "--micro-batches", "0"], "argument --micro-batches: got"),
        (["--stages", "4", "--micro-batches", "2", "--depth", "1,2,0,0"], "depth_map: got [1, 2, 0, 0]"),
        (["--stages", "4", "--micro-batches", "2", "-o", "x.gif"], "--output: got"),
        (["--stages", "4", "--micro-batches", "2", "-o", "no/such/folder/x.svg"], "a file in a folder that is there"),
    ],
)
def test_show_refuses_in_one_line(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in refused(capsys, "show", *argv)


def test_a_trace_is_no_picture(recording: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "trace", recording, "-o", str(tmp_path / "trace.svg"))
    assert 'trace.svg"; a trace is JSON; pictures are drawn by python -m ds_vpipe show; allowed: a name' in line
    assert not list(tmp_path.glob("trace*"))


@pytest.mark.parametrize("command", ["ds_vpipe.export", "ds_vpipe.models.export"])
@pytest.mark.parametrize(
    "argv", [[], ["a", "b", "--fooo"], ["a", "b", "--dtype", "int8"], ["a", "b", "--tag=1", "--tag=2"]]
)
def test_exports_refuse_misuse_in_one_line(command: str, argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        import_module(command).main(argv)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.startswith(f"python -m {command}: ")
    assert line.endswith("; --help explains\n")
    assert line.count("\n") == 1


def test_an_option_of_one_value_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Two profiles would be the last one without a word."""
    line = refused(capsys, "simulate", "--profile", "a", "--profile", "b")
    assert "--profile: got a and b, allowed is one" in line
    assert "--stages: got 2 and 2, allowed is one" in refused(capsys, "show", "--stages", "2", "--stages=2")


def test_wrong_blocks_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.json"
    for content, message in (
        ({**CONFIG, "vpipe": {"sync": "asp"}}, "vpipe.sync"),
        ({**CONFIG, "vPipe": {}}, "did you mean"),
        ({"vpipe": {"partition": [1, 1]}}, "gradient_accumulation_steps: got null; allowed"),
        ({**CONFIG, "vpipe": {}}, "give --stages"),
        ([1], "it holds no object"),
        ({**CONFIG, "vpipe": {}, "optimizer": 5}, "optimizer: got 5"),
    ):
        path.write_text(json.dumps(content), encoding="utf-8")
        assert message in refused(capsys, "show", str(path))
    path.write_text('{"vpipe": {}, // asp\n "vpipe": {}}', encoding="utf-8")
    assert 'key "vpipe" is given twice' in refused(capsys, "show", str(path))
    path.write_text('{"vpipe": {}, // asp\n "optimizer": }', encoding="utf-8")
    line = refused(capsys, "show", str(path))
    assert "line 1 column 15" in line
    assert re.search(r"nor is it Hjson, which may have comments: .* line 2 column", line)
    path.write_text("{", encoding="utf-8")
    assert "it is not JSON" in refused(capsys, "show", str(path))


def test_comments_are_read_as_deepspeed_reads_them(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(config).read_text(encoding="utf-8")
    Path(config).write_text(f"// four stages\n{text[:-1]}  # the end\n}}\n", encoding="utf-8")
    assert printed(capsys, "check", config).startswith("sound: asp, 4 stages, 2 micro-batches")


# check


def test_check_finds_schedules_sound(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "check", config).startswith("sound: asp, 4 stages, 2 micro-batches per batch, ")
    one = printed(capsys, "check", "--stages", "1", "--micro-batches", "1", "--batches", "1")
    assert re.match(r"sound: \w+, 1 stage, 1 micro-batch per batch, \d+ actions in 1 batch checked", one)
    result = printed_json(capsys, "check", "--stages", "3", "--micro-batches", "6", "--schedule", "gpipe")
    assert (result["ok"], result["faults"]) == (True, [])
    assert result["actions"] > 0


@pytest.mark.parametrize("sizes", [(64, 2048), (8, 20_000), (4, 10_000_000)])
def test_check_looks_at_as_many_micro_batches_as_show_all(
    sizes: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    stages, micro_batches = sizes
    text = printed(capsys, "check", "--stages", str(stages), "--micro-batches", str(micro_batches))
    assert text.startswith(f"sound: asp, {stages} stages, {micro_batches} micro-batches per batch, ")
    assert text.splitlines()[0].endswith(f" batches of {stages + 1} checked")


def test_check_shows_faults(config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fault = ScheduleFault(1, 5, None, "made up")
    monkeypatch.setattr(checks, "check_programs", lambda *_: [fault])
    text = printed(capsys, "check", config, status=1)
    assert text.splitlines()[-1] == "rank 1, position 5, end: made up"
    result = printed_json(capsys, "check", config, status=1)
    assert result["faults"] == [{"rank": 1, "position": 5, "action": None, "reason": "made up"}]


def test_check_refuses_what_training_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.json"
    content = {**CONFIG, "zero_optimization": {"stage": 3}, "vpipe": {}}
    path.write_text(json.dumps(content), encoding="utf-8")
    for command in (["check"], ["simulate", "--forward", "1"], ["plan"]):
        assert "zero_optimization.stage" in refused(capsys, *command, str(path), "--stages", "2")
    path.write_text(json.dumps({**CONFIG, "scheduler": "WarmupLR"}), encoding="utf-8")
    assert 'scheduler: got "WarmupLR"; allowed: an object' in refused(capsys, "check", str(path), "--stages", "2")
    for params, message in (
        ({"total_num_steps": "100"}, 'scheduler.params.total_num_steps: got "100"; allowed: an int >= 1'),
        ({"total_num_steps": True}, "scheduler.params.total_num_steps: got true"),
        ({"total_steps": 100}, "scheduler.params.total_steps: got 100; allowed: warmup_num_steps, total_num_steps"),
    ):
        content = {**CONFIG, "scheduler": {"type": "PolyWarmupLR", "params": params}, "vpipe": {}}
        path.write_text(json.dumps(content), encoding="utf-8")
        assert message in refused(capsys, "check", str(path), "--stages", "2")
    nadam = {**CONFIG, "optimizer": {"type": "SGD"}, "vpipe": {"staleness": {"nadam": True}}}
    path.write_text(json.dumps(nadam), encoding="utf-8")
    assert "nadam: got an optimizer of type SGD, allowed" in refused(capsys, "check", str(path), "--stages", "2")
    nadam["optimizer"] = {"type": "AdamW", "params": {"amsgrad": True, "torch_adam": True}}
    path.write_text(json.dumps(nadam), encoding="utf-8")
    line = refused(capsys, "check", str(path), "--stages", "2")
    assert "vpipe.staleness.nadam: got an optimizer with amsgrad True, allowed is False" in line
    for block, message in (
        ({"partition": "profile", "profile": "gone.json"}, 'profile: got "gone.json"; the file cannot be read'),
        ({"memory_budget": [1, 2]}, "vpipe.memory_budget: got [1, 2]; it has 2 entries"),
    ):
        path.write_text(json.dumps({**CONFIG, "vpipe": block}), encoding="utf-8")
        assert message in refused(capsys, "check", str(path), "--stages", "3")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sparse_gradients": True}, "DeepSpeedConfigError: Sparse compression of dense"),
        ({"zero_optimization": {"stage": 1, "bucket": 1}}, "DeepSpeedZeroConfig bucket Extra inputs are not permitted"),
        ({"communication_data_type": "fp31"}, "ValueError: Invalid communication_data_type"),
    ],
)
def test_check_refuses_what_deepspeed_would(
    settings: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**CONFIG, **settings, "vpipe": {}}))
    line = refused(capsys, "check", str(path), "--stages", "2")
    assert "DeepSpeed refuses the JSON: " in line
    assert words in line


def test_check_takes_what_a_trainer_fills_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, auto = tmp_path / "c.json", "auto"
    sizes = {"train_batch_size": auto, "train_micro_batch_size_per_gpu": auto, "gradient_clipping": auto}
    others = {"fp16": {"enabled": auto}, "optimizer": {"type": "AdamW", "params": {"lr": auto}}}
    others["zero_optimization"] = {"stage": 1, "reduce_bucket_size": auto}
    path.write_text(json.dumps({**sizes, **others, "pipeline": {"stages": 2}, "vpipe": {}}))
    assert "sound: asp, 2 stages" in printed(capsys, "check", str(path), "--micro-batches", "2")


@pytest.mark.parametrize(
    ("sizes", "argv", "found"),
    [
        ((8, 2, 4), [], "sound: asp, 2 stages, 4 micro-batches per batch, "),
        ((16, 2, 4), [], "sound: asp, 2 stages of 2 replicas, 4 micro-batches per batch, "),
        ((16, 2, 4), ["--replicas", "2"], "2 stages of 2 replicas, 4 micro-batches"),
        ((16, 2, 4), ["--replicas", "1"], "train_batch_size: got 16; 2 ranks in 2 stages are 1 replica; allowed: 8"),
        ((17, 2, 4), [], "train_batch_size: got 17; 4 ranks in 2 stages are 2 replicas; allowed: 16"),
        ((7, 2, None), [], "train_batch_size: got 7; 2 ranks in 2 stages are 1 replica; allowed: a multiple of 2"),
        ((17, 2, 4), ["--micro-batches", "3"], "2 stages, 3 micro-batches"),
    ],
)
def test_batch_sizes_are_those_that_training_takes(
    sizes: Any, argv: list[str], found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.json"
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    given = {key: value for key, value in zip(keys, sizes, strict=True) if value}
    path.write_text(json.dumps({**given, "vpipe": {}}))
    refuses = "got" in found
    assert found in (refused if refuses else printed)(capsys, "check", str(path), "--stages", "2", *argv)
    if refuses:
        assert found in refused(capsys, "show", str(path), "--stages", "2", *argv)
    else:
        replicas = 1 if sizes[0] == 8 or argv[:1] == ["--micro-batches"] else 2
        assert printed_json(capsys, "check", str(path), "--stages", "2", *argv)["replicas"] == replicas


def test_stages_of_a_plain_module_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.json"

    def write(stages: Any, **block: Any) -> None:
        path.write_text(json.dumps({**CONFIG, "pipeline": {"stages": stages}, "vpipe": block}))

    write(3)
    assert "sound: asp, 3 stages" in printed(capsys, "check", str(path))
    assert printed(capsys, "show", str(path), "--stages", "2").count("stage ") == 2
    assert "pipeline.stages: got 3; the pipeline has 2; allowed: 2" in refused(
        capsys, "check", str(path), "--stages", "2"
    )
    write(0)
    assert "pipeline.stages: got 0; allowed: an int >= 1" in refused(capsys, "check", str(path))
    write("auto", partition=[2, 2])
    assert "sound: asp, 2 stages" in printed(capsys, "check", str(path))
    write(3, partition=[2, 2])
    for command in ("check", "show"):
        assert "pipeline.stages: got 3; vpipe has a list for 2; allowed: 2" in refused(capsys, command, str(path))


def test_depths_are_those_that_training_plans(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "auto.json"
    vpipe = {"partition": [4, 4], "stage_to_depth_map": "auto", "profile": profile, "link_bandwidth": 1e8}
    content = {**CONFIG, "gradient_accumulation_steps": 1, "vpipe": vpipe}
    path.write_text(json.dumps(content), encoding="utf-8")
    assert printed(capsys, "show", str(path)).splitlines()[1].startswith("stage 0 |F0 F1 F2 ")
    assert printed(capsys, "show", str(path), "--depth", "1,0").splitlines()[1].startswith("stage 0 |F0 F1 . ")
    assert printed_json(capsys, "simulate", str(path), "--forward", "1")["in_flight"] == [3, 1]
    path.write_text(json.dumps({**content, "vpipe": {**vpipe, "profile": "gone.json"}}), encoding="utf-8")
    for command in ("check", "show"):
        assert 'profile: got "gone.json"; the file cannot be read' in refused(capsys, command, str(path))
        printed(capsys, command, str(path), "--depth", "1,0")


@pytest.mark.parametrize(
    ("vpipe", "stages", "line"),
    [
        ({"partition": [2, 2, 2, 2]}, "3", "vpipe.partition: got"),
        ({"recompute_ratio": [0.5, 0, 0]}, "4", "vpipe.recompute_ratio: got"),
        (
            {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2},
            "1",
            "vpipe.virtual_stages: got 2; there",
        ),
    ],
)
def test_check_refuses_lists_that_do_not_fit(
    vpipe: dict[str, Any], stages: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**CONFIG, "vpipe": vpipe}), encoding="utf-8")
    assert line in refused(capsys, "check", str(path), "--stages", stages)


def test_check_refuses_lists_that_do_not_fit_the_same_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vpipe = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2, "partition": [1, 2, 3]}
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**CONFIG, "vpipe": vpipe}), encoding="utf-8")
    argv = ["check", str(path), "--stages", "2"]
    for same in ("--schedule=interleaved", "--virtual-stages=2"):
        assert "vpipe.partition: got [1, 2, 3]; it has 3 entries" in refused(capsys, *argv, same)
    for other in ("--schedule=1f1b", "--virtual-stages=3"):
        assert printed(capsys, *argv, other).startswith("sound: ")


# simulate


def test_simulate_by_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--stages", "4", "--micro-batches", "8", "--schedule", "gpipe", "--forward", "1", "--batches", "1"]
    result = printed_json(capsys, "simulate", *argv)
    assert result["bubble"] == pytest.approx([3 / 11] * 4)
    assert result["makespan_s"] == pytest.approx(33.0)
    text = printed(capsys, "simulate", *argv, "-o", str(tmp_path / "s.json"))
    assert text.splitlines()[1].split()[:2] == ["0", "27.3%"]
    assert Timeline.load(tmp_path / "s.json").source == "simulation"


def test_simulate_says_what_comes_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.json"
    scheduler = {"type": "PolyWarmupLR", "params": {"total_num_steps": 100}}
    optimizer = {"type": "AdamW", "params": {}}
    sizes = {**CONFIG, "gradient_accumulation_steps": 1}
    path.write_text(json.dumps({**sizes, "optimizer": optimizer, "scheduler": scheduler, "vpipe": {}}))
    chosen, last = printed(capsys, "simulate", str(path), "--stages", "4", "--forward", "1").splitlines()[-2:]
    assert chosen == printed(capsys, "check", str(path), "--stages", "4").splitlines()[-1]
    assert last == "the 20 synchronous updates at the start are not simulated"


def test_simulate_names_the_split(
    config: str, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("simulate", config, "--profile", profile)
    split = tmp_path / "split.json"
    split.write_text('{"partition": [1, 2, 2, 3], "recompute_ratio": [1, 0, 0, 0]}', encoding="utf-8")
    line = "asp, 4 stages of layers [1, 2, 2, 3], depths [3, 2, 1, 0], M = 2, recompute_ratio [1.0, 0.0, 0.0, 0.0]"
    assert line in printed(capsys, *argv, "--split", str(split)).splitlines()
    assert "asp, 4 stages of layers [2, 2, 2, 2], depths [3, 2, 1, 0], M = 2" in printed(capsys, *argv).splitlines()
    result = printed_json(capsys, *argv)
    assert (result["partition"], result["depths"]) == ([2, 2, 2, 2], [3, 2, 1, 0])
    assert "asp, 2 stages, depths [1, 0], M = 1" in printed(
        capsys, "simulate", "--stages", "2", "--micro-batches", "1", "--forward", "1"
    )


@pytest.mark.parametrize("name", ["export", "run"])
def test_modules_that_are_taken_for_commands_are_named(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, name, "checkpoints", "model.pt")
    assert f"{name} is not one of the commands: use " in line
    assert f"ds_vpipe.{name} " in line


def test_moves_of_layers(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ("--stages", "3", "--micro-batches", "1")
    costs = ("--forward", "1", "--send", "4")
    moves = ("--move", "3:0:1:6", "--move", "3:1:0:20")
    assert "layer 3 from stage 0 to 1 at micro-batch 6" in printed(capsys, "show", *argv, *moves)
    plain = printed_json(capsys, "simulate", *argv, *costs, "--batches", "24")
    with_moves = printed_json(capsys, "simulate", *argv, *costs, "--batches", "24", *moves)
    assert plain["makespan_s"] < with_moves["makespan_s"] < 1.5 * plain["makespan_s"]
    late = refused(capsys, "simulate", *argv, *costs, "--batches", "6", *moves)
    assert '--move: got "layer 3 from stage 0 to 1 at micro-batch 6"; the last micro-batch comes before it' in late
    assert "multiples of 1 from 3 on" in refused(capsys, "show", *argv, "--move", "3:0:1:2")


def test_simulate_a_pipeline_that_balances_itself(
    config: str, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = (
        "simulate",
        config,
        "--profile",
        profile,
        "--replan",
        "--every",
        "10",
        "--slow",
        "1:3:10",
        "--freeze",
        "2:40",
    )
    text = printed(capsys, *argv, "-o", str(tmp_path / "pace.svg"))
    assert "replan at update 22: [2, 2, 2, 2] -> [3, 1, 2, 2], 18.00 -> 9.00 ms per micro-batch expected; moves" in text
    assert "10-21  [2, 2, 2, 2]" in text
    assert "best split" in (tmp_path / "pace.svg").read_text(encoding="utf-8")
    found = printed_json(capsys, *argv, "-o", str(tmp_path / "s.json"))
    assert found["replan_s"] < found["without_s"]
    assert [row["updates"] for row in found["stretches"]][:3] == [[0, 10], [10, 22], [22, 40]]
    assert found["stretches"][2]["replan_s"] == pytest.approx(found["stretches"][2]["best_s"], rel=0.1)
    events = Timeline.load(tmp_path / "s.json").meta["events"]
    assert [line for _, line in events] == found["decisions"]


def test_layers_move_on_paper_as_the_settings_let_them(
    config: str, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    adam = {"type": "AdamW", "params": {"torch_adam": True}}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {}, "in 2 steps"),
        ({"gradient_clipping": None}, {}, "gradients are clipped"),
        ({"optimizer": {"type": "AdamW"}}, {}, "the optimizer is AdamW without torch_adam"),
        ({"optimizer": {"type": "Lion"}}, {}, "the optimizer is Lion"),
        ({"optimizer": {"type": "SGD"}}, {}, "in 2 steps"),
        ({"zero_optimization": {"stage": 1}}, {}, "weights are in flat buffers, or in other types than fp32"),
        ({}, {"recompute_ratio": 0.5}, "layers are recomputed"),
        ({}, {"staleness": None}, '"staleness" is in use, by default too ("off" ends it)'),
    ]
    argv = ("simulate", config, "--profile", profile, "--replan", "--slow", "1:3:10", "--batches", "70")
    for settings, block, expected in cases:
        vpipe = {"partition": [2, 2, 2, 2], "staleness": "off", "replan": {"every": 20, "moves": "live"}, **block}
        vpipe = {name: value for name, value in vpipe.items() if value is not None}
        content = {**CONFIG, "gradient_clipping": 0, "optimizer": adam, **settings, "vpipe": vpipe}
        Path(config).write_text(json.dumps(content), encoding="utf-8")
        line = next(line for line in printed_json(capsys, *argv)["decisions"] if "; moves" in line)
        way = expected if "steps" in expected else f"in an empty pipeline: {expected}"
        assert line.endswith(f"; moves {way}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--slow", "1:2:3"), "--replan: got null; allowed: the option, with --slow"),
        (("--replan", "--move", "3:0:1:8"), '--replan: got "--move"; allowed: --profile, one part'),
        (("--replan", "--slow", "4:2:3"), "--slow: got 4; allowed: a stage from 0 to 3"),
        (("--replan", "--slow", "1:0:3"), "argument --slow: got"),
        (("--replan", "--freeze", "8:3"), "--freeze: got 8; allowed: fewer than all 8 layers"),
        (("--replan", "--batches", "1000000"), "passes to look at"),
        (("--replan", "--batches", "3", "--slow", "1:2:3"), "--batches: got 3; allowed: more than 3"),
    ],
)
def test_balance_on_paper_refuses_what_it_would_ignore(
    options: tuple[str, ...], message: str, config: str, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "simulate", config, "--profile", profile, *options)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"swap_ratio": 0.5}, "vpipe.replan.every: got 50; swap_ratio is above 0, and swapped layers do not move"),
        ({"recovery": {"every": 2}}, "vpipe.recovery.every: got 2; layers and depths are then not those of the JSON"),
    ],
)
def test_balance_on_paper_refuses_what_training_would(
    block: dict[str, Any], message: str, config: str, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["simulate", config, "--profile", profile, "--replan"]
    Path(config).write_text(json.dumps({**CONFIG, "vpipe": {"partition": [2] * 4, **block}}), encoding="utf-8")
    assert message in refused(capsys, *argv)
    block = {
        "partition": [2] * 4,
        "weight_sync": "vertical",
        "staleness": "off",
        "replan": {"threshold": 0.2, "every": 9},
    }
    Path(config).write_text(json.dumps({**CONFIG, "vpipe": block}), encoding="utf-8")
    for schedule in ("asp", "1f1b"):
        printed(capsys, *argv, "--every", "7", "--schedule", schedule)


def test_simulate_a_profile(config: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    result = printed_json(capsys, "simulate", config, "--profile", profile)
    assert result["throughput"] == pytest.approx(1 / 6e-3)  # two layers of 3 ms on every stage
    planned = printed_json(capsys, "plan", config, "--profile", profile, "--current")
    peaks = [stage["memory"]["total"] for stage in planned["stages"]]
    assert result["peak_bytes"] == pytest.approx(peaks, rel=0.02)


def test_moves_change_the_seconds_of_a_profile(config: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["simulate", config, "--profile", profile, "--batches", "40"]
    slower = printed_json(capsys, *argv, "--move", "1:0:1:10")
    assert slower["throughput"] == pytest.approx(1 / 9e-3)  # three layers of 3 ms on stage 1
    back = printed_json(capsys, *argv, "--move", "1:0:1:10", "--move", "1:1:0:20")
    assert back["throughput"] == pytest.approx(1 / 6e-3)
    assert "allowed: layer 1, the last of two or more" in refused(capsys, *argv, "--move", "0:0:1:10")


def test_transfers_slow_a_simulation_down(config: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    slow = printed_json(capsys, "simulate", config, "--profile", profile, "--bandwidth", "100MB")
    assert slow["throughput"] < 0.95 / 6e-3  # 1 ms for every activation and gradient


def test_simulate_refuses_costs_that_do_not_fit(config: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "simulate", config, "--profile", profile, "--update", "0.5,0,0,0")
    assert "--update: got [0.5, 0.0, 0.0, 0.0]; allowed: one number next to a profile" in line
    assert "--profile FILE, --recording FOLDER, --forward S" in refused(capsys, "simulate", config)
    assert "1 or 4 numbers" in refused(capsys, "simulate", config, "--forward", "1,2")
    for name in ("--bandwidth", "--host-bandwidth", "--reduce-bandwidth", "--memory", "--latency"):
        value = "5" if name == "--latency" else "1KB"
        assert f"{name}: got " in refused(capsys, "simulate", config, "--forward", "1", name, value)
    line = refused(capsys, "simulate", config, "--profile", profile, "--memory", "1KB")
    assert "--memory: got 1000; the split is given; allowed: the option where something is planned" in line
    assert "input: got null" in refused(capsys, "simulate", "--stages", "4", "--forward", "1")


def test_a_profile_of_another_training_is_refused(
    config: str, profile: str, capsys: pytest.CaptureFixture[str]
) -> None:
    vpipe = {"partition": [2, 2, 2, 2]}
    for changed, message in (
        (
            {"train_micro_batch_size_per_gpu": 8},
            "it is of micro-batches of 4; allowed: a profile of micro-batches of 8",
        ),
        ({"bf16": {"enabled": True}}, "it is of float32 and the JSON trains in bfloat16"),
    ):
        Path(config).write_text(json.dumps({**CONFIG, **changed, "vpipe": vpipe}), encoding="utf-8")
        for command in ("plan", "simulate"):
            assert message in refused(capsys, command, config, "--profile", profile)
    found = replace(ModelProfile.load(profile), dtype="bfloat16")
    found.save(profile)
    printed(capsys, "plan", "--stages", "2", "--micro-batches", "2", "--profile", profile)  # with no JSON to compare


# plan


def test_plan_writes_a_split_that_the_json_takes(
    config: str, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    split = tmp_path / "split.json"
    result = printed_json(capsys, "plan", config, "--profile", profile, "-o", str(split))
    assert result["partition"] == [2, 2, 2, 2]
    assert json.loads(split.read_text(encoding="utf-8")) == {
        "partition": [2, 2, 2, 2],
        "recompute_ratio": [0.0, 0.0, 0.0, 0.0],
    }
    content = {**CONFIG, "vpipe": {"partition": [1, 2, 2, 3], "recompute_ratio": 1}}
    Path(config).write_text(json.dumps(content), encoding="utf-8")
    current = printed_json(capsys, "plan", config, "--profile", profile, "--split", str(split), "--current")
    assert (current["partition"], current["recompute_ratio"]) == ([2, 2, 2, 2], [0.0] * 4), "not those of the JSON"
    content = {**CONFIG, "vpipe": {"partition": str(split)}}
    (tmp_path / "planned.json").write_text(json.dumps(content), encoding="utf-8")
    assert "K = 4" in printed(capsys, "show", str(tmp_path / "planned.json"))


def test_plan_respects_memory(config: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    free = printed_json(capsys, "plan", config, "--profile", profile, "--current")
    need = free["stages"][0]["memory"]["total"]
    budget = str(need - 1)
    text = printed(capsys, "plan", config, "--profile", profile, "--current", "--memory", budget, status=1)
    assert f"memory budget: got {budget} bytes for stage 0; this split does not fit: it needs {need} bytes" in text
    assert "does not fit" not in printed(capsys, "plan", config, "--profile", profile, "--memory", budget)
    tight = printed_json(capsys, "plan", config, "--profile", profile, "--memory", budget)
    assert max(stage["memory"]["total"] for stage in tight["stages"]) < need
    assert "too many" in refused(capsys, "plan", config, "--profile", profile, "--memory", "1MB")
    assert "profile: got null" in refused(capsys, "plan", config)


def test_plan_says_what_states_for_restarts_take(config: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "recovery" not in printed(capsys, "plan", config, "--profile", profile)
    content = {**CONFIG, "optimizer": {"type": "AdamW"}, "vpipe": {"partition": [2] * 4, "recovery": {"every": 2}}}
    Path(config).write_text(json.dumps(content), encoding="utf-8")
    planned = printed_json(capsys, "plan", config, "--profile", profile)
    optimizers, weights = ([stage["memory"][key] for stage in planned["stages"]] for key in ("optimizer", "weights"))
    kept = [kept_states(Pipeline("asp", 4, planned["micro_batches"]), stage, 2) for stage in range(4)]
    sizes = [
        show_bytes(states * optimizer + versions * weight)
        for (states, versions), optimizer, weight in zip(kept, optimizers, weights, strict=True)
    ]
    assert optimizers[0] > 0
    line = f"recovery, a state every 2 updates: at most {', '.join(sizes)} of host memory, a number for each stage"
    assert line in printed(capsys, "plan", config, "--profile", profile)


def test_plan_keeps_what_it_is_told(config: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", config, "--profile", profile]
    content = {**CONFIG, "vpipe": {"partition": [1, 2, 2, 3], "recompute_ratio": [1, 1, 1, 0]}}
    Path(config).write_text(json.dumps(content), encoding="utf-8")
    kept = printed_json(capsys, *argv, "--keep", "recompute_ratio")
    assert kept["recompute_ratio"] == [1.0, 1.0, 1.0, 0.0]
    assert kept["partition"] == [2, 2, 2, 2]
    assert printed_json(capsys, *argv, "--keep", "partition")["partition"] == [1, 2, 2, 3]
    assert printed_json(capsys, *argv, "--current")["partition"] == [1, 2, 2, 3]
    content["vpipe"]["swap_ratio"] = 0.5
    Path(config).write_text(json.dumps(content), encoding="utf-8")
    swapping = printed_json(capsys, *argv, "--stages", "2")
    assert (swapping["partition"], swapping["swap_ratio"]) == ([4, 4], [0.5, 0.5]), "the lists are for other stages"
    del content["vpipe"]["swap_ratio"]
    Path(config).write_text(json.dumps(content), encoding="utf-8")
    assert printed_json(capsys, *argv)["partition"] == [2, 2, 2, 2]


def test_plan_divides_ranks(config: str, profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", config, "--profile", profile, "--micro-batches", "4", "--ranks", "4"]
    slow, split = ["--reduce-bandwidth", "1GB"], tmp_path / "split.json"
    rows = [line.split() for line in printed(capsys, *argv, *slow, "-o", str(split)).splitlines()]
    assert rows[0] == ["stages", "replicas", "M", "ms", "per", "micro-batch", "peak"]
    # Passes of 24 ms, and 8 MB that 4 replicas, or 4 MB that 2 reduce in 12 or 4 ms: at M = 1 and 2.
    assert [row[:4] for row in rows[1:4]] == [
        ["1", "4", "1", "9.00"],
        ["2", "2", "2", "7.00"],
        ["4", "1", "4", "6.00"],
    ]
    assert rows[4] == []
    assert rows[-2][:4] == ["asp,", "M", "=", "4:"]
    assert json.loads(split.read_text(encoding="utf-8"))["partition"] == [2, 2, 2, 2]
    # As many replicas as there are ranks, with little to reduce: a synchronous pipeline idles.
    fast = [*argv, "--schedule", "1f1b", "--reduce-bandwidth", "100GB"]
    found = printed_json(capsys, *fast)
    assert (found["partition"], found["micro_batches"], found["replicas"]) == ([8], 1, 4)
    assert [list(row.values())[:3] for row in found["divisions"]] == [[1, 4, 1], [2, 2, 2], [4, 1, 4]]
    assert found["divisions"][0]["seconds_per_micro_batch"] == pytest.approx(found["seconds_per_micro_batch"] / 4)
    assert found["divisions"][0]["peak_bytes"] == found["stages"][0]["memory"]["total"]
    found = printed_json(capsys, *argv[:-4], *slow, "--ranks", "4")
    assert [line[:9] for line in found["refused"]] == ["stages 1:"]
    text = printed(capsys, *fast, "--memory", "30MB")
    assert "stages 1: memory budget: got 30000000 bytes for stage 0; nothing fits" in text
    assert "1f1b, M = 2:" in text, "so that two stages are fastest"
    text = printed(capsys, *argv[:-4], *slow, "--ranks", "4")
    assert "stages 1: micro-batches per update: got 2; allowed: a multiple of 4, the replicas" in text
    assert "micro-batches per update" not in printed(capsys, *argv[:-4], *slow, "--ranks", "2", "--replicas", "2")
    content = {**CONFIG, "vpipe": {"stage_to_depth_map": [1, 0]}}
    Path(config).write_text(json.dumps(content), encoding="utf-8")
    text = printed(capsys, *argv[:-4], *slow, "--ranks", "4")  # the list is for two stages, each on two ranks
    assert text.splitlines()[1].split()[:4] == ["2", "2", "1", "8.00"]
    assert "stages 4: vpipe.stage_to_depth_map: got [1, 0]" in text
    block = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}
    Path(config).write_text(json.dumps({**CONFIG, "vpipe": block}), encoding="utf-8")
    found = printed_json(capsys, *argv, *slow)
    assert [row["stages"] for row in found["divisions"]] == [1, 2, 4], "one stage has nothing to interleave"
    for bandwidth, other in (("1GB", False), ("100GB", True)):
        text = printed(capsys, *argv, "--reduce-bandwidth", bandwidth)
        assert text.endswith('for the JSON: "schedule": "1f1b", no "virtual_stages"\n') == other
    Path(config).write_text(json.dumps({**CONFIG, "train_batch_size": 12}), encoding="utf-8")
    assert "train_batch_size: got 12" in refused(capsys, *argv[:-4], *slow, "--ranks", "2")
    assert "gradient_accumulation_steps: got null" in refused(capsys, *argv[:1], *argv[2:4], *slow, "--ranks", "4")


def test_depths_are_chosen_whatever_the_json_has(config: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", config, "--profile", profile, "--hide-transfers", "--bandwidth", "100MB"]
    smallest = printed_json(capsys, *argv)["depths"]
    for depths in ([3, 2, 1, 0], [9, 6, 3, 0]):
        Path(config).write_text(json.dumps({**CONFIG, "vpipe": {"stage_to_depth_map": depths}}), encoding="utf-8")
        assert printed_json(capsys, *argv)["depths"] == smallest


def test_plan_suggests_micro_batches(config: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, "plan", config, "--profile", profile)
    assert text.splitlines()[-1] == "at most one update stale: 3 micro-batches per batch or more"
    text = printed(capsys, "plan", config, "--profile", profile, "--depth", "1,1,1,0")
    assert text.splitlines()[-1] == "at most one update stale: any number of micro-batches"
    text = printed(capsys, "plan", config, "--profile", profile, "--schedule", "gpipe")
    assert text.splitlines()[-1] == "at most 10% idle: 27 micro-batches per batch or more"


def test_plan_refuses_options_without_effect(config: str, profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["plan", config, "--profile", profile]
    split = Path(config).with_name("split.json")
    split.write_text(json.dumps({"partition": [5, 1, 1, 1]}), encoding="utf-8")
    line = refused(capsys, *argv, "--split", str(split))
    assert "another split is searched; allowed: the option with --current or --keep partition" in line
    for more in (["--hide-transfers"], ["--keep", "partition"]):
        assert "leave one of them out" in refused(capsys, *argv, "--current", *more)
    assert '--hide-transfers: got true; schedule "1f1b"' in refused(
        capsys, *argv, "--schedule", "1f1b", "--hide-transfers"
    )
    for more in (["--stages", "2"], ["--depth", "1,0"], ["--keep", "partition"]):
        line = refused(capsys, *argv, "--ranks", "2", "--reduce-bandwidth", "1GB", *more)
        assert f'options of plan: got "{more[0]} with --ranks"; that is for one number of stages; allowed: one' in line
    assert "--reduce-bandwidth: got null; reductions would take no time" in refused(capsys, *argv, "--ranks", "2")
    assert "--ranks with --current" in refused(capsys, *argv, "--ranks", "2", "--reduce-bandwidth", "1GB", "--current")
    assert "too many" in refused(capsys, *argv, "--ranks", "2", "--reduce-bandwidth", "1GB", "--memory", "1KB")
    line = refused(capsys, *argv, "--hide-transfers", "--depth", "6,4,2,0", "--bandwidth", "1MB")
    assert "--depth: got [6, 4, 2, 0]; depths are chosen; allowed: none with --hide-transfers" in line
    assert "--batches: got 7; a plan is of any number; allowed: none" in refused(capsys, *argv, "--batches", "7")
    line = refused(capsys, *argv, "--hide-transfers")
    assert (
        "--hide-transfers: got true; transfers take no time unless one is given; allowed: the option with --bandwidth"
        in line
    )
    simulated = ["simulate", config, "--profile", profile]
    assert "--backward: got [1.0]; --profile has the seconds" in refused(capsys, *simulated, "--backward", "1")


def test_micro_batches_are_what_deepspeed_makes_of_the_batch_sizes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "vpipe": {}}))
    assert "2 stages, 4 micro-batches per batch" in printed(capsys, "check", str(path), "--stages", "2")
    assert "2 micro-batches per batch" in printed(capsys, "check", str(path), "--stages", "2", "--replicas", "2")


def test_commands_plan_what_training_plans(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Profile, budget, links and what is left to the planner come from the block."""
    block = {"partition": "profile", "recompute_ratio": "auto", "stage_to_depth_map": "auto", "profile": profile}
    vpipe: dict[str, Any] = {**block, "memory_budget": 26 * MB, "link_bandwidth": 1e8}
    content = {**CONFIG, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "vpipe": vpipe}
    path = tmp_path / "auto.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    training, _ = planned(vpipe, content, [4, 4])
    assert training.stage_to_depth_map == (2, 0)
    argv = [str(path), "--stages", "2"]
    for command in (["plan", *argv], ["plan", *argv, "--current"]):
        found = printed_json(capsys, *command)
        assert found["partition"] == list(training.partition or ())
        assert found["recompute_ratio"] == list(training.recompute_ratio)
        assert found["depths"] == [2, 0]
    simulated = printed_json(capsys, "simulate", *argv)
    assert simulated["in_flight"] == [3, 1]
    assert simulated["throughput"] == pytest.approx(1 / found["pace_s"], rel=0.01)
    assert '"stage_to_depth_map": [2, 0]' in printed(capsys, "plan", *argv)
    path.write_text(json.dumps({**content, "vpipe": {**vpipe, "memory_budget": MB}}), encoding="utf-8")
    assert "too many" in refused(capsys, "plan", *argv)
    assert "too many" in refused(capsys, "simulate", *argv)
    printed(capsys, "plan", *argv, "--memory", "26MB")


def test_a_plan_on_the_cpu_counts_the_bytes_that_training_counts(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages are kept in the same memory there."""
    found = replace(ModelProfile.load(profile), device="cpu")
    found.save(tmp_path / "cpu.json")
    block = {"partition": "profile", "recompute_ratio": "auto", "profile": str(tmp_path / "cpu.json")}
    vpipe: dict[str, Any] = {**block, "memory_budget": 26 * MB}
    content = {**CONFIG, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "vpipe": vpipe}
    path = tmp_path / "auto.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    _, training = planned(vpipe, content, [4, 4], host_transfers=True)
    stages = printed_json(capsys, "plan", str(path), "--stages", "2")["stages"]
    assert stages == json.loads(json.dumps(training.to_json()))["stages"]
    assert all(stage["memory"]["buffers"] > 0 for stage in stages)


def test_a_plan_of_parts_is_what_training_takes(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vpipe: dict[str, Any] = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}
    path, split = tmp_path / "c.json", tmp_path / "split.json"
    path.write_text(json.dumps({**CONFIG, "vpipe": vpipe}), encoding="utf-8")
    printed(capsys, "plan", str(path), "--stages", "2", "--profile", profile, "-o", str(split))
    pipeline = VPipeConfig.parse({**vpipe, "partition": str(split)}).pipeline(2, 2)
    assert (pipeline.partition, pipeline.recompute_ratio) == ((2, 2, 2, 2), (0.0,) * 4)
    path.write_text(json.dumps({**CONFIG, "vpipe": {**vpipe, "recompute_ratio": [0.5, 1]}}), encoding="utf-8")
    found = printed_json(capsys, "plan", str(path), "--stages", "2", "--profile", profile, "--keep", "recompute_ratio")
    assert found["recompute_ratio"] == [0.5, 1.0, 0.5, 1.0]
    assert "give --stages" in refused(capsys, "show", str(path))


def test_parts_fit_if_their_rank_does(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vpipe = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2, "partition": [3, 1, 1, 3]}
    path = tmp_path / "c.json"
    path.write_text(json.dumps({**CONFIG, "vpipe": vpipe}), encoding="utf-8")
    argv = ["plan", str(path), "--profile", profile, "--current"]
    parts = [part["memory"]["total"] for part in printed_json(capsys, *argv)["stages"]]
    most = max(parts[0] + parts[2], parts[1] + parts[3])
    assert most < 2 * max(parts)
    printed(capsys, *argv, "--memory", str(most))
    printed(capsys, *argv, "--memory", str(min(parts)), status=1)


# profile


def test_profile_names_what_it_cannot_import(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "profile", "--model", "nowhere:model", "--micro-batch-size", "2")
    assert "No module named 'nowhere'" in line
    assert "--micro-batch-size" in refused(capsys, "profile", "--model", "json:loads")
    line = refused(capsys, "profile", "--model", "time:sleep_not", "--micro-batch-size", "2")
    assert "sleep_not" in line
    line = refused(capsys, "profile", "--model", "math:pi", "--micro-batch-size", "2")
    assert "it is of type float" in line


MODEL = """
import torch

def example(micro_batch_size, width=8):
    layers = [torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 2)]
    return {"layers": layers, "inputs": torch.zeros(micro_batch_size, width),
            "loss_fn": torch.nn.functional.cross_entropy, "labels": torch.zeros(micro_batch_size, dtype=torch.long)}

def wrong(micro_batch_size):
    return {"model": None}

def empty(micro_batch_size, layers=()):
    return {"layers": layers, "inputs": torch.zeros(micro_batch_size, 8)}
"""


def test_profile_measures_and_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    base = ["profile", "--model", "some_model:example", "--micro-batch-size", "4", "--set", "width=16"]
    for how in (["--repeat", "2"], ["--analytic"]):
        printed(capsys, *base, *how)
        found = ModelProfile.load("profile.json")
        assert [layer.parameter_bytes for layer in found.layers] == [4 * 17 * 16, 0, 4 * 17 * 2]
        assert (found.micro_batch_size, found.input_bytes) == (4, 4 * 4 * 16)
    assert '[["width", 16], ["width", 8]]; allowed: every argument once' in refused(capsys, *base, "--set", "width=8")
    line = refused(capsys, "profile", "--model", "some_model:wrong", "--micro-batch-size", "4")
    assert 'got ["model"]' in line
    for layers in ([], ["--set", "layers=3"]):
        line = refused(capsys, "profile", "--model", "some_model:empty", "--micro-batch-size", "4", *layers)
        assert "allowed: a list of at least one layer; change what some_model:empty returns" in line
    assert "unexpected keyword argument 'depth'" in refused(capsys, *base, "--set", "depth=2")
    with monkeypatch.context() as patch:
        patch.setattr("torch.cuda.is_available", lambda: False)
        assert '--device: got "cuda"; no GPU' in refused(capsys, *base, "--device", "cuda")


def test_profile_hints_at_a_busy_machine(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    layer, other = (replace(one, name=name) for one, name in zip(ModelProfile.load(profile).layers, "ab", strict=False))
    for slow, says in ((2e-3, False), (5e-3, True)):
        layers = (layer, other, replace(layer, forward_s=slow), replace(other, boundary_bytes=1, forward_s=1.0))
        made = replace(ModelProfile.load(profile), layers=layers)
        monkeypatch.setattr(import_module("ds_vpipe.commands.profile"), "_profile", lambda *_, made=made: made)
        text = printed(capsys, "profile", "--model", "some_model:example", "--micro-batch-size", "4")
        assert ("layers 0 and 2 are of one kind and took 3.000 and 7.000 ms; measure on an idle" in text) == says


def test_profile_casts_as_training_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cast_model.py").write_text(MODEL, encoding="utf-8")
    (tmp_path / "ds.json").write_text(json.dumps({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    argv = ["profile", "ds.json", "--model", "cast_model:example", "--micro-batch-size", "4"]
    printed(capsys, *argv, "--repeat", "2")
    found = ModelProfile.load("profile.json")
    assert [layer.boundary_bytes for layer in found.layers[:2]] == [4 * 8 * 2] * 2
    assert (found.dtype, found.layers[0].parameter_bytes) == ("float32", 4 * 9 * 8)
    assert "torch_autocast.enabled: got true; --analytic" in refused(capsys, *argv, "--analytic")
    for option, value in (("--repeat", "9"), ("--device", "cuda")):
        line = refused(capsys, "profile", *argv[2:], "--analytic", option, value)
        assert f"{option}: got " in line
        assert "the layers are computed; allowed: the option without --analytic" in line
    for option in ("--flops", "--memory-bandwidth"):
        assert f"{option}: got 1000.0; without it the layers are measured" in refused(capsys, *argv, option, "1000")


# trace and report


def test_trace_merges_recordings(recording: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, merged = str(tmp_path / "trace.json"), str(tmp_path / "merged.json")
    result = printed_json(capsys, "trace", recording, "-o", trace)
    assert result["output"] == trace
    assert result["timelines"][0]["throughput"] == pytest.approx(1 / 8.5)
    assert len(json.loads(Path(trace).read_text(encoding="utf-8"))["traceEvents"]) > len(TWO_STAGES.spans)
    printed(capsys, "show", recording, "-o", merged)
    assert Timeline.load(merged).source == "recording"
    assert printed(capsys, "trace", recording, "-o", trace).startswith(trace)


def test_report_lays_timelines_side_by_side(
    config: str, recording: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, page = tmp_path / "saved.json", tmp_path / "r.html"
    replace(TWO_STAGES, source="simulation").save(saved)
    result = printed_json(capsys, "report", config, str(saved), recording, "-o", str(page), "--title", "all three")
    assert [timeline["source"] for timeline in result["timelines"]] == ["plan", "simulation", "recording"]
    text = page.read_text(encoding="utf-8")
    assert "<h1>all three</h1>" in text
    assert text.count("<figure ") == 3
    assert printed(capsys, "report", str(saved), "-o", str(page)) == f"{page}\n"


# Values on the command line


@pytest.mark.parametrize(
    ("text", "count"),
    [("123456", 123456), ("16GB", 16 * 10**9), ("80GiB", 80 * 2**30), ("1.5e9", 1_500_000_000), ("2 kb", 2000)],
)
def test_sizes(text: str, count: int) -> None:
    assert size(text) == count
    assert sizes(f"{text},1MB") == (count, 10**6)


def test_other_values() -> None:
    assert numbers(int)("3,2,1") == (3, 2, 1)
    assert setting("a=3") == ("a", 3)
    assert setting("name=large") == ("name", "large")
    with pytest.raises(ArgumentTypeError, match='got "a"'):
        setting("a")


SIMULATE = ("simulate", "--stages", "4", "--micro-batches", "2")
SHOW = ("show", "--stages", "4", "--micro-batches", "2")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ((*SIMULATE, "--forward", "0"), "costs: got 0.0; allowed: seconds that are not all 0"),
        ((*SIMULATE, "--forward=-1"), 'argument --forward: got "-1"; allowed: a number from 0 to 1e9'),
        ((*SIMULATE, "--profile", "p", "--latency", "nan"), "argument --latency: got"),
        ((*SIMULATE, "--profile", "p", "--bandwidth", "0"), 'argument --bandwidth: got "0"; allowed: bytes > 0'),
        ((*SIMULATE, "--profile", "p", "--bandwidth", "inf"), "argument --bandwidth: got"),
        ((*SIMULATE, "--profile", "p", "--bandwidth", "1.2.3GB"), "argument --bandwidth: got"),
        ((*SIMULATE, "--profile", "p", "--replicas", "0"), "argument --replicas: got"),
        ((*SHOW, "--batches", "0"), "argument --batches: got"),
        ((*SHOW, "--virtual-stages", "0"), "argument --virtual-stages: got"),
        ((*SHOW, "--unit", "0"), "argument --unit: got"),
        ((*SHOW, "--width=-5", "-o", "a.svg"), 'argument --width: got "-5"; allowed: pixels, 100 to 20000'),
        ((*SHOW, "--width", "1e9", "-o", "a.png"), "argument --width: got"),
        ((*SHOW, "--window", "0:inf"), "argument --window: got"),
        ((*SHOW, "--batches", "1000000"), "schedule: got 16000000; passes of 4 parts"),
        (("check", "--stages", "100000", "--micro-batches", "2"), "at most 2000000 passes to look at"),
        (("plan", "--stages", "4", "--micro-batches", "100000000"), "at most 2000000 passes to look at"),
        (("plan", "--stages", "4", "--micro-batches", "1", "--depth", "100000000,0,0,0"), "at most 2000000 passes"),
        (("plan", "--stages", "4", "--micro-batches", "1", "-o", "split.txt"), '--output: got "split.txt"'),
        ((*SIMULATE, "--replan", "--slow", "1:1e18:2"), "argument --slow: got"),
        (("doctor", "--port=-5"), 'argument --port: got "-5"; allowed: a whole number from 1 to 65535'),
        (("doctor", "--ssh-port", "99999999"), "argument --ssh-port: got"),
        (("profile", "--model", "a:b", "--repeat", "0"), "argument --repeat: got"),
        (("profile", "--model", "a:b", "--analytic", "--flops", "0"), "argument --flops: got"),
        (("profile", "--model", "a:b", "--device", "tpu"), "argument --device: invalid choice"),
    ],
)
def test_senseless_numbers_are_refused_in_one_line(
    argv: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *argv)
