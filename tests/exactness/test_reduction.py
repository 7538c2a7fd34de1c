"""How gradients are averaged over replicas, against the stock engine and the replay."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import reference
import torch
from test_exactness import LAYERS, difference
from test_features import assert_same
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
            "overlap_comm": True,
            "reduce_bucket_size": 64,
            "allgather_bucket_size": 64,
        },
        "zero_allow_untested_optimizer": True,
    },
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
        wanted = reference.Replay(
            uniform_partition(LAYERS, STAGES), default_depths(STAGES), 2,
            lambda parameters: torch.optim.SGD(parameters, lr=0.3), replicas=2,
        ).run(BATCHES).parameters()  # fmt: skip
        assert difference(cases.merged([asp[0], asp[2]]), wanted) < (1e-5, 3e-2, 1e-5)[position]
    exact, rounded = ranks[0][0][0]["parameters"], ranks[0][1][0]["parameters"]
    assert any(not torch.equal(value, rounded[name]) for name, value in exact.items()), "gradients travel in bf16"
