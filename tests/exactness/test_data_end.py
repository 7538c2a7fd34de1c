"""Iterators that end anywhere: every rank agrees, nothing hangs, complete batches are trained exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import pytest
import reference
import torch
import toy
from deepspeed.pipe import LayerSpec
from test_exactness import OPTIMIZERS, difference, sgd
from torch import nn
from worlds import Worlds

from ds_vpipe.engine.execution import executor
from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.one_f_one_b import default_depths

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
    worlds: Worlds,
    depths: Sequence[int],
    micro_batches: int,
    lengths: Sequence[int],
    clip: float | None = None,
    sync: str = "stash",
) -> None:
    stages = len(depths)
    block: dict[str, Any] = {"partition": "uniform", "stage_to_depth_map": list(depths), "weight_sync": sync}
    extra: dict[str, Any] = {}
    options: dict[str, Any] = {"stash": sync != "none"}
    if clip is not None:
        block["gradient_clipping_scope"] = "delayed_global"
        extra = {"gradient_clipping": clip}
        options |= {"clip": clip, "scope": "delayed_global"}
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


def test_without_a_stash(worlds: Worlds) -> None:
    check_lengths(worlds, (4, 2, 0), 2, [*range(4, 12), 2], sync="none")


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


def train_and_save(ds_config: dict[str, Any], stages: int, length: int, epochs: int, folder: str) -> dict[str, Any]:
    """Save after every batch; every epoch ends by itself."""
    trained = cases.engine(ds_config, stages)
    iterator, losses = Restarting(length), []
    for _ in range(epochs):
        with suppress(StopIteration):
            while True:
                losses.append(float(trained.train_batch(iterator)))
                trained.save_checkpoint(folder, tag="newest")
    return {"losses": losses, "parameters": cases.parameters(trained)}


@pytest.mark.parametrize("length", [4, 5])
def test_a_save_after_the_first_stage_has_met_the_end(worlds: Worlds, tmp_path: Path, length: int) -> None:
    """It reads three ahead, so the others have forgotten that the data ended, and the micro-batch left over."""
    ds_config = cases.config(2, OPTIMIZERS["SGD"][0], {"partition": "uniform", "stage_to_depth_map": [3, 1, 0]})
    reports = worlds.run(3, train_and_save, ds_config, 3, length, 3, str(tmp_path))
    wanted, losses = reference.replay(
        uniform_partition(10, 3), (3, 1, 0), 2, 6, sgd, order=[0, 1, 2, 3] * 3, refills=range(0, 12, 2)
    )
    for report in reports:
        assert report["losses"] == pytest.approx(losses, rel=1e-5)
    assert difference(cases.merged(reports), wanted) == 0


class Times(nn.Module):
    """Multiplies by one, which is not trained: what comes out is what went in."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def distance(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return (outputs - labels).abs().mean()


class Numbered(Restarting):
    """Inputs are equal to their labels, and to those of no other micro-batch."""

    def __next__(self) -> Any:
        super().__next__()
        number = torch.full((toy.MICRO_BATCH, 1), 100.0 * self.length + self.position)
        return number, number.clone()


class Reshuffled:
    """Endless; each pass over four micro-batches is the one that ``epoch`` says when it begins, as samplers do."""

    def __init__(self) -> None:
        self.epoch = 0
        self.numbers: Iterator[float] = iter(())

    def __next__(self) -> Any:
        if (given := next(self.numbers, None)) is None:
            self.numbers = iter([4.0 * self.epoch + index for index in range(4)])
            given = next(self.numbers)
        number = torch.full((toy.MICRO_BATCH, 1), given)
        return number, number.clone()


class Refilled:
    """Endless; the item is one object that changes, of which a ``batch_fn`` makes a micro-batch."""

    number = 0.0

    def __next__(self) -> Refilled:
        self.number += 1
        return self

    def micro_batch(self) -> Any:
        number = torch.full((toy.MICRO_BATCH, 1), self.number)
        return number, number.clone()


def warnings_of_labels(stages: int, block: dict[str, Any]) -> list[int]:
    """Warnings after batches with labels of the last stage alone, equal ones, an incomplete batch, and others."""
    ds_config = cases.config(2, OPTIMIZERS["SGD"][0], {"partition": "uniform", **block})
    trained, counts = cases.engine(ds_config, stages), []
    with mock.patch.object(executor.logger, "warning") as warning:
        for first, last, length in ((None, 0, 4), (0, 0, 3), (0, 0, 4), (0, 1, 4), (0, 1, 4)):
            other = first if trained.stage.is_first else last
            items = [(x, None if other is None else (y + other) % 3) for x, y in toy.data(length)]
            iterator = iter(items)
            with suppress(StopIteration):
                while True:
                    trained.train_batch(iterator)
            counts.append(sum("different labels in batch" in str(call.args[0]) for call in warning.call_args_list))
    cases.end(trained)
    return counts


@pytest.mark.parametrize(
    "block",
    [{}, {"sync_mode": "bsp"}, {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}],
)
def test_labels_that_differ_between_first_and_last_stage_are_warned_of(worlds: Worlds, block: dict[str, Any]) -> None:
    first, last = worlds.run(2, warnings_of_labels, 2, block)
    assert first == [0, 0, 0, 1, 1]
    assert last == [0] * 5


def rest(trained: Any, what: str, folder: str) -> None:
    if what == "save, load":
        trained.save_checkpoint(folder, tag="newest")
        trained.load_checkpoint(folder, tag="newest")
    elif what == "another size":
        size, in_flight = 3 - trained.micro_batches, len(trained.stage.in_flight)
        with pytest.raises(ValueError, match="divisible"):
            trained.set_train_batch_size(size * toy.MICRO_BATCH + 1)
        assert len(trained.stage.in_flight) == in_flight
        trained.set_train_batch_size(size * toy.MICRO_BATCH)
    elif what == "evaluation":
        assert float(trained.eval_batch(Numbered(10), num_micro_batches=1)) == 0
    elif what == "rest":
        trained.quiesce()


