"""Scripts that loop over forward, backward and step in fp16 and bf16, against the replay in that precision."""

from __future__ import annotations

from typing import Any

import cases
import loops
import pytest
import reference
import torch
import toy
from test_exactness import OPTIMIZERS, adamw, difference, sgd
from test_precision import FP16, ZERO_1
from worlds import Worlds

from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.one_f_one_b import default_depths

pytestmark = pytest.mark.mp

STAGES, MICRO_BATCHES, ROUNDS, LAYERS = 4, 2, 24, 10
STATIC = {"fp16": {"enabled": True, "loss_scale": 128.0}}


def config(optimizer: str, **precision: Any) -> dict[str, Any]:
    return cases.config(MICRO_BATCHES, OPTIMIZERS[optimizer][0], {"partition": "uniform"}, **precision)


def replayed(make_optimizer: Any, **options: Any) -> loops.Replay:
    counts, depths = uniform_partition(LAYERS, STAGES), default_depths(STAGES)
    criterion = toy.float_cross_entropy
    run = loops.Replay(counts, depths, MICRO_BATCHES, make_optimizer, criterion=criterion, **options)
    run.run(ROUNDS // MICRO_BATCHES)
    return run


def test_fp16_with_dynamic_loss_scale(worlds: Worlds) -> None:
    """The scale starts so high that several updates overflow."""
    configs = [config("AdamW", **FP16, **ZERO_1), config("SGD", **FP16)]
    ranks = worlds.run(STAGES, loops.train_each, configs, STAGES, ROUNDS)
    for position, make_optimizer in enumerate((adamw, sgd)):
        scaler = reference.Scaler(2.0**20, window=4)
        wanted = replayed(make_optimizer, dtype=torch.float16, scaler=scaler)
        assert len(set(wanted.scales)) > 3
        assert difference(cases.merged([rank[position] for rank in ranks]), wanted.parameters()) <= 2e-3


def test_static_loss_scale_and_bf16(worlds: Worlds) -> None:
    configs = [config("SGD", **STATIC), config("AdamW", bf16={"enabled": True}, **ZERO_1)]
    ranks = worlds.run(STAGES, loops.train_each, configs, STAGES, ROUNDS)
    scaled = replayed(sgd, dtype=torch.float16, scaler=reference.Scaler(128.0, dynamic=False))
    assert difference(cases.merged([rank[0] for rank in ranks]), scaled.parameters()) <= 2e-3
    wanted = replayed(adamw, dtype=torch.bfloat16)
    assert difference(cases.merged([rank[1] for rank in ranks]), wanted.parameters()) == 0
