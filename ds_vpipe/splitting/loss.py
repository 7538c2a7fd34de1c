"""The loss in what a user's forward returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ds_vpipe.splitting.absent import SplitError


def find_loss(output: Any) -> torch.Tensor | None:
    """The scalar that training minimises: ``output`` itself, its ``loss``, the first of a tuple, or None."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif hasattr(output, "loss"):
        output = output.loss
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    if isinstance(output, torch.Tensor) and output.dim() == 0 and output.is_floating_point():
        return output
    return None


def loss_of(output: Any, model: str) -> torch.Tensor:
    """:func:`find_loss`, of the forward of ``model``.

    Raises:
        SplitError: there is none.
    """
    loss = find_loss(output)
    if loss is None:
        raise SplitError(
            f"{model}: forward returned {_describe(output)} without a loss, allowed is a scalar, alone, as .loss or "
            f'["loss"], or first of a tuple; pass the labels to the model, or wrap it in a module that computes the '
            "loss"
        )
    return loss


def _describe(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {list(output.shape)}"
    if isinstance(output, Mapping):
        return f"{type(output).__name__} with {', '.join(map(str, output))}"
    return f"a {type(output).__name__}"
