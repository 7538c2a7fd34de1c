"""What stages may hand each other in training, and stages with little or nothing to train."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import boundary
import cases
import pytest
import torch
from worlds import Worlds

pytestmark = pytest.mark.mp

SGD = {"type": "SGD", "params": {"lr": boundary.RATE}}
BATCHES = 6

Models = tuple[Callable[[], list[Any]], ...]

MODELS: Models = (
    boundary.every_dtype,
    boundary.through_stages,
    boundary.frozen_start,
    boundary.frozen_inside,
    boundary.only_the_last_learns,
    boundary.without_parameters,
    boundary.integers_between,
)
NOTHING_TO_TRAIN: Models = (boundary.without_parameters, boundary.frozen_start)


def build(model: Callable[[], list[Any]], ds_config: dict[str, Any], stages: int) -> Any:
    return cases.engine(ds_config, stages, loss_fn=boundary.criterion, specs=model)


def train_all(models: Models, ds_config: dict[str, Any], stages: int) -> list[Any]:
    """Parameters and losses of this stage after a few updates of each model."""
    results = []
    for model in models:
        trained = build(model, ds_config, stages)
        iterator = boundary.data()
        losses = [float(trained.train_batch(iterator)) for _ in range(BATCHES)]
        results.append({"parameters": cases.parameters(trained), "losses": losses})
        cases.end(trained)
    return results


def compare(worlds: Worlds, models: Models, ds_config: dict[str, Any], stages: int) -> None:
    ranks = worlds.run(stages, train_all, models, ds_config, stages)
    for position, model in enumerate(models):
        reports = [rank[position] for rank in ranks]
        depth = 1 if ds_config["vpipe"].get("sync_mode") == "bsp" else stages
        wanted, losses = boundary.replay(model(), depth, ds_config["gradient_accumulation_steps"], BATCHES)
        got = cases.merged(reports)
        assert got.keys() == wanted.keys(), model.__name__
        for name, value in wanted.items():
            assert torch.allclose(got[name], value, rtol=0, atol=1e-6), f"{model.__name__}: {name}"
        for report in reports:
            assert report["losses"] == pytest.approx(losses, abs=1e-5), model.__name__


@pytest.mark.parametrize(
    ("stages", "micro_batches", "models", "block"),
    [
        (4, 1, MODELS, {}),
        (2, 2, (boundary.every_dtype, boundary.frozen_start), {}),
        (4, 2, (boundary.every_dtype, boundary.without_parameters), {"recompute_ratio": 1}),
        (2, 2, MODELS, {"sync_mode": "bsp"}),
    ],
    ids=("4 stages", "2 stages", "recompute", "bsp"),
)
def test_training_equals_one_process(
    worlds: Worlds, stages: int, micro_batches: int, models: Models, block: dict[str, Any]
) -> None:
    compare(worlds, models, cases.config(micro_batches, SGD, block), stages)


def train_and_save(model: Callable[[], list[Any]], ds_config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A few updates, a checkpoint, and what another engine makes of it."""
    trained = build(model, ds_config, 4)
    iterator = boundary.data()
    losses = [float(trained.train_batch(iterator)) for _ in range(BATCHES)]
    trained.save_checkpoint(str(folder))
    report = {"parameters": cases.parameters(trained), "losses": losses, "rate": trained.get_lr()}
    trained.destroy()
    loaded = build(model, ds_config, 4)
    loaded.load_checkpoint(str(folder))
    report["loaded"] = cases.parameters(loaded)
    cases.end(loaded)
    return report


def train_and_save_each(ds_configs: list[dict[str, Any]], folder: Path) -> list[Any]:
    """:func:`train_and_save` where the second stage and the last have no parameters, and where two are frozen."""
    return [
        train_and_save(model, ds_config, folder / f"{model.__name__}{position}")
        for position, ds_config in enumerate(ds_configs)
        for model in NOTHING_TO_TRAIN
    ]


def test_stages_with_nothing_to_train_under_zero_and_bf16(worlds: Worlds, tmp_path: Path) -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_min_lr": boundary.RATE, "warmup_max_lr": boundary.RATE}}
    zero = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True, "scheduler": scheduler}
    ds_configs = [cases.config(2, SGD, {}, **zero), cases.config(2, SGD, {}, **zero, bf16={"enabled": True})]
    ranks = worlds.run(4, train_and_save_each, ds_configs, tmp_path)
    for position in range(4):
        reports = [rank[position] for rank in ranks]
        model, bf16 = NOTHING_TO_TRAIN[position % 2], position > 1
        wanted, _ = boundary.replay(model(), 4, 2, BATCHES)
        for name, value in cases.merged(reports).items():
            assert torch.allclose(value, wanted[name], rtol=0, atol=5e-2 if bf16 else 1e-6), f"{model.__name__}: {name}"
        for report in reports:
            assert report["rate"] == [boundary.RATE]
            assert all(torch.equal(report["loaded"][name], value) for name, value in report["parameters"].items())


def test_replay_notices_a_frozen_layer_that_learns() -> None:
    wanted, _ = boundary.replay(boundary.frozen_inside(), 4, 1, BATCHES)
    thawed = [
        layer.requires_grad_() if isinstance(layer, torch.nn.Module) else layer for layer in boundary.frozen_inside()
    ]
    assert not torch.equal(boundary.replay(thawed, 4, 1, BATCHES)[0]["2.weight"], wanted["2.weight"])
    assert torch.equal(boundary.Linear(2).weight, wanted["2.weight"])
