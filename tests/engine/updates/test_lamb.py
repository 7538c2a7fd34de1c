"""LAMB against its formulas, written down again in numpy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.config.unsupported import refuse_unsupported
from ds_vpipe.engine.updates.optimizers import Lamb, as_spelled, own_optimizer
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.staleness.soap import SOAP

SHAPES = [(3, 4), (5,), (2, 2, 2), ()]
STEPS = 5


def start() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64)) for shape in SHAPES]


def gradients(step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) * 3 for shape in SHAPES]


def train(optimizer: torch.optim.Optimizer, parameters: list[torch.nn.Parameter], steps: range) -> None:
    for step in steps:
        for parameter, gradient in zip(parameters, gradients(step), strict=True):
            parameter.grad = gradient.clone().to(parameter.dtype)
        optimizer.step()


def formula(settings: dict[str, Any], steps: int, weights: list[Any] | None = None) -> list[Any]:
    """Algorithm 2 of the paper, with the options of DeepSpeed's FusedLamb."""
    given = {
        "lr": 1e-3,
        "bias_correction": True,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "eps_inside_sqrt": False,
        "weight_decay": 0.0,
        "max_coeff": 10.0,
        "min_coeff": 0.01,
        **settings,
    }
    beta1, beta2 = given["betas"]
    x = [p.detach().numpy().copy() for p in start()] if weights is None else weights
    m, v = [0 * w for w in x], [0 * w for w in x]
    for t in range(1, steps + 1):
        g = [gradient.numpy() for gradient in gradients(t - 1)]
        for i in range(len(x)):
            m[i] = beta1 * m[i] + (1 - beta1) * g[i]
            v[i] = beta2 * v[i] + (1 - beta2) * g[i] ** 2
            m_hat, v_hat = m[i], v[i]
            if given["bias_correction"]:
                m_hat, v_hat = m[i] / (1 - beta1**t), v[i] / (1 - beta2**t)
            if given["eps_inside_sqrt"]:
                r = m_hat / np.sqrt(v_hat + given["eps"])
            else:
                r = m_hat / (np.sqrt(v_hat) + given["eps"])
            u = r + given["weight_decay"] * x[i]
            x_norm, u_norm = np.sqrt(np.sum(x[i] ** 2)), np.sqrt(np.sum(u**2))
            ratio = 1.0
            if x_norm > 0 and u_norm > 0:
                ratio = min(max(x_norm / u_norm, given["min_coeff"]), given["max_coeff"])
            x[i] = x[i] - given["lr"] * ratio * u
    return x


SETTINGS: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "betas": (0.8, 0.95)},
    {"bias_correction": False},
    {"weight_decay": 0.3},
    {"eps": 0.5},
    {"eps": 0.5, "eps_inside_sqrt": True},
    {"max_coeff": 0.4},
    {"min_coeff": 0.9},
    {"lr": 0.05, "weight_decay": 0.1, "max_coeff": 0.9, "min_coeff": 0.5, "eps": 1e-3},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_five_steps(settings: dict[str, Any]) -> None:
    parameters = start()
    train(Lamb(parameters, **settings), parameters, range(STEPS))
    for parameter, wanted in zip(parameters, formula(settings, STEPS), strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), wanted, rtol=1e-12, atol=1e-14)


def test_every_setting_matters() -> None:
    results = {tuple(np.concatenate([part.ravel() for part in formula(s, STEPS)])) for s in SETTINGS}
    assert len(results) == len(SETTINGS)


def test_weights_and_gradients_of_norm_zero() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.ones(3))]
    optimizer = Lamb(parameters, lr=0.1)
    parameters[0].grad, parameters[1].grad = torch.ones(3), torch.zeros(3)
    optimizer.step()
    torch.testing.assert_close(parameters[0].detach(), torch.full((3,), -0.1))  # ratio 1
    assert torch.equal(parameters[1].detach(), torch.ones(3))


def test_parameter_without_a_gradient_is_left_alone() -> None:
    with_gradient, without = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = Lamb([with_gradient, without])
    with_gradient.grad = torch.ones(2)
    optimizer.step()
    assert torch.equal(without.detach(), torch.ones(2))
    assert not torch.equal(with_gradient.detach(), torch.ones(2))
    assert without not in optimizer.state
    Lamb([torch.nn.Parameter(torch.ones(1))]).step()


def test_gradients_are_not_changed() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.full((2,), 5.0)
    Lamb([parameter]).step()
    assert parameter.grad.tolist() == [5, 5]


