"""Optimizers in host memory by ZeRO-1's offload: the updates of optimizers on the device, bit for bit."""

from __future__ import annotations

from typing import Any

import cases
import loops
import pytest
import torch
import toy
from deepspeed.pipe import LayerSpec
from test_exactness import OPTIMIZERS
from test_precision import FP16
from torch import nn
from worlds import Worlds

from ds_vpipe.errors import VPipeConfigError

pytestmark = pytest.mark.mp

STAGES, BATCHES = 2, 6
SGD, ADAMW = OPTIMIZERS["SGD"][0], OPTIMIZERS["AdamW"][0]
BF16 = {"bf16": {"enabled": True}}
OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


class Sometimes(nn.Module):
    """Layer of which every third micro-batch uses no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = toy.seeded(77, lambda: nn.Linear(toy.HIDDEN, toy.HIDDEN))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x if self.calls % 3 == 0 else self.linear(x)


def sometimes_specs() -> list[Any]:
    specs = toy.layer_specs()
    return [*specs[:2], LayerSpec(Sometimes), *specs[2:-1], LayerSpec(Sometimes), specs[-1]]


CASES: dict[str, tuple[int, int, dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "bf16": (1, 1, ADAMW, {}, BF16, {}),
    "bf16, replicas": (2, 2, ADAMW, {"recompute_ratio": 0.5}, BF16, {}),
    "fp32": (1, 2, SGD, {}, {}, {}),
    "fp16, skipped updates": (1, 1, ADAMW, {}, FP16, {}),
    "tied": (1, 1, SGD, {}, BF16, {"specs": toy.words_tied_specs, "loss_fn": toy.mean_over_positions}),
    "staleness": (1, 1, ADAMW, {"staleness": {"nadam": True}}, BF16, {}),
    "vertical": (1, 1, SGD, {"weight_sync": "vertical"}, BF16, {}),
    "weights without gradients": (1, 1, SGD, {}, BF16, {"specs": sometimes_specs}),
    "weights without gradients, bsp": (1, 1, SGD, {"sync_mode": "bsp"}, BF16, {"specs": sometimes_specs}),
}
"""Replicas, M, optimizer, block, more of the JSON, and what else the model has."""


def train_both_ways(names: list[str]) -> list[list[dict[str, Any]]]:
    reports = []
    for name in names:
        _, micro_batches, optimizer, block, extra, model = CASES[name]
        model = {"loss_fn": toy.float_cross_entropy, **model}
        for offload in ({}, OFFLOAD):
            zero = {"stage": 1, **offload}
            ds_config = cases.config(
                micro_batches, optimizer, {"partition": "uniform", **block}, zero_optimization=zero,
                zero_allow_untested_optimizer=True, **extra,
            )  # fmt: skip
            reports.append(cases.train(ds_config, STAGES, BATCHES, **model))
        cases.close_groups()
    return [reports[at : at + 2] for at in range(0, len(reports), 2)]


@pytest.mark.parametrize("replicas", [1, 2])
def test_equal_to_an_optimizer_on_the_device(worlds: Worlds, replicas: int) -> None:
    names = [name for name, case in CASES.items() if case[0] == replicas]
    for ranks in worlds.run(STAGES * replicas, train_both_ways, names):
        for name, (without, offloaded) in zip(names, ranks, strict=True):
            assert offloaded["losses"] == without["losses"], name
            assert offloaded["skipped"] == without["skipped"], name
            for weight, value in without["parameters"].items():
                assert torch.equal(offloaded["parameters"][weight], value), f"{name}: {weight}"


def train_and_freeze(extra: dict[str, Any]) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    reports = []
    for offload in ({}, OFFLOAD):
        optimizer = ADAMW if "fp16" in extra else SGD
        stage = {"stage": 1, "ignore_unused_parameters": False, **offload}  # nothing is unused: frozen weights are not
        zero = {"zero_optimization": stage, "zero_allow_untested_optimizer": True}
        engine = cases.engine(cases.config(1, optimizer, {}, **zero, **extra), STAGES, toy.float_cross_entropy)
        iterator = toy.data()
        losses = [float(engine.train_batch(iterator)) for _ in range(3)]
        engine.quiesce()
        next(engine.module.parameters()).requires_grad_(False)
        losses += [float(engine.train_batch(iterator)) for _ in range(9)]
        reports.append((losses, cases.parameters(engine)))
        cases.end(engine)
    return reports


@pytest.mark.parametrize("extra", [{}, FP16], ids=["fp32", "fp16"])
def test_weights_that_are_frozen_later(worlds: Worlds, extra: dict[str, Any]) -> None:
    """DeepSpeed goes on with the last gradient that they had; in fp16 one that has overflowed leaves no number."""
    for (wanted, weights), (losses, offloaded) in worlds.run(STAGES, train_and_freeze, extra):
        assert losses == wanted
        assert all(torch.equal(value, offloaded[name]) for name, value in weights.items())


def states_away(plain: bool) -> list[dict[str, torch.Tensor]]:
    """Weights after training in which states leave the device and come back, and in which they do not."""
    found = []
    for moved in (True, False):
        zero = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
        ds_config = cases.config(1, ADAMW, {"partition": "uniform"}, **zero, **BF16)
        engine = loops.engine(ds_config, STAGES) if plain else cases.engine(ds_config, STAGES, toy.float_cross_entropy)
        iterator = toy.data()
        for start in (0, 4):
            for number in range(start, start + 4):
                loops.rounds(engine, number, 1) if plain else engine.train_batch(iterator)
            if moved:
                engine.offload_states()
                engine.reload_states()
            else:
                engine.quiesce()
        found.append(cases.parameters(engine))
        cases.end(engine)
    return found


def offload_without_zero() -> str:
    """What a script is told, which goes on."""
    engine = cases.engine(cases.config(1, ADAMW, {"partition": "uniform"}), STAGES)
    iterator = toy.data()
    engine.train_batch(iterator)
    with pytest.raises(VPipeConfigError, match=r"^reload_states\(\): got "):
        engine.reload_states()
    with pytest.raises(VPipeConfigError) as refused:
        engine.offload_states()
    engine.train_batch(iterator)
    cases.end(engine)
    return str(refused.value)


def test_states_stay_without_zero(worlds: Worlds) -> None:
    """DeepSpeed's engine ends in an AttributeError there."""
    for line in worlds.run(STAGES, offload_without_zero):
        assert line.startswith("offload_states(): got ")
        assert "allowed: the optimizer of ZeRO-1" in line


@pytest.mark.parametrize("plain", [False, True])
def test_states_that_leave_the_device_and_come_back(worlds: Worlds, plain: bool) -> None:
    """DeepSpeed's ``offload_states()`` puts weights on other memory."""
    for moved, kept in worlds.run(STAGES, states_away, plain):
        assert all(torch.equal(value, kept[name]) for name, value in moved.items())
