"""The loss in what a user's forward returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ds_vpipe.splitting.absent import SplitError


def find_loss(output: Any) -> torch.Tensor | None:
    """The scalar that training minimises: ``output`` itself, its ``loss``, that of a tuple, or None.

    Of several in a tuple, such as a loss and an accuracy, it is the only one with a graph, or else the first item.
    """
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif hasattr(output, "loss"):
        output = output.loss
    elif isinstance(output, (tuple, list)):
        scalars = [item for item in output if _is_scalar(item)]
        with_graph = [item for item in scalars if item.requires_grad]
        candidates = with_graph or scalars
        only = len(candidates) == 1 or any(item is output[0] for item in candidates)
        output = candidates[0] if only else None
    return output if _is_scalar(output) else None


def loss_of(output: Any, model: str) -> torch.Tensor:
    """:func:`find_loss`, of the forward of ``model``.

    Raises:
        SplitError: there is none.
    """
    loss = find_loss(output)
    if loss is None:
        raise SplitError(
            f"{model}: forward returned {_describe(output)} without a loss, allowed is a scalar, alone, as .loss or "
            f'["loss"], or first or only one of a tuple; pass the labels to the model, or wrap it in a module that '
            f"computes the loss"
        )
    return loss


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def _describe(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"a tensor of shape {list(output.shape)}"
    if isinstance(output, Mapping):
        return f"{type(output).__name__} with {', '.join(map(str, output))}"
    scalars = sum(map(_is_scalar, output)) if isinstance(output, (tuple, list)) else 0
    return f"a {type(output).__name__}{f' with {scalars} scalars' if scalars else ''}"
