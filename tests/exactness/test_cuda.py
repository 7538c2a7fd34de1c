"""Training on GPUs, ranks sharing one if there are not enough, against the replay on the CPU; over all links of GPUs.

Each test also runs on a simulated device, so that it is the GPU that may fail it and not the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import cases
import pytest
import reference
import torch
import toy
from test_exactness import LAYERS, difference
from worlds import Worlds

from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.one_f_one_b import default_depths

pytestmark = pytest.mark.mp
OVER = pytest.mark.parametrize("link", ["host", "shared", "ipc", "nccl"])

STAGES = 2
BATCHES = 12
# A GPU adds in another order, and Adam makes steps of full size of gradients that are nothing but rounding, such as
# those of the biases of attention's keys.
SGD = {"type": "SGD", "params": {"lr": 0.5}}
ZERO = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 20, "loss_scale_window": 4, "hysteresis": 1}}
# Configuration, precision and tolerance. Rounding is well below it, the newest weights are well above: the last test.
SETTINGS: dict[str, tuple[dict[str, Any], torch.dtype, float]] = {
    "fp32": ({}, torch.float32, 1e-4),
    "bf16": (BF16, torch.bfloat16, 0.2),
    "bf16, ZeRO-1": ({**BF16, **ZERO}, torch.bfloat16, 0.2),
    "fp16": (FP16, torch.float16, 3e-2),
    "fp16, ZeRO-1": ({**FP16, **ZERO}, torch.float16, 3e-2),
}
ROUNDING = {torch.float32: 3e-7, torch.bfloat16: 3e-3, torch.float16: 3e-4}  # of one number


PLACES = ["simulated", *(pytest.param(name, marks=pytest.mark.cuda) for name in ("cuda", "cuda, all by nccl"))]


@pytest.fixture(scope="module", params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[tuple[str, Worlds]]:
    """Where :func:`cases.engine` computes, and processes for it; NCCL also connects all ranks, as in most scripts."""
    if request.param == "simulated":
        pool = Worlds(gpus=0)
    else:
        pool = Worlds(gpus=torch.cuda.device_count(), backend="nccl" if "nccl" in request.param else "gloo")
    yield request.param.partition(",")[0], pool
    pool.close()


def replayed(dtype: torch.dtype, newest: bool = False, rounding: float = 0.0) -> reference.Replay:
    layers, generator = toy.built_layers(), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (parameter for layer in layers for parameter in layer.parameters()):
            parameter.mul_(1 + rounding * torch.randn(parameter.shape, generator=generator))
    return reference.Replay(
        uniform_partition(LAYERS, STAGES), default_depths(STAGES), 2, lambda found: torch.optim.SGD(found, lr=0.5),
        dtype=dtype, scaler=reference.Scaler(2.0**20, window=4) if dtype == torch.float16 else None,
        criterion=toy.float_cross_entropy, newest=newest, layers=layers, device="cpu",
    ).run(BATCHES)  # fmt: skip


@OVER
@pytest.mark.parametrize("setting", SETTINGS)
def test_training_against_the_replay(place: tuple[str, Worlds], setting: str, link: str) -> None:
    extra, dtype, tolerance = SETTINGS[setting]
    device, pool = place
    ds_config = cases.config(2, SGD, {"partition": "uniform", "recompute_ratio": 0.5, "link": link}, **extra)
    module = {"loss_fn": toy.float_cross_entropy, "device": device}
    reports = pool.run(STAGES, cases.train, ds_config, STAGES, BATCHES, **module)
    wanted = replayed(dtype)
    assert difference(cases.merged(reports), wanted.parameters()) <= tolerance
    if dtype == torch.float16:
        assert reports[-1]["scales"] == wanted.scales
        assert len(set(wanted.scales)) > 2


def test_an_optimizer_in_host_memory(place: tuple[str, Worlds]) -> None:
    """On a GPU its updates wait for the gradients, and the next forward pass for the weights."""
    zero = {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": place[0] == "cuda"}}
    extra = {**BF16, **ZERO, "zero_optimization": zero}
    ds_config = cases.config(2, SGD, {"partition": "uniform", "link": "host"}, **extra)
    module = {"loss_fn": toy.float_cross_entropy, "device": place[0]}
    reports = place[1].run(STAGES, cases.train, ds_config, STAGES, BATCHES, **module)
    assert difference(cases.merged(reports), replayed(torch.bfloat16).parameters()) <= SETTINGS["bf16, ZeRO-1"][2]


def save_and_go_on(directory: str, device: str, link: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    ds_config = cases.config(2, SGD, {"partition": "uniform", "link": link}, **FP16)
    results = []
    for loads in (False, True):
        trained = cases.engine(ds_config, STAGES, loss_fn=toy.float_cross_entropy, dropout=0.2, device=device)
        iterator = toy.data()
        if loads:
            trained.load_checkpoint(directory)
            iterator = toy.data(start=trained.consumed_micro_batches)
        else:
            for _ in range(6):
                trained.train_batch(iterator)
                trained.eval_batch(toy.data(start=500))
            trained.save_checkpoint(directory)
        for _ in range(4):
            trained.train_batch(iterator)
        results.append(cases.parameters(trained))
        cases.end(trained)
    return results[0], results[1]


@OVER
def test_resume(place: tuple[str, Worlds], tmp_path: Any, link: str) -> None:
    device, pool = place
    for wanted, found in pool.run(STAGES, save_and_go_on, str(tmp_path), device, link):
        assert difference(found, wanted) <= 1e-3


@pytest.mark.parametrize("setting", SETTINGS)
def test_tolerances_leave_room_for_rounding_and_not_for_newest_weights(setting: str) -> None:
    _, dtype, tolerance = SETTINGS[setting]
    wanted = replayed(dtype).parameters()
    assert difference(wanted, replayed(dtype, rounding=ROUNDING[dtype]).parameters()) < tolerance / 2
    assert difference(wanted, replayed(dtype, newest=True).parameters()) > 2 * tolerance
