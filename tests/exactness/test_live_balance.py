"""A pipeline that balances itself layer by layer while it trains, on made-up seconds: exact, saved, resumed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import cases
import pytest
import reference
import torch
import toy
from deepspeed.pipe import LayerSpec
from test_live_moves import ScheduledSGD, difference, evaluated, rate
from worlds import Worlds

from ds_vpipe.schedules.moves import Move, completed
from ds_vpipe.schedules.pipeline import Pipeline

pytestmark = pytest.mark.mp

STAGES, SIZE, START, DEPTHS = 3, 2, (8, 1, 1), (5, 3, 0)
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
HOWS = ("drain", "live")


ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True}}


class ScheduledAdamW(torch.optim.AdamW):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=3e-3, weight_decay=0.1)
        self.updates = 0

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = rate_of_adamw(self.updates)
        self.updates += 1
        return super().step(closure)


def rate_of_adamw(update: int) -> float:
    return 0.03 * rate(update)


def config(**block: Any) -> dict[str, Any]:
    return cases.config(SIZE, SGD, {"partition": list(START), "replan": {"every": 3, "moves": "live"}, **block})


def measured(trained: Any, seed: int | None) -> None:
    """Make up the seconds of layers: devices that differ from look to look, or all the same."""

    def seconds(*_: Any) -> tuple[float, float]:
        draw = random.Random(1000 * (seed or 0) + 10 * balance._counted + trained.stage_id)
        slowness = 1.0 if seed is None else draw.choice((1.0, 2.0, 4.0))
        return 0.1 * slowness, 0.2 * slowness

    balance = trained.balance
    if balance is not None:
        balance._probe.seconds = seconds


def train(
    ds_config: dict[str, Any],
    batches: int,
    *,
    seed: int | None = 0,
    saves: tuple[int, ...] = (),
    evaluates: bool = False,
    stop: int | None = None,
    folder: str = "",
    load: bool = False,
    watcher: Any = None,
    rates: Callable[[int], float] = rate,
    specs: Callable[[], list[Any]] | None = None,
    hooked: int | None = None,
) -> dict[str, Any]:
    """Train, with checkpoints after these updates, evaluations in every batch and data that end, if wanted."""
    torch.manual_seed(1234)
    trained = cases.engine(ds_config, STAGES, specs=specs)
    if hooked is not None and trained.stage_id == 0:
        trained.module.forward_funcs[hooked].register_forward_hook(lambda *_: None)
    measured(trained, seed)
    if watcher is not None:
        trained.executor.watchers.append(watcher)
    if load:
        trained.load_checkpoint(folder)
    iterator = toy.data(stop, start=trained.consumed_micro_batches)
    losses, evaluations, splits = [], [], [[b - a for a, b in pairwise(trained.module.parts)]]
    while trained.global_steps < batches:
        update = trained.global_steps
        if update in saves:
            if watcher is not None:
                watcher.saving(saves.index(update))
            trained.save_checkpoint(folder)
        for group in trained.optimizer.param_groups:
            group["lr"] = rates(update)
        if evaluates:
            held_out = iter([toy.micro_batch(10_000 + update)]) if trained.stage_id in (0, STAGES - 1) else None
            evaluations.append(float(trained.eval_batch(held_out, num_micro_batches=1)))
        try:
            losses.append(float(trained.train_batch(iterator)))
        except StopIteration:
            iterator = toy.data(start=trained.consumed_micro_batches)
        splits.append([b - a for a, b in pairwise(trained.module.parts)])
    report = {
        "parameters": cases.parameters(trained),
        "losses": losses,
        "evaluations": evaluations,
        "splits": splits,
        "steps": [] if trained.balance is None else trained.balance.steps,
        "decisions": [] if trained.balance is None else trained.balance.decisions,
    }
    cases.end(trained)
    return report


def train_all(runs: list[tuple[dict[str, Any], dict[str, Any]]], batches: int) -> list[dict[str, Any]]:
    return [train(ds_config, batches, **options) for ds_config, options in runs]


def replayed(
    batches: int,
    steps: list[Move],
    drains: tuple[int, ...] = (),
    counts: tuple[int, ...] = START,
    optimizer: Any = ScheduledSGD,
) -> reference.Replay:
    """The replay of these steps, of a pipeline that is emptied after these updates."""
    pipeline = Pipeline("asp", STAGES, SIZE, DEPTHS)
    for drain in drains:
        steps = list(completed(pipeline, steps, drain * SIZE))
    moves = [(move.layer, move.source, move.target, move.micro_batch) for move in steps]
    refills = (0, *(drain * SIZE for drain in drains))
    return reference.Replay(counts, DEPTHS, SIZE, optimizer, moves=moves, refills=refills).run(batches)


class Sized(toy.Scale):
    """A layer that keeps something for the size of its input, and that size, from its first pass on."""

    def __init__(self, seed: int, dropout: float = 0.0) -> None:
        super().__init__(seed, dropout)
        self.size = self.ones = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.size != len(x):
            self.size, self.ones = len(x), torch.ones_like(x[:1])
        return super().forward(x) * self.ones


def sized_specs() -> list[Any]:
    specs = toy.layer_specs()
    return [LayerSpec(Sized, *spec.module_args) if spec.typename is toy.Scale else spec for spec in specs]


def test_decisions_that_are_carried_out_live_are_exact(worlds: Worlds, tmp_path: Path) -> None:
    batches = 100
    asp = config(stage_to_depth_map=list(DEPTHS))
    still = {"every": 0}
    runs: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (asp, {"seed": 1, "specs": sized_specs}),
        (asp, {"seed": 2, "saves": (6, 7, 11, 20), "evaluates": True, "stop": 51, "folder": str(tmp_path)}),
        *((config(**sync, **extra), {"seed": 3}) for sync in ({"weight_sync": "vertical"}, {"sync_mode": "bsp"})
          for extra in ({}, {"replan": still})),
    ]  # fmt: skip
    ranks = worlds.run(STAGES, train_all, runs, batches)
    by_run = list(zip(*ranks, strict=True))
    assert not any(decision.empties for reports in by_run for decision in reports[0]["decisions"])
    for reports in by_run:
        assert all(report["steps"] == reports[0]["steps"] for report in reports)
        assert all(report["decisions"] == reports[0]["decisions"] for report in reports)
    for reports, drains in zip(by_run[:2], ((), (6, 7, 11, 20, 25)), strict=True):
        steps = [move for _, move in reports[0]["steps"]]
        assert len(steps) >= 8
        run = replayed(batches, steps, drains)
        assert difference(cases.merged(reports), run.parameters()) == 0, steps
        at = next(at for at, move in enumerate(steps) if move.micro_batch > SIZE * max(drains, default=0))
        early = [*steps[:at], replace(steps[at], micro_batch=steps[at].micro_batch - SIZE), *steps[at + 1 :]]
        assert difference(cases.merged(reports), replayed(batches, early, drains).parameters()) > 0
    means = [evaluated(run, update) for update in range(batches)]
    found = by_run[1][-1]["evaluations"]
    assert found[:25] + found[26:] == pytest.approx(means, rel=1e-6)  # the batch in which the data end has two
    for moving, plain in (by_run[2:4], by_run[4:6]):
        assert len(moving[0]["steps"]) >= 20
        assert difference(cases.merged(moving), cases.merged(plain)) == 0
        assert moving[0]["losses"] == plain[0]["losses"]


class Annealed(toy.Scale):
    """A layer whose passes have less and less weight, by a number that it keeps."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + (super().forward(x) - x) / self.calls


