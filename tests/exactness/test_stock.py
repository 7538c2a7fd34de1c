"""What must equal DeepSpeed's own engine bit for bit: bsp, one stage, and a large enough batch."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
import toy
from worlds import Worlds

pytestmark = pytest.mark.mp

ZERO_1 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}


def run(
    worlds: Worlds,
    ranks: int,
    stages: int,
    micro_batches: int,
    block: dict[str, Any],
    model: dict[str, Any] | None = None,
    **extra: Any,
) -> None:
    configs = [cases.config(micro_batches, ADAMW, vpipe, **extra) for vpipe in (None, block)]
    model = {"dropout": 0.2} if model is None else model
    for rank, (stock, ours) in enumerate(worlds.run(ranks, cases.train_each, configs, stages, 8, **model)):
        assert stock["parameters"].keys() == ours["parameters"].keys()
        for name, value in stock["parameters"].items():
            assert torch.equal(value, ours["parameters"][name]), f"rank {rank}: {name}"
        assert stock["losses"] == ours["losses"], f"rank {rank}"


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_bsp_is_the_stock_engine(worlds: Worlds, stages: int, micro_batches: int) -> None:
    run(worlds, stages, stages, micro_batches, {"sync_mode": "bsp"})


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 4), (2, 1), (4, 2), (4, 6)])
def test_gpipe_is_the_stock_engine(worlds: Worlds, stages: int, micro_batches: int) -> None:
    run(worlds, stages, stages, micro_batches, {"sync_mode": "bsp", "schedule": "gpipe"})


def test_bsp_is_the_stock_engine_with_replicas_and_zero_1(worlds: Worlds) -> None:
    extra = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}
    run(worlds, 4, 2, 2, {"sync_mode": "bsp"}, **extra)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_stage_is_the_stock_engine(worlds: Worlds, micro_batches: int) -> None:
    run(worlds, 1, 1, micro_batches, {}, gradient_clipping=1.0)


@pytest.mark.parametrize("extra", [{}, ZERO_1], ids=["fp32", "bf16-zero1"])
def test_bsp_with_tied_layers_is_the_stock_engine(worlds: Worlds, extra: dict[str, Any]) -> None:
    model = {"specs": toy.tied_specs, "loss_fn": toy.mean_over_positions}
    run(worlds, 4, 4, 2, {"sync_mode": "bsp"}, model, **extra)


def test_bsp_in_fp16_is_the_stock_engine(worlds: Worlds) -> None:
    """With ZeRO; without it DeepSpeed does not scale the loss of a pipeline. The scale falls, but never grows."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "hysteresis": 1}, "zero_optimization": {"stage": 1}}
    run(worlds, 4, 4, 2, {"sync_mode": "bsp"}, **fp16)
