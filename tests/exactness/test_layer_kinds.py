"""Layers with what users put into them: normalised, pruned, quantized and recurrent weights, hooks, other gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import cases
import pytest
import reference
import torch
import toy
from deepspeed.pipe import LayerSpec
from test_exactness import difference
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn.utils import parametrizations, prune
from worlds import Worlds

pytestmark = pytest.mark.mp

STAGES, SIZE, BATCHES = 2, 2, 6
BLOCKS: list[dict[str, Any]] = [{}, {"recompute_ratio": 0.5}, {"recompute_ratio": 1}, {"swap_ratio": 1}]


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(toy.HIDDEN, toy.HIDDEN), "weight", 0.5)


def half(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tuple(gradient / 2 for gradient in inputs)


def hooked() -> nn.Module:
    linear = nn.Linear(toy.HIDDEN, toy.HIDDEN)
    linear.register_full_backward_hook(half)
    return linear


def quantized() -> nn.Module:
    fake = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
    return nn.Sequential(nn.Linear(toy.HIDDEN, toy.HIDDEN), fake)


class Recurrent(nn.LSTM):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x)[0]


class WithGradient(nn.Linear):
    """Adds the gradient of its output's square, through which the backward pass goes once more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():  # where a stage looks only at shapes, too
            at = x if x.requires_grad else x.detach().requires_grad_()
            output = super().forward(at)
            (gradient,) = torch.autograd.grad(output.square().sum(), at, create_graph=True)
        return output + gradient


class Smoothed(nn.Linear):
    """Takes off a running mean, which each pass puts a new tensor in the place of, and counts its passes."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.register_buffer("mean", torch.zeros(sizes[1]))
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * output.detach().mean((0, 1))
        output.register_hook(lambda gradient: gradient / 4)
        return (output - self.mean) / self.calls


KINDS: list[Callable[[], nn.Module]] = [
    lambda: parametrizations.spectral_norm(nn.Linear(toy.HIDDEN, toy.HIDDEN)),
    pruned,
    lambda: Recurrent(toy.HIDDEN, toy.HIDDEN, 2, batch_first=True),
    hooked,
    quantized,
    lambda: WithGradient(toy.HIDDEN, toy.HIDDEN),
    lambda: Smoothed(toy.HIDDEN, toy.HIDDEN),
    lambda: parametrizations.weight_norm(nn.Linear(toy.HIDDEN, toy.HIDDEN)),
]


class Residual(nn.Module):
    def __init__(self, kind: int) -> None:
        super().__init__()
        self.inner = toy.seeded(kind, KINDS[kind])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


def specs() -> list[Any]:
    inner = [LayerSpec(Residual, kind) for kind in range(len(KINDS))]
    return [LayerSpec(toy.Embed, 100), *inner, LayerSpec(toy.Pool, 200)]


def train_each(blocks: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """Parameters and buffers of this stage, with each of the blocks."""
    found = []
    for block in blocks:
        engine = cases.engine(cases.config(SIZE, {"type": "SGD", "params": {"lr": 0.1}}, block), STAGES, specs=specs)
        iterator = toy.data(SIZE * BATCHES)
        with contextlib.suppress(StopIteration):
            while True:
                engine.train_batch(iterator)
        found.append({**cases.parameters(engine), **{n: b.float().clone() for n, b in engine.module.named_buffers()}})
        cases.end(engine)
    return found


def test_equal_to_the_replay(worlds: Worlds) -> None:
    """Bit for bit, buffers too, whether layers run once, or again, or their activations leave the device."""
    layers = [toy.Embed(100), *map(Residual, range(len(KINDS))), toy.Pool(200)]
    counts = (5, 5)
    reference.Replay(counts, (1, 0), SIZE, lambda p: torch.optim.SGD(p, lr=0.1), layers=layers).run(BATCHES)
    wanted = {f"{at}.{n}": t.detach().float() for at, found in enumerate(layers) for n, t in found.state_dict().items()}
    for reports in zip(*worlds.run(STAGES, train_each, BLOCKS), strict=True):
        found = {name: value for report in reports for name, value in report.items()}
        assert found.keys() == wanted.keys()
        assert difference(found, wanted) == 0
