"""Recomputation changes memory, not results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toy
from worlds import Worlds

pytestmark = pytest.mark.mp

RATIOS = [0.0, 0.3, 0.5, 1.0]


@pytest.mark.parametrize(
    ("ratio", "layers", "recomputed"),
    [(0, 12, 0), (0.3, 12, 3), (0.5, 13, 6), (0.85, 12, 10), (0.999, 12, 11), (1, 12, 12), (0.9, 1, 0), (1, 1, 1)],
)
def test_ratio_is_rounded_down_to_layers(ratio: float, layers: int, recomputed: int) -> None:
    from ds_vpipe.engine.recompute import recomputed_layers

    assert recomputed_layers(ratio, layers) == recomputed


def passes(ratio: float, seed_layers: bool, count: int = 3) -> dict[str, Any]:
    """Forward and backward passes of the toy model as the only stage; inputs are integers."""
    from deepspeed.pipe import PipelineModule

    from ds_vpipe.engine.recompute import apply_recompute

    module = PipelineModule(toy.layer_specs(0.3), num_stages=1, partition_method="uniform", seed_layers=seed_layers)
    original = module.forward
    apply_recompute(module, ratio)
    calls = [0] * len(module.forward_funcs)
    for position, layer in enumerate(module.forward_funcs):
        layer.register_forward_pre_hook(lambda *_, position=position: calls.__setitem__(position, calls[position] + 1))
    torch.manual_seed(5)
    outputs = [module(toy.micro_batch(number)[0]) for number in range(count)]
    for output in reversed(outputs):  # long after the forward pass, and in another order
        torch.rand(3)
        output.square().sum().backward()
    with torch.no_grad():
        module(toy.micro_batch(0)[0])
    return {
        "calls": calls,
        "outputs": [output.detach() for output in outputs],
        "gradients": [parameter.grad for parameter in module.parameters()],
        "random": torch.rand(4),
        "micro_offset": module.micro_offset,
        "same": module.forward == original,
    }


def all_passes(seed_layers: bool) -> list[dict[str, Any]]:
    return [passes(ratio, seed_layers) for ratio in RATIOS]


@pytest.mark.parametrize("seed_layers", [False, True])
def test_every_ratio_gives_the_same_bits(worlds: Worlds, seed_layers: bool) -> None:
    (reports,) = worlds.run(1, all_passes, seed_layers)
    plain = reports[0]
    assert plain["same"]
    assert not torch.equal(plain["outputs"][0], plain["outputs"][1])
    for ratio, report in zip(RATIOS, reports, strict=True):
        recomputed = int(ratio * len(toy.LAYERS))
        assert report["calls"] == [4] * (len(toy.LAYERS) - recomputed) + [7] * recomputed
        for name in ("outputs", "gradients"):
            assert len(report[name]) == len(plain[name])
            assert all(torch.equal(a, b) for a, b in zip(report[name], plain[name], strict=True)), (name, ratio)
        assert torch.equal(report["random"], plain["random"])
        assert report["micro_offset"] == plain["micro_offset"] == 4


def memory(ratio: float) -> int:
    """Bytes that autograd keeps between forward and backward pass."""
    from deepspeed.pipe import PipelineModule

    from ds_vpipe.engine.recompute import apply_recompute

    module = PipelineModule(toy.layer_specs(0.3), num_stages=1)
    apply_recompute(module, ratio)
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(toy.micro_batch(0)[0])
    return sum(kept.values())


def test_less_is_kept_the_more_is_recomputed(worlds: Worlds) -> None:
    none, half, everything = (worlds.run(1, memory, ratio)[0] for ratio in (0, 0.5, 1))
    assert none > half > everything
