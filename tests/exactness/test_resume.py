"""Going on after a save, and going on from the saved checkpoint, are the same training bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import toy
from test_exactness import OPTIMIZERS, difference
from worlds import Worlds

pytestmark = pytest.mark.mp

Snapshot = dict[str, torch.Tensor]
ADAMW = OPTIMIZERS["AdamW"][0]
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}}}


def go_on(engine: Any, iterator: Iterator[Any], batches: int, save_to: str | None = None) -> list[Snapshot]:
    """Train, saving before every batch but the first."""
    snapshots = []
    for number in range(batches):
        if number and save_to is not None:
            engine.save_checkpoint(save_to, tag=str(engine.global_steps))
        loss = engine.train_batch(iterator)
        scale = torch.tensor(engine.optimizer.loss_scale if engine.fp16_enabled() else 1.0)
        state = {"loss": loss, "lr": torch.tensor(engine.get_lr()), "scale": scale}
        snapshots.append(cases.parameters(engine) | state)
    return snapshots


def data_of(engine: Any) -> Iterator[Any]:
    return toy.data(start=engine.consumed_micro_batches, replica=engine.grid.data_parallel_id)


def resume_everywhere(
    directory: str, ds_config: dict[str, Any], stages: int, points: Sequence[int], **module: Any
) -> list[str]:
    """Save after every batch; load at ``points`` into a new engine, at some into the running one; name differences."""
    engine = cases.engine(ds_config, stages, dropout=0.2, **module)
    iterator = data_of(engine)
    taken = [go_on(engine, iterator, 1)[0]]
    for point in range(1, max(points) + 1):
        engine.save_checkpoint(directory, tag=str(point))
        taken += go_on(engine, iterator, 1)
    if engine.consumed_micro_batches != len(taken) * engine.micro_batches:
        return [f"consumed {engine.consumed_micro_batches}"]
    wrong = []

    def check(name: str, point: int, engine: Any, batches: int) -> None:
        engine.load_checkpoint(directory, tag=str(point))
        for number, snapshot in enumerate(go_on(engine, data_of(engine), batches, directory + "-again"), point):
            wrong.extend(
                f"{name} {point}, batch {number}: {key}"
                for key, value in snapshot.items()
                if not torch.equal(value, taken[number][key])
            )

    for point in (points[-2], points[0]):
        check("same engine", point, engine, 2)
    engine.destroy()
    for point in points:
        cases.close_groups()
        engine = cases.engine(ds_config, stages, dropout=0.2, **module)
        check("new engine", point, engine, min(2, len(taken) - point))
        engine.destroy()
    return wrong


@pytest.mark.parametrize(("micro_batches", "points"), [(1, range(1, 11)), (4, (1, 2, 3, 6))], ids=["ten", "M=4"])
def test_ten_points(worlds: Worlds, tmp_path: Path, micro_batches: int, points: Sequence[int]) -> None:
    """Of more micro-batches some points: the pipeline is full after the first of their updates."""
    ds_config = cases.config(micro_batches, ADAMW, {"partition": "uniform", "recompute_ratio": 0.5}, **SCHEDULE)
    for wrong in worlds.run(3, resume_everywhere, str(tmp_path), ds_config, 3, points):
        assert wrong == []


def resume_uncompiled(*args: Any) -> list[str]:
    """:func:`resume_everywhere` without torch's compiler, which takes the processor half a minute for Muon's update."""
    with torch.compiler.set_stance("force_eager"):
        return resume_everywhere(*args)


@pytest.mark.parametrize(
    ("kind", "mode", "extra"),
    [("AdamW", "asp", {}), ("AdamW", "bsp", {}), ("Muon", "bsp", {}), ("Adagrad", "asp", {"bf16": {"enabled": True}})],
)
def test_optimizers_with_states_of_their_own(
    worlds: Worlds, tmp_path: Path, kind: str, mode: str, extra: dict[str, Any]
) -> None:
    """DeepSpeed's Adam keeps powers of its betas in no state; Adagrad's states are there before a wrapper's weights."""
    optimizer = {"type": kind, "params": {"lr": 0.01}}
    ds_config = cases.config(2, optimizer, {"partition": "uniform", "sync_mode": mode}, **extra)
    for wrong in worlds.run(2, resume_uncompiled, str(tmp_path), ds_config, 2, (1, 4, 7)):
        assert wrong == []


@pytest.mark.parametrize(
    ("extra", "block", "module"),
    [
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, {"weight_sync": "vertical"}, {}),
        ({"bf16": {"enabled": True}}, {}, {"seed_layers": True, "base_seed": 7}),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 3, "hysteresis": 1}},
            {"gradient_clipping_scope": "delayed_global"},
            {"loss_fn": toy.float_cross_entropy},
        ),
        (
            {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 3, "hysteresis": 1}},
            {},
            {"loss_fn": toy.mean_over_positions, "specs": toy.tied_specs},
        ),
        (
            {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
            {},
            {"loss_fn": toy.mean_over_positions, "specs": toy.tied_specs},
        ),
        ({}, {"weight_sync": "none", "recompute_ratio": 0.5}, {}),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}, {}, {}),
    ],
    ids=[
        "bf16-zero1-vertical",
        "bf16-seeded",
        "fp16-global-norm",
        "fp16-tied",
        "bf16-zero1-tied",
        "no-stash",
        "zero1-host",
    ],
)
def test_other_settings(
    worlds: Worlds, tmp_path: Path, extra: dict[str, Any], block: dict[str, Any], module: dict[str, Any]
) -> None:
    ds_config = cases.config(1, ADAMW, {"partition": "uniform", **block}, gradient_clipping=0.5, **extra)
    for wrong in worlds.run(3, resume_everywhere, str(tmp_path), ds_config, 3, (1, 5), **module):
        assert wrong == []


