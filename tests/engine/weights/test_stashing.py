"""The stashing optimizer: versions keyed by micro-batch around any optimizer that steps in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from ds_vpipe.engine.weights.stashing import WeightStashingOptimizer
from ds_vpipe.errors import VPipeError


class Silent(torch.optim.Optimizer):
    """Updates as FusedAdam does: in place and without telling autograd."""

    def __init__(self, parameters: list[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> str:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.data.sub_(group["lr"] * parameter.grad)
        return f"stepped with {closure}"


class Adder:
    """Adds one to every weight; the simplest optimizer that steps in place."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.data.add_(1)


def counting(*, stash: bool = True) -> tuple[nn.Parameter, WeightStashingOptimizer]:
    """A weight that equals the number of its updates."""
    weight = nn.Parameter(torch.zeros(()))
    return weight, WeightStashingOptimizer(Adder([weight]), [weight], stash=stash)


def forward(weight: nn.Parameter, optimizer: WeightStashingOptimizer, micro_batch: int, version: Any = None) -> float:
    with optimizer.forward(micro_batch, version):
        return float(weight.detach())


def test_versions_are_keyed_by_micro_batch() -> None:
    weight, optimizer = counting()
    for micro_batch in range(4):
        assert forward(weight, optimizer, micro_batch) == micro_batch
        assert optimizer.version_of(micro_batch) == micro_batch
        optimizer.step()
    assert (optimizer.latest_version, optimizer.versions.pointed, optimizer.num_versions) == (4, 4, 5)
    for micro_batch in (2, 0, 3, 1):  # in any order
        optimizer.load_old_params(micro_batch)
        assert float(weight.detach()) == optimizer.versions.pointed == micro_batch
        optimizer.load_new_params()
        assert float(weight.detach()) == optimizer.versions.pointed == 4
        optimizer.release(micro_batch)
    assert optimizer.num_versions == 1
    assert list(optimizer.versions.alive) == [4]


def test_a_version_lives_as_long_as_its_last_micro_batch() -> None:
    weight, optimizer = counting()
    for micro_batch in range(3):
        forward(weight, optimizer, micro_batch)
    optimizer.step()
    forward(weight, optimizer, 3)
    for micro_batch, alive in ((0, 2), (2, 2), (1, 1), (3, 1)):
        assert optimizer.num_versions == 2
        optimizer.release(micro_batch)
        assert optimizer.num_versions == alive
        if alive == 1:
            break
    assert optimizer.version_of(3) == 1


def test_no_fork_when_nothing_is_in_flight() -> None:
    weight, optimizer = counting()
    storage = weight.data_ptr()
    for micro_batch in range(3):
        forward(weight, optimizer, micro_batch)
        optimizer.release(micro_batch)
        optimizer.step()
        assert weight.data_ptr() == storage
        assert (optimizer.num_versions, optimizer.versions.allocated) == (1, 1)
    assert float(weight.detach()) == 3


def test_no_fork_when_only_older_versions_are_in_flight() -> None:
    weight, optimizer = counting()
    forward(weight, optimizer, 0)
    optimizer.step()
    storage = weight.data_ptr()
    optimizer.step()
    assert weight.data_ptr() == storage
    assert list(optimizer.versions.alive) == [0, 2]


def test_memory_is_bounded() -> None:
    weight, optimizer = counting()
    for micro_batch in range(40):
        forward(weight, optimizer, micro_batch)
        if micro_batch >= 3:
            optimizer.load_old_params(micro_batch - 3)
            assert float(weight.detach()) == max(0, micro_batch - 6)
            optimizer.release(micro_batch - 3)
            optimizer.step()
            assert optimizer.num_versions <= 4
            assert optimizer.versions.allocated <= 5


