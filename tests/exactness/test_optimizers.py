"""Which optimizer a JSON names, and gradient clipping of a stage."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import toy
from torch import nn
from worlds import Worlds

from ds_vpipe.partition import bounds, uniform_partition

pytestmark = pytest.mark.mp

SGD = {"type": "SGD", "params": {"lr": 1.0}}


def built(optimizer: dict[str, Any]) -> dict[str, Any]:
    """The optimizer that ``initialize`` makes, and the weights after a batch."""
    trained = cases.engine(cases.config(1, optimizer, {}), 1)
    trained.train_batch(toy.data())
    return {
        "class": f"{type(trained.optimizer).__module__}.{type(trained.optimizer).__name__}",
        "group": {k: v for k, v in trained.optimizer.param_groups[0].items() if k != "params"},
        "parameters": cases.parameters(trained),
    }


def test_lamb_from_json(worlds: Worlds) -> None:
    from ds_vpipe.engine.updates.optimizers import Lamb

    params = {"lr": 0.02, "weight_decay": 0.1, "betas": [0.8, 0.9], "max_coeff": 0.7}
    (report,) = worlds.run(1, built, {"type": "Lamb", "params": params})
    assert report["class"] == "ds_vpipe.engine.updates.optimizers.Lamb"
    assert {key: report["group"][key] for key in params} == {**params, "betas": (0.8, 0.9)}

    layers = nn.Sequential(*toy.built_layers())
    tokens, labels = toy.micro_batch(0)
    nn.functional.cross_entropy(layers(tokens), labels).backward()
    Lamb(layers.parameters(), **params).step()  # type: ignore[arg-type]
    for name, parameter in layers.named_parameters():
        torch.testing.assert_close(report["parameters"][name], parameter.detach(), rtol=1e-6, atol=1e-7)


def lamb_kernel(weight: Any, copy: Any, mean: Any, square: Any, gradient: Any, lr: float, *settings: Any) -> Any:
    """DeepSpeed's kernel for LAMB in torch; as there, gradients are not in bf16."""
    beta1, beta2, most, least, eps, scale, step, _, corrects, decay = settings
    if gradient.dtype is torch.bfloat16:
        raise RuntimeError("\"lamb_cuda_kernel\" not implemented for 'bfloat16'")
    gradient = gradient.float() / scale
    mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    one, two = (1 - beta1**step, 1 - beta2**step) if corrects else (1, 1)
    change = (mean / one) / ((square / two).sqrt() + eps) + decay * weight
    trust = (weight.norm() / change.norm()).clamp(least, most)
    weight.sub_(lr * trust * change)
    if copy.numel():
        copy.copy_(weight)
    return trust


def with_deepspeeds_lamb(precision: str, block: dict[str, Any]) -> tuple[list[float], float]:
    """Losses with the LAMB that DeepSpeed has on CUDA, its kernel in torch, and the largest change of a weight."""
    kernels = SimpleNamespace(lamb=torch.no_grad()(lamb_kernel))
    extra: dict[str, Any] = {precision: {"enabled": True}}
    if precision == "fp16":
        extra["fp16"]["initial_scale_power"] = 4
    with (
        mock.patch("deepspeed.ops.lamb.fused_lamb.FusedLambBuilder.load", return_value=kernels),
        mock.patch("ds_vpipe.engine.updates.optimizers.get_accelerator") as accelerator,
    ):
        accelerator().device_name.return_value = "cuda"
        config = cases.config(2, {"type": "Lamb", "params": {"lr": 0.02}}, block, **extra)
        trained = cases.engine(config, 2, loss_fn=toy.float_cross_entropy)
    assert type(trained.basic_optimizer).__name__ == "FusedLamb"
    data, before = toy.data(), cases.parameters(trained)
    losses = [float(trained.train_batch(data)) for _ in range(8)]
    moved = max(float((after - before[name]).abs().max()) for name, after in cases.parameters(trained).items())
    cases.end(trained)
    return losses, moved


def all_of_deepspeeds_lamb() -> list[tuple[list[float], float]]:
    runs = (("fp16", {}), ("fp16", {"staleness": {"nadam": True}}), ("bf16", {}))
    return [with_deepspeeds_lamb(*run) for run in runs]


def test_deepspeeds_lamb_sees_what_others_make_of_gradients(worlds: Worlds) -> None:
    for rank in worlds.run(2, all_of_deepspeeds_lamb):
        (plain, *moved), (nadam, moved_by_nadam), (bf16, moved_in_bf16) = rank
        assert min(*moved, moved_by_nadam, moved_in_bf16) > 0.01
        assert nadam != pytest.approx(plain, abs=1e-3)
        assert bf16 == pytest.approx(plain, abs=0.05)


def with_legacy_fusion() -> list[list[float]]:
    """Losses with and without DeepSpeed's key for apex of old, in both half precisions."""
    optimizer = {"type": "AdamW", "params": {"lr": 0.01}}
    return [
        cases.train(
            cases.config(2, {**optimizer, **more}, {}, **{precision: {"enabled": True}}),
            2,
            4,
            loss_fn=toy.float_cross_entropy,
        )["losses"]
        for precision in ("bf16", "fp16")
        for more in ({}, {"legacy_fusion": True})
    ]


