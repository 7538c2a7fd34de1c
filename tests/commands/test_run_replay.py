"""Replays of recorded runs: the state at a past update bit for bit, and the places of planted faults.

``DS_VPIPE_LONG_REPLAYS=1`` takes all shapes and all faults.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import psutil
import pytest
import recorded_training
import torch
from launches import launched
from recorded_training import SHAPES
from worlds import Worlds

import ds_vpipe.run
from ds_vpipe.__main__ import main
from ds_vpipe.commands import replay
from ds_vpipe.engine.observe.history import RecordedReplay, RunRecorder
from ds_vpipe.errors import VPipeError
from ds_vpipe.faults import Fault, by_growth, first_fault
from ds_vpipe.run_record import (
    RecordWriter,
    RunRecord,
    differences,
    environment,
    first_jump,
    first_not_finite,
    machine,
)

LONG = os.environ.get("DS_VPIPE_LONG_REPLAYS") == "1"
UPDATES = 9
# Runs of which any update is replayed.
ANYWHERE = sorted({*SHAPES} - {"moved"}) if LONG else ["dropout", "ties", "soap", "live", "depths", "loop", "loader"]
RESUMED = ("ties", "live", "depths")  # runs that end after five updates, and go on from their checkpoint of the third
ROOT = Path(__file__).parents[2]


def on_rank(name: str, folder: Path, updates: int, fault: dict[str, Any], plan: Path | None) -> Any:
    """The script on a rank, recorded or replayed; whether it ended by itself."""
    starts_processes = mock.patch.dict(multiprocessing.current_process()._config, {"daemon": False})  # type: ignore[attr-defined]
    with starts_processes, mock.patch.dict(os.environ, {} if plan is None else {"DS_VPIPE_REPLAY": str(plan)}):
        try:
            return recorded_training.train(name, folder, updates, fault)
        except SystemExit as end:
            return end.code


class Runs:
    """Runs of the script in waiting processes, by the command that would start them."""

    def __init__(self, worlds: Worlds, folder: Path, name: str, fault: dict[str, Any] | None = None) -> None:
        self._worlds, self._name, self.folder, self._fault = worlds, name, folder, fault or {}

    def train(self, updates: int = UPDATES, folder: Path | None = None) -> list[float]:
        arguments = (self._name, folder or self.folder, updates, self._fault, None)
        losses = self._worlds.run(SHAPES[self._name].ranks, on_rank, *arguments)[0]
        return [float.fromhex(loss) for loss in losses]

    def replay(self, *words: str) -> int:
        with mock.patch.object(replay, "run_ranks", self._run_ranks):
            return main(["replay", str(self.folder / "record"), *words])

    def _run_ranks(self, plan: dict[str, Any], more: Any) -> list[int]:
        path = Path(plan["out"], "plan.json")
        arguments = (self._name, self.folder, UPDATES, self._fault, path)
        outcomes = self._worlds.outcomes(plan["start"]["ranks"], on_rank, *arguments)
        for rank, outcome in enumerate(outcomes):
            Path(plan["out"], f"rank{rank:03d}.log").write_text(outcome.text)
        return [0 if outcome.good else 1 for outcome in outcomes]


def content(folder: Path) -> dict[str, Any]:
    """Everything in a checkpoint but what names the run."""

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return (str(value.dtype), tuple(value.shape), value.contiguous().view(-1).view(torch.uint8).tolist())
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items() if key != "ds_config"}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return value if isinstance(value, (int, float, str, bool, type(None))) else repr(value)

    return {path.name: plain(torch.load(path, weights_only=False)) for path in sorted(folder.glob("*.pt"))}


def assert_same(one: Path, other: Path) -> None:
    mine, its = content(one), content(other)
    assert mine.keys() == its.keys()
    assert mine
    for name, values in mine.items():  # the run's own may hold the script's state too
        assert [key for key in values if values[key] != its[name][key]] == [], name


@pytest.mark.mp
@pytest.mark.parametrize("name", ANYWHERE)
def test_the_state_at_any_update_is_that_of_the_run(name: str, worlds: Worlds, tmp_path: Path, capsys: Any) -> None:
    runs = Runs(worlds, tmp_path / "run", name)
    before = runs.train(5)[:3] if name in RESUMED else []  # from update 3 on all is trained anew
    losses = before + runs.train()
    record = RunRecord.read(tmp_path / "run" / "record")
    if name != "loop":  # in which a rank sees the loss of a micro-batch, and that late
        assert [record.losses[update] for update in range(1, UPDATES + 1)] == losses
    draw = random.Random(name)
    for update in {draw.choice((4, 5)), draw.choice((7, 8))} if LONG else {draw.choice((4, 5, 7, 8))}:
        state = tmp_path / f"state{update}"
        if not SHAPES[name].looks:
            assert runs.replay("--to", str(update), "--state", str(state)) == 0
            Runs(worlds, tmp_path / f"until{update}", name).train(update)
            assert_same(state / f"global_step{update}", tmp_path / f"until{update}" / "end" / "state")
    # Moves that were decided on measurements are in this run alone.
    if SHAPES[name].looks:  # as the checkpoint of update 6 has them
        assert runs.replay("--to", "9") == 0
    for before in ("5", "0") if LONG else ("0",):
        state = tmp_path / f"since{before}"
        assert runs.replay("--to", "6", "--from", before, "--state", str(state)) == 0
        assert_same(state / "global_step6", tmp_path / "run" / "checkpoints" / "global_step6")
    said = capsys.readouterr().out
    assert "from update 0: 6 losses are the recorded ones" in said
    if SHAPES[name].looks:
        kinds = {event["event"] for event in record.events}
        assert {"live": "moved", "drain": "split", "depths": "depths"}[name] in kinds


@pytest.mark.mp
def test_no_replay_begins_while_a_layer_is_to_move(worlds: Worlds, tmp_path: Path, capsys: Any) -> None:
    """The script moves it after update 2, saves after update 3 and does not move it again where it resumes."""
    runs = Runs(worlds, tmp_path, "moved")
    runs.train(5)
    assert runs.replay("--to", "5") == 0
    assert "from update 0: 5 losses are the recorded ones" in capsys.readouterr().out


def fault(kind: str, micro_batch: int, layer: int = 0, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "micro_batch": micro_batch, "layer": layer, **more}


@pytest.mark.mp
def test_a_bert_is_replayed_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    page = (ROOT / "docs" / "replay.md").read_text(encoding="utf-8")
    train, state = (re.search(rf"^{start} .*$", page, re.MULTILINE) for start in ("deepspeed", "python -m ds_vpipe"))
    assert train is not None
    assert state is not None
    config = json.loads((ROOT / "ds_configs" / "bert_tiny_cpu.json").read_text(encoding="utf-8"))
    config["vpipe"] = {"record": "runs/recorded/run"}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(ROOT / "models")
    (tmp_path / "recorded.json").write_text(json.dumps(config))
    words = train[0].replace("accelerators 4", "accelerators 2").replace("60", "4").replace("20", "2").split()[1:]
    launched(tmp_path, words)

    def run_ranks(plan: dict[str, Any], more: list[str]) -> list[int]:
        launched(tmp_path, [*words, *more], DS_VPIPE_REPLAY=f"{plan['out']}/plan.json")
        return [0, 0]

    monkeypatch.setattr(replay, "run_ranks", run_ranks)
    assert main(shlex.split(state[0].replace("47", "4"))[3:]) == 0
    assert "replayed to update 4 from update 2, checkpoint runs/recorded/checkpoints/" in capsys.readouterr().out
    assert_same(next((tmp_path / "runs" / "state").glob("*4")), next(tmp_path.glob("runs/recorded/checkpoints/*4")))


FAULTS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # the name of a run, the fault, and what is to be found besides its micro-batch
    ("plain", fault("output", 9, 7), {"where": "forward", "layer": 7, "stage": 1}),
    ("dropout", fault("data", 8, floats=True), {"where": "data", "stage": 0}),
    ("plain", {"kind": "weight", "update": 5, "layer": 3}, {"where": "weights", "layer": 3, "micro_batch": 11}),
    ("dropout", fault("output hook", 10, 4), {"where": "backward", "layer": 4, "stage": 1}),
    ("nadam", fault("parameter hook", 5, 8), {"where": "backward", "layer": 8}),
    ("loop", fault("output", 8, 1), {"where": "forward", "stage": 0}),
    ("plain", fault("data", 11, floats=True), {"where": "data", "stage": 0}),
    ("plain", fault("data", 2, floats=True), {"where": "data", "stage": 0}),
    ("dropout", fault("output", 8, 0), {"where": "forward", "layer": 0, "stage": 0}),
    ("dropout", fault("output", 13, 9), {"where": "forward", "layer": 9, "stage": 2}),
    ("nadam", fault("output", 6, 5), {"where": "forward", "layer": 5}),
    ("soap", fault("output", 4, 4), {"where": "forward", "layer": 4}),
    ("dropout", {"kind": "weight", "update": 4, "layer": 0}, {"where": "weights", "layer": 0, "micro_batch": 11}),
    ("dropout", {"kind": "weight", "update": 5, "layer": 9}, {"where": "weights", "layer": 9, "micro_batch": 10}),
    ("nadam", {"kind": "weight", "update": 5, "layer": 5}, {"where": "weights", "layer": 5, "micro_batch": 6}),
    ("plain", fault("output hook", 10, 5), {"where": "backward", "layer": 5, "stage": 1}),
    ("plain", fault("output hook", 11, 9), {"where": "backward", "layer": 9, "stage": 1}),
    ("plain", fault("input hook", 9, 5), {"where": "backward", "layer": 5, "stage": 1}),
    ("dropout", fault("input hook", 11, 2), {"where": "backward", "layer": 2, "stage": 0}),
    ("plain", fault("parameter hook", 12, 1), {"where": "backward", "layer": 1, "stage": 0}),
    ("blocks", fault("output", 9, 2), {"where": "forward", "stage": 0, "layer": None}),
    ("loop", fault("output", 9, 6), {"where": "forward", "stage": 1}),
    ("bsp", fault("output hook", 9, 6), {"where": "backward", "layer": 6, "stage": 1}),
]


@pytest.mark.mp
@pytest.mark.parametrize(("name", "planted", "expected"), FAULTS if LONG else FAULTS[:6])
def test_a_planted_fault_is_found(
    name: str, planted: dict[str, Any], expected: dict[str, Any], worlds: Worlds, tmp_path: Path, capsys: Any
) -> None:
    runs = Runs(worlds, tmp_path, name, planted)
    assert any(not math.isfinite(loss) for loss in runs.train())
    assert runs.replay("--find", "nan", "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["fault"]
    wanted = {"micro_batch": planted.get("micro_batch"), **expected}
    assert {name: found[name] for name in wanted} == wanted


@pytest.mark.mp
def test_layers_that_have_grown_where_the_loss_jumps(worlds: Worlds, tmp_path: Path, capsys: Any) -> None:
    runs = Runs(worlds, tmp_path, "plain", fault("scale", 15, 7))
    runs.train()
    assert runs.replay("--find", "loss-jump", "--factor", "3", "--json") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    growth = {row["layer"]: row["activation"][1] / row["activation"][0] for row in found["norms"]}
    assert (found["to"], found["began"], found["norms"][0]["growth"] > 100) == (8, 6, True)
    assert next(layer for layer in sorted(growth) if growth[layer] > 2) == 7


@pytest.mark.mp
def test_what_is_not_the_recorded_run_ends_at_the_first_loss(worlds: Worlds, tmp_path: Path, capsys: Any) -> None:
    runs = Runs(worlds, tmp_path, "plain")
    losses = runs.train()
    runs._fault = fault("scale", 9, 7)
    assert runs.replay("--to", "7", "--from", "0") == 1
    said = capsys.readouterr().out
    assert said.startswith(f"update 5: loss {losses[4]:.9g} recorded, ")
    runs._fault = {}
    runs._name = "bsp"
    assert runs.replay("--to", "7") == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "DeepSpeed JSON: got " in said
    assert "it has changed" in said


RANK = """
import json, os, sys, time
plan = json.load(open(os.environ["DS_VPIPE_REPLAY"]))
rank = int(os.environ["RANK"])
if "--waits" in sys.argv and rank == 0:
    time.sleep(60)
