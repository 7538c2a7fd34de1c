"""Iterators that end anywhere: every rank agrees, nothing hangs, complete batches are trained exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import cases
import pytest
import reference
import torch
import toy
from test_exactness import OPTIMIZERS, difference, sgd
from worlds import Worlds

from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.schedule import default_depths

pytestmark = pytest.mark.mp

STAGES = 4


def train_on(ds_config: dict[str, Any], stages: int, lengths: Sequence[int]) -> dict[str, Any]:
    """Train on one iterator after the other, of these numbers of micro-batches, each until it ends.

    Ranks meet between calls: no call may need what another rank does in its next one.
    """
    trained = cases.engine(ds_config, stages)
    batches, losses = [], []
    for number, length in enumerate(lengths):
        iterator, before = toy.data(100 * number + length, start=100 * number), len(losses)
        with suppress(StopIteration):
            while True:
                losses.append(float(trained.train_batch(iterator)))
                torch.distributed.barrier()
        batches.append(len(losses) - before)
    return {"batches": batches, "losses": losses, "parameters": cases.parameters(trained)}


def check_lengths(
    worlds: Worlds, depths: Sequence[int], micro_batches: int, lengths: Sequence[int], clip: float | None = None
) -> None:
    stages = len(depths)
    block: dict[str, Any] = {"partition": "uniform", "stage_to_depth_map": list(depths)}
    extra: dict[str, Any] = {}
    options: dict[str, Any] = {}
    if clip is not None:
        block["gradient_clipping_scope"] = "delayed_global"
        extra, options = {"gradient_clipping": clip}, {"clip": clip, "scope": "delayed_global"}
    ds_config = cases.config(micro_batches, OPTIMIZERS["SGD"][0], block, **extra)
    ranks = worlds.run(stages, train_on, ds_config, stages, lengths)
    complete = [length // micro_batches for length in lengths]
    order = [100 * number + i for number, count in enumerate(complete) for i in range(count * micro_batches)]
    refills = tuple(accumulate((count * micro_batches for count in complete), initial=0))
    left_over = {end: length % micro_batches for end, length in zip(refills[1:], lengths, strict=True)}
    options |= {"order": order, "refills": refills[:-1], "left_over": left_over}
    wanted, losses = reference.replay(
        uniform_partition(10, stages), depths, micro_batches, sum(complete), sgd, **options
    )
    for rank in ranks:
        assert rank["batches"] == complete
        assert rank["losses"] == pytest.approx(losses, rel=1e-5)
    assert difference(cases.merged(ranks), wanted) <= (0 if clip is None else 1e-5)


@pytest.mark.parametrize(
    ("depths", "micro_batches"),
    [
        ((0,), 3),
        ((2, 0), 2),
        ((4, 0), 4),
        ((4, 2, 0), 3),
        ((5, 5, 0), 3),
        ((3, 2, 1, 0), 1),
        ((3, 2, 1, 0), 2),
        ((3, 2, 1, 0), 8),
        ((6, 4, 2, 0), 4),
    ],
)
def test_every_length(worlds: Worlds, depths: tuple[int, ...], micro_batches: int) -> None:
    """With depths that fall by two, a stage has run backward passes that the one before never asks for."""
    check_lengths(worlds, depths, micro_batches, [*range(3 * micro_batches + depths[0] + 2), micro_batches])


def test_gradients_are_dropped_before_and_after_norms_of_later_stages(worlds: Worlds) -> None:
    """Both come over the same link."""
    check_lengths(worlds, (4, 2, 0), 3, [*range(4, 12), 3], clip=0.3)


def train_epochs_by_count(ds_config: dict[str, Any], stages: int, batches: int) -> dict[str, Any]:
    """As scripts do that know the length of their data: no call runs into its end."""
    trained = cases.engine(ds_config, stages)
    losses = []
    for start in (0, 50, 100):
        iterator = toy.data(start + batches * trained.micro_batches + 1, start=start)
        losses += [float(trained.train_batch(iterator)) for _ in range(batches)]
    return {"losses": losses, "parameters": cases.parameters(trained)}


def test_micro_batch_left_over_is_in_no_loss_and_no_update(worlds: Worlds) -> None:
    ds_config = cases.config(2, OPTIMIZERS["SGD"][0], {"partition": "uniform"})
    reports = worlds.run(STAGES, train_epochs_by_count, ds_config, STAGES, 4)
    order = [*range(8), *range(50, 58), *range(100, 108)]
    wanted, losses = reference.replay(
        uniform_partition(10, STAGES), default_depths(STAGES), 2, 12, sgd, order=order, refills=(0, 8, 16)
    )
    for report in reports:
        assert report["losses"] == pytest.approx(losses, rel=1e-5)
    assert difference(cases.merged(reports), wanted) == 0


def train_per_call(ds_config: dict[str, Any], stages: int, starts: list[int], length: int | None) -> dict[str, Any]:
    trained = cases.engine(ds_config, stages)
    losses = [
        float(trained.train_batch(toy.data(None if length is None else start + length, start=start)))
        for start in starts
    ]
    return {"losses": losses, "parameters": cases.parameters(trained)}


def test_one_iterator_per_call_drains_every_call(worlds: Worlds) -> None:
    ds_config = cases.config(2, OPTIMIZERS["SGD"][0], {"partition": "uniform"})
    reports = worlds.run(STAGES, train_per_call, ds_config, STAGES, [0, 2, 4, 6, 8], 2)
    wanted, _ = reference.replay(
        uniform_partition(10, STAGES), default_depths(STAGES), 2, 5, sgd, refills=(0, 2, 4, 6, 8)
    )
    assert difference(cases.merged(reports), wanted) == 0


def test_new_endless_iterator_per_call_keeps_inputs_and_labels_together(worlds: Worlds) -> None:
    """Stage 0 reads three ahead: four micro-batches of the first iterator, one of each later one."""
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform"})
    reports = worlds.run(STAGES, train_per_call, ds_config, STAGES, [0, 10, 20, 30, 40, 50], None)
    wanted, losses = reference.replay(
        uniform_partition(10, STAGES), default_depths(STAGES), 1, 6, sgd, order=[0, 1, 2, 3, 10, 20]
    )
    assert difference(cases.merged(reports), wanted) == 0
    assert reports[0]["losses"] == pytest.approx(losses, rel=1e-5)


class Restarting:
    """Ends after each epoch and starts over when it is asked again, as some data loaders do."""

    def __init__(self, length: int) -> None:
        self.length, self.position = length, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.position == self.length:
            self.position = 0
            raise StopIteration
        self.position += 1
        return toy.micro_batch(self.position - 1)


def train_epochs(ds_config: dict[str, Any], stages: int, length: int, epochs: int) -> dict[str, Any]:
    trained = cases.engine(ds_config, stages)
    iterator, batches = Restarting(length), 0
    for _ in range(epochs):
        while True:
            try:
                trained.train_batch(iterator)
            except StopIteration:
                break
            batches += 1
    return {"batches": batches, "parameters": cases.parameters(trained)}


def test_iterator_that_starts_over(worlds: Worlds) -> None:
    """Every epoch of five leaves a micro-batch over; inputs and labels stay paired in the epochs after it."""
    ds_config = cases.config(2, OPTIMIZERS["SGD"][0], {"partition": "uniform"})
    reports = worlds.run(STAGES, train_epochs, ds_config, STAGES, 5, 3)
    wanted, _ = reference.replay(
        uniform_partition(10, STAGES), default_depths(STAGES), 2, 6, sgd, order=[0, 1, 2, 3] * 3, refills=(0, 4, 8)
    )
    assert [report["batches"] for report in reports] == [6] * STAGES
    assert difference(cases.merged(reports), wanted) == 0


def train_uneven(ds_config: dict[str, Any], stages: int) -> list[Any]:
    trained = cases.engine(ds_config, stages)
    iterator = toy.data(7 if trained.grid.data_parallel_id else 10, replica=trained.grid.data_parallel_id)
    batches = 0
    while True:
        try:
            trained.train_batch(iterator)
        except StopIteration:
            return [batches, trained.global_steps]
        batches += 1


def test_shortest_replica_decides(worlds: Worlds) -> None:
    ds_config = cases.config(2, OPTIMIZERS["SGD"][0], {"partition": "uniform"})
    assert worlds.run(4, train_uneven, ds_config, 2) == [[3, 3]] * 4


def evaluate_between(ds_config: dict[str, Any], stages: int, evaluate: bool) -> dict[str, Any]:
    torch.manual_seed(7)
    trained = cases.engine(ds_config, stages, dropout=0.2)
    iterator, losses, evaluations = toy.data(30), [], []
    while True:
        if evaluate:
            evaluations.append(float(trained.eval_batch(toy.data(200, start=100), num_micro_batches=3)))
        try:
            losses.append(float(trained.train_batch(iterator)))
        except StopIteration:
            break
    return {"losses": losses, "evaluations": evaluations, "parameters": cases.parameters(trained)}


@pytest.mark.parametrize("sync_mode", ["asp", "bsp"])
def test_evaluation_leaves_no_trace(worlds: Worlds, sync_mode: str) -> None:
    ds_config = cases.config(2, OPTIMIZERS["AdamW"][0], {"partition": "uniform", "sync_mode": sync_mode})
    without = worlds.run(STAGES, evaluate_between, ds_config, STAGES, False)
    with_evaluation = worlds.run(STAGES, evaluate_between, ds_config, STAGES, True)
    assert difference(cases.merged(with_evaluation), cases.merged(without)) == 0
    assert with_evaluation[0]["losses"] == without[0]["losses"]
    assert len({tuple(report["evaluations"]) for report in with_evaluation}) == 1
    assert len(set(with_evaluation[0]["evaluations"])) == 16  # the weights do change in between


def evaluate_on_training_data(ds_config: dict[str, Any], stages: int) -> None:
    trained = cases.engine(ds_config, stages)
    iterator = toy.data()
    trained.train_batch(iterator)
    trained.eval_batch(iterator)


def test_evaluation_on_the_training_iterator_is_refused(worlds: Worlds) -> None:
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], {"partition": "uniform"})
    outcomes = worlds.outcomes(2, evaluate_on_training_data, ds_config, 2)
    assert [outcome.good for outcome in outcomes] == [False, False]
    for outcome in outcomes:
        assert outcome.text.startswith("VPipeError: eval_batch(data_iter): got the iterator that train_batch() reads")
