"""A script that loops over forward, backward and step trains what the reference says, and sees the losses it should."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import cases
import loops
import pytest
import torch
from script_losses import loss_known
from test_exactness import OPTIMIZERS, difference
from torch import nn
from worlds import Worlds

import ds_vpipe
from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.one_f_one_b import Progress, default_depths, update_delay
from ds_vpipe.schedules.pipeline import Pipeline

pytestmark = pytest.mark.mp

LAYERS, ROUNDS = 10, 16


def replayed(stages: int, micro_batches: int, optimizer: str, **options: Any) -> loops.Replay:
    counts, depths = uniform_partition(LAYERS, stages), default_depths(stages)
    options = {"counts": counts, "depths": depths, **options}
    run = loops.Replay(micro_batches=micro_batches, make_optimizer=OPTIMIZERS[optimizer][1], **options)
    run.run(ROUNDS // micro_batches)
    return run


def losses_seen(each: list[float], stages: int, stage: int, micro_batches: int, schedule: Any = "asp") -> list[float]:
    pipeline = Pipeline(schedule, stages, micro_batches)
    return [each[loss_known(pipeline, stage, Progress(handed, handed))] for handed in range(len(each))]


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_updates_are_those_of_the_reference(worlds: Worlds, stages: int, micro_batches: int) -> None:
    names = ("SGD", "AdamW")
    block = {"partition": "uniform"}
    configs = [cases.config(micro_batches, OPTIMIZERS[name][0], block) for name in names]
    ranks = worlds.run(stages, loops.train_each, configs, stages, ROUNDS)
    for position, name in enumerate(names):
        reports = [rank[position] for rank in ranks]
        wanted = replayed(stages, micro_batches, name)
        off = difference(cases.merged(reports), wanted.parameters())
        assert off <= (0 if name == "SGD" else 1e-5), f"{name}: parameters off by {off:.1e}"
        for stage, report in enumerate(reports):
            seen = losses_seen(wanted.each, stages, stage, micro_batches)
            assert report["losses"] == pytest.approx(seen, rel=1e-5), f"{name}, stage {stage}"
            assert report["latest"] == report["steps"] == ROUNDS // micro_batches
            assert report["allocated"] <= (update_delay(stages - 1 - stage, micro_batches) + 1)


@pytest.mark.parametrize("variant", ["vertical", "deeper", "recompute", "offload"])
def test_variants_are_those_of_the_reference(worlds: Worlds, variant: str) -> None:
    block: dict[str, Any] = {"partition": [4, 3, 3]}
    options: dict[str, Any] = {"counts": (4, 3, 3)}
    extra: dict[str, Any] = {}
    if variant == "vertical":
        block["weight_sync"], options["vertical"] = "vertical", True
    elif variant == "deeper":
        block["stage_to_depth_map"] = options["depths"] = [5, 2, 0]
    elif variant == "offload":
        extra["zero_optimization"] = {"stage": 1, "offload_optimizer": {"device": "cpu"}}
        extra["zero_allow_untested_optimizer"] = True
    else:
        block["recompute_ratio"] = 0.5
    ranks = worlds.run(3, loops.train, cases.config(2, OPTIMIZERS["SGD"][0], block, **extra), 3, ROUNDS)
    assert difference(cases.merged(ranks), replayed(3, 2, "SGD", **options).parameters()) == 0


class Size(nn.Module):
    """Mean square of what it gets."""

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value.pow(2).mean()


def sequential(named: bool) -> Any:
    """A plain Sequential, trained synchronously, with the weights that one process has."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2), Size())
    whole = copy.deepcopy(model)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    ds_config = {**cases.config(1, OPTIMIZERS["SGD"][0], {"sync_mode": "bsp"}), "pipeline": {"stages": 2}}
    ds_config["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    given = list(model.named_parameters()) if named else model.parameters()
    engine = ds_vpipe.initialize(model=model, model_parameters=given, config=ds_config)[0]
    for number in range(5):
        value = torch.randn(2, 4, generator=torch.Generator().manual_seed(number))
        loss = engine(value)
        engine.backward(loss)
        engine.step()
        optimizer.zero_grad()
        whole(value).backward()
        optimizer.step()
    engine.drain()
    trained = {name: p.detach().clone() for name, p in engine.module.user_module.named_parameters() if not p.is_meta}
    cases.end(engine)
    return trained, {name: p.detach() for name, p in whole.named_parameters()}


@pytest.mark.parametrize("named", [False, True])
def test_a_sequential_and_named_parameters(worlds: Worlds, named: bool) -> None:
    seen: set[str] = set()
    for trained, wanted in worlds.run(2, sequential, named):
        for name, value in wanted.items():
            if name in trained:
                assert torch.equal(trained[name], value)
                seen.add(name)
    assert seen == set(wanted)


def test_newest_weights_would_be_noticed() -> None:
    """The comparison above can fail: a replay with the newest weights is another one."""
    stashed, newest = (replayed(4, 1, "SGD", newest=newest).parameters() for newest in (False, True))
    assert difference(stashed, newest) > 1e-3


def plain(micro_batches: int, updates: int, name: str) -> dict[str, torch.Tensor]:
    """Training in one process without any engine."""
    whole = loops.Whole()
    optimizer = OPTIMIZERS[name][1](list(whole.parameters()))
    for update in range(updates):
        for number in range(update * micro_batches, (update + 1) * micro_batches):
            tokens, labels = loops.toy.micro_batch(number)
            (whole(tokens, labels) / micro_batches).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name.removeprefix("layers.").replace(".layer.", "."): value.detach() for name, value in whole.named_parameters()
    }


@pytest.mark.parametrize(
    ("stages", "micro_batches", "schedule"),  # of one micro-batch both schedules are the same
    [(2, 1, "1f1b"), (4, 1, "gpipe"), (4, 2, "1f1b"), (4, 2, "gpipe"), (2, 4, "1f1b"), (2, 4, "gpipe"), (4, 4, "1f1b")],
)
def test_bsp_is_plain_training(worlds: Worlds, stages: int, micro_batches: int, schedule: str) -> None:
    block = {"sync_mode": "bsp", "schedule": schedule}
    updates = 8
    config = cases.config(micro_batches, OPTIMIZERS["AdamW"][0], block)
    ranks = worlds.run(stages, loops.train, config, stages, updates * micro_batches)
    wanted = plain(micro_batches, updates, "AdamW")
    got = cases.merged(ranks)
    assert got.keys() == wanted.keys()
    off = max(float((got[name] - wanted[name]).abs().max()) for name in wanted)
    assert off <= 1e-5, f"parameters off by {off:.1e}"
    last = ranks[-1]["losses"]
    for stage, report in enumerate(ranks):
        assert report["losses"] == losses_seen(last, stages, stage, micro_batches, schedule)


def muon(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Muon([parameter for parameter in parameters if parameter.dim() == 2], lr=0.02)


def muon_of_the_script(whole: nn.Module) -> torch.optim.Optimizer:
    return muon(whole.parameters())


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_optimizer_of_matrices_alone(worlds: Worlds, micro_batches: int) -> None:
    """The script's own Muon; other weights stay as they are."""
    config = cases.config(micro_batches, {}, {"partition": "uniform"})
    del config["optimizer"]
    ranks = worlds.run(3, loops.train, config, 3, ROUNDS, optimizer=muon_of_the_script)
    run = loops.Replay(uniform_partition(LAYERS, 3), default_depths(3), micro_batches, muon)
    assert difference(cases.merged(ranks), run.run(ROUNDS // micro_batches).parameters()) == 0
