"""The replay of the library equals the engine, and the tests' own replay, which shares no code with it."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import cases
import pytest
import reference
import torch
import toy
from test_exactness import LAYERS, difference
from test_staleness_engine import DEPTHS, METHODS, OPTIMIZERS, STAGES
from torch import nn
from worlds import Worlds

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.lr_policies import LRPolicy
from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.one_f_one_b import default_depths
from ds_vpipe.staleness.replay import Replay

BATCHES = 12


def weights_of(run: Replay) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in run.layers.named_parameters()}


def replayed(
    partition: list[int], micro_batches: int, optimizer: str, batches: int = BATCHES, **options: Any
) -> tuple[dict[str, torch.Tensor], list[float], Replay]:
    layers = toy.built_layers()
    run = Replay(layers, partition, micro_batches, OPTIMIZERS[optimizer][1], nn.CrossEntropyLoss(), **options)
    data = toy.data()
    losses = [run.train_batch(data) for _ in range(batches)]
    return weights_of(run), losses, run


@pytest.mark.parametrize("micro_batches", [1, 3, 4])
@pytest.mark.parametrize("stages", [1, 2, 4, 10])
@pytest.mark.parametrize("sync", ["stash", "vertical", "none"])
def test_versions_are_those_of_the_design(stages: int, micro_batches: int, sync: str) -> None:
    partition, sgd = uniform_partition(LAYERS, stages), OPTIMIZERS["SGD"][1]
    depths = tuple(2 * depth for depth in default_depths(stages))
    got, losses, _ = replayed(list(partition), micro_batches, "SGD", depths=depths, weight_sync=sync)
    options = {"vertical": sync == "vertical", "stash": sync != "none"}
    wanted, expected = reference.replay(partition, depths, micro_batches, BATCHES, sgd, **options)
    assert difference(got, wanted) == 0
    assert losses == pytest.approx(expected, rel=1e-6)


def test_gradient_without_a_stash_is_that_of_its_formula() -> None:
    """Of y = x A, z = tanh(y B), by hand: late inputs times gradients that newest weights have brought back.

    Three stages; A is used two updates late in forward passes, B one.
    """
    rate, updates = 0.5, 5
    data = [(torch.randn(3, 4, generator=torch.Generator().manual_seed(n)), torch.tensor([0, 1, 1])) for n in range(9)]
    layers = [toy.seeded(n, lambda: nn.Linear(4, 4, bias=False)) for n in range(2)]
    layers.append(toy.seeded(3, lambda: nn.Linear(4, 2, bias=False)))
    a, b, c = ([layer.weight.detach().T.clone()] for layer in layers)
    parts = [layers[0], nn.Sequential(layers[1], nn.Tanh()), layers[2]]
    run = Replay(parts, [1, 1, 1], 1, lambda p: torch.optim.SGD(p, lr=rate), nn.CrossEntropyLoss(), weight_sync="none")
    for t in range(updates):
        run.train_batch(iter(data[t : t + 1]))
        x, labels = data[t]
        y = x @ a[max(0, t - 2)]
        z = torch.tanh(y @ b[max(0, t - 1)])
        g = (torch.softmax(z @ c[t], 1) - nn.functional.one_hot(labels, 2)) / 3
        of_tanh = g @ c[t].T * (1 - z * z)
        c.append(c[t] - rate * z.T @ g)
        b.append(b[t] - rate * y.T @ of_tanh)
        a.append(a[t] - rate * x.T @ (of_tanh @ b[t].T))  # not b[t - 1], with which z was computed
    for layer, weights in zip(layers, (a, b, c), strict=True):
        torch.testing.assert_close(layer.weight.detach(), weights[-1].T)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_mitigations_are_those_of_the_tests_replay(method: str, micro_batches: int) -> None:
    optimizer, settings = METHODS[method]
    partition = uniform_partition(LAYERS, STAGES)
    make = OPTIMIZERS[optimizer][1]
    got, *_ = replayed(list(partition), micro_batches, optimizer, staleness=settings, clip=0.3)
    wanted, _ = reference.replay(partition, DEPTHS, micro_batches, BATCHES, make, staleness=settings, clip=0.3)
    assert difference(got, wanted) <= 1e-4


@pytest.mark.mp
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_equal_to_the_engine(worlds: Worlds, micro_batches: int) -> None:
    """Bit for bit, with every mitigation, a learning-rate policy and clipping."""
    policy = {"total_num_steps": 40, "warmup_num_steps": 4}
    scheduler = {"type": "CosineWarmupLR", "params": policy}
    runs = [(name, clip) for name in METHODS for clip in (0.0, 0.3)]
    configs = []
    for name, clip in runs:
        optimizer, settings = METHODS[name]
        block = {"partition": "uniform", "staleness": settings}
        extra = {"gradient_clipping": clip, "scheduler": scheduler}
        configs.append(cases.config(micro_batches, OPTIMIZERS[optimizer][0], block, **extra))
    ranks = worlds.run(STAGES, cases.train_each, configs, STAGES, BATCHES)
    partition = list(uniform_partition(LAYERS, STAGES))
    for position, (name, clip) in enumerate(runs):
        optimizer, settings = METHODS[name]
        options: dict[str, Any] = {"staleness": settings, "clip": clip}
        factor = LRPolicy("CosineWarmupLR", **policy).factor
        got, losses, _ = replayed(partition, micro_batches, optimizer, factor=factor, **options)
        reports = [rank[position] for rank in ranks]
        assert difference(got, cases.merged(reports)) == 0, f"{name}, clip {clip}"
        assert reports[0]["losses"] == pytest.approx(losses, rel=1e-6)


def test_one_stage_is_plain_training() -> None:
    layers = toy.built_layers()
    optimizer = torch.optim.SGD([p for layer in layers for p in layer.parameters()], lr=0.1)
    for index in range(6):
        value, labels = toy.micro_batch(index)
        for layer in layers:
            value = layer(value)
        (nn.functional.cross_entropy(value, labels) / 2).backward()
        if index % 2:
            optimizer.step()
            optimizer.zero_grad()
    got, *_ = replayed([LAYERS], 2, "SGD", 3, staleness={"synchronous_updates": 9})
    assert difference(got, {n: p.detach() for n, p in nn.ModuleList(layers).named_parameters()}) == 0


@pytest.mark.parametrize("sync", ["stash", "none"])
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_stage_may_have_nothing_to_train(sync: Any, optimizer: str) -> None:
    first, *others, last = toy.built_layers()

    def trained(partition: list[int], depths: tuple[int, ...]) -> dict[str, torch.Tensor]:
        layers = copy.deepcopy([first, *others[:2], nn.Tanh(), nn.Identity(), *others[2:], last])
        make, nadam = OPTIMIZERS[optimizer][1], {"nadam": optimizer != "SGD"}
        options: dict[str, Any] = {"depths": depths, "weight_sync": sync, "clip": 0.3, "staleness": nadam}
        run = Replay(layers, partition, 2, make, nn.CrossEntropyLoss(), **options)
        data = toy.data()
        for _ in range(4):
            run.train_batch(data)
        return weights_of(run)

    count = len(others) - 2 + 1
    assert difference(trained([3, 2, count], (4, 2, 0)), trained([3, 2 + count], (4, 0))) == 0


def test_memory_and_evaluation() -> None:
    """A stage keeps its delay + 1 versions, the last stage one, and evaluation sees the newest weights."""
    *_, run = replayed([3, 3, 4], 1, "SGD")
    assert [len(stage._versions) for stage in run.stages] == [3, 2, 1]
    run.layers.train()
    before = weights_of(run)
    run.stages[0].point_to(run.batches - 2)
    assert difference(before, weights_of(run)) > 0
    run.layers[2].norm.eval()
    modes = [part.training for part in run.layers.modules()]
    loss = run.evaluate(toy.data(2))
    assert [part.training for part in run.layers.modules()] == modes
    assert difference(before, weights_of(run)) == 0
    assert all(layer.training for layer in run.layers)
    value, labels = zip(*toy.data(2), strict=True)
    plain = [nn.functional.cross_entropy(run._forward(v), y).item() for v, y in zip(value, labels, strict=True)]
    assert loss == pytest.approx(sum(plain) / 2)


def test_data_that_end_inside_a_batch_train_nothing() -> None:
    layers = toy.built_layers()
    run = Replay(layers, [5, 5], 2, OPTIMIZERS["SGD"][1], nn.CrossEntropyLoss())
    data = itertools.islice(toy.data(), 3)
    run.train_batch(data)
    before = weights_of(run)
    with pytest.raises(StopIteration):
        run.train_batch(data)
    assert difference(before, weights_of(run)) == 0
    assert run.batches == 1


def test_refusals() -> None:
    layers, sgd, loss = toy.built_layers(), OPTIMIZERS["SGD"][1], nn.CrossEntropyLoss()
    with pytest.raises(ValueError, match=r"partition: got \[5, 4\], allowed are counts > 0 that sum to the 10 layers"):
        Replay(layers, [5, 4], 1, sgd, loss)
    with pytest.raises(ValueError, match=r"depths: got \[1\], allowed is one of each of the 2 stages"):
        Replay(layers, [5, 5], 1, sgd, loss, depths=[1])
    with pytest.raises(ValueError, match="a weight that two stages share"):
        Replay([*layers[:9], layers[1]], [5, 5], 1, sgd, loss)
    with pytest.raises(VPipeConfigError, match="got an optimizer of type SGD"):
        Replay(layers, [3, 3, 4], 1, sgd, loss, staleness={"nadam": True})


def test_weights_without_a_gradient_are_updated_with_zeros() -> None:
    """As in the engine, whose reductions leave zeros: weight decay goes on."""
    layer = nn.Linear(2, 1)
    layer.unused = nn.Parameter(torch.ones(1))
    replay = Replay([layer], [1], 1, lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.5), lambda out, _: out.sum())
    replay.train_batch(iter([(torch.ones(1, 2), None)]))
    assert layer.unused.item() == pytest.approx(0.95)