def test_weight_sync_none_sees_the_newest_weights() -> None:
    weight, optimizer = counting(stash=False)
    storage = weight.data_ptr()
    forward(weight, optimizer, 0)
    optimizer.step()
    optimizer.load_old_params(0)
    assert float(weight.detach()) == 1
    assert optimizer.versions.pointed == 1
    optimizer.release(0)
    assert weight.data_ptr() == storage
    assert (optimizer.latest_version, optimizer.num_versions) == (1, 1)


def test_keep_from_holds_versions_for_forward_passes_to_come() -> None:
    weight, optimizer = counting()
    optimizer.keep_from(0)
    for _ in range(3):
        optimizer.step()
    assert list(optimizer.versions.alive) == [0, 1, 2, 3]
    assert forward(weight, optimizer, 0, version=1) == 1
    assert optimizer.versions.pointed == 3
    optimizer.keep_from(2)
    assert list(optimizer.versions.alive) == [1, 2, 3]
    optimizer.load_old_params(0)
    assert float(weight.detach()) == 1
    optimizer.load_new_params()
    optimizer.release(0)
    assert list(optimizer.versions.alive) == [2, 3]


def test_changes_of_what_has_no_versions_are_still_counted() -> None:
    """An optimizer's hooks may change frozen weights and buffers that are in use."""
    weight, frozen = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    base = torch.optim.SGD([weight], lr=1.0)
    optimizer = WeightStashingOptimizer(base, [weight, frozen])
    base.register_step_post_hook(lambda *_: frozen.mul_(0))
    with optimizer.forward(0):
        loss = (weight * frozen).sum()
    with torch.no_grad():
        optimizer.step()
    optimizer.load_old_params(0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_optimizer_may_differentiate() -> None:
    """Also through changes of views in place, which autograd follows by its counters."""
    weight, optimizer = counting()

    def step() -> torch.Tensor:
        values = torch.ones(3, requires_grad=True)
        changed = values * 2
        changed[0] = 0
        changed.sum().backward()
        assert values.grad is not None
        return values.grad

    optimizer.base_optimizer.step = step  # type: ignore[method-assign]
    with optimizer.forward(0):
        assert weight == 0
    assert optimizer.step().tolist() == [0, 2, 2]


def test_weights_on_other_memory_get_versions_where_nothing_is_in_flight() -> None:
    weight, optimizer = counting()
    with optimizer.forward(0):
        pass
    optimizer.step()
    weight.data = torch.tensor(7.0)
    with pytest.raises(VPipeError, match=r"^p.data = values: got .* other memory while .* call engine.quiesce\(\)"):
        forward(weight, optimizer, 1)
    optimizer.release(0)
    assert forward(weight, optimizer, 1) == 7
    optimizer.step()
    assert float(weight.detach()) == 8
    optimizer.load_old_params(1)
    assert float(weight.detach()) == 7


def test_weights_that_exchange_their_memory_are_on_other_memory_too() -> None:
    """A layer that runs again in the backward pass would find the other one's values."""
    weights = [nn.Parameter(torch.tensor(value)) for value in (2.0, 3.0)]
    optimizer = WeightStashingOptimizer(Adder(weights), weights)
    with optimizer.forward(0):
        pass
    optimizer.step()
    weights[0].data = weights[0].data.view(())  # the same memory
    assert forward(weights[0], optimizer, 1) == 3
    optimizer.step()
    weights[0].data, weights[1].data = weights[1].data, weights[0].data
    with pytest.raises(VPipeError, match="other memory while"):
        forward(weights[0], optimizer, 2)


def test_step_passes_on_arguments_and_result() -> None:
    weight = nn.Parameter(torch.ones(2))
    base = Silent([weight], lr=1.0)
    assert WeightStashingOptimizer(base, [weight]).step("a closure") == "stepped with a closure"
    assert WeightStashingOptimizer(base, [weight]).base_optimizer is base


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    "AdamW foreach": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, foreach=True),
    "without a version bump": lambda parameters: Silent(parameters, lr=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_those_of_the_version_used(name: str) -> None:
    """Three micro-batches in flight over updates: each gradient is the one at the weights of its forward pass."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1))
    parameters = list(module.parameters())
    optimizer = WeightStashingOptimizer(OPTIMIZERS[name](parameters), parameters)
    losses: dict[int, torch.Tensor] = {}
    wanted: dict[int, list[torch.Tensor]] = {}
    for micro_batch in range(8):
        x = torch.randn(5, 3)
        weights = {n: p.detach().clone().requires_grad_() for n, p in module.named_parameters()}
        loss = torch.func.functional_call(module, weights, (x,)).square().sum()
        wanted[micro_batch] = list(torch.autograd.grad(loss, list(weights.values())))
        with optimizer.forward(micro_batch):
            losses[micro_batch] = module(x).square().sum()
        done = micro_batch - 2
        if done < 0:
            continue
        optimizer.load_old_params(done)
        losses.pop(done).backward()
        optimizer.load_new_params()
        optimizer.release(done)
        assert all(torch.equal(p.grad, w) for p, w in zip(parameters, wanted[done], strict=True)), done  # type: ignore[arg-type]
        optimizer.step()
        module.zero_grad()
    assert optimizer.latest_version == 6


def test_update_applies_an_old_gradient_to_the_newest_weights() -> None:
    weight = nn.Parameter(torch.tensor(10.0))
    optimizer = WeightStashingOptimizer(torch.optim.SGD([weight], lr=1.0), [weight])
    with optimizer.forward(0):
        loss = weight * 3
    weight.grad = torch.tensor(2.0)
    optimizer.step()
    weight.grad = None
    optimizer.load_old_params(0)
    loss.backward()
    optimizer.step()  # points to the newest weights by itself
    assert float(weight.detach()) == 10 - 2 - 3


def test_errors() -> None:
    _, optimizer = counting()
    with pytest.raises(KeyError):
        optimizer.load_old_params(0)
    with pytest.raises(KeyError):
        optimizer.release(0)
    with pytest.raises(KeyError):
        optimizer.version_of(0)
    optimizer.step()
    with pytest.raises(KeyError), optimizer.forward(0, version=0):
        pass
    assert optimizer.versions.pointed == 1


def test_a_failing_forward_pass_leaves_nothing_in_flight() -> None:
    _, optimizer = counting()
    optimizer.keep_from(0)
    optimizer.step()
    with pytest.raises(ZeroDivisionError), optimizer.forward(0, version=0):
        raise ZeroDivisionError
    assert optimizer.versions.pointed == 1
    with pytest.raises(KeyError):
        optimizer.version_of(0)


@pytest.mark.parametrize("updates", [0, 1])
def test_parameters_that_are_frozen_for_a_while(updates: int) -> None:
    """What is in flight by then has no gradients of them, whenever they were frozen."""
    weight, scale = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0))
    optimizer = WeightStashingOptimizer(Silent([weight, scale], 1.0), [weight, scale])
    for _ in range(updates):
        with optimizer.in_batch():
            optimizer.step()
    scale.requires_grad_(False)
    with optimizer.in_batch(), optimizer.forward(0):
        weight * scale
    scale.requires_grad_(True)
    with pytest.raises(VPipeError, match="parameters that were unfrozen while"), optimizer.in_batch():
        pass
    optimizer.release(0)
    with optimizer.in_batch(), optimizer.forward(1):
        pass


@pytest.mark.parametrize("restarted", [False, True])
def test_parameters_that_are_unfrozen_before_the_first_pass(restarted: bool) -> None:
    """By an optimizer that does not tell autograd."""
    weight, scale = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0), requires_grad=False)
    optimizer = WeightStashingOptimizer(Silent([weight, scale], 1.0), [weight, scale])
    if restarted:
        optimizer.restart(4)
    scale.requires_grad_(True)
    with optimizer.in_batch():
        with optimizer.forward(0):
            loss = weight * scale
        weight.grad, scale.grad = torch.tensor(0.0), torch.tensor(10.0)
        optimizer.step()
        optimizer.load_old_params(0)
        loss.backward()
    assert float(weight.grad) == 3, "the scale that the forward pass used"


def test_other_memory_where_only_backward_passes_are_left() -> None:
    weight, optimizer = counting()
    for _ in range(2):
        with optimizer.in_batch(), optimizer.forward("last"):
            pass
        optimizer.step()
    weight.data = weight.data * 2
    with pytest.raises(VPipeError, match="other memory while"), optimizer.in_batch():
        optimizer.load_old_params("last")
    optimizer.release("last")
    with optimizer.in_batch():
        pass


def test_unfrozen_parameters_have_versions_too() -> None:
    """Where nothing is in flight; an optimizer that does not tell autograd would change what is."""
    weight, scale = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor(3.0), requires_grad=False)
    optimizer = WeightStashingOptimizer(Silent([weight, scale], 1.0), [weight, scale], version=4)
    with optimizer.forward(0):
        (weight * scale).backward()
    scale.requires_grad_(True)
    with pytest.raises(VPipeError, match=r"unfrozen while .* call engine.quiesce\(\) before"), optimizer.forward(1):
        pass
    optimizer.release(0)
    with optimizer.forward(1):
        loss = weight * scale
    optimizer.step()
    weight.grad, scale.grad = torch.tensor(0.0), torch.tensor(10.0)
    optimizer.step()
    assert (optimizer.latest_version, float(scale.detach())) == (6, -7)
    optimizer.load_old_params(1)
    loss.backward()
    assert float(weight.grad) == 3, "the scale that the forward pass used"
    optimizer.release(1)
    assert optimizer.num_versions == 1


def test_layers_that_come_and_go() -> None:
    weight, optimizer = counting()
    optimizer.keep_from(0)
    optimizer.step()
    optimizer.check()
    come, bias = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2), requires_grad=False)
    layer = optimizer.add([come, bias], version=1)
    layer.used = True
    bias.requires_grad_(True)
    with pytest.raises(VPipeError, match="unfrozen while"):
        optimizer.check()
    bias.requires_grad_(False)
    optimizer.step()
    assert layer.versions.alive == (1, 2), "later forward passes use what the stage keeps"
    with optimizer.forward(0, version=1):
        assert optimizer.unshared(come).data_ptr() != come.data_ptr()
        assert optimizer.unshared(weight).data_ptr() != weight.data_ptr()
    optimizer.keep_from(2)
    assert (optimizer.versions.alive, layer.versions.alive) == ((1, 2), (1, 2))
    optimizer.release(0)
    assert (optimizer.versions.alive, layer.versions.alive) == ((2,), (2,))
    layer.used = False
    assert forward(weight, optimizer, 1) == 2
    optimizer.remove([come, bias])
    bias.requires_grad_(True)  # and is no longer the stage's
    assert forward(weight, optimizer, 2) == 2


@pytest.mark.parametrize("way", ["restart", "take_over"])
def test_one_version_that_is_left_is_the_newest(way: str) -> None:
    weight, optimizer = counting()
    optimizer.keep_from(0)
    optimizer.step()
    optimizer.versions.point_to(0)
    if way == "restart":
        optimizer.restart(7)
    else:
        optimizer.take_over(optimizer.base_optimizer, [weight])
    assert float(weight.detach()) == 1
    assert optimizer.versions.alive == ((7,) if way == "restart" else (1,))


def test_gradients_are_dropped_wherever_they_are() -> None:
    """In what the optimizer adds up by itself, and in weights that it does not have."""
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    base = torch.optim.SGD(weights[:1], lr=1.0)
    asked = mock.patch.object(base, "zero_grad", wraps=base.zero_grad)
    for weight in weights:
        weight.grad = torch.ones(2)
    with asked as zero_grad:
        WeightStashingOptimizer(base, weights).drop_gradients()
    zero_grad.assert_called_once()
    assert [weight.grad for weight in weights] == [None, None]
