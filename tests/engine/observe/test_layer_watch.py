"""Watchers of layers in a replay."""

from __future__ import annotations

import itertools
from dataclasses import asdict
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import toy
from torch import nn
from worlds import Worlds

pytestmark = pytest.mark.mp

SGD = {"type": "SGD", "params": {"lr": 0.0}}


def norms_of(size: int) -> list[dict[str, Any]]:
    """Sums of squares of updates 5 and 6, after a change of the micro-batches per batch from 2 to ``size``."""
    from ds_vpipe.engine.observe.layer_watch import NormWatch

    engine = cases.engine(cases.config(2, SGD, {}), 2)
    watch = NormWatch(engine.stage, 5)
    engine.executor.watchers.append(watch)
    data = itertools.repeat(toy.micro_batch(0))
    for update in range(6):
        if update == 3:
            engine.set_train_batch_size(size * toy.MICRO_BATCH)
        engine.train_batch(data)
    engine.destroy()
    return watch.rows()


def test_norms_are_of_both_batches_after_a_change_of_their_size(worlds: Worlds) -> None:
    """With the same data and no changes, three micro-batches have three times the squares of one."""
    one, three = ([*itertools.chain(*worlds.run(2, norms_of, size))] for size in (1, 3))
    assert len(one) == len(three) == 10
    for row, larger in zip(one, three, strict=True):
        assert larger["activation"] == pytest.approx([3 * square for square in row["activation"]], rel=1e-4)
        assert min(row["activation"]) > 0
        assert row["activation"][0] == pytest.approx(row["activation"][1], rel=1e-4)


class Masked(nn.Module):
    """A layer whose activations go on with a mask that is added to scores."""

    def __init__(self, mask: float) -> None:
        super().__init__()
        self.scale, self.mask = nn.Parameter(torch.tensor(2.0)), mask

    def forward(self, given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = given[0] if isinstance(given, tuple) else given
        return x * self.scale, torch.full((2, 5), self.mask)


class Unmasked(nn.Module):
    def forward(self, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return given[0]


def norms_beside(mask: float) -> list[list[float]]:
    """Squares of activations of two updates by layer, beside a mask of such values."""
    from deepspeed.pipe import LayerSpec

    from ds_vpipe.engine.observe.layer_watch import NormWatch

    def specs() -> list[Any]:
        first, *_, last = toy.layer_specs()
        return [first, LayerSpec(Masked, mask), LayerSpec(Masked, mask), LayerSpec(Unmasked), last]

    engine = cases.engine(cases.config(1, SGD, {}), 2, specs=specs)
    watch = NormWatch(engine.stage, 1)
    engine.executor.watchers.append(watch)
    data = toy.data()
    for _ in range(2):
        engine.train_batch(data)
    cases.end(engine)
    return [row["activation"] for row in watch.rows()]


def norms_beside_each(*masks: float) -> list[list[list[float]]]:
    return [norms_beside(mask) for mask in masks]


def test_masks_do_not_count(worlds: Worlds) -> None:
    for without, *masked in worlds.run(2, norms_beside_each, 0.0, float("-inf"), -1e30):
        assert masked == [without, without]
        assert 0 < min(map(min, without)) <= max(map(max, without)) < 1e6


BAD = 10  # micro-batch of the data


def first_fault_of(folder: str, way: str) -> dict[str, Any] | None:
    """The fault that data with a NaN make after a change of M from 4 to 1, by a call or between two runs."""
    from ds_vpipe.engine.observe.layer_watch import FaultWatch

    def data(start: int) -> Any:
        for index, (tokens, labels) in enumerate(toy.data(start=start), start):
            floats = nn.functional.one_hot(tokens, 11).float()[..., :8]
            yield floats * (float("nan") if index == BAD else 1.0), labels

    def engine_of(micro_batches: int) -> Any:
        return cases.engine(cases.config(micro_batches, SGD, {}), 2, specs=lambda: toy.layer_specs()[1:])

    engine = engine_of(4)
    iterator = data(0)
    for _ in range(2):
        engine.train_batch(iterator)
    if way == "call":
        engine.set_train_batch_size(toy.MICRO_BATCH)
    else:
        engine.save_checkpoint(folder)
        cases.end(engine)
        engine = engine_of(1)
        engine.load_checkpoint(folder)
        iterator = data(engine.consumed_micro_batches)
    watch = FaultWatch(engine, engine.stage, lambda: None)
    engine.executor.watchers.append(watch)
    for _ in range(4):
        engine.train_batch(iterator)
    cases.end(engine)
    return None if watch.fault is None else {**asdict(watch.fault), "line": watch.fault.line()}


def first_faults(folder: str) -> list[dict[str, Any] | None]:
    return [first_fault_of(folder, way) for way in ("call", "resume")]


def test_a_fault_has_the_micro_batch_of_the_data(worlds: Worlds, tmp_path: Path) -> None:
    """Also where micro-batches are numbered anew."""
    for fault in worlds.run(2, first_faults, str(tmp_path))[0]:
        assert fault is not None
        assert (fault["micro_batch"], fault["where"]) == (BAD, "data")
        assert fault["line"].startswith(f"update 5, micro-batch {BAD} (number 1 of 1 of its batch), stage 0, data: ")
