"""Training does not depend on what carries tensors between stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import cases
import pytest
import torch
import toy
from worlds import Worlds

pytestmark = pytest.mark.mp

ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
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
    payloads = [{"partition": "uniform", **block, "link": link} for link in ("host", "shared")]
    configs = [cases.config(micro_batches, ADAMW, payload, gradient_clipping=0.5) for payload in payloads]
    for host, shared in worlds.run(stages, cases.train_each, configs, stages, 8, **module):
        assert host["losses"] == shared["losses"]
        assert host["parameters"].keys() == shared["parameters"].keys()
        for name, value in host["parameters"].items():
            assert torch.equal(value, shared["parameters"][name]), name
