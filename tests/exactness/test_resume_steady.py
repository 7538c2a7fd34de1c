"""Resuming from a save in steady state: every setting, more replicas, weights only, and a loss that learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import deepspeed
import pytest
import torch
import toy
from test_exactness import OPTIMIZERS, difference
from test_resume import SCHEDULE, data_of
from worlds import Worlds

import ds_vpipe
from ds_vpipe.checkpoints.pipeline_checkpoint import PipelineCheckpoint
from ds_vpipe.errors import VPipeError
from ds_vpipe.export import full_state_dict

pytestmark = pytest.mark.mp

ADAMW = OPTIMIZERS["AdamW"][0]
TIED: dict[str, Any] = {"loss_fn": toy.mean_over_positions, "specs": toy.tied_specs}
FLOAT: dict[str, Any] = {"loss_fn": toy.float_cross_entropy, "dropout": 0.2}
CLIP = {"gradient_clipping": 0.5}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 3, "hysteresis": 2}, **CLIP}
ZERO = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
GLOBAL = {"gradient_clipping_scope": "delayed_global"}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {"dropout": 0.2}),
    "vertical": ({"weight_sync": "vertical"}, {}, {"dropout": 0.2}),
    "fp16, global norm": (GLOBAL, FP16, FLOAT),
    "fp16, ties": ({}, FP16, TIED),
    "ties, global norm": (GLOBAL, CLIP, TIED),
    "ties, bf16, ZeRO-1": ({}, ZERO, TIED),
}
BATCHES = 6


def trained(engine: Any, iterator: Any) -> list[dict[str, torch.Tensor]]:
    return [{"loss": engine.train_batch(iterator), **cases.parameters(engine)} for _ in range(BATCHES)]


def resumed(directory: str) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Train 7 batches, save, and go on; load and go on; what differs and the loss scaler in the save, by setting."""
    wrong: dict[str, list[str]] = {}
    scalers: dict[str, Any] = {}
    for name, (block, extra, model) in SETTINGS.items():
        ds_config = cases.config(1, ADAMW, {"partition": "uniform", **block}, **SCHEDULE, **extra)
        torch.manual_seed(1234)
        engine = cases.engine(ds_config, 3, **model)
        iterator = toy.data()
        for _ in range(7):
            engine.train_batch(iterator)
        scaling = engine.stage.loss_scaling
        before = None if scaling is None else scaling.state()
        engine.save_checkpoint(f"{directory}/{name}")
        if scaling is not None:
            scalers[name] = before if engine.is_last_stage() else scaling.state()
        wanted = trained(engine, iterator)
        cases.end(engine)
        engine = cases.engine(ds_config, 3, **model)
        engine.load_checkpoint(f"{directory}/{name}")
        found = trained(engine, data_of(engine))
        cases.end(engine)
        wrong[name] = [
            f"batch {number}: {key}"
            for number, snapshot in enumerate(wanted)
            for key, value in snapshot.items()
            if not torch.equal(value, found[number][key])
        ]
    return wrong, scalers


def test_every_setting(worlds: Worlds, tmp_path: Path) -> None:
    """The loss scaler in a save is the last stage's, which decides the scale; DeepSpeed's engine expects one."""
    ranks = worlds.run(3, resumed, str(tmp_path))
    for wrong, scalers in ranks:
        assert wrong == {name: [] for name in SETTINGS}
        assert "fp16, ties" in scalers
        assert scalers == ranks[-1][1]


def files_of_ranks(folder: str) -> tuple[bool, int, float]:
    """Whether a rank draws on as it did after the save; and what an engine of another split knows after a load."""
    engine = cases.engine(cases.config(1, ADAMW, {"partition": [5, 5], **GLOBAL}, **CLIP), 2)
    for _ in range(2):
        engine.train_batch(data_of(engine))
    torch.manual_seed(engine.global_rank)
    engine.save_checkpoint(folder)
    wanted = torch.rand(1)
    torch.manual_seed(99)
    engine.load_checkpoint(folder)
    goes_on = torch.equal(torch.rand(1), wanted)
    cases.end(engine)
    engine = cases.engine(cases.config(1, ADAMW, {"partition": [4, 6], **GLOBAL}, **CLIP), 2)
    engine.train_batch(data_of(engine))
    assert engine.module.micro_offset > 0
    assert engine.stage.peers.table.any()
    engine.load_checkpoint(folder)
    found = goes_on, engine.module.micro_offset, float(engine.stage.peers.table.sum())
    cases.end(engine)
    return found


def test_files_of_ranks_are_of_one_rank_and_split(worlds: Worlds, tmp_path: Path) -> None:
    """Replicas draw their own numbers; stages that have other layers begin as in a new run."""
    assert worlds.run(4, files_of_ranks, str(tmp_path)) == [(True, 0, 0.0)] * 4


def save_after(ds_config: dict[str, Any], directory: str, batches: int) -> None:
    engine = cases.engine(ds_config, 2)
    iterator = data_of(engine)
    for _ in range(batches):
        engine.train_batch(iterator)
    engine.save_checkpoint(directory)
    engine.destroy()


def load_and_train(ds_config: dict[str, Any], directory: str, batches: int) -> dict[str, Any]:
    engine = cases.engine(ds_config, 2)
    engine.load_checkpoint(directory)
    iterator = data_of(engine)
    for _ in range(batches):
        engine.train_batch(iterator)
    report = {"stage": engine.stage_id, "parameters": cases.parameters(engine)}
    engine.destroy()
    return report