def saves_change_only_staleness(ds_config: dict[str, Any], directory: str) -> tuple[Snapshot, Snapshot]:
    """Train with a save after every batch, and by one batch per iterator: the same refills, the same training."""
    engine = cases.engine(ds_config, 3)
    iterator = data_of(engine)
    for _ in range(6):
        engine.train_batch(iterator)
        engine.save_checkpoint(directory)
    saved = cases.parameters(engine)
    cases.end(engine)
    engine = cases.engine(ds_config, 3)
    for number in range(6):
        engine.train_batch(toy.data(start=2 * number, stop=2 * number + 2))
    return saved, cases.parameters(engine)


def test_a_save_is_a_refill(worlds: Worlds, tmp_path: Path) -> None:
    ds_config = cases.config(2, ADAMW, {"partition": "uniform"})
    for saved, drained in worlds.run(3, saves_change_only_staleness, ds_config, str(tmp_path)):
        assert difference(saved, drained) == 0


def save_before_the_data_end(ds_config: dict[str, Any], directory: str, stop: int, at: int) -> dict[str, Any]:
    engine = cases.engine(ds_config, 3)
    iterator = toy.data(stop)
    losses = []
    for number in range(100):
        if number == at:
            engine.save_checkpoint(directory)
        try:
            losses.append(float(engine.train_batch(iterator)))
        except StopIteration:
            break
    again = toy.data(2)
    losses.append(float(engine.train_batch(again)))
    return {"losses": losses, "steps": engine.global_steps}


@pytest.mark.parametrize("at", [1, 2, 3])
def test_save_while_the_data_end(worlds: Worlds, tmp_path: Path, at: int) -> None:
    """The end of the data has been met by some stages and not by others when the pipeline rests."""
    ds_config = cases.config(2, ADAMW, {"partition": "uniform"})
    reports = worlds.run(3, save_before_the_data_end, ds_config, str(tmp_path), 6, at)
    for report in reports:
        assert report["steps"] == 4
        assert report["losses"] == reports[0]["losses"]
        assert len(report["losses"]) == 4


def other_batch_sizes(ds_config: dict[str, Any], directory: str) -> tuple[Snapshot, Snapshot, list[int]]:
    """Change M from 2 to 4 to 1 while training; and train with engines that have those M from the start."""
    engine = cases.engine(ds_config, 3)
    iterator = data_of(engine)
    consumed = []
    for size in (2, 4, 1):
        engine.set_train_batch_size(size * toy.MICRO_BATCH)
        for _ in range(3):
            engine.train_batch(iterator)
        consumed.append(engine.consumed_micro_batches)
    changed = cases.parameters(engine)
    engine.destroy()
    for position, size in enumerate((2, 4, 1)):
        cases.close_groups()
        engine = cases.engine({**ds_config, "gradient_accumulation_steps": size}, 3)
        if position:
            engine.load_checkpoint(directory)
        iterator = data_of(engine)
        for _ in range(3):
            engine.train_batch(iterator)
        engine.save_checkpoint(directory)
    return changed, cases.parameters(engine), consumed


def test_batch_size_changes_between_batches(worlds: Worlds, tmp_path: Path) -> None:
    growing = {"synchronous_updates": 1, "delay_warmup_updates": 9}
    for block in (
        {"partition": "uniform"},
        {"partition": "uniform", "weight_sync": "vertical"},
        {"partition": "uniform", "weight_sync": "stash", "staleness": growing},
    ):
        ds_config = cases.config(2, ADAMW, block)
        for changed, built, consumed in worlds.run(3, other_batch_sizes, ds_config, str(tmp_path / str(len(block)))):
            assert difference(changed, built) == 0
            assert consumed == [6, 18, 21]


def killed_while_saving(ds_config: dict[str, Any], directory: str, files: int) -> None:
    engine = cases.engine(ds_config, 2)
    iterator = data_of(engine)
    engine.train_batch(iterator)
    engine.save_checkpoint(directory, tag="kept")
    engine.train_batch(iterator)
    save, left = engine.checkpoint_engine.save, [files]

    def save_some(*args: Any, **kwargs: Any) -> None:
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        save(*args, **kwargs)

    engine.checkpoint_engine.save = save_some
    engine.save_checkpoint(directory, tag="kept")


def loaded_steps(ds_config: dict[str, Any], directory: str) -> int:
    engine = cases.engine(ds_config, 2)
    engine.load_checkpoint(directory)
    engine.train_batch(data_of(engine))
    engine.save_checkpoint(directory, tag="kept")
    return int(engine.global_steps)


def test_killed_while_saving(worlds: Worlds, tmp_path: Path) -> None:
    ds_config = cases.config(2, ADAMW, {"partition": "uniform"})
    outcomes = worlds.outcomes(2, killed_while_saving, ds_config, str(tmp_path), 3)
    assert not any(outcome.good for outcome in outcomes)
    assert len(list(tmp_path.glob(".kept.*.unfinished"))) == 1
    assert worlds.run(2, loaded_steps, ds_config, str(tmp_path)) == [2, 2]
    os.replace(tmp_path / "kept", tmp_path / ".kept.previous")  # killed between the two renamings
    assert worlds.run(2, loaded_steps, ds_config, str(tmp_path)) == [3, 3]
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
