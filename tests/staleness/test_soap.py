"""SOAP against its formulas, written down again in numpy."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch

from ds_vpipe.staleness.soap import SOAP

SHAPES = [(3, 4), (5,), (2, 2, 2), ()]
STEPS = 9


def start(shapes: Any = SHAPES) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in shapes]


def train(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 3
        optimizer.step()


def by_formula(weight: Any, gradients: list[Any], lr: float, decay: float, every: int, sides: tuple[bool, bool]) -> Any:
    """A matrix after updates with ``gradients``: Adam's moments rotated, NAdam's mix of gradient and mean."""
    beta1, beta2, beta = 0.99, 0.999, 0.95
    mu = [0.0, *(beta1 * (1 - 0.5 * 0.96 ** (0.004 * t)) for t in range(1, len(gradients) + 2))]
    left, right = np.zeros((weight.shape[0],) * 2), np.zeros((weight.shape[1],) * 2)
    u, v = np.eye(len(left)), np.eye(len(right))
    mean, square = np.zeros_like(weight), np.zeros_like(weight)
    for t, g in enumerate(gradients, 1):
        left, right = beta * left + (1 - beta) * g @ g.T, beta * right + (1 - beta) * g.T @ g
        if t == 1:
            u = np.linalg.eigh(left)[1][:, ::-1] if sides[0] else u
            v = np.linalg.eigh(right)[1][:, ::-1] if sides[1] else v
        elif t % every == 0:
            u = np.linalg.qr(left @ u)[0] if sides[0] else u
            v = np.linalg.qr(right @ v)[0] if sides[1] else v
        mean = beta1 * mean + (1 - beta1) * g
        square = beta2 * square + (1 - beta2) * (u.T @ g @ v) ** 2
        mixed = (1 - mu[t]) * g / (1 - np.prod(mu[1 : t + 1])) + mu[t + 1] * mean / (1 - np.prod(mu[1 : t + 2]))
        step = (u.T @ mixed @ v) / (np.sqrt(square / (1 - beta2**t)) + 1e-8)
        weight = weight * (1 - lr * decay) - lr * u @ step @ v.T
    return weight


@pytest.mark.parametrize(("largest", "sides"), [(10000, (True, True)), (3, (True, False)), (2, (False, False))])
@pytest.mark.parametrize("every", [1, 4])
def test_a_matrix_by_formula(every: int, largest: int, sides: tuple[bool, bool]) -> None:
    parameters = start([(3, 4)])
    weight, gradients = parameters[0].detach().numpy().copy(), []
    optimizer = SOAP(parameters, lr=0.1, weight_decay=0.2, precondition_frequency=every, max_precond_dim=largest)
    for step in range(STEPS):
        train(optimizer, parameters, range(step, step + 1))
        gradients.append(parameters[0].grad.numpy().copy())  # type: ignore[union-attr]
    wanted = by_formula(weight, gradients, 0.1, 0.2, every, sides)
    np.testing.assert_allclose(parameters[0].detach().numpy(), wanted, rtol=1e-4, atol=1e-6)


def test_what_is_no_matrix_is_trained_by_nadam() -> None:
    shapes = SHAPES[1:]
    options = {"lr": 0.1, "betas": (0.99, 0.999), "weight_decay": 0.2}
    ours, torchs = start(shapes), start(shapes)
    train(SOAP(ours, **options), ours, range(STEPS))  # type: ignore[arg-type]
    train(torch.optim.NAdam(torchs, decoupled_weight_decay=True, **options), torchs, range(STEPS))  # type: ignore[arg-type]
    for got, wanted in zip(ours, torchs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-8)


def test_the_path_does_not_depend_on_the_axes() -> None:
    """In a rotated problem the same weights are found, rotated, which is the point; Adam's path is another one."""
    turn = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))).Q
    scales = torch.tensor([1.0, 10.0, 100.0, 1000.0], dtype=torch.float64)

    def path(rotation: torch.Tensor, make: Any) -> torch.Tensor:
        weight = torch.nn.Parameter(rotation @ start([(4, 4)])[0].detach())
        optimizer = make([weight])
        for _ in range(30):
            optimizer.zero_grad()
            (scales.unsqueeze(1) * (rotation.T @ weight) ** 2).sum().backward()
            optimizer.step()
        return rotation.T @ weight.detach()

    def soap(parameters: Any) -> torch.optim.Optimizer:
        return SOAP(parameters, lr=0.01, precondition_frequency=1)

    def adam(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=0.01)

    axes = torch.eye(4, dtype=torch.float64)
    torch.testing.assert_close(path(turn, soap), path(axes, soap), rtol=1e-3, atol=1e-4)
    assert (path(turn, adam) - path(axes, adam)).abs().max() > 1e-2


