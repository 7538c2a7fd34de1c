"""Iterators that refill their buffers, and ranks that have none: what is trained is what was read."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import loops
import pytest
import torch
import toy
from test_exactness import OPTIMIZERS, difference
from torch import nn
from worlds import Worlds

pytestmark = pytest.mark.mp

SGD = OPTIMIZERS["SGD"][0]


class Shift(nn.Module):
    """A first layer that may work in place on its input."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return (tokens if self.in_place else tokens.clone()).add_(1).remainder_(toy.VOCABULARY)


def shifted_specs(in_place: bool) -> list[Any]:
    from deepspeed.pipe import LayerSpec

    return [LayerSpec(Shift, in_place), *toy.layer_specs()]


def loss_of(outputs: torch.Tensor, labels: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs, labels["labels"])


def data(refills: bool, stop: int | None = None) -> Iterator[Any]:
    """Micro-batches with labels in a dict, all of them in the same two tensors if it ``refills`` them."""
    buffers = [torch.empty_like(part) for part in toy.micro_batch(0)]
    for parts in toy.data(stop):
        tokens, labels = [b.copy_(p) for b, p in zip(buffers, parts, strict=True)] if refills else parts
        yield tokens, {"labels": labels}


def train(block: dict[str, Any], micro_batches: int, refills: bool, rest_after: int = -1) -> tuple[Any, ...]:
    ds_config = cases.config(micro_batches, SGD, {"partition": "uniform", **block})
    specs = functools.partial(shifted_specs, in_place=refills)  # of what is admitted once more, too
    engine, iterator, losses = cases.engine(ds_config, 2, loss_fn=loss_of, specs=specs), data(refills), []
    for number in range(6):
        losses.append(float(engine.train_batch(iterator)))
        if number == rest_after:
            engine.quiesce()  # as every save does
    losses.append(float(engine.eval_batch(data(refills), num_micro_batches=3)))
    found = losses, cases.parameters(engine)
    cases.end(engine)
    return found


def loop(refills: bool) -> tuple[Any, ...]:
    engine = loops.engine(cases.config(1, SGD, {"partition": "uniform", "stage_to_depth_map": [3, 0]}), 2)
    losses = []
    for tokens, labels in data(refills, 6):
        loss = engine(tokens, labels["labels"])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.drain()
    found = losses, loops.parameters(engine)
    cases.end(engine)
    return found


def both_ways() -> dict[str, list[Any]]:
    deep = {"stage_to_depth_map": [3, 0]}
    ways = {
        "asp": functools.partial(train, deep, 1),
        "asp, a save": functools.partial(train, deep, 1, rest_after=2),
        "gpipe": functools.partial(train, {"sync_mode": "bsp", "schedule": "gpipe"}, 4),
        "interleaved": functools.partial(
            train, {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}, 4
        ),
        "loop": loop,
    }
    return {name: [way(refills=refills) for refills in (False, True)] for name, way in ways.items()}


def test_refilled_buffers_are_fresh_tensors(worlds: Worlds) -> None:
    for report in worlds.run(2, both_ways):
        for name, (fresh, refilled) in report.items():
            assert fresh[0] == refilled[0], name
            assert difference(fresh[1], refilled[1]) == 0, name


def slice_data(grid: Any, stop: int | None) -> tuple[Iterator[Any] | None, Any]:
    """Rank 0 of a tensor slice reads; ``batch_fn`` hands it to the others, whose iterator is None."""
    root = min(grid.slice_group)

    def batch_fn(item: Any) -> Any:
        tokens, labels = toy.micro_batch(0) if item is None else item
        for tensor in (tokens, labels):
            torch.distributed.broadcast(tensor, root, group=grid.slice_proc_group)
        return tokens, labels

    return (toy.data(stop) if grid.get_slice_parallel_rank() == 0 else None), batch_fn


def train_slices(block: dict[str, Any], broadcast: bool) -> tuple[Any, ...]:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    engine = cases.engine(cases.config(2, SGD, {"partition": "uniform", **block}), None, topology=topology)
    iterator, batch_fn = slice_data(engine.grid, 9) if broadcast else (toy.data(9), None)
    if batch_fn is not None:
        engine.set_batch_fn(batch_fn)
    losses = []
    for _ in range(3):
        losses.append(float(engine.train_batch(iterator)))
    losses.append(float(engine.eval_batch(slice_data(engine.grid, 4)[0] if broadcast else toy.data(4))))
    losses.append(float(engine.train_batch(iterator)))
    with pytest.raises(StopIteration):  # a micro-batch is left over
        engine.train_batch(iterator)
    with pytest.raises(StopIteration):
        engine.eval_batch(slice_data(engine.grid, 1)[0] if broadcast else toy.data(1))
    found = losses, cases.parameters(engine)
    cases.end(engine)
    return found


