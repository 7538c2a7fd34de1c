"""Optimizers and parameter groups that a script has made of the whole model, cut down to one stage.

Scripts group parameters by name, such as those without weight decay, before there are stages. The split keeps the
``Parameter`` objects of what a stage owns, so a group's members are found by identity. An optimizer object stays the
object that it is, with its groups, their order and options: whatever else refers to it, a learning-rate scheduler or
the script, goes on doing so. A group of which a stage owns nothing holds a placeholder, because DeepSpeed drops empty
groups and schedulers go by their number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

Own = Callable[[Iterable[Any]], list[Any]]
"""Of parameters of the whole model those that the stage has, in the same order."""

Placeholder = Callable[[], torch.nn.Parameter]


def by_identity(stage_parameters: Iterable[torch.nn.Parameter]) -> Own:
    """The stage's own are those among ``stage_parameters``."""
    owned = {id(parameter) for parameter in stage_parameters}
    return lambda parameters: [parameter for parameter in parameters if id(parameter) in owned]


def follow(optimizer: torch.optim.Optimizer, own: Own, placeholder: Placeholder) -> None:
    """Leave in ``optimizer`` only the stage's own; what it has kept for others is forgotten."""
    for group in optimizer.param_groups:
        kept = own(group["params"])
        there = {id(parameter) for parameter in kept}
        if "param_names" in group:
            named = zip(group["param_names"], group["params"], strict=True)
            group["param_names"] = [name for name, parameter in named if own([parameter])] or ["placeholder"]
        for parameter in group["params"]:
            if id(parameter) not in there:
                optimizer.state.pop(parameter, None)
        group["params"] = kept or [placeholder()]


def restricted(model_parameters: Sequence[Any], own: Own, placeholder: Placeholder) -> list[Any]:
    """``model_parameters``, a list of parameters or of groups of them, with the stage's own only."""
    if not any(isinstance(item, dict) for item in model_parameters):
        return own(model_parameters) or [placeholder()]
    return [{**group, "params": own(group["params"]) or [placeholder()]} for group in model_parameters]


def listed(model_parameters: Any) -> list[Any] | None:
    """``model_parameters`` as a list that stays what it is when the model is split: iterators are read to their end."""
    if model_parameters is None:
        return None
    given = [model_parameters] if isinstance(model_parameters, dict) else list(model_parameters)
    return [{**item, "params": _list(item["params"])} if isinstance(item, dict) else item for item in given]


def _list(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