def test_going_on_from_a_saved_state_is_the_same_training() -> None:
    straight, resumed = start(), start()
    options = {"lr": 0.1, "precondition_frequency": 2}
    train(SOAP(straight, **options), straight, range(STEPS))  # type: ignore[arg-type]
    first = SOAP(resumed, **options)  # type: ignore[arg-type]
    train(first, resumed, range(5))
    second = SOAP(resumed, lr=99.0)
    second.load_state_dict(first.state_dict())
    train(second, resumed, range(5, STEPS))
    assert all(torch.equal(one, other) for one, other in zip(straight, resumed, strict=True))


def test_a_copy_trains_as_the_optimizer_itself_and_so_does_a_pickled_one() -> None:
    straight = start()
    first = SOAP(straight, lr=0.1)
    train(first, straight, range(3))
    copies = [copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    train(first, straight, range(3, 6))
    for other in copies:
        copied = other.param_groups[0]["params"]
        train(other, copied, range(3, 6))
        assert all(torch.equal(one, two) for one, two in zip(straight, copied, strict=True))


def test_a_scheduler_of_the_momentum() -> None:
    """OneCycle changes betas[0] in every update: the correction is that of the momenta that there were, as in torch."""
    shapes, options = SHAPES[1:], {"lr": 0.1, "betas": (0.99, 0.999), "weight_decay": 0.2}
    ours, torchs = start(shapes), start(shapes)
    pairs: list[tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]] = [
        (SOAP(ours, **options), ours),  # type: ignore[arg-type]
        (torch.optim.NAdam(torchs, decoupled_weight_decay=True, **options), torchs),  # type: ignore[arg-type]
    ]
    for optimizer, parameters in pairs:
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20, base_momentum=0.5)
        for step in range(STEPS):
            train(optimizer, parameters, range(step, step + 1))
            scheduler.step()
    for got, wanted in zip(ours, torchs, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-8)


def test_weights_in_half_precision_without_masters() -> None:
    """Their bases are refreshed too, though no QR decomposition takes bf16."""
    weight = torch.nn.Parameter(start([(3, 4)])[0].detach().bfloat16())
    optimizer = SOAP([weight], precondition_frequency=2)
    for _ in range(4):
        weight.grad = torch.randn(3, 4).bfloat16()
        optimizer.step()
    assert weight.isfinite().all()
    assert optimizer.state[weight]["rows_basis"].dtype is torch.bfloat16


@pytest.mark.parametrize("step", [0, 1, 2])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_does_what_it_does_with_adam(wrong: float, step: int) -> None:
    """In the update that makes the bases, in that which refreshes them, and in another: the weights are NaN."""
    weights = [start([(3, 4)])[0], start([(3, 4)])[0]]
    for optimizer in (SOAP(weights[:1], precondition_frequency=2), torch.optim.AdamW(weights[1:])):
        for now in range(4):
            (weight,) = optimizer.param_groups[0]["params"]
            weight.grad = torch.full((3, 4), wrong if now == step else 1.0, dtype=weight.dtype)
            optimizer.step()
    assert all(weight.isnan().all() for weight in weights)


def test_without_gradient_nothing_changes() -> None:
    (parameter,) = start([(3, 4)])
    before = parameter.detach().clone()
    SOAP([parameter], lr=0.1).step()
    assert torch.equal(parameter, before)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"betas": (1.0, 0.999)}, "betas"),
        ({"betas": (0.9, -1.0)}, "betas"),
        ({"betas": [0.9]}, "betas"),
        ({"betas": (0.9, 0.9, 0.9)}, "betas"),
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"eps": -1.0}, "eps"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"precondition_frequency": 1.5}, "precondition_frequency"),
        ({"max_precond_dim": "x"}, "max_precond_dim"),
        ({"shampoo_beta": 1.5}, "shampoo_beta"),
        ({"precondition_frequency": 0}, "precondition_frequency"),
    ],
)
def test_numbers_out_of_range(options: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}: got "):
        SOAP(start(), **options)


def test_complex_weights_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^params: got complex ones, allowed are real ones"):
        SOAP([torch.nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
