"""NAdam's direction in an optimizer's steps, in one process: closed forms, and steps that must be no steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_vpipe.config.staleness import NAdam, Staleness
from ds_vpipe.engine.updates.optimizers import Lamb
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.staleness.nadam import NAdamStep, end_nadam, momentum, use_nadam


def settings_of(**methods: Any) -> Staleness:
    return Staleness.model_validate(methods)


def weight(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values))


def run(
    make: Callable[[Any], torch.optim.Optimizer],
    gradients: Sequence[Sequence[float]],
    delay: int,
    **methods: Any,
) -> tuple[list[torch.Tensor], torch.nn.Parameter]:
    """Weights after every update, the first being the initial ones."""
    parameter = weight(1.0, -2.0)
    optimizer = make([parameter])
    use_nadam(optimizer, settings_of(**methods), delay)
    weights = [parameter.detach().clone()]
    for gradient in gradients:
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
        weights.append(parameter.detach().clone())
    return weights, parameter


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def random_gradients(count: int) -> list[list[float]]:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(3)).tolist()


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum_decay", [0.004, 5.0])
def test_nadam_is_torchs(decay: float, momentum_decay: float) -> None:
    def nadam(parameters: Any) -> torch.optim.Optimizer:
        options = {"momentum_decay": momentum_decay, "weight_decay": decay, "decoupled_weight_decay": True}
        return torch.optim.NAdam(parameters, lr=0.01, betas=(0.99, 0.999), **options)

    gradients = random_gradients(200)
    wanted, *_ = run(nadam, gradients, 0)
    settings = True if momentum_decay == 0.004 else {"momentum_decay": momentum_decay}
    weights, *_ = run(lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=decay), gradients, 2, nadam=settings)
    for got, want in zip(weights, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_nadam_of_complex_weights_is_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(30, 4, dtype=torch.complex64, generator=generator)
    mine, its = (torch.nn.Parameter(values[0].clone()) for _ in range(2))
    step = NAdamStep(torch.optim.AdamW([mine], lr=0.01, weight_decay=0.1), NAdam())
    torchs = torch.optim.NAdam(
        [its], lr=0.01, betas=(0.99, 0.999), weight_decay=0.1, momentum_decay=0.004, decoupled_weight_decay=True
    )
    for value in values:
        mine.grad, its.grad = value.clone(), value.clone()
        step()
        torchs.step()
    torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


def test_nadam_around_lamb_mixes_before_the_trust_ratio() -> None:
    """LAMB's update has the length lr times the weight's norm, and NAdam's direction with decay."""
    gradients = random_gradients(5)
    rate, decay, eps, (beta1, beta2) = 0.01, 0.1, 1e-8, (0.9, 0.99)

    def lamb(parameters: Any) -> torch.optim.Optimizer:
        return Lamb(parameters, lr=rate, weight_decay=decay, eps=eps)

    weights, *_ = run(lamb, gradients, 2, nadam={"betas": [beta1, beta2]})
    mean, square, product = torch.zeros(2), torch.zeros(2), 1.0
    for t, (before, after) in enumerate(itertools.pairwise(weights), 1):
        gradient = torch.tensor(gradients[t - 1])
        mean, square = beta1 * mean + (1 - beta1) * gradient, beta2 * square + (1 - beta2) * gradient**2
        now, ahead = (beta1 * (1 - 0.5 * 0.96 ** (n * 0.004)) for n in (t, t + 1))
        product *= now
        mixed = (1 - now) / (1 - product) * gradient + ahead / (1 - product * ahead) * mean
        direction = mixed / ((square / (1 - beta2**t)).sqrt() + eps) + decay * before
        torch.testing.assert_close(before - after, rate * before.norm() / direction.norm() * direction)


