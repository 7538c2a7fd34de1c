"""The tensor that a training script gets as its loss.

It is an ordinary tensor without dimensions, with a graph, so that a script may compute with it. On the last stage the
graph is the model's: what the script hands to ``engine.backward()`` is what is differentiated. On the others it ends
at the number, which came from the last stage. Everywhere the graph is behind a gate that is open in
``engine.backward()`` only: a backward pass is the pipeline's, with the weights that its forward pass used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_vpipe.errors import CallOrderError


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: torch.Tensor, enter: Callable[[], None]) -> torch.Tensor:
        ctx.enter = enter
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.enter()
        return gradients[0], None


class HandedLoss:
    """What becomes of one micro-batch's loss between ``engine(...)`` and its backward pass.

    Attributes:
        open: a backward pass of the pipeline is under way.
        used: it has come through here.
    """

    def __init__(self) -> None:
        self.open = self.used = False

    def gated(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as the script gets it; ``loss`` is the model's, or a number from elsewhere."""
        source = loss if loss.requires_grad else loss.detach().clone().requires_grad_()
        with torch.enable_grad():
            handed: torch.Tensor = _Gate.apply(source, self._enter)
        return handed

    def _enter(self) -> None:
        if not self.open:
            raise CallOrderError(
                "loss.backward(): called on what engine(...) returned; allowed is engine.backward(loss), which runs "
                "the backward pass that is due on every stage"
            )
        self.used = True