def annealed_specs() -> list[Any]:
    specs = toy.layer_specs()
    specs[4:8] = [LayerSpec(Annealed, seed) for seed in range(4)]
    return specs


def test_layers_that_count_move_in_an_empty_pipeline(worlds: Worlds) -> None:
    runs = [(config(sync_mode="bsp", **extra), {"seed": 3, "specs": annealed_specs}) for extra in ({}, {"replan": {}})]
    moving, still = zip(*worlds.run(STAGES, train_all, runs, 40), strict=True)
    assert {tuple(split) for split in moving[0]["splits"]} > {START}
    whys = [decision.empties for decision in moving[0]["decisions"] if not decision.stays]
    assert any("keeps a calls that passes may change" in why for why in whys)
    assert moving[0]["losses"] == still[0]["losses"]
    assert difference(cases.merged(moving), cases.merged(still)) == 0


def test_a_layer_that_the_script_has_changed_stays(worlds: Worlds) -> None:
    """The last one of the first stage, without which none can leave it."""
    runs = [(config(sync_mode="bsp", replan={"every": 3, "moves": how}), {"seed": 3, "hooked": 7}) for how in HOWS]
    for moving in zip(*worlds.run(STAGES, train_all, runs, 20), strict=True):
        reasons = {decision.stays for decision in moving[0]["decisions"]}
        assert any("changed modules or hooks of layer 7" in reason for reason in reasons)
        assert {tuple(split) for split in moving[0]["splits"]} == {START}


def test_adamw_in_a_chain_of_moves(worlds: Worlds, tmp_path: Path) -> None:
    """Late updates of a layer take its own moments and the rate of their update; a save is in the midst of a move."""
    batches, saves = 60, (11, 20)
    asp = {**config(stage_to_depth_map=list(DEPTHS)), "optimizer": ADAMW}
    options = {"seed": 1, "saves": saves, "folder": str(tmp_path), "rates": rate_of_adamw}
    reports = [rank[0] for rank in worlds.run(STAGES, train_all, [(asp, options)], batches)]
    steps = [move for _, move in reports[0]["steps"]]
    assert len(steps) >= 5
    found = cases.merged(reports)
    assert difference(found, replayed(batches, steps, saves, optimizer=ScheduledAdamW).parameters()) <= 1e-5
    assert difference(found, replayed(batches, steps[1:], saves, optimizer=ScheduledAdamW).parameters()) > 1e-4


def after_a_load_that_failed(ds_config: dict[str, Any], folder: str) -> tuple[list[Move], list[list[int]]]:
    """Steps made and splits of a run in which a load fails while a chain of moves is under way."""
    from ds_vpipe.errors import VPipeError

    trained = cases.engine(ds_config, STAGES)
    measured(trained, None)
    iterator, splits = toy.data(), []
    for _ in range(30):
        if len(trained.balance.steps) == 1 and trained.moves.move is not None and len(splits) < 8:
            with pytest.raises(VPipeError, match="nowhere"):
                trained.load_checkpoint(folder, tag="nowhere")
        trained.train_batch(iterator)
        splits.append([b - a for a, b in pairwise(trained.module.parts)])
    steps = [move for _, move in trained.balance.steps]
    cases.end(trained)
    return steps, splits


def test_a_load_that_fails_ends_a_chain_of_moves(worlds: Worlds, tmp_path: Path) -> None:
    ranks = worlds.run(STAGES, after_a_load_that_failed, config(stage_to_depth_map=list(DEPTHS)), str(tmp_path))
    assert all(rank == ranks[0] for rank in ranks)
    assert max(ranks[0][1][-1]) < START[0]  # another look has begun another chain