def on_a_shared_stream(trained: Any, what: str, folder: str) -> list[float]:
    """Losses with another iterator in every call, all over one stream, and something else before the fourth call."""
    stream, losses = Numbered(1000), []
    for call in range(7):
        if call == 3 and what != "another size":
            rest(trained, what, folder)
        losses.append(float(trained.train_batch(map(list, stream))))
    return losses


def on_epochs(trained: Any, calls: int) -> list[float]:
    """Losses of ten calls; the script has its data shuffled anew after every few."""
    iterator, losses = Reshuffled(), []
    for iterator.epoch in range(10 // calls):
        losses += [float(trained.train_batch(iterator)) for _ in range(calls)]
    return losses


def train_numbered(ds_config: dict[str, Any], stages: int, folder: str, whats: list[str]) -> list[Any]:
    """Data of several lengths, each for two epochs, with those of others in between."""
    trained = cases.engine(ds_config, stages, loss_fn=distance, specs=lambda: [LayerSpec(Times) for _ in range(4)])
    found: list[Any] = []
    warning = mock.patch.object(executor.logger, "warning").start()
    for what in whats:
        lengths = (4, 5, 7)
        iterators = {length: Numbered(length) for length in lengths}
        for length in lengths * 2:
            losses = []
            with suppress(StopIteration):
                while True:
                    losses.append(float(trained.train_batch(iterators[length])))
                    rest(trained, what, folder)
            found.append((what, length, losses))
        trained.set_train_batch_size(2 * toy.MICRO_BATCH)
    losses = []
    for _ in range(4):
        losses.append(float(trained.train_batch(Numbered(3))))
        assert not trained.stage.is_last or len(trained.fwd_outputs) == 2  # none of a micro-batch that was left over
    found.append(("another iterator", 8, losses))
    found += [("shared stream", 14, on_a_shared_stream(trained, what, folder)) for what in whats]
    rest(trained, "save, load", folder)
    before = Numbered(7)  # with a rest in front of its end
    losses = [float(trained.train_batch(before))]
    trained.quiesce()
    losses += [float(trained.train_batch(before)) for _ in range(2)]
    losses += on_epochs(trained, calls=1)
    rest(trained, "save, load", folder)
    losses += on_epochs(trained, calls=2)  # of another iterator: what was read ahead is dropped
    if trained.pipeline.virtual_stages == 1:  # else a whole batch is read before it begins
        trained.set_batch_fn(Refilled.micro_batch)
        refilled = Refilled()
        found.append(("batch_fn", 8, [float(trained.train_batch(refilled)) for _ in range(4)]))
    mock.patch.stopall()
    differ = sum("different labels in batch" in str(call.args[0]) for call in warning.call_args_list)
    return [*found, ("set_epoch", 46, losses), ("warnings", 2, [differ])]


@pytest.mark.parametrize(
    ("stages", "block"),
    [
        (2, {"stage_to_depth_map": [1, 0]}),
        (3, {"stage_to_depth_map": [2, 1, 0]}),
        (3, {"stage_to_depth_map": [6, 4, 0]}),
        (2, {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}),
    ],
)
def test_inputs_keep_their_labels(worlds: Worlds, tmp_path: Path, stages: int, block: dict[str, Any]) -> None:
    """Whatever empties the pipeline near the end of data that start over, or starts them over in another order."""
    optimizer = {"type": "SGD", "params": {"lr": 0.0}}
    whats = ["rest", "save, load", "another size", "evaluation"]
    ds_config = cases.config(2, optimizer, {"partition": "uniform", **block})
    for report in worlds.run(stages, train_numbered, ds_config, stages, str(tmp_path), whats):
        for what, length, losses in report:
            assert losses == [0] * len(losses), (what, length)
            assert what == "another size" or len(losses) == length // 2, (what, length)


def train_after_loads(ds_config: dict[str, Any], folder: str) -> list[Any]:
    """Data that go on, and others in between after one or two checkpoints; the first may be rewound by then."""
    trained = cases.engine(ds_config, 2, loss_fn=distance, specs=lambda: [LayerSpec(Times) for _ in range(4)])
    found = []
    for before, loads, rewound in ((1, 1, False), (2, 1, False), (3, 2, False), (2, 1, True)):
        old, other = Numbered(20), Numbered(30)
        losses = [float(trained.train_batch(old)) for _ in range(before)]
        for _ in range(loads):
            rest(trained, "save, load", folder)
        if rewound:
            old.position = 0
        losses += [float(trained.train_batch(iterator)) for iterator in (other, other, old, old)]
        found.append((before, loads, rewound, losses))
        trained.quiesce()
    return found


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_iterator_that_goes_on_after_a_load_and_other_data(
    worlds: Worlds, tmp_path: Path, micro_batches: int
) -> None:
    """What the first stage had read ahead of it is dropped, with its labels."""
    optimizer = {"type": "SGD", "params": {"lr": 0.0}}
    ds_config = cases.config(micro_batches, optimizer, {"partition": "uniform", "stage_to_depth_map": [1, 0]})
    for report in worlds.run(2, train_after_loads, ds_config, str(tmp_path)):
        for *case, losses in report:
            assert losses == [0] * len(losses), case


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
    worlds.run(1, evaluate_on_training_data, ds_config, 1)  # which is at one position, as with DeepSpeed
