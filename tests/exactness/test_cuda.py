"""Training on GPUs, ranks sharing one if there are not enough, against the replay on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cases
import pytest
import reference
import torch
import toy
from test_exactness import LAYERS, OPTIMIZERS, adamw, difference
from worlds import Worlds

from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.one_f_one_b import default_depths

pytestmark = [pytest.mark.cuda, pytest.mark.mp]

STAGES = 2
BATCHES = 12
ZERO = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 4, "hysteresis": 1}}
# GPU kernels add in another order; the replay with the newest weights is further away, see the last test.
SETTINGS: dict[str, tuple[dict[str, Any], torch.dtype, float]] = {
    "fp32": ({}, torch.float32, 1e-4),
    "bf16": (BF16, torch.bfloat16, 3e-2),
    "bf16, ZeRO-1": ({**BF16, **ZERO}, torch.bfloat16, 3e-2),
    "fp16": (FP16, torch.float16, 1e-2),
    "fp16, ZeRO-1": ({**FP16, **ZERO}, torch.float16, 1e-2),
}


@pytest.fixture(scope="module")
def gpu_worlds() -> Iterator[Worlds]:
    pool = Worlds(gpus=torch.cuda.device_count())
    yield pool
    pool.close()


def replayed(dtype: torch.dtype, newest: bool = False) -> reference.Replay:
    return reference.Replay(
        uniform_partition(LAYERS, STAGES), default_depths(STAGES), 2, adamw,
        dtype=dtype, scaler=reference.Scaler(2.0**20, window=4) if dtype == torch.float16 else None,
        criterion=toy.float_cross_entropy, newest=newest,
    ).run(BATCHES)  # fmt: skip


@pytest.mark.parametrize("setting", SETTINGS)
def test_training_against_the_replay(gpu_worlds: Worlds, setting: str) -> None:
    extra, dtype, tolerance = SETTINGS[setting]
    ds_config = cases.config(2, OPTIMIZERS["AdamW"][0], {"partition": "uniform", "recompute_ratio": 0.5}, **extra)
    reports = gpu_worlds.run(STAGES, cases.train, ds_config, STAGES, BATCHES, loss_fn=toy.float_cross_entropy)
    wanted = replayed(dtype)
    found = {name: value.cpu() for name, value in cases.merged(reports).items()}
    assert difference(found, wanted.parameters()) <= tolerance
    if dtype == torch.float16:
        assert reports[-1]["scales"] == wanted.scales
        assert len(set(wanted.scales)) > 2


def save_and_go_on(directory: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    ds_config = cases.config(2, OPTIMIZERS["AdamW"][0], {"partition": "uniform"}, **FP16)
    results = []
    for loads in (False, True):
        engine = cases.engine(ds_config, STAGES, loss_fn=toy.float_cross_entropy, dropout=0.2)
        iterator = toy.data()
        if loads:
            engine.load_checkpoint(directory)
            iterator = toy.data(start=engine.consumed_micro_batches)
        else:
            for _ in range(6):
                engine.train_batch(iterator)
            engine.save_checkpoint(directory)
        for _ in range(4):
            engine.train_batch(iterator)
        results.append({name: value.cpu() for name, value in cases.parameters(engine).items()})
        engine.destroy()
        cases.close_groups()
    return results[0], results[1]


def test_resume(gpu_worlds: Worlds, tmp_path: Any) -> None:
    for wanted, found in gpu_worlds.run(STAGES, save_and_go_on, str(tmp_path)):
        assert difference(found, wanted) <= 1e-3


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_tolerance_would_notice_newest_weights(setting: str) -> None:
    _, dtype, tolerance = SETTINGS[setting]
    assert difference(replayed(dtype).parameters(), replayed(dtype, newest=True).parameters()) > 2 * tolerance
