"""Mitigations of staleness around optimizers in one process: closed forms, and steps that must be no steps."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from ds_vpipe.config.staleness import NAdam, Staleness, refuse_delays
from ds_vpipe.engine.updates.optimizers import Lamb
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.staleness.delay_warmup import NO_WARMUP, DelayWarmup
from ds_vpipe.staleness.mitigation import PREVIOUS_CHANGE, StalenessMitigation, end_mitigation
from ds_vpipe.staleness.nadam import NAdamStep, momentum

LR = 0.125  # with gradients and weights that are small multiples of powers of two nothing is rounded


def settings_of(**methods: Any) -> Staleness:
    return Staleness.model_validate(methods)


def weight(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values))


def run(
    make: Callable[[Any], torch.optim.Optimizer],
    gradients: Sequence[Sequence[float]],
    delay: int,
    start: Sequence[float] = (1.0, -2.0),
    warmup: DelayWarmup = NO_WARMUP,
    **methods: Any,
) -> tuple[list[torch.Tensor], StalenessMitigation, torch.nn.Parameter]:
    """Weights after every update, the first being the initial ones."""
    parameter = weight(*start)
    optimizer = make([parameter])
    mitigation = StalenessMitigation(optimizer, settings_of(**methods), delay, warmup)
    weights = [parameter.detach().clone()]
    for number, gradient in enumerate(gradients):
        parameter.grad = torch.tensor(gradient)
        mitigation.updates = number
        optimizer.step()
        weights.append(parameter.detach().clone())
    return weights, mitigation, parameter


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LR)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)


def random_gradients(count: int) -> list[list[float]]:
    return torch.randn(count, 2, generator=torch.Generator().manual_seed(3)).tolist()


def test_feedback_telescopes_on_a_linear_loss() -> None:
    """The gradients of a linear loss do not depend on the weights, so u_t is -lr times the t-th."""
    gradients = [(1.0, 0.5), (-2.0, 0.25), (0.5, 4.0), (3.0, -1.0)]
    weights, *_ = run(sgd, gradients, 1, error_feedback=True)
    changes = [-LR * torch.tensor(gradient) for gradient in gradients]
    assert torch.equal(weights[-1], weights[0] + torch.stack(changes).sum(0) + changes[-1] - changes[0])
    halved, *_ = run(sgd, gradients, 1, error_feedback={"scale": 0.5})
    assert torch.equal(halved[-1], weights[0] + torch.stack(changes).sum(0) + (changes[-1] - changes[0]) / 2)


def test_feedback_makes_up_for_one_update_where_gradients_change_evenly() -> None:
    """Gradients a + t b, one update late, and corrected: from the second on those without delay."""
    late = [(float(max(t - 1, 0)), 1.0) for t in range(1, 8)]
    fresh = [(float(t), 1.0) for t in range(1, 8)]
    mended, *_ = run(sgd, late, 1, error_feedback=True)
    wanted, *_ = run(sgd, fresh, 0)
    assert torch.equal(mended[-1] - mended[1], wanted[-1] - wanted[1])


def test_methods_where_the_pipeline_drains() -> None:
    """Intervals of 1, 2, 3 and 4 updates with D = 3, then one without end."""
    methods = {"synchronous_updates": 1, "delay_warmup_updates": 6}
    warmup = DelayWarmup.of(settings_of(**methods), 3)
    gradients = [(1.0 + n, -2.0) for n in range(12)]
    plain, *_ = run(sgd, gradients, 3)
    fed, *_ = run(sgd, gradients, 3, warmup=warmup, error_feedback=True, **methods)
    extra = torch.stack(fed).diff(dim=0) - torch.stack(plain).diff(dim=0)
    assert [bool(row.any()) for row in extra] == [n not in (0, 1, 3, 6, 10) for n in range(12)]
    rescheduled, *_ = run(sgd, gradients, 3, warmup=warmup, lr_rescheduling={"num_steps": 10**9}, **methods)
    share = (torch.stack(rescheduled).diff(dim=0) / torch.stack(plain).diff(dim=0))[:, 0].tolist()
    assert share == pytest.approx([1, 1, 1, 1 / 2, 1 / 2, 1 / 2, *[1 / 3] * 6], rel=1e-5)


@pytest.mark.parametrize("delay", [1, 2, 5])
def test_rescheduled_rates(delay: int) -> None:
    steps = 4
    weights, *_ = run(sgd, [(1.0, 1.0)] * 6, delay, lr_rescheduling={"num_steps": steps})
    for t, (before, after) in enumerate(itertools.pairwise(weights)):
        rate = LR / delay ** (1 - min(t / steps, 1))
        torch.testing.assert_close(before - after, torch.full((2,), rate))
    plain, *_ = run(sgd, [(1.0, 1.0)] * 6, delay)
    assert all(torch.equal(a, b) for a, b in zip(plain, weights, strict=True)) == (delay == 1)


def test_the_optimizer_keeps_its_learning_rate() -> None:
    *_, parameter = run(sgd, [(1.0, 1.0)], 4, lr_rescheduling={"num_steps": 4})
    optimizer = sgd([parameter])
    StalenessMitigation(optimizer, settings_of(lr_rescheduling={"num_steps": 4}), 4)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == LR


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


EVERYTHING = {"nadam": True, "lr_rescheduling": {"num_steps": 10}}


@pytest.mark.parametrize("make", [adamw, lambda p: Lamb(p, lr=0.01)])
@pytest.mark.parametrize("methods", [EVERYTHING, {"error_feedback": True}])
def test_no_delay_is_no_change(make: Callable[[Any], torch.optim.Optimizer], methods: dict[str, Any]) -> None:
    gradients = random_gradients(6)
    plain_parameter = weight(1.0, -2.0)
    plain = make([plain_parameter])
    for gradient in gradients:
        plain_parameter.grad = torch.tensor(gradient)
        plain.step()
    weights, _, parameter = run(make, gradients, 0, **methods)
    assert torch.equal(weights[-1], plain_parameter.detach())
    assert torch.equal(parameter, plain_parameter)


def test_feedback_of_scale_zero_is_no_change() -> None:
    gradients = random_gradients(6)
    wanted, *_ = run(adamw, gradients, 0)
    weights, *_ = run(adamw, gradients, 1, error_feedback={"scale": 0.0})
    assert all(torch.equal(got, want) for got, want in zip(weights, wanted, strict=True))


def test_state_goes_through_a_checkpoint_of_the_optimizer() -> None:
    methods: dict[str, Any] = {"nadam": True, "error_feedback": True}
    gradients = random_gradients(8)
    wanted, *_ = run(adamw, gradients, 1, **methods)

    def optimizer_of(parameter: torch.nn.Parameter) -> tuple[torch.optim.Optimizer, StalenessMitigation]:
        optimizer = adamw([parameter])
        return optimizer, StalenessMitigation(optimizer, settings_of(**methods), 1)

    parameter = weight(1.0, -2.0)
    optimizer, mitigation = optimizer_of(parameter)
    for number, gradient in enumerate(gradients):
        if number == 5:
            state = optimizer.state_dict()
            parameter = torch.nn.Parameter(parameter.detach().clone())
            optimizer, mitigation = optimizer_of(parameter)
            optimizer.load_state_dict(state)
            assert PREVIOUS_CHANGE in optimizer.state[parameter]
        parameter.grad = torch.tensor(gradient)
        mitigation.updates = number
        optimizer.step()
    assert torch.equal(parameter.detach(), wanted[-1])


def test_schedulers_of_torch_step_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    parameter = weight(1.0)
    optimizer = adamw([parameter])
    StalenessMitigation(optimizer, settings_of(nadam=True), 1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    parameter.grad = torch.ones(1)
    optimizer.step()
    scheduler.step()
    assert parameter.item() != 1.0
    assert [str(warning.message) for warning in recwarn] == []


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adamax, torch.optim.RAdam, torch.optim.RMSprop])
def test_nadam_needs_adams_moments(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    with pytest.raises(VPipeConfigError, match=r"^vpipe.staleness.nadam: got an optimizer of type \w+, allowed are"):
        StalenessMitigation(optimizer([weight(1.0)], lr=0.1), settings_of(nadam=True), 1)


def test_nadam_refuses_what_it_has_no_form_for() -> None:
    for option in ("amsgrad", "maximize"):
        base: torch.optim.Optimizer = torch.optim.AdamW([weight(1.0)], **{option: True})
        with pytest.raises(VPipeConfigError, match=f"got an optimizer with {option} True, allowed is False"):
            StalenessMitigation(base, settings_of(nadam=True), 1)
    base = Lamb([weight(1.0)], bias_correction=False)
    with pytest.raises(VPipeConfigError, match="got an optimizer with bias_correction False, allowed is True"):
        StalenessMitigation(base, settings_of(nadam=True), 1)


@pytest.mark.parametrize("before", [0, 1, 50, 5000])
def test_a_parameter_that_is_trained_later_begins_anew(before: int) -> None:
    """It has the first steps of a group of its own, whatever the others of its group have had."""
    early, late, alone = weight(1.0), weight(1.0), weight(1.0)
    together, apart = adamw([early, late]), adamw([alone])
    for optimizer in (together, apart):
        StalenessMitigation(optimizer, settings_of(nadam=True), 1)
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
    StalenessMitigation(optimizer, settings_of(nadam=True), 1)
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


def test_feedback_is_for_one_update() -> None:
    refuse_delays(settings_of(error_feedback=True), [1, 1, 0])
    refuse_delays(settings_of(nadam=True), [9, 0])
    refuse_delays(None, [9, 0])
    with pytest.raises(VPipeConfigError, match=r"stage 1 is 2 updates behind, .* gradient_accumulation_steps"):
        refuse_delays(settings_of(error_feedback=True), [1, 2, 0])


@pytest.mark.parametrize("ends", ["by itself", "by another"])
@pytest.mark.parametrize("methods", [{"error_feedback": True}, {"lr_rescheduling": {"num_steps": 9}}])
def test_steps_are_the_optimizers_own_again(ends: str, methods: dict[str, Any]) -> None:
    """Of an optimizer of the script's, with which it goes on, or another engine."""
    parameter = weight(1.0)
    optimizer = sgd([parameter])
    StalenessMitigation(optimizer, settings_of(**methods), 3)
    torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)  # which wraps the step
    for number in range(3):
        if number == 2:
            if ends == "by itself":
                end_mitigation(optimizer)
            else:
                StalenessMitigation(optimizer, settings_of(**methods), 0)
        before, parameter.grad = parameter.item(), torch.full((1,), 1.0 + number)
        optimizer.step()
    assert before - parameter.item() == 3 * LR


def test_error_feedback_is_applied_once_by_the_latest_mitigation() -> None:
    parameter = weight(1.0)
    optimizer = sgd([parameter])
    for _ in range(2):
        mitigation = StalenessMitigation(optimizer, settings_of(error_feedback=True), 1)
    for number, gradient in enumerate([1.0, 2.0]):
        mitigation.updates = number
        before, parameter.grad = parameter.item(), torch.full((1,), gradient)
        optimizer.step()
    assert before - parameter.item() == (2 * 2.0 - 1.0) * LR
    end_mitigation(None)
