"""Training on an accelerator gives the CPU's bits, and no thread of a stage waits for it; on a simulated one.

``DS_VPIPE_TEST_DEVICE=simulated scripts/test.sh -k exactness`` runs all of these tests on it.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import toy
from worlds import Worlds

pytestmark = pytest.mark.mp

ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
BF16 = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 4, "hysteresis": 1}}
INTERLEAVED = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}
GLOBAL = {"gradient_clipping_scope": "delayed_global"}


@pytest.mark.parametrize(
    ("stages", "micro_batches", "block", "extra", "module"),
    [
        (4, 1, {"recompute_ratio": 0.5, "stage_to_depth_map": [6, 4, 2, 0]}, {}, {"dropout": 0.3}),
        (4, 4, {"weight_sync": "vertical"}, {}, {"dropout": 0.3}),
        (3, 2, GLOBAL, {}, {"specs": toy.tied_specs, "loss_fn": toy.mean_over_positions}),
        (2, 2, {}, BF16, {"loss_fn": toy.float_cross_entropy}),
        (3, 1, GLOBAL, FP16, {"loss_fn": toy.float_cross_entropy}),
        (2, 4, INTERLEAVED, {}, {}),
    ],
    ids=["deeper", "vertical", "ties", "bf16, ZeRO-1", "fp16", "interleaved"],
)
def test_a_device_gives_the_same_bits(
    worlds: Worlds,
    stages: int,
    micro_batches: int,
    block: dict[str, Any],
    extra: dict[str, Any],
    module: dict[str, Callable[..., Any]],
) -> None:
    ds_config = cases.config(
        micro_batches, ADAMW, {"partition": "uniform", **block, "link": "host"}, gradient_clipping=0.5, **extra
    )
    where = ("cpu", "simulated")
    stop = 10 * micro_batches + micro_batches // 2  # data that end inside a batch, if that has several
    for cpu, device in worlds.run(stages, trained_on, where, ds_config, stages, 12, stop=stop, **module):
        assert device["losses"] == cpu["losses"]
        assert len(cpu["losses"]) == 10
        assert device["parameters"].keys() == cpu["parameters"].keys()
        for name, value in cpu["parameters"].items():
            assert torch.equal(value, device["parameters"][name]), name


def trained_on(devices: tuple[str, ...], *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """Reports of the same training on each of ``devices``."""
    reports = []
    for device in devices:
        reports.append(cases.train(*args, device=device, **kwargs))
        cases.close_groups()
    return reports


def waits(ds_config: dict[str, Any], stages: int, **module: Any) -> tuple[Counter[str], int, int]:
    """In steady batches: waits for the device and for the send thread, and copies that were queued."""
    from ds_vpipe.engine.links.send_thread import SendThread

    trained = cases.engine(ds_config, stages, device="simulated", **module)
    accelerator, iterator, me = trained.stage.copies.accelerator, toy.data(), threading.get_ident()
    for _ in range(2 * stages + 2):
        trained.train_batch(iterator)
    accelerator.host_waits.clear()
    before, settled = accelerator.num_copies, 0
    settle = SendThread.settle

    def counted(thread: SendThread, limit_s: float | None = None) -> None:
        nonlocal settled
        settled += threading.get_ident() == me
        settle(thread, limit_s)

    with mock.patch.object(SendThread, "settle", counted):
        for _ in range(5):
            trained.train_batch(iterator)
    found = accelerator.host_waits, settled, accelerator.num_copies - before
    trained.destroy()
    return found


@pytest.mark.parametrize("link", ["host", "shared", "ipc", "nccl"])
@pytest.mark.parametrize(
    ("block", "extra", "module"),
    [
        ({}, {}, {}),
        ({"recompute_ratio": 0.5, "weight_sync": "vertical"}, {}, {}),
        (GLOBAL, {}, {}),
        ({}, BF16, {"loss_fn": toy.float_cross_entropy}),
        ({}, {}, {"specs": toy.tied_specs, "loss_fn": toy.mean_over_positions}),
        ({"sync_mode": "bsp"}, {}, {}),
    ],
    ids=["asp", "vertical", "delayed clipping", "bf16, ZeRO-1", "ties", "bsp"],
)
def test_a_stage_never_waits_for_its_device(
    worlds: Worlds, block: dict[str, Any], extra: dict[str, Any], module: dict[str, Callable[..., Any]], link: str
) -> None:
    block = {"partition": "uniform", **block, "link": link}
    ds_config = cases.config(2, ADAMW, block, gradient_clipping=0.5, **extra)
    for found, settled, copied in worlds.run(3, waits, ds_config, 3, **module):
        assert not found
        assert settled == 0
        assert copied >= 5 * 2 * 2


def evaluated(ds_config: dict[str, Any], stages: int) -> list[float]:
    """Losses of training with evaluations between, on both; no copy is one of memory that is not page-locked."""
    losses: list[float] = []
    for device in ("cpu", "simulated"):
        torch.manual_seed(1234)
        trained = cases.engine(ds_config, stages, device=device)
        iterator, other = toy.data(), toy.data(start=500)
        for _ in range(4):
            losses.append(float(trained.train_batch(iterator)))
            losses.append(float(trained.eval_batch(other)))
        if device == "simulated":
            assert not trained.stage.copies.accelerator.host_waits
        cases.end(trained)
    return losses


@pytest.mark.parametrize("stages", [1, 3])
def test_evaluation(worlds: Worlds, stages: int) -> None:
    ds_config = cases.config(2, ADAMW, {"partition": "uniform"})
    for losses in worlds.run(stages, evaluated, ds_config, stages):
        assert losses[:8] == losses[8:]
