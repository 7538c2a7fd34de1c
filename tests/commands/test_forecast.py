"""The command forecast: its losses are a real run's, its times the simulator's; what it cannot do it says."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import pytest
import toy
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from worlds import Worlds

from ds_vpipe.__main__ import main
from ds_vpipe.commands.arguments import Answer
from ds_vpipe.commands.forecast import _rows, _text, _Training
from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.staleness import Staleness
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile
from ds_vpipe.planning.planner import plan
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.simulation.forecast import Pace, planned_pace, updates_to

UPDATES, STAGES = 8, 4
OPTIMIZER: dict[str, Any] = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}
SCHEDULE = {"type": "WarmupDecayLR", "params": {"total_num_steps": 8, "warmup_num_steps": 3, "warmup_max_lr": 1e-2}}
MORE = {"gradient_clipping": 0.5, "scheduler": SCHEDULE}


def training(micro_batch_size: int, end: int | None = None, alone: bool = False, replicas: int = 1) -> dict[str, Any]:
    assert micro_batch_size == toy.MICRO_BATCH
    data = (inputs for inputs, _ in toy.data()) if alone else toy.data(end)
    if replicas > 1:
        data = (toy.micro_batch(index // replicas, index % replicas) for index in itertools.count())
    return {"layers": toy.layer_specs(), "loss_fn": nn.CrossEntropyLoss(), "data": data}


def mixed(micro_batch_size: int) -> dict[str, Any]:
    """Layers of all kinds, and a second loss."""
    embed = functools.partial(TiedLayerSpec, "words", toy.Embed, 1, tied_weight_attr="embedding")
    layers: list[Any] = [embed(), toy.Norm(2), lambda value: value * 2, LayerSpec(nn.Tanh)]
    layers += [toy.Scale(3), embed(forward_fn=toy.decode)]
    return {
        "layers": layers,
        "loss_fn": lambda outputs, labels: (toy.mean_over_positions(outputs, labels), labels.sum()),
        "data": toy.data(),
    }


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., str]:
    numbers = itertools.count()

    def write(micro_batches: int = 1, optimizer: dict[str, Any] = OPTIMIZER, **more: Any) -> str:
        path = tmp_path / f"ds{next(numbers)}.json"
        path.write_text(json.dumps(cases.config(micro_batches, optimizer, **({"vpipe": {}} | more))), encoding="utf-8")
        return str(path)

    return write


def rows(capsys: pytest.CaptureFixture[str], *argv: str) -> list[dict[str, Any]]:
    assert main(["forecast", *argv, "--json"]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.mp
@pytest.mark.parametrize(
    ("micro_batches", "replicas", "params", "block"),
    [
        (1, 1, {}, {"staleness": {"nadam": True, "synchronous_updates": 2}, "weight_sync": "vertical"}),
        (2, 1, {"weight_decay": 0.1, "adam_w_mode": False}, {"stage_to_depth_map": [6, 4, 2, 0]}),
        (2, 2, {}, {"stage_to_depth_map": [3, 0], "staleness": {"delay_warmup_updates": 3}}),
    ],
)
def test_losses_are_those_of_a_run(
    worlds: Worlds,
    config: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    micro_batches: int,
    replicas: int,
    params: Any,
    block: Any,
) -> None:
    optimizer, stages = {**OPTIMIZER, "params": OPTIMIZER["params"] | params}, STAGES // replicas
    words = ["--model", "test_forecast:training", "--stages", str(stages), "--updates", str(UPDATES)]
    words += ["--set", f"replicas={replicas}"]
    more = MORE | {"train_batch_size": toy.MICRO_BATCH * micro_batches * replicas}
    synchronous, late = rows(capsys, config(micro_batches, optimizer, vpipe=block, **more), *words)
    assert late["losses"] != pytest.approx(synchronous["losses"], rel=1e-4)
    blocks: list[dict[str, Any]] = [block | {"partition": late["partition"]}, {"sync_mode": "bsp"}]
    configs = [cases.config(micro_batches, optimizer, block, **more) for block in blocks]
    ran = worlds.run(STAGES, cases.train_each, configs, stages, UPDATES)[0]
    assert ran[0]["losses"] == pytest.approx(late["losses"], rel=1e-5)
    assert ran[1]["losses"] == pytest.approx(synchronous["losses"], rel=1e-5)


def test_several_settings(config: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """Layers of every kind; rows of all settings have as many updates; a table with the best of each K."""
    staleness = {"staleness": {"synchronous_updates": 4}}
    files = [config(), config(optimizer={"type": "SGD", "params": {"lr": 1e-3}}, vpipe=staleness)]
    words = [*files, "--model", "test_forecast:mixed", "--stages", "2", "3", "--minutes", "0.02"]
    assert main(["forecast", *words]) == 0
    streams = capsys.readouterr()
    table = streams.out.splitlines()
    assert [line.split()[:2] for line in table[1:4]] == [["ds0.json", name] for name in ("synchronous", "2", "3")]
    assert [line.split()[:2] for line in table[4:7]] == [["ds1.json", name] for name in ("synchronous", "2", "3")]
    assert table[7].startswith("2 stages: ds")
    assert len({line.split()[3] for line in table[1:7]}) == 1
    assert streams.err.count("updates, loss") == 6


def test_auto_depths_are_the_planners(config: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    """Slow links ask for deeper ones than K - 1 - s."""
    block = {"stage_to_depth_map": "auto", "link_bandwidth": 1e3, "replan": {"every": 5}}
    words = ["--model", "test_forecast:training", "--stages", "2", "--updates", "2"]
    assert rows(capsys, config(vpipe=block), *words)[1]["late by"] > 1


def test_neither_order_swaps() -> None:
    layer = LayerProfile("Layer", 1e-3, 2e-3, 1, 1000, 1)
    profile = ModelProfile((layer,) * 4, 1, 2, "some GPU", "float32", "measured")
    devices = Devices(10_000, host_bandwidth=1e3)
    pipeline = Pipeline("asp", 2, 8, swap_ratio=(0.0, 0.0))
    with mock.patch("ds_vpipe.simulation.forecast.plan", wraps=plan) as planned:
        planned_pace(profile, pipeline, devices)
    assert [call.args[1].swap_ratio for call in planned.call_args_list] == [(0.0, 0.0)] * 2


@pytest.mark.parametrize(
    ("settings", "words", "wanted"),
    [
        ({"vpipe": {"sync_mode": "bsp"}}, [], 'vpipe.sync_mode: got "bsp"'),
        ({"optimizer": {"type": "Lamb", "params": {}}}, [], 'optimizer.type: got "Lamb"'),
        ({"optimizer": {"type": "Adam", "params": {"rate": 1}}}, [], "optimizer.params: got"),
        (
            {"vpipe": {"gradient_clipping_scope": "delayed_global"}},
            [],
            'vpipe.gradient_clipping_scope: got "delayed_gl',
        ),
        (
            {"scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}}},
            [],
            "cycle_momentum",
        ),
        ({"gradient_clipping": "auto"}, [], 'gradient_clipping: got "auto"'),
        ({"optimizer": {"type": "SOAP", "params": {"lr": "auto"}}}, [], "optimizer.params: got"),
        ({"scheduler": {"type": "Cosine"}}, [], 'scheduler.type: got "Cosine"'),
        ({"scheduler": "WarmupLR"}, [], 'scheduler: got "WarmupLR"; allowed: an object'),
        ({"zero_optimization": {"stage": 3}}, [], "zero_optimization.stage: got 3"),
        ({"train_batch_size": 100001}, [], "train_batch_size: got 100001"),
        ({}, ["--set", "alone=true"], '"data": got "Tensor"; allowed: micro-batches (inputs, labels)'),
        ({}, ["--set", "end=3"], '"data": got 3; they ended; allowed: micro-batches without an end; let the function '),
        ({}, ["--set", "end=3"], "yield more, or give --updates 3"),
        ({}, ["--set", "end=0"], '"data": got 0; they ended'),
        ({}, ["--stages", "1"], '--stages: got "1"; allowed: a whole number >= 2'),
    ],
)
def test_refusals(
    config: Callable[..., str], capsys: pytest.CaptureFixture[str], settings: Any, words: list[str], wanted: str
) -> None:
    argv = ["forecast", config(**settings), "--model", "test_forecast:training", "--updates", "4"]
    assert main([*argv, *(words if "--stages" in words else ["--stages", "2", *words])]) == 2
    error = capsys.readouterr().err
    assert wanted in error.splitlines()[-1]
    assert "Traceback" not in error


def test_profiles_of_other_models_and_batches_are_refused(
    config: Callable[..., str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layer, path = LayerProfile("Layer", 1e-3, 2e-3, 8, 8, 8), tmp_path / "profile.json"
    argv = ["forecast", config(), "--model", "test_forecast:training", "--updates", "1", "--profile", str(path)]
    for layers, size, wanted in (
        (10, 32, "it is of micro-batches of 32; allowed: a profile of micro-batches of 2"),
        (7, 2, "it has 7 layers but the model has 10"),
    ):
        ModelProfile(layers * (layer,), 8, size, "some GPU", "float32", "measured").save(path)
        assert main(argv) == 2
        assert wanted in capsys.readouterr().err.splitlines()[-1]


def test_nothing_but_json_is_printed_for_scripts(config: Callable[..., str]) -> None:
    """DeepSpeed logs to the standard output while it is imported."""
    words = ["forecast", config(), "--model", "test_forecast:training", "--stages", "2", "--updates", "2", "--json"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-m", "ds_vpipe", *words], env=environment, capture_output=True, text=True)
    assert [row["stages"] for row in json.loads(done.stdout)] == [1, 2]


def test_settings_of_other_batch_sizes_are_refused(
    config: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["forecast", config(1), config(2), "--model", "test_forecast:training"]) == 2
    assert "batch size: got [2, 4]" in capsys.readouterr().err


def trained(name: str, stages: int, loss: float) -> _Training:
    late = None if stages == 1 else (Pace(0.25, 0.75), VPipeConfig.parse({}), Pipeline("asp", stages, 1))
    return _Training(name, stages, [loss] * 10, 0 if stages == 1 else stages - 1, late)


def test_losses_that_are_no_numbers_or_negative() -> None:
    """Whatever the order of the JSONs, what diverges is not the best, and better is less."""
    nan = float("nan")
    good = [trained("good", 1, 2.0), trained("good", 4, 2.0)]
    bad = [trained("bad", 1, nan), trained("bad", 4, nan)]
    for found in ([*good, *bad], [*bad, *good]):
        rows = _rows(found)
        assert [row["gap"] for row in rows if row["settings"] == "good"] == [0, 0]
        assert "4 stages: good, to the synchronous loss in" in _text(rows)
    worse = _rows([trained("one", 1, -4.0), trained("one", 4, -3.0)])
    assert worse[1]["gap"] == 0.25
    assert "+25.00%" in _text(worse)
    assert _rows([trained("one", 1, 0.0), trained("one", 4, 1.0)])[1]["gap"] is None
    assert "4 stages: one, ; none" not in _text(_rows([trained("one", 1, 0.0), trained("one", 4, 1.0)]))


def test_json_has_null_where_a_loss_is_no_number(
    config: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """``NaN`` is Python's own, which other readers of JSON refuse."""
    found = _rows([trained("one", 1, 2.0), trained("one", 4, math.nan)])
    monkeypatch.setattr("ds_vpipe.commands.forecast.run", lambda _: Answer(lambda: found, str))
    assert main(["forecast", config(), "--model", "m:f", "--stages", "4", "--minutes", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out, parse_constant=pytest.fail)[1]["loss"] is None


def test_time_counts_drains() -> None:
    """A synchronous beginning costs what synchronous updates do."""
    pace = Pace(0.25, 0.75)
    assert pace.time(8, None, 3) == 2
    assert pace.time(8, Staleness(synchronous_updates=4), 3) == 4 + 1


def test_updates_to_a_loss() -> None:
    assert updates_to([4, 3, 2, 1], 2.5, 2) == 3
    assert updates_to([4, 3, 2, 1], 1, 2) is None
    assert updates_to([math.nan, 3, 2, 1], 2.5, 2) == 3
    assert updates_to([4, 1, 4, 2, 1], 2, 1) == 4  # what only passes the level does not count
    assert updates_to([4, 1, 4], 2, 1) is None
    assert updates_to([1, 1, 1], 2, 2) == 2


def test_a_loss_that_has_passed_the_level_and_ends_above_it_has_no_time() -> None:
    synchronous = trained("one", 1, 2.0)
    noisy = replace(trained("one", 4, 3.0), losses=[1.0, *[3.0] * 9])
    rows = _rows([synchronous, noisy])
    assert [row["time"] for row in rows] == [0.1, None]
    assert _text(rows).splitlines()[-1] == (
        "4 stages: one, +50.00%; none came to the synchronous loss, see docs/convergence.md"
    )


def test_losses_without_a_finite_end() -> None:
    late = trained("late", 4, float("nan"))
    assert _text(_rows([trained("one", 1, 2.0), late])).splitlines()[-1].startswith("4 stages: late, diverged; none")
    text = _text(_rows([trained("one", 1, float("nan")), late]))
    assert "+nan%" not in text
    assert text.splitlines()[-1] == "no synchronous training ended at a finite loss; lower the learning rate"


def test_files_with_equal_names_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "ds.json").write_text(json.dumps(cases.config(1, OPTIMIZER, vpipe={})))
    files = [str(tmp_path / folder / "ds.json") for folder in ("a", "b")]
    found = rows(capsys, *files, "--model", "test_forecast:training", "--stages", "2", "--updates", "2")
    assert [row["settings"] for row in found] == [files[0], files[0], files[1], files[1]]