def test_more_replicas_stay_equal(worlds: Worlds, tmp_path: Path) -> None:
    """They clip by what they know of other stages, which new replicas have from the first one."""
    sgd = OPTIMIZERS["SGD"][0]
    ds_config = cases.config(1, sgd, {"partition": "uniform", **GLOBAL}, gradient_clipping=0.05)
    worlds.run(2, save_after, ds_config, str(tmp_path), 4)
    ranks = worlds.run(4, load_and_train, ds_config, str(tmp_path), 3)
    for stage in range(2):
        one, other = (rank["parameters"] for rank in ranks if rank["stage"] == stage)
        assert difference(one, other) == 0


class Weighted(torch.nn.Module):
    """A loss function with something to learn."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(toy.CLASSES))

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return toy.float_cross_entropy(outputs * self.weight, labels)


def learned_loss(directory: str, loads: bool, stages: int) -> dict[str, Any]:
    """Parameters after training and saving, or after loading, with and without optimizer states."""
    ds_config = cases.config(1, ADAMW, {"partition": "uniform"}, bf16={"enabled": True})
    engine = cases.engine(ds_config, stages, loss_fn=Weighted())
    report = {"stage": engine.stage_id}
    if loads:
        for name, states in (("loaded", True), ("weights", False)):
            engine.load_checkpoint(directory, load_optimizer_states=states)
            report[name] = cases.parameters(engine)["other.loss_fn.weight"]
    else:
        iterator = toy.data()
        for _ in range(5):
            engine.train_batch(iterator)
        engine.save_checkpoint(directory)
        report["saved"] = cases.parameters(engine)["other.loss_fn.weight"]
    engine.destroy()
    return report


@pytest.mark.parametrize("stages", [2, 3])
def test_parameters_outside_of_layers(worlds: Worlds, tmp_path: Path, stages: int) -> None:
    """They are the last stage's, which trains them, also where there were fewer stages."""
    saved = worlds.run(2, learned_loss, str(tmp_path), False, 2)[-1]["saved"]
    assert float((saved - 1).abs().max()) > 1e-3
    for report in worlds.run(stages, learned_loss, str(tmp_path), True, stages):
        if report["stage"] == stages - 1:
            assert torch.equal(report["loaded"], saved)
            assert torch.equal(report["weights"], saved)
    exported = full_state_dict(PipelineCheckpoint(next(tmp_path.glob("global_step*"))))["loss_fn.weight"]
    assert torch.equal(exported.bfloat16().float(), saved)


def shared_outside(where: str, frozen: bool) -> str:
    """What a rank ends with where a layer that is a function uses a module of the whole model."""
    specs = toy.layer_specs()
    shared = torch.nn.Linear(toy.HIDDEN, toy.HIDDEN, bias=False).requires_grad_(not frozen)
    specs[2 if where == "first" else 8] = lambda hidden: hidden + shared(hidden)
    ds_config = cases.config(1, ADAMW, {"partition": "uniform"})
    net = deepspeed.pipe.PipelineModule(specs, num_stages=2, loss_fn=torch.nn.CrossEntropyLoss())
    net.shared = shared
    engine = ds_vpipe.initialize(model=net, config=ds_config)[0]
    try:
        iterator = toy.data()
        for _ in range(4):
            engine.train_batch(iterator)
        return "trained"
    except VPipeError as error:
        return str(error)
    finally:
        cases.end(engine)


@pytest.mark.parametrize(("where", "frozen"), [("first", False), ("first", True), ("last", False)])
def test_parameters_outside_of_layers_are_trained_by_the_last_stage_alone(
    worlds: Worlds, where: str, frozen: bool
) -> None:
    """Nothing says whose copy would be saved, if an earlier stage trained its own."""
    ended = worlds.run(2, shared_outside, where, frozen)
    if where == "last" or frozen:
        assert ended == ["trained"] * 2
    else:
        assert ended[0].startswith("model: got a gradient of shared.weight, which belongs to no layer, on stage 0 of 2")
        assert "got a gradient of shared.weight" in ended[1]
        assert not any("\n" in line for line in ended)


def weights_only(directory: str) -> dict[str, float]:
    """How far one tiny update moves weights that were loaded without optimizer states."""
    moved = {}
    for name, extra in {"bf16": {"bf16": {"enabled": True}}, "ZeRO-1": ZERO, "fp32": {}}.items():
        ds_config = cases.config(1, ADAMW, {"partition": "uniform"}, **extra)
        save_after(ds_config, f"{directory}/{name}", 5)
        cases.close_groups()
        tiny = {"type": "AdamW", "params": {"lr": 1e-7, "torch_adam": True, "weight_decay": 0.0}}
        engine = cases.engine({**ds_config, "optimizer": tiny}, 2)
        engine.load_checkpoint(f"{directory}/{name}", load_optimizer_states=False)
        before = cases.parameters(engine)
        engine.train_batch(data_of(engine))
        moved[name] = difference(cases.parameters(engine), before)
        cases.end(engine)
    return moved


def test_weights_only(worlds: Worlds, tmp_path: Path) -> None:
    for moved in worlds.run(2, weights_only, str(tmp_path)):
        assert moved.keys() == {"bf16", "ZeRO-1", "fp32"}
        assert all(distance < 1e-4 for distance in moved.values()), moved
