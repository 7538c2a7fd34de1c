"""Every update is the stashed-version gradient: the engine against an independent replay in one process."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import cases
import psutil
import pytest
import reference
import torch
import toy
from worlds import Worlds

from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.one_f_one_b import default_depths, update_delay

pytestmark = pytest.mark.mp

LAYERS = 10
MICRO_BATCHES = 24


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def fused_adam(parameters: Any) -> torch.optim.Optimizer:
    from deepspeed.ops.adam import FusedAdam

    return FusedAdam(parameters, lr=3e-3, weight_decay=0.1)


OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "SGD": ({"type": "SGD", "params": {"lr": 0.1}}, sgd),
    "AdamW": ({"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True}}, adamw),
    "FusedAdam": ({"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1}}, fused_adam),
}


def depths_of(stages: int, factor: int) -> tuple[int, ...]:
    return tuple(factor * depth for depth in default_depths(stages))


@cache
def expected(
    stages: int, micro_batches: int, batches: int, optimizer: str, vertical: bool, factor: int
) -> tuple[dict[str, torch.Tensor], list[float]]:
    return reference.replay(
        uniform_partition(LAYERS, stages),
        depths_of(stages, factor),
        micro_batches,
        batches,
        OPTIMIZERS[optimizer][1],
        vertical=vertical,
    )


def difference(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Largest deviation relative to the tensor's largest entry; infinite if tensors are missing."""
    if got.keys() != wanted.keys():
        return float("inf")
    return max(
        (float((got[name] - wanted[name]).abs().max() / (wanted[name].abs().max() + 1e-12)) for name in wanted),
        default=0.0,
    )


def variants(stages: int, micro_batches: int, optimizer: str) -> list[tuple[float, str, int]]:
    """Recompute ratio, weight_sync, depth factor; for SGD, which must agree to the last bit, every two with each other.

    With one micro-batch per update, where most versions are alive, all three; in turns with two, four and eight.
    """
    if stages == 1:  # nothing is ever in flight across an update
        return [(ratio, "stash", 1) for ratio in (0, 0.5, 1)]
    if optimizer == "SGD":
        choices = (0, 0.5, 1), ("stash", "vertical"), (1, 2)
        numbers = itertools.product(*map(range, map(len, choices)))
        turn = micro_batches.bit_length() % 2
        taken = [at for at in numbers if micro_batches == 1 or sum(at) % 2 == turn]
        return [(choices[0][a], choices[1][b], choices[2][c]) for a, b, c in taken]
    return [(0, "stash", 1), (0.5, "vertical", 2), (1, "stash", 2)]


def asp(stages: int, micro_batches: int, optimizer: str, ratio: float, sync: str, factor: int) -> dict[str, Any]:
    block = {
        "partition": "uniform",
        "recompute_ratio": ratio,
        "weight_sync": sync,
        "stage_to_depth_map": list(depths_of(stages, factor)),
    }
    return cases.config(micro_batches, OPTIMIZERS[optimizer][0], block)


@pytest.fixture(scope="module")
def compiled_fused_adam() -> None:
    """DeepSpeed compiles FusedAdam when it is first used, which takes minutes: here, not in a timed case."""
    fused_adam([torch.nn.Parameter(torch.ones(1))])


@pytest.mark.parametrize(
    ("micro_batches", "optimizer"),
    [*((size, "SGD") for size in (1, 2, 4, 8)), *itertools.product((1, 4), ("AdamW", "FusedAdam"))],
)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_update_is_the_stashed_version_gradient(
    request: pytest.FixtureRequest, worlds: Worlds, stages: int, micro_batches: int, optimizer: str
) -> None:
    if optimizer == "FusedAdam":
        request.getfixturevalue("compiled_fused_adam")
    batches = MICRO_BATCHES // micro_batches
    combinations = variants(stages, micro_batches, optimizer)
    configs = [asp(stages, micro_batches, optimizer, *variant) for variant in combinations]
    ranks = worlds.run(stages, cases.train_each, configs, stages, batches)
    for position, (ratio, sync, factor) in enumerate(combinations):
        reports = [rank[position] for rank in ranks]
        wanted, losses = expected(stages, micro_batches, batches, optimizer, sync == "vertical", factor)
        where = f"ratio {ratio}, {sync}, depth x{factor}"
        off = difference(cases.merged(reports), wanted)
        assert off <= (0 if optimizer == "SGD" else 1e-5), f"{where}: parameters off by {off:.1e}"
        for report in reports:
            assert report["losses"] == pytest.approx(losses, rel=1e-5), where
            assert report["steps"] == report["latest"] == batches, where


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_comparison_would_notice_backward_with_newest_weights(worlds: Worlds, micro_batches: int) -> None:
    stages, batches = 4, MICRO_BATCHES // micro_batches
    reports = worlds.run(stages, cases.train, asp(stages, micro_batches, "SGD", 0, "none", 1), stages, batches)
    wanted, _ = expected(stages, micro_batches, batches, "SGD", False, 1)
    assert difference(cases.merged(reports), wanted) > 1e-3


