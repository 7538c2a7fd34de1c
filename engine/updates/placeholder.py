"""A parameter for the optimizer of a stage that has none to train.

Stages made of activation functions, or of frozen layers, are ordinary in a pipeline, but optimizers refuse an
empty list of parameters, and learning-rate schedulers want a group to write to. The placeholder never gets
a gradient, belongs to no layer and is in no model checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def has_trainable(model_parameters: Sequence[Any]) -> bool:
    """Say whether a list of parameters, or of groups of them, holds one that requires a gradient."""
    return any(
        parameter.requires_grad
        for item in model_parameters
        for parameter in (item["params"] if isinstance(item, dict) else [item])
    )


def with_placeholder(model_parameters: Sequence[Any], placeholder: torch.nn.Parameter) -> list[Any]:
    """A list with nothing but ``placeholder`` to train; in the first group, if there are groups, with its settings."""
    if model_parameters and isinstance(model_parameters[0], dict):
        return [{**model_parameters[0], "params": [placeholder]}]
    return [placeholder]
