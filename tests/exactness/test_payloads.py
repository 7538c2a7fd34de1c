"""Training does not depend on what carries tensors between stages, on the CPU or on a simulated accelerator."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import boundary
import cases
import pytest
import torch
import toy
from torch import nn
from worlds import Worlds

import ds_vpipe

pytestmark = pytest.mark.mp

ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
CARRIERS = (("host", "cpu"), ("shared", "cpu"), ("shared", "simulated"), ("ipc", "simulated"), ("nccl", "simulated"))
INTERLEAVED = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}


@pytest.mark.parametrize(
    ("stages", "micro_batches", "block", "module"),
    [
        (4, 1, {"recompute_ratio": 0.5, "stage_to_depth_map": [6, 4, 2, 0]}, {"dropout": 0.3}),
        (4, 4, {"weight_sync": "vertical"}, {"dropout": 0.3}),
        (3, 2, {"gradient_clipping_scope": "delayed_global"}, {"specs": toy.tied_specs}),
        (2, 4, INTERLEAVED, {}),
    ],
)
def test_payloads_give_the_same_bits(
    worlds: Worlds, stages: int, micro_batches: int, block: dict[str, Any], module: dict[str, Callable[..., Any]]
) -> None:
    if "specs" in module:
        module["loss_fn"] = toy.mean_over_positions
    ds_config = cases.config(micro_batches, ADAMW, {"partition": "uniform", **block}, gradient_clipping=0.5)
    for reports in worlds.run(stages, trained_over_each, ds_config, stages, **module):
        assert_same(reports)


def trained_over_each(ds_config: dict[str, Any], stages: int, **module: Any) -> list[dict[str, Any]]:
    """Reports of the same training over each carrier."""
    reports = []
    for link, device in CARRIERS:
        over = {**ds_config, "vpipe": {**ds_config["vpipe"], "link": link}}
        reports.append(cases.train(over, stages, 8, device=device, **module))
        cases.close_groups()
    return reports


def assert_same(reports: list[dict[str, Any]]) -> None:
    """The same losses and parameters of one stage, whatever carries its tensors."""
    first, *others = reports
    assert len(others) == len(CARRIERS) - 1
    for other in others:
        assert other["losses"] == first["losses"]
        assert other["parameters"].keys() == first["parameters"].keys()
        for name, value in first["parameters"].items():
            assert torch.equal(value, other["parameters"][name]), name


class Sum(nn.Module):
    """A plain model, whose calls travel with marks of their form and with numbers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, value: torch.Tensor, factor: float) -> torch.Tensor:
        return self.layers(value).pow(2).sum() * factor


def plain_models() -> list[dict[str, Any]]:
    """A plain model trained over each payload, with several samples in a micro-batch."""
    reports = []
    for link, device in CARRIERS:
        config = {**cases.config(1, ADAMW, {"link": link}), "pipeline": {"stages": 2}}

        def build(config: dict[str, Any] = config) -> Any:
            return ds_vpipe.initialize(model=Sum(), config=config)[0]

        engine = build() if device == "cpu" else cases.on_simulated(build)
        losses = []
        for number in range(6):
            loss = engine(torch.randn(3, 4, generator=torch.Generator().manual_seed(number)), 0.5 + number)
            engine.backward(loss)
            engine.step()
            losses.append(float(loss))
        engine.drain()
        trained = {n: p.detach().clone() for n, p in engine.module.user_module.named_parameters() if not p.is_meta}
        reports.append({"losses": losses, "parameters": trained})
        cases.end(engine)
    return reports


def test_a_plain_model(worlds: Worlds) -> None:
    for reports in worlds.run(2, plain_models):
        assert_same(reports)


def used(ds_config: dict[str, Any], stages: int, folder: str, data: Callable[..., Any], **module: Any) -> list[Any]:
    """What a run does beside training, over each payload: evaluations, a save, the data's end."""
    reports = []
    for link, device in CARRIERS:
        torch.manual_seed(1234)
        block = {**ds_config["vpipe"], "link": link}
        trained = cases.engine({**ds_config, "vpipe": block}, stages, device=device, **module)
        assert {sender.payload for sender in trained.stage.links.training_senders} == {link}
        iterator = itertools.islice(data(), 9 * trained.micro_batches + trained.micro_batches // 2)
        losses = []
        with suppress(StopIteration):
            for batch in itertools.count():
                losses.append(float(trained.train_batch(iterator)))
                if batch in (2, 3):
                    losses.append(float(trained.eval_batch(data())))
                if batch == 5:
                    trained.save_checkpoint(f"{folder}/{link} {device}")
        assert len(losses) == 9 + 2
        reports.append({"losses": losses, "parameters": cases.parameters(trained)})
        cases.end(trained)
    return reports


@pytest.mark.parametrize(
    ("stages", "micro_batches", "data", "module"),
    [
        (3, 1, toy.data, {"dropout": 0.3}),
        (3, 2, toy.data, {}),
        (2, 2, boundary.data, {"specs": boundary.every_dtype, "loss_fn": boundary.criterion}),
    ],
    ids=["update per micro-batch", "two micro-batches", "every dtype, changing shapes"],
)
def test_evaluations_saves_and_the_end_of_the_data(
    worlds: Worlds,
    tmp_path: Path,
    stages: int,
    micro_batches: int,
    data: Callable[..., Any],
    module: dict[str, Any],
) -> None:
    ds_config = cases.config(micro_batches, ADAMW, {"partition": "uniform"}, gradient_clipping=0.5)
    for reports in worlds.run(stages, used, ds_config, stages, str(tmp_path), data, **module):
        assert_same(reports)