if "--fails" in sys.argv:
    sys.exit(f"rank {rank}: no such thing")
names = "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "PYTHONHASHSEED"
found = {"began": 0, "loaded": None, "reached": plan["to"], "words": sys.argv[1:], "folder": os.getcwd()}
found["environment"] = [os.environ[name] for name in names]
open(f"{plan['out']}/rank{rank:03d}.json", "w").write(json.dumps(found))
"""


def started(folder: Path) -> dict[str, Any]:
    """A plan for ranks that need not train."""
    script = folder / "rank.py"
    script.write_text(RANK)
    start = {
        "command": ["python3", str(script), "--local_rank=0", "--x"],
        "folder": str(folder),
        "ranks": 2,
        "environment": {"PYTHONHASHSEED": "7"},
        "machine": {"threads": 3},
    }
    plan = {"record": str(folder), "start": start, "to": 4, "latest": 3, "find": None, "state": None}
    return {**plan, "out": str(folder / "replay")}


def test_ranks_are_started_as_in_the_run(tmp_path: Path) -> None:
    reports = replay.launch(started(tmp_path), ["--resume"])
    assert [report["words"] for report in reports] == [[f"--local_rank={n}", "--x", "--resume"] for n in (0, 1)]
    assert [report["environment"] for report in reports] == [[str(n), "2", "3", "7"] for n in (0, 1)]
    assert [report["folder"] for report in reports] == [str(tmp_path)] * 2


def test_ranks_are_not_started_again(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert ds_vpipe.run.main(["--restarts", "3", "gone.py"]) == 2
    monkeypatch.setenv("DS_VPIPE_REPLAY", "plan.json")
    assert ds_vpipe.run.main(["--restarts", "3", "gone.py"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "--restarts: got" in first
    assert "'gone.py', which is not a file" in second


def test_the_environment_of_a_launcher_stays_with_its_run() -> None:
    """torchrun's says that somebody else keeps the store; Accelerate's has the engine's configuration."""
    given = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_SHOW_CPP_STACKTRACES": "1", "HOME": "/"}
    given["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = "ds.json"
    assert list(environment(given)) == ["ACCELERATE_DEEPSPEED_CONFIG_FILE", "TORCH_SHOW_CPP_STACKTRACES"]


def test_results_of_a_gpu_depend_on_which_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    recorded = machine("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    assert differences(recorded, machine("cuda")) == ["GPU a GPU recorded, another here"]


def test_a_device_that_fails_before_its_losses_are_read(tmp_path: Path) -> None:
    """The run ends for that reason, and not for its record."""

    class Lost(torch.Tensor):
        @classmethod
        def __torch_function__(cls, *_: Any, **__: Any) -> Any:
            raise RuntimeError("CUDA error: device-side assert\ntriggered")

    with mock.patch("ds_vpipe.engine.observe.history.logger.warning") as said:
        recorder = RunRecorder(mock.MagicMock(), str(tmp_path / "run"), {})
        recorder._unread = [(4, torch.ones(()).as_subclass(Lost))]
        recorder.end()
    ((line,), _), = said.call_args_list  # fmt: skip
    assert line.endswith("as losses cannot be read: RuntimeError: CUDA error: device-side assert triggered")


def test_ranks_end_with_the_command(tmp_path: Path) -> None:
    lines = "import sys; from test_run_replay import replay, started, Path"
    code = f"{lines}; replay.launch(started(Path({str(tmp_path)!r})), ['--waits'])"
    command = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    report = tmp_path / "replay" / "rank001.json"
    while not report.exists() and command.poll() is None:
        time.sleep(0.05)
    # The one that waits, and perhaps the other one, which has written its report and not ended yet.
    ranks = [child for child in psutil.Process(command.pid).children() if child.status() != psutil.STATUS_ZOMBIE]
    assert ranks
    command.terminate()
    assert command.wait(30) == 128 + signal.SIGTERM
    assert not any(rank.is_running() for rank in ranks)


def test_ranks_that_fail_or_wait_end_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_GRACE_S", 0.2)
    with pytest.raises(VPipeError, match="rank 1 ended with status 1 before it, and said: rank 1: no such thing; see"):
        replay.launch(started(tmp_path), ["--fails", "--waits"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "9"], "--to: got 9; allowed: an update whose loss is recorded, up to 6; name one, or what to --find"),
        ([], "--to: got null; allowed"),
        (
            ["--find", "nan", "--factor", "3"],
            "--factor: got 3.0; no jump is looked for; allowed: the option with --find",
        ),
        (["--find", "loss-jump", "--to", "3", "--factor", "3"], "--factor: got 3.0; no jump is looked for"),
        (["--find", "nan"], '--find: got "nan"; none of the 6 recorded losses is one; allowed'),
        (["--to", "0"], 'argument --to: got "0"; allowed: a whole number >= 1'),
        (["--to", "3", "--arguments", '"a'], 'argument --arguments: got ""a"; allowed: words with their quotes closed'),
        (["--to", "3", "--state", "saved"], "the run's own files are there; allowed: a folder of its own"),
    ],
)
def test_what_was_not_recorded_is_refused(
    words: list[str], said: str, tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["replay", str(tmp_path), "--to", "1"]) == 2
    assert "RUN: got " in capsys.readouterr().err
    writer = RecordWriter(str(tmp_path))
    writer.event("start", 0, micro_batches=1)
    for update in range(1, 7):
        writer.loss(update, 1.0)
    writer.event("saved", 2, folder=os.path.abspath("saved"), tag="global_step2")
    assert main(["replay", str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err


def test_a_record_that_is_trained_anew_and_was_cut_off(tmp_path: Path) -> None:
    writer = RecordWriter(str(tmp_path))
    start = {"command": ["first"]}
    writer.event("start", 0, **start)
    for update in range(1, 8):
        writer.loss(update, update / 10)
    for update in range(2, 10):
        (tmp_path / "saved" / f"s{update}").mkdir(parents=True)
    for update in (2, 4, 6):
        writer.event("saved", update, folder=str(tmp_path / "saved"), tag=f"s{update}")
        writer.event("emptied", update)
    with (tmp_path / "losses.bin").open("ab") as losses, (tmp_path / "events.jsonl").open("ab") as events:
        losses.write(b"abc")
        events.write(b'{"event": "emp')
    writer = RecordWriter(str(tmp_path))
    writer.event("start", 4, **start | {"command": ["second"]})
    writer.loss(5, 0.75)
    writer.event("moved", 5, move=(3, 1, 0, 14), until=7)
    writer.event("saved", 5, folder=str(tmp_path / "saved"), tag="s5")
    writer.event("move_layer", 7, until=9)
    for update in (6, 7, 8, 9):
        writer.event("saved", update, folder=str(tmp_path / "saved"), tag=f"s{update}")
    record = RunRecord.read(tmp_path)
    assert list(record.losses) == [1, 2, 3, 4, 5]
    assert record.losses[5] == 0.75
    assert [event["update"] for event in record.events if event["event"] == "emptied"] == [2, 4]
    assert [record.start_of(update)["command"] for update in (4, 5)] == [["first"], ["second"]]
    # Those of updates 5 to 8 were saved while a layer was on its way, or was to go.
    names = [record.checkpoint(latest, str(tmp_path / "saved")) for latest in (1, 2, 3, 4, 5, 8, 9)]
    assert names == [None, "s2", "s2", "s4", "s4", "s4", "s9"]
    shutil.rmtree(tmp_path / "saved" / "s4")
    assert record.checkpoint(5, str(tmp_path / "saved")) == "s2"
    assert record.checkpoint(5, str(tmp_path)) is None


def test_no_checkpoint_is_taken_after_a_move_that_does_not_say_where_it_ends(tmp_path: Path) -> None:
    """As records of earlier versions have them."""
    writer = RecordWriter(str(tmp_path))
    writer.event("start", 0)
    writer.loss(1, 2.5)
    for update in (2, 6):
        (tmp_path / f"s{update}").mkdir()
        writer.event("saved", update, folder=str(tmp_path), tag=f"s{update}")
        writer.event("moved", update + 1, move=(3, 1, 0, 14))
    record = RunRecord.read(tmp_path)
    assert [record.checkpoint(latest, str(tmp_path)) for latest in (2, 6)] == ["s2", "s2"]


def test_a_name_is_that_of_the_last_checkpoint(tmp_path: Path) -> None:
    writer = RecordWriter(str(tmp_path))
    writer.event("start", 0)
    writer.loss(1, 2.5)
    for update, name in ((2, "best"), (4, "last"), (6, "last")):
        (tmp_path / name).mkdir(exist_ok=True)
        writer.event("saved", update, folder=str(tmp_path), tag=name)
    record = RunRecord.read(tmp_path)
    assert [record.checkpoint(latest, str(tmp_path)) for latest in (1, 5, 6)] == [None, "best", "last"]
    writer.event("start", 5)  # anew, where "last" holds update 6 of what has been dropped
    assert RunRecord.read(tmp_path).checkpoint(4, str(tmp_path)) == "best"


def test_data_that_begin_anew_are_replayed_from_a_start(tmp_path: Path) -> None:
    writer = RecordWriter(str(tmp_path))
    writer.event("start", 0, data_begin_anew=True)
    for update in range(1, 7):
        writer.loss(update, 2.5)
        writer.event("saved", update, folder=str(tmp_path), tag=f"s{update}")
        (tmp_path / f"s{update}").mkdir()
    assert RunRecord.read(tmp_path).checkpoint(5, str(tmp_path)) is None
    writer.event("start", 3, data_begin_anew=True)
    writer.loss(4, 2.5)
    writer.event("saved", 4, folder=str(tmp_path), tag="s4")
    assert [RunRecord.read(tmp_path).checkpoint(latest, str(tmp_path)) for latest in (2, 3, 4)] == [None, "s3", "s3"]
    line = RunRecord.read(tmp_path).difference(4, 2.75)
    assert line is not None
    assert line.endswith("or the data since update 3, which began anew there; replay from that checkpoint")
    line = RunRecord(({"update": 0}, {"update": 3}), (), {4: 2.5}).difference(4, 2.75)  # a script's own iterator
    assert line is not None
    assert line.endswith("its environment differ")


def test_a_replay_that_begins_before_the_record_is_refused() -> None:
    """The run began with a checkpoint of training that was not recorded, which is not found again."""
    found = SimpleNamespace(_said={"began": None}, _to=9, _record=RunRecord(({"update": 4},), (), {}))
    with pytest.raises(VPipeError, match="begins after update 0, but the record after update 4, with a checkpoint"):
        RecordedReplay._loss(found, 0, torch.tensor(2.5))  # type: ignore[arg-type]


def test_a_loss_that_differs_after_a_load_in_mid_run(tmp_path: Path) -> None:
    writer = RecordWriter(str(tmp_path))
    writer.event("start", 0)
    for update in (1, 2, 3, 4, 3):
        writer.loss(update, 2.5)
    writer.event("loaded", 2)
    record = RunRecord.read(tmp_path)
    before, after = record.difference(2, 0.5), record.difference(3, 0.5)
    assert before == "update 2: loss 2.5 recorded, 0.5 replayed: the script, its data or its environment differ"
    assert after == (
        "update 3: loss 2.5 recorded, 0.5 replayed: the script, its data or its environment differ, or the data since "
        "it loaded the checkpoint of update 2 in mid-run, which a replay does not do"
    )
    assert record.difference(3, 2.5) is record.difference(4, 0.5) is None


def test_where_losses_go_wrong() -> None:
    losses = dict(enumerate([3.0, 2.9, 3.1, 2.8, 2.9, 6.2, 2.7, float("nan")], 1))
    assert first_not_finite(losses) == 8
    assert first_jump(losses, 2.0) == 6
    assert first_jump(losses, 2.2) == 8
    assert first_jump(dict(enumerate([3.0, 9.0, 3.0, 3.0, 4.0], 1)), 2.0) is None
    assert first_jump(dict.fromkeys(range(20), -1.0), 2.0) is None
    assert first_jump({**dict.fromkeys(range(20), -1.0), 20: 0.5}, 2.0) == 20
    for value in (float("nan"), float("inf"), float("-inf")):
        early = dict(enumerate([1.4, value, 1.1, 1.2, 1.3, 1.0, 2.5], 1))
        assert first_jump(early, 2.0) == 2


def test_growth_is_that_of_layers_that_were_finite() -> None:
    nan, inf = float("nan"), float("inf")
    pairs = [((inf, inf), 0), ((1.0, 4.0), 2), ((nan, 1.0), 0), ((1.0, 9.0), 3), ((0.0, 9.0), 0), ((1.0, nan), inf)]
    rows = [
        {"layer": layer, "name": "Layer", "stage": 0, "activation": pair, "gradient": (1.0, 0.0)}
        for layer, (pair, _) in enumerate(pairs)
    ]
    found = {row["layer"]: row["growth"] for row in by_growth([rows])}
    assert [found[layer] for layer in range(len(pairs))] == [growth for _, growth in pairs]
    assert list(found)[:3] == [5, 3, 1]


def test_the_first_fault_is_that_of_the_smallest_micro_batch_and_the_earliest_pass() -> None:
    def at(micro_batch: int, where: str, stage: int, begins: bool = False) -> Fault:
        return Fault(micro_batch, 7, where, stage, 0, None, "x", 0, 2, begins)

    order = [at(9, "weights", 2, True), at(3, "forward", 1), at(3, "backward", 1), at(3, "backward", 0)]
    order += [at(3, "update", 0), at(4, "data", 0), at(1, "received", 2)]
    for left_out in range(len(order)):
        assert first_fault(reversed(order[left_out:])) == order[left_out]
    assert first_fault([]) is None


def test_weights_that_were_wrong_already_and_a_script_that_ends_by_itself() -> None:
    def report(began: int | None, begins: bool) -> dict[str, Any]:
        found = Fault(35, 20, "weights", 1, 0, 7, "7.scale is NaN", 10, 2, begins)
        return {"began": began, "fault": asdict(found)}

    plan = {"to": 12, "latest": 11, "find": "nan", "state": None, "out": "logs"}
    assert replay.earlier_start(plan, [report(10, True)]) == 9
    assert replay.earlier_start(plan, [report(10, False)]) is None
    assert replay.earlier_start(plan, [report(0, True)]) is None
    assert replay.earlier_start({**plan, "latest": 9}, [report(10, True)]) is None  # it cannot begin earlier
    found = replay.answer(plan, [{}, report(None, True)])
    assert found.status == 1
    assert found.text().splitlines() == [
        "the script has ended by itself before update 12; see logs/rank*.log",
        "first value that is not finite: update 11, micro-batch 35 (number 1 of 2 of its batch), stage 1, layer 7, "
        "when the replay began: 7.scale is NaN, with weights of version 10",
    ]
