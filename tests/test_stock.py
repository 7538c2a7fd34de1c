"""What must equal DeepSpeed's own engine bit for bit: bsp, one stage, and a large enough batch."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
from worlds import Worlds

pytestmark = pytest.mark.mp

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}


def run(worlds: Worlds, ranks: int, stages: int, micro_batches: int, block: dict[str, Any], **extra: Any) -> None:
    configs = [cases.config(micro_batches, ADAMW, vpipe, **extra) for vpipe in (None, block)]
    for rank, (stock, ours) in enumerate(worlds.run(ranks, cases.train_each, configs, stages, 20, dropout=0.2)):
        assert stock["parameters"].keys() == ours["parameters"].keys()
        for name, value in stock["parameters"].items():
            assert torch.equal(value, ours["parameters"][name]), f"rank {rank}: {name}"
        assert stock["losses"] == ours["losses"], f"rank {rank}"


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_bsp_is_the_stock_engine(worlds: Worlds, stages: int, micro_batches: int) -> None:
    run(worlds, stages, stages, micro_batches, {"sync_mode": "bsp"})


def test_bsp_is_the_stock_engine_with_replicas_and_zero_1(worlds: Worlds) -> None:
    extra = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}
    run(worlds, 4, 2, 2, {"sync_mode": "bsp"}, **extra)


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_one_stage_is_the_stock_engine(worlds: Worlds, micro_batches: int) -> None:
    run(worlds, 1, 1, micro_batches, {}, gradient_clipping=1.0)