@pytest.mark.parametrize("make", [adamw, lambda p: Lamb(p, lr=0.01)])
def test_no_delay_is_no_change(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    gradients = random_gradients(6)
    plain_parameter = weight(1.0, -2.0)
    plain = make([plain_parameter])
    for gradient in gradients:
        plain_parameter.grad = torch.tensor(gradient)
        plain.step()
    weights, parameter = run(make, gradients, 0, nadam=True)
    assert torch.equal(weights[-1], plain_parameter.detach())
    assert torch.equal(parameter, plain_parameter)


def test_state_goes_through_a_checkpoint_of_the_optimizer() -> None:
    gradients = random_gradients(8)
    wanted, *_ = run(adamw, gradients, 1, nadam=True)
    parameter = weight(1.0, -2.0)
    optimizer = adamw([parameter])
    use_nadam(optimizer, settings_of(nadam=True), 1)
    for number, gradient in enumerate(gradients):
        if number == 5:
            state = optimizer.state_dict()
            parameter = torch.nn.Parameter(parameter.detach().clone())
            optimizer = adamw([parameter])
            use_nadam(optimizer, settings_of(nadam=True), 1)
            optimizer.load_state_dict(state)
        parameter.grad = torch.tensor(gradient)
        optimizer.step()
    assert torch.equal(parameter.detach(), wanted[-1])


def test_schedulers_of_torch_step_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    parameter = weight(1.0)
    optimizer = adamw([parameter])
    use_nadam(optimizer, settings_of(nadam=True), 1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parameter.grad = torch.ones(1)
    optimizer.step()
    scheduler.step()
    assert parameter.item() != 1.0
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adamax, torch.optim.RAdam, torch.optim.RMSprop])
def test_nadam_needs_adams_moments(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    with pytest.raises(VPipeConfigError, match=r"^vpipe.staleness.nadam: got an optimizer of type \w+, allowed are"):
        use_nadam(optimizer([weight(1.0)], lr=0.1), settings_of(nadam=True), 1)


def test_nadam_refuses_what_it_has_no_form_for() -> None:
    for option in ("amsgrad", "maximize"):
        base: torch.optim.Optimizer = torch.optim.AdamW([weight(1.0)], **{option: True})
        with pytest.raises(VPipeConfigError, match=f"got an optimizer with {option} True, allowed is False"):
            use_nadam(base, settings_of(nadam=True), 1)
    base = Lamb([weight(1.0)], bias_correction=False)
    with pytest.raises(VPipeConfigError, match="got an optimizer with bias_correction False, allowed is True"):
        use_nadam(base, settings_of(nadam=True), 1)


@pytest.mark.parametrize("before", [0, 1, 50, 5000])
def test_a_parameter_that_is_trained_later_begins_anew(before: int) -> None:
    """It has the first steps of a group of its own, whatever the others of its group have had."""
    early, late, alone = weight(1.0), weight(1.0), weight(1.0)
    together, apart = adamw([early, late]), adamw([alone])
    for optimizer in (together, apart):
        use_nadam(optimizer, settings_of(nadam=True), 1)
    early.grad = torch.ones(1)
    for _ in range(before):
        together.step()
    for gradient in (0.5, -0.25, 2.0):
        late.grad = torch.full((1,), gradient)
        alone.grad = late.grad.clone()
        together.step()
        apart.step()
        assert torch.equal(late, alone)
    assert int(together.state[late]["step"]) == 3
    assert int(together.state[early]["step"]) == before + 3


@pytest.mark.parametrize("counted", [0, 2])
def test_updates_that_are_counted_in_one_parameter_are_those_of_all(counted: int) -> None:
    """As by DeepSpeed's FusedAdam, which marks its groups so; before that all may have been counted."""
    weights = weight(1.0), weight(1.0)
    optimizer = adamw(weights)
    use_nadam(optimizer, settings_of(nadam=True), 1)
    for number in range(5):
        if number == 4:
            optimizer.state[weights[0]]["step"] = torch.tensor(float(counted))
            optimizer.param_groups[0]["step"] = 0
        for parameter in weights:
            parameter.grad = torch.full((1,), 1.0 - number)
        optimizer.step()
    assert torch.equal(*weights)
    assert [int(optimizer.state[parameter]["step"]) for parameter in weights] == [5, 5]
    assert "step" not in optimizer.param_groups[0]  # each is counted from now on


def test_groups_with_other_counts_are_quick() -> None:
    """The product of all momenta does not begin anew in every update of a long run."""
    step = NAdamStep(torch.optim.AdamW([weight(1.0)]), NAdam())
    wanted = 1.0
    for number in range(1, 300):
        wanted *= momentum(0.99, 4e-3, number)
        assert 1 - step._momenta(number) == 1 - wanted
    assert 1 - step._momenta(10**9) == 1  # which would take minutes one by one


def test_hooks_of_steps_are_called() -> None:
    parameter, called = weight(1.0), list[str]()
    optimizer = adamw([parameter])
    use_nadam(optimizer, settings_of(nadam=True), 1)
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda *_: called.append(f"after {parameter.item() != 1}"))
    parameter.grad = torch.ones(1)
    optimizer.step()
    assert called == ["before", "after True"]


@pytest.mark.parametrize(("depth", "micro_batches", "delay"), [(0, 1, 0), (3, 1, 3), (3, 2, 2), (3, 4, 1), (8, 4, 2)])
def test_delay(depth: int, micro_batches: int, delay: int) -> None:
    pipeline = Pipeline("asp", 2, micro_batches, depth_map=(depth, 0))
    assert pipeline.delays == (delay, 0)
    assert replace(pipeline, weight_sync="vertical").delays == (delay, delay)
    assert Pipeline("1f1b", 2, micro_batches).delays == (0, 0)


@pytest.mark.parametrize("ends", ["by itself", "by another"])
def test_steps_are_the_optimizers_own_again(ends: str) -> None:
    """Of an optimizer of the script's, with which it goes on, or another engine."""
    parameter = weight(1.0)
    optimizer = torch.optim.AdamW([parameter], lr=0.125, weight_decay=0.0)
    use_nadam(optimizer, settings_of(nadam=True), 3)
    torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)  # which wraps the step
    for number in range(3):
        if number == 2:
            if ends == "by itself":
                end_nadam(optimizer)
            else:
                use_nadam(optimizer, settings_of(nadam=True), 0)
            optimizer.state.clear()
        before, parameter.grad = parameter.item(), torch.ones(1)
        optimizer.step()
    assert before - parameter.item() == pytest.approx(0.125), "Adam's first step"
    end_nadam(None)
