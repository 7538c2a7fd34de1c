"""How gradients are averaged over replicas, against the stock engine and the replay."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import reference
import torch
import toy
from deepspeed.pipe import LayerSpec
from test_exactness import LAYERS, difference
from test_features import assert_same
from torch import nn
from worlds import Worlds

from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.one_f_one_b import default_depths

pytestmark = pytest.mark.mp

SGD = {"type": "SGD", "params": {"lr": 0.3}}
STAGES = 2
BATCHES = 4

REDUCTIONS: list[dict[str, Any]] = [
    {"prescale_gradients": True, "gradient_predivide_factor": 2.0, "memory_breakdown": True},
    {"communication_data_type": "bf16", "dump_state": True},
    {
        "zero_optimization": {
            "stage": 1,
            "round_robin_gradients": True,
            "contiguous_gradients": False,
            "reduce_bucket_size": 64,
            "allgather_bucket_size": 64,
        },
        "zero_allow_untested_optimizer": True,
    },
    {"gradient_allreduce_op": "sum"},
    {"gradient_allreduce_op": "sum", "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True},
]


def reduced() -> list[list[dict[str, Any]]]:
    blocks: list[dict[str, Any] | None] = [None, {"sync_mode": "bsp"}, {}]
    cells = [[cases.config(2, SGD, block, **extra) for block in blocks] for extra in REDUCTIONS]
    return [cases.train_each(ds_configs, STAGES, BATCHES) for ds_configs in cells]


def test_reduction_over_replicas_as_the_stock_engine(worlds: Worlds) -> None:
    ranks = worlds.run(4, reduced)
    for position in range(len(REDUCTIONS)):
        stock, bsp, asp = ([rank[position][mode] for rank in ranks] for mode in range(3))
        assert_same(bsp, stock)
        for one, other in ((asp[0], asp[1]), (asp[2], asp[3])):
            assert_same([one], [other])
        rate = 0.6 if "gradient_allreduce_op" in REDUCTIONS[position] else 0.3  # sums over two replicas
        wanted = reference.Replay(
            uniform_partition(LAYERS, STAGES), default_depths(STAGES), 2,
            lambda parameters, rate=rate: torch.optim.SGD(parameters, lr=rate), replicas=2,
        ).run(BATCHES).parameters()  # fmt: skip
        assert difference(cases.merged([asp[0], asp[2]]), wanted) < (1e-5, 3e-2, 1e-5, 1e-5, 1e-5)[position]
    exact, rounded = ranks[0][0][0]["parameters"], ranks[0][1][0]["parameters"]
    assert any(not torch.equal(value, rounded[name]) for name, value in exact.items()), "gradients travel in bf16"


class OwnWeight(nn.Module):
    """Layer of which every replica uses another weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = toy.seeded(9, lambda: nn.ModuleList(nn.Linear(toy.HIDDEN, toy.HIDDEN) for _ in range(2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linears[torch.distributed.get_rank() % 2](x)


def specs_of_own_weights() -> list[Any]:
    first, *rest = toy.layer_specs()
    return [first, LayerSpec(OwnWeight), *rest[:-1], LayerSpec(OwnWeight), rest[-1]]


def with_own_weights() -> list[dict[str, Any]]:
    offload = {"offload_optimizer": {"device": "cpu"}}
    zeros: list[dict[str, Any]] = [{"stage": 0}, {"stage": 1}, {"stage": 1, **offload}]
    options = {"zero_allow_untested_optimizer": True}
    configs = [cases.config(1, SGD, {}, zero_optimization=zero, **options) for zero in zeros]
    return cases.train_each(configs, STAGES, BATCHES, specs=specs_of_own_weights)


def test_replicas_that_use_other_weights(worlds: Worlds) -> None:
    """With ZeRO-1 DeepSpeed adds gradients of different weights to each other."""
    for without, *others in worlds.run(4, with_own_weights):
        for other in others:
            assert other["losses"] == pytest.approx(without["losses"], rel=1e-5)
            assert difference(other["parameters"], without["parameters"]) < 1e-5