def load_and_go_on(folder: str, broadcast: bool, same: bool) -> tuple[Any, ...]:
    """A slice that loads a checkpoint with micro-batches read ahead, and goes on with other data or the same."""
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

    topology = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=1)
    engine = cases.engine(cases.config(2, SGD, {"partition": "uniform", "peer_timeout_s": 60}), None, topology=topology)
    iterator, batch_fn = slice_data(engine.grid, 40) if broadcast else (toy.data(40), None)
    if batch_fn is not None:
        engine.set_batch_fn(batch_fn)
    losses = [float(engine.train_batch(iterator)) for _ in range(2)]
    engine.save_checkpoint(folder)
    losses.append(float(engine.train_batch(iterator)))
    engine.load_checkpoint(folder)
    if not same:
        iterator = slice_data(engine.grid, 30)[0] if broadcast else toy.data(30)
    losses += [float(engine.train_batch(iterator)) for _ in range(2)]
    found = losses, cases.parameters(engine)
    cases.end(engine)
    return found


def loaded_both_ways(folder: str) -> list[list[Any]]:
    return [[load_and_go_on(f"{folder}/{n}{same}", n == 1, same) for n in range(2)] for same in (True, False)]


def test_a_tensor_slice_goes_on_with_other_data_after_a_load(worlds: Worlds, tmp_path: Path) -> None:
    """Ranks without an iterator drop what had been read ahead if the rank that reads does."""
    for report in worlds.run(4, loaded_both_ways, str(tmp_path)):
        for each, one in report:
            assert each[0] == one[0]
            assert difference(each[1], one[1]) == 0


def slices_both_ways() -> list[list[Any]]:
    interleaved = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}
    return [[train_slices(block, broadcast) for broadcast in (False, True)] for block in ({}, interleaved)]


def test_one_rank_of_a_tensor_slice_reads(worlds: Worlds) -> None:
    """Training, evaluation and the end of the data, with None for an iterator on the slice's other ranks."""
    for report in worlds.run(4, slices_both_ways):
        for each, one in report:
            assert each[0] == one[0]
            assert difference(each[1], one[1]) == 0


class Force(nn.Module):
    """A layer that asks for a gradient of what it has received, as force fields do."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = toy.seeded(seed, lambda: nn.Linear(toy.HIDDEN, toy.HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        energy = torch.tanh(self.linear(x)).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x.detach() + force


def with_forces() -> list[nn.Module]:
    """Layers of which the first half is frozen, so that nothing needs a gradient where the second begins."""
    layers = [toy.Embed(100), Force(110), Force(120), toy.Pool(130)]
    layers[0].requires_grad_(False)
    return layers


def train_forces(block: dict[str, Any], number: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    config = cases.config(1, SGD, {"partition": [1, 3], **block})
    engine, iterator = cases.engine(config, 2, specs=with_forces), toy.data()
    found = [float(engine.train_batch(iterator)) for _ in range(number)], cases.parameters(engine)
    cases.end(engine)
    return found


@pytest.mark.parametrize("block", [{}, {"recompute_ratio": 1}, {"sync_mode": "bsp"}])
def test_layers_may_ask_for_gradients_of_what_they_receive(worlds: Worlds, block: dict[str, Any]) -> None:
    """The stage before hears nothing of them. The last stage's gradients are in time."""
    layers = nn.Sequential(*with_forces())
    optimizer = OPTIMIZERS["SGD"][1]([p for p in layers.parameters() if p.requires_grad])
    losses = []
    for number in range(5):
        tokens, labels = toy.micro_batch(number)
        loss = nn.functional.cross_entropy(layers(tokens), labels)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = dict(layers.named_parameters())
    for found, parameters in worlds.run(2, train_forces, block, 5):
        assert found == pytest.approx(losses, rel=1e-6)
        assert difference(parameters, {name: weights[name].detach() for name in parameters}) < 1e-6