def test_state_dict_resumes_bit_for_bit() -> None:
    settings = SETTINGS[-1]
    straight, resumed = start(), start()
    train(Lamb(straight, **settings), straight, range(STEPS))
    first = Lamb(resumed, **settings)
    train(first, resumed, range(2))
    second = Lamb(resumed, lr=99.0)
    second.load_state_dict(first.state_dict())
    train(second, resumed, range(2, STEPS))
    assert all(torch.equal(a, b) for a, b in zip(straight, resumed, strict=True))


def test_groups_have_settings_of_their_own() -> None:
    """As DeepSpeed makes them: no switches of torch's own optimizers in a group; a scheduler changes lr."""
    parameters = start()
    groups = [{"params": parameters[:1], "weight_decay": 0.3}, {"params": parameters[1:], "lr": 1.0}]
    optimizer = Lamb(groups, lr=0.01)
    assert {"foreach", "fused", "capturable"}.isdisjoint(optimizer.param_groups[0])
    optimizer.param_groups[1]["lr"] = 0.02
    train(optimizer, parameters, range(STEPS))
    decayed, plain = formula({"lr": 0.01, "weight_decay": 0.3}, STEPS), formula({"lr": 0.02}, STEPS)
    for parameter, wanted in zip(parameters, [decayed[0], *plain[1:]], strict=True):
        np.testing.assert_allclose(parameter.detach().numpy(), wanted, rtol=1e-12, atol=1e-14)


def test_coefficients_of_the_last_update() -> None:
    """Scripts that ask DeepSpeed's FusedLamb for them get the ratios that the last update used, tensor by tensor."""
    parameters = start()
    parameters.append(torch.nn.Parameter(torch.ones(2)))  # without a gradient
    optimizer = Lamb(parameters, lr=0.5, bias_correction=False, betas=(0.0, 0.0), eps=0.0, max_coeff=2.0)
    assert optimizer.get_lamb_coeffs() == []
    train(optimizer, parameters[:-1], range(1))
    before = [parameter.detach().clone() for parameter in parameters]
    train(optimizer, parameters[:-1], range(1, 2))
    ratios = optimizer.get_lamb_coeffs()
    assert len(ratios) == len(SHAPES)
    for ratio, old, new, gradient in zip(ratios, before[:-1], parameters[:-1], gradients(1), strict=True):
        torch.testing.assert_close(new.detach(), old - 0.5 * ratio * gradient.sign())


def test_closure_and_betas_from_json() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Lamb([parameter], betas=[0.9, 0.99])  # type: ignore[arg-type]

    def closure() -> float:
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) == 2.0
    assert parameter.grad is not None


@pytest.mark.parametrize("options", [{"betas": [0.9]}, {"lr": -1.0}, {"eps": float("inf")}, {"weight_decay": -1.0}])
def test_numbers_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=rf"^{next(iter(options))}: got "):
        Lamb([torch.nn.Parameter(torch.ones(1))], **options)


def test_names_of_optimizers_count_in_any_case() -> None:
    weights = [torch.nn.Parameter(torch.ones(2, 2))]
    assert (
        type(own_optimizer("soap", {"lr": 0.1}, weights)) is type(own_optimizer("SOAP", {"lr": 0.1}, weights)) is SOAP
    )
    assert (as_spelled("fusedADAM"), as_spelled("Adam"), as_spelled(None)) == ("FusedAdam", "Adam", None)
    ds_config = {"optimizer": {"type": "soap"}, "zero_optimization": {"stage": 1}}
    with pytest.raises(VPipeConfigError, match=r"^zero_optimization\.stage: got 1"):
        refuse_unsupported(DeepSpeedJson(ds_config), VPipeConfig(), 2)


def test_amsgrad_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^optimizer\.params\.amsgrad: got true, allowed is false"):
        Lamb([torch.nn.Parameter(torch.ones(1))], amsgrad=True)


@pytest.mark.parametrize(("on_host", "wanted"), [(True, Lamb), (False, type(None))])
def test_an_offloaded_lamb_needs_no_kernel_of_the_gpu(
    monkeypatch: pytest.MonkeyPatch, on_host: bool, wanted: type
) -> None:
    gpu = SimpleNamespace(device_name=lambda: "cuda")
    monkeypatch.setattr("ds_vpipe.engine.updates.optimizers.get_accelerator", lambda: gpu)
    assert type(own_optimizer("lamb", {"lr": 0.1}, [torch.nn.Parameter(torch.ones(2))], on_host)) is wanted
