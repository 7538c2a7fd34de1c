"""Checkpoints of models with tied layers: a save changes nothing, every engine loads it, what is not tied is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import toy
from test_exactness import OPTIMIZERS, difference
from worlds import Worlds

from ds_vpipe.checkpoints.pipeline_checkpoint import PipelineCheckpoint
from ds_vpipe.export import full_state_dict

pytestmark = pytest.mark.mp

ADAMW = OPTIMIZERS["AdamW"][0]
TIED: dict[str, Any] = {"loss_fn": toy.mean_over_positions, "specs": toy.tied_specs}
BF16 = {"bf16": {"enabled": True}}
ZERO = {**BF16, "zero_optimization": {"stage": 1}}
SETTINGS = {"fp32": {}, "bf16": BF16, "ZeRO-1": ZERO, "rounded": {**BF16, "zero_optimization": {"stage": 1}}}
SETTINGS["rounded"]["zero_optimization"]["load_from_fp32_weights"] = False


def tied_engine(ds_config: dict[str, Any], stages: int = 3) -> Any:
    """With other hyperparameters on every stage."""
    engine = cases.engine(ds_config, stages, **TIED)
    for group in engine.optimizer.param_groups:
        group["lr"] *= 1 + engine.stage_id
        group["weight_decay"] = 0.1 * engine.stage_id
    return engine


def rest_or_save(ds_configs: list[dict[str, Any]], directory: str) -> list[tuple[Any, Any]]:
    """Parameters after training that rests after every second batch, and that saves there; by configuration."""
    pairs = []
    for number, ds_config in enumerate(ds_configs):
        results = []
        for saves in (False, True):
            engine = tied_engine(ds_config)
            iterator = toy.data()
            for batch in range(6):
                engine.train_batch(iterator)
                if batch % 2:
                    engine.save_checkpoint(f"{directory}/{number}") if saves else engine.quiesce()
            engine.train_batch(iterator)
            results.append(cases.parameters(engine))
            cases.end(engine)
        pairs.append((results[0], results[1]))
    return pairs


def test_a_save_is_a_rest(worlds: Worlds, tmp_path: Path) -> None:
    ds_configs = [cases.config(1, ADAMW, {"partition": "uniform"}, **extra) for extra in SETTINGS.values()]
    for rank in worlds.run(3, rest_or_save, ds_configs, str(tmp_path)):
        for name, (rested, saved) in zip(SETTINGS, rank, strict=True):
            assert difference(saved, rested) == 0, name


def into_stock(ds_configs: list[dict[str, Any]], directory: str) -> list[dict[str, Any]]:
    """Save asynchronously, go on with DeepSpeed's engine."""
    reports = []
    for number, ds_config in enumerate(ds_configs):
        engine = cases.engine(ds_config, 3, **TIED)
        iterator = toy.data()
        for _ in range(5):
            engine.train_batch(iterator)
        engine.save_checkpoint(f"{directory}/{number}")
        saved = {"parameters": cases.parameters(engine), "stage": engine.stage_id}
        cases.end(engine)
        stock = cases.engine({key: value for key, value in ds_config.items() if key != "vpipe"}, 3, **TIED)
        stock.load_checkpoint(f"{directory}/{number}")
        for _ in range(4):
            stock.train_batch(iterator)
        reports.append({**saved, "after": cases.parameters(stock)})
        cases.end(stock)
    return reports


def test_copies_stay_equal_in_the_stock_engine(worlds: Worlds, tmp_path: Path) -> None:
    """It updates every copy by itself, from the states that the checkpoint has of each."""
    ds_configs = [cases.config(2, ADAMW, {"partition": "uniform"}, **extra) for extra in ({}, ZERO)]
    ranks = worlds.run(3, into_stock, ds_configs, str(tmp_path))
    name = "other.tied_modules.words.embedding.weight"
    for position in range(2):
        owner, copy = ranks[0][position], ranks[2][position]
        assert torch.equal(owner["parameters"][name], copy["parameters"][name])
        assert torch.equal(owner["after"][name], copy["after"][name])
        assert difference({name: owner["after"][name]}, {name: owner["parameters"][name]}) > 1e-3