@pytest.mark.parametrize(
    ("depths", "micro_batches"),
    [((3, 2, 1, 0), 1), ((3, 2, 1, 0), 2), ((3, 2, 1, 0), 4), ((7, 5, 2, 0), 1), ((7, 5, 2, 0), 3), ((6, 4, 4, 0), 8)],
)
@pytest.mark.parametrize("sync", ["stash", "vertical"])
def test_versions_alive(worlds: Worlds, depths: Sequence[int], micro_batches: int, sync: str) -> None:
    block = {"partition": "uniform", "weight_sync": sync, "stage_to_depth_map": list(depths)}
    ds_config = cases.config(micro_batches, OPTIMIZERS["SGD"][0], block)
    reports = worlds.run(4, cases.train, ds_config, 4, 12)
    for stage, report in enumerate(reports):
        wanted = update_delay(depths[0] if sync == "vertical" else depths[stage], micro_batches) + 1
        assert report["alive"][-1] == wanted, f"stage {stage}"
        assert max(report["alive"]) == wanted, f"stage {stage}"
        assert report["allocated"] <= wanted + 1, f"stage {stage}"
    if sync == "stash":
        assert reports[-1]["allocated"] == 1  # no copy at all on the last stage


def memory_over(ds_config: dict[str, Any], stages: int, batches: int) -> list[tuple[int, int, int]]:
    """Live tensors, resident MiB and weight sets in memory after each fifth of ``batches``."""
    trained = cases.engine(ds_config, stages)
    iterator, readings = toy.data(), []
    for batch in range(1, batches + 1):
        trained.train_batch(iterator)
        if batch % (batches // 5) == 0:
            if trained.stage.wiring._thread is not None:
                trained.stage.wiring._thread.settle()
            gc.collect()
            tensors = sum(isinstance(item, torch.Tensor) for item in gc.get_objects())
            resident = psutil.Process().memory_info().rss >> 20
            readings.append((tensors, resident, trained.stashing_optimizer.versions.allocated))
    trained.destroy()
    return readings


@pytest.mark.parametrize(("sync", "batches"), [("stash", 500), ("vertical", 200)])
def test_memory_is_flat(worlds: Worlds, sync: str, batches: int) -> None:
    ds_config = cases.config(1, OPTIMIZERS["AdamW"][0], {"partition": "uniform", "weight_sync": sync})
    for rank, readings in enumerate(worlds.run(4, memory_over, ds_config, 4, batches)):
        tensors, resident, allocated = zip(*readings, strict=True)
        assert len(set(tensors[1:])) == 1, f"rank {rank}: live tensors {tensors}"
        assert resident[-1] - resident[1] <= 4, f"rank {rank}: resident MiB {resident}"
        assert len(set(allocated[1:])) == 1, f"rank {rank}: weight sets {allocated}"


@pytest.mark.parametrize("micro_batches", [1, 4])
def test_recompute_is_bit_identical_with_dropout(worlds: Worlds, micro_batches: int) -> None:
    configs = [asp(4, micro_batches, "AdamW", ratio, "stash", 1) for ratio in (0, 0.3, 0.5, 1)]
    ranks = worlds.run(4, cases.train_each, configs, 4, 12, dropout=0.3)
    plain = cases.merged([rank[0] for rank in ranks])
    for position in range(1, len(configs)):
        recomputed = cases.merged([rank[position] for rank in ranks])
        assert difference(recomputed, plain) == 0, configs[position]["vpipe"]


@pytest.mark.parametrize(("stages", "replicas"), [(2, 2), (4, 2), (2, 4)])
def test_replicas(worlds: Worlds, stages: int, replicas: int) -> None:
    # Adam would blow rounding up where a gradient is 0 but for the order of the sum over replicas.
    zero = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True, "bf16": {"enabled": True}}
    configs = [cases.config(2, OPTIMIZERS["SGD"][0], {"partition": "uniform"}, **extra) for extra in ({}, zero)]
    ranks = worlds.run(stages * replicas, cases.train_each, configs, stages, 12)
    for position, dtype in enumerate((torch.float32, torch.bfloat16)):
        reports = [rank[position] for rank in ranks]
        wanted, losses = reference.replay(
            uniform_partition(LAYERS, stages), default_depths(stages), 2, 12, sgd, replicas=replicas, dtype=dtype
        )
        # Ranks of a stage are neighbours.
        first, *others = (cases.merged(reports[replica::replicas]) for replica in range(replicas))
        for other in others:
            assert difference(first, other) == 0
        assert difference(first, wanted) <= (2e-2 if position else 1e-5)
        for report in reports:
            assert report["losses"] == pytest.approx(losses, rel=1e-2 if position else 1e-5)


def train_sliced(ds_config: dict[str, Any]) -> dict[str, Any]:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    return cases.train(ds_config, None, 8, topology=topology)


def test_slices_beside_stages_and_replicas(worlds: Worlds) -> None:
    """A topology with a tensor-parallel axis, whose slices hold the same here."""
    block = {"partition": "uniform"}
    reports = worlds.run(8, train_sliced, cases.config(2, OPTIMIZERS["SGD"][0], block, gradient_clipping=0.2))
    counts = uniform_partition(LAYERS, 2)
    wanted, _ = reference.replay(counts, (1, 0), 2, 8, sgd, replicas=2, clip=0.2)
    for position in range(4):
        mine = [report for report in reports if report["place"] == divmod(position, 2)]
        assert difference(cases.merged(mine), wanted) <= 1e-5