def test_legacy_fusion_changes_nothing(worlds: Worlds) -> None:
    """It asks for a call of apex's Adam that there is no more; DeepSpeed's pipeline does not look at it in bf16."""
    for bf16, bf16_legacy, fp16, fp16_legacy in worlds.run(2, with_legacy_fusion):
        assert (bf16, fp16) == (bf16_legacy, fp16_legacy)


@pytest.mark.parametrize("name", ["FusedLAMB", "FusedAdam"])
def test_apex_is_refused_where_it_is_missing(worlds: Worlds, name: str) -> None:
    (outcome,) = worlds.outcomes(1, built, {"type": name, "params": {"lr": 0.01}})
    assert not outcome.good
    assert outcome.text.startswith(f"VPipeConfigError: optimizer.type: got '{name}', which needs NVIDIA's apex")
    assert '"Lamb" or "Adam"' in outcome.text
    assert "\n" not in outcome.text


def with_apex(optimizer: dict[str, Any], complete: bool) -> dict[str, Any]:
    """:func:`built` where a module ``apex`` is installed, NVIDIA's with its optimizers or the other one."""

    class FusedLAMB(torch.optim.SGD):
        pass

    class FusedAdam(torch.optim.SGD):
        pass

    modules = {"apex": ModuleType("apex")}
    if complete:
        modules["apex"].__path__ = []
        modules["apex.optimizers"] = ModuleType("apex.optimizers")
        for kind in (FusedLAMB, FusedAdam):
            kind.__module__ = "apex.optimizers"
            setattr(modules["apex.optimizers"], kind.__name__, kind)
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
    sys.modules.update(modules)
    try:
        return built(optimizer)
    finally:
        for name in modules:
            del sys.modules[name]


@pytest.mark.parametrize("name", ["FusedLAMB", "FusedAdam"])
def test_apex_is_used_where_it_is_installed(worlds: Worlds, name: str) -> None:
    (report,) = worlds.run(1, with_apex, {"type": name, "params": {"lr": 0.125, "momentum": 0.5}}, True)
    assert report["class"] == f"apex.optimizers.{name}"
    assert report["group"]["lr"] == 0.125
    assert report["group"]["momentum"] == 0.5


def test_the_other_package_called_apex_is_refused(worlds: Worlds) -> None:
    (outcome,) = worlds.outcomes(1, with_apex, {"type": "FusedLAMB", "params": {"lr": 0.01}}, False)
    assert outcome.text.startswith("VPipeConfigError: optimizer.type: got 'FusedLAMB', which needs NVIDIA's apex")


# Clipping


def clipped(ds_config: dict[str, Any], stages: int) -> dict[str, Any]:
    """One batch; the norm that the engine reports and the length of the step (lr is 1)."""
    trained = cases.engine(ds_config, stages)
    before = cases.parameters(trained)
    trained.train_batch(toy.data())
    after = cases.parameters(trained)
    step = torch.stack([(after[name] - before[name]).norm() for name in before]).norm()
    return {"norm": float(trained.get_global_grad_norm()), "step": float(step)}


def norms(micro_batches: int, stages: int) -> list[float]:
    """Norm of the gradient of each stage's layers, in one process."""
    layers = toy.built_layers()
    for number in range(micro_batches):
        value, labels = toy.micro_batch(number)
        for layer in layers:
            value = layer(value)
        (nn.functional.cross_entropy(value, labels) / micro_batches).backward()
    edges = bounds(uniform_partition(len(layers), stages))
    return [
        float(nn.utils.get_total_norm([p.grad for layer in layers[start:end] for p in layer.parameters()]))  # type: ignore[misc]
        for start, end in pairwise(edges)
    ]


@pytest.mark.parametrize("limit", [0.05, 1000.0])
@pytest.mark.parametrize("sync_mode", ["asp", "bsp"])
def test_norm_that_is_clipped(worlds: Worlds, sync_mode: str, limit: float) -> None:
    block = {"partition": "uniform", "sync_mode": sync_mode}
    reports = worlds.run(2, clipped, cases.config(2, SGD, block, gradient_clipping=limit), 2)
    own = norms(2, 2)
    assert min(own) > 0.05
    assert own[0] != pytest.approx(own[1], rel=1e-2)
    whole = sum(norm**2 for norm in own) ** 0.5
    for report, norm in zip(reports, own, strict=True):
        counted = whole if sync_mode == "bsp" else norm
        assert report["norm"] == pytest.approx(counted, rel=1e-5)
        assert report["step"] == pytest.approx(norm * min(1.0, limit / counted), rel=1e-4)


def test_norm_of_replicas_is_counted_once(worlds: Worlds) -> None:
    reports = worlds.run(2, clipped, cases.config(1, SGD, {}, gradient_clipping=0.05), 1)
    assert reports[0] == reports[1]
    assert reports[0]["step"] == pytest.approx(0.05, rel=1e-4)