def free_bias(engine: Any) -> torch.Tensor | None:
    layers = engine.module.tied_modules
    return layers["linear"].linear.bias.detach().float().clone() if "linear" in layers else None


def free_biases(ds_config: dict[str, Any], directory: str) -> dict[str, Any]:
    """A bias that two stages have in layers whose weights are tied; after training, and loaded into other stages."""
    engine = cases.engine(ds_config, 3, **TIED)
    iterator = toy.data()
    for _ in range(5):
        engine.train_batch(iterator)
    engine.save_checkpoint(directory)
    biases = {"trained": free_bias(engine), "whole": engine.full_state_dict()}
    with torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.zero_()
    engine.module.load_state_dict(biases["whole"], strict=False)
    biases["taken back"] = free_bias(engine)
    cases.end(engine)
    engine = cases.engine({**ds_config, "vpipe": {"partition": [2, 4, 4]}}, 3, **TIED)
    engine.load_checkpoint(directory)
    biases["loaded"] = free_bias(engine)
    cases.end(engine)
    return biases


@pytest.mark.parametrize("setting", ["fp32", "ZeRO-1"])
def test_what_is_not_tied_stays_apart(worlds: Worlds, tmp_path: Path, setting: str) -> None:
    ds_config = cases.config(1, ADAMW, {"partition": [4, 3, 3]}, **SETTINGS[setting])
    ranks = worlds.run(3, free_biases, ds_config, str(tmp_path))
    first, second = ranks[1], ranks[2]
    assert not torch.equal(first["trained"], second["trained"])
    for rank in (first, second):
        assert torch.equal(rank["trained"], rank["loaded"])
        assert torch.equal(rank["trained"], rank["taken back"])
    for rank in ranks:  # a name that several stages have is the first one's
        assert list(rank["whole"]) == list(first["whole"])
        assert torch.equal(rank["whole"]["tied_modules.linear.linear.bias"].float(), first["trained"])
        assert torch.equal(rank["whole"]["8.linear.bias"].float(), second["trained"])
        assert "8.linear.weight" not in rank["whole"]
    found = full_state_dict(PipelineCheckpoint(next(tmp_path.glob("global_step*"))))
    dtype = torch.bfloat16 if setting == "ZeRO-1" else torch.float32
    for layer, rank in ((5, first), (8, second)):
        assert torch.equal(found[f"{layer}.linear.bias"].to(dtype).float(), rank["trained"])
    assert "tied_modules.linear.linear.bias" not in found
    assert "tied_modules.linear.linear.weight" in found


def tied_layers_meet(folder: str) -> list[dict[str, torch.Tensor]]:
    """The model before a save, and after a load into a split that has two tied layers of two stages on one."""
    found = []
    for partition in ([3, 7], [5, 5]):
        engine = cases.engine(cases.config(2, ADAMW, {"partition": partition}), 2, **TIED)
        if partition == [3, 7]:
            iterator = toy.data()
            for _ in range(3):
                engine.train_batch(iterator)
            engine.save_checkpoint(folder)
        else:
            engine.load_checkpoint(folder)
        found.append({name: value.clone() for name, value in engine.full_state_dict().items()})
        cases.end(engine)
    return found


def test_what_tied_layers_do_not_share_is_the_first_ones(worlds: Worlds, tmp_path: Path) -> None:
    before, after = worlds.run(2, tied_layers_meet, str(tmp_path))[0]
    name = "tied_modules.scale.linear.bias"
    assert not torch.equal(before[name], before["4.linear.bias"]), "of layers 2 and 4"
    assert before.keys() - after.keys() == {"4.linear.bias"}
    assert [name for name, value in after.items() if not torch.equal(value, before[name])] == []
