"""Stages may hand each other their weights themselves: what is sent is of the micro-batch's version."""

from functools import partial
from typing import Any

import cases
import pytest
import torch
import toy
from torch import nn
from worlds import Worlds

pytestmark = pytest.mark.mp

SGD = {"type": "SGD", "params": {"lr": 0.1}}


class _PullToWeight(torch.autograd.Function):
    """A sum of input and weight; the gradient of the input is the weight, itself or a copy of it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, copied: bool) -> torch.Tensor:
        ctx.weight, ctx.copied = weight.detach(), copied
        return x + weight

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return ctx.weight.clone() if ctx.copied else ctx.weight.view_as(ctx.weight), gradients[0], None


class Lend(nn.Module):
    """Hands on a weight, itself or a copy of it, and sends back another as a gradient."""

    def __init__(self, copied: bool) -> None:
        super().__init__()
        self.copied = copied
        self.gain = nn.Parameter(toy.seeded(1, lambda: nn.Linear(toy.HIDDEN, toy.HIDDEN)).weight.detach().clone())
        self.goal = nn.Parameter(torch.full((toy.MICRO_BATCH, toy.SEQUENCE, toy.HIDDEN), 0.5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return _PullToWeight.apply(x, self.goal, self.copied), self.gain.clone() if self.copied else self.gain


class Borrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = toy.Pool(3)

    def forward(self, both: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x, gain = both
        return self.pool(torch.tanh(x @ gain))  # type: ignore[no-any-return]


def specs(copied: bool) -> list[Any]:
    from deepspeed.pipe import LayerSpec

    return [LayerSpec(toy.Embed, 100), LayerSpec(Lend, copied), LayerSpec(Borrow)]


@pytest.mark.parametrize("link", ["host", "shared"])
@pytest.mark.parametrize("sync", ["stash", "vertical"])
def test_weights_that_are_sent_are_those_of_the_version(worlds: Worlds, sync: str, link: str) -> None:
    block = {"partition": "uniform", "weight_sync": sync, "link": link, "stage_to_depth_map": [4, 2, 0]}
    ds_config = cases.config(1, SGD, block)
    copied, themselves = (worlds.run(3, cases.train, ds_config, 3, 8, specs=partial(specs, c)) for c in (True, False))
    wanted, got = cases.merged(copied), cases.merged(themselves)
    assert [report["losses"] for report in themselves] == [report["losses"] for report in copied]
    assert wanted.keys() == got.keys()
    assert {name: float((got[name] - wanted[name]).abs().max()) for name in wanted} == dict.fromkeys(wanted, 0.0)
