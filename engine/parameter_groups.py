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

from ds_vpipe.errors import VPipeConfigError

Parameters = Sequence[torch.nn.Parameter]


def follow(
    optimizer: torch.optim.Optimizer,
    stage_parameters: Iterable[torch.nn.Parameter],
    placeholder: Callable[[], torch.nn.Parameter],
) -> None:
    """Leave in ``optimizer`` only what is in ``stage_parameters``; what it has kept for others is forgotten.

    Raises:
        VPipeConfigError: the stage trains parameters, and none of them is there.
    """
    owned = _owned(stage_parameters)
    _refuse_other_parameters("optimizer", optimizer.param_groups, owned)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in owned:
                optimizer.state.pop(parameter, None)
        group["params"] = _kept(group["params"], owned) or [placeholder()]


def restricted(
    model_parameters: Sequence[Any],
    stage_parameters: Iterable[torch.nn.Parameter],
    placeholder: Callable[[], torch.nn.Parameter],
) -> list[Any]:
    """``model_parameters``, a list of parameters or of groups of them, with what is in ``stage_parameters`` only.

    Raises:
        VPipeConfigError: the stage trains parameters, and none of them is there.
    """
    owned = _owned(stage_parameters)
    if not any(isinstance(item, dict) for item in model_parameters):
        _refuse_other_parameters("model_parameters", [{"params": model_parameters}], owned)
        return _kept(model_parameters, owned) or [placeholder()]
    groups = [{**group, "params": list(group["params"])} for group in model_parameters]
    _refuse_other_parameters("model_parameters", groups, owned)
    return [{**group, "params": _kept(group["params"], owned) or [placeholder()]} for group in groups]


def listed(model_parameters: Any) -> list[Any] | None:
    """``model_parameters`` as a list that stays what it is when the model is split: iterators are read to their end."""
    if model_parameters is None:
        return None
    given = [model_parameters] if isinstance(model_parameters, dict) else list(model_parameters)
    return [{**item, "params": _list(item["params"])} if isinstance(item, dict) else item for item in given]


def _list(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _owned(parameters: Iterable[torch.nn.Parameter]) -> dict[int, torch.nn.Parameter]:
    return {id(parameter): parameter for parameter in parameters}


def _kept(parameters: Iterable[torch.nn.Parameter], owned: dict[int, torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    return [parameter for parameter in parameters if id(parameter) in owned]


def _refuse_other_parameters(what: str, groups: Iterable[dict[str, Any]], owned: dict[int, torch.nn.Parameter]) -> None:
    trained = any(parameter.requires_grad for parameter in owned.values())
    given = [parameter for group in groups for parameter in group["params"]]
    if trained and given and not _kept(given, owned) and any(parameter.is_meta for parameter in given):
        raise VPipeConfigError(
            f"{what}: got parameters on the meta device, which are others once they have values; allowed are those of "
            f"a model with values; name the optimizer in the DeepSpeed JSON"
        )
