"""Content of a message with a layer: its weights and optimizer states, as they are after some updates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds_vpipe.engine.execution.movable_layers import layer_form
from ds_vpipe.engine.execution.stage_layers import parameters_in_order

_TENSOR = "tensor"


def packed(version: int, number: int, layer: Any, optimizer: Any) -> tuple[torch.Tensor, tuple[Any, ...], Any]:
    """A copy of a layer after ``version`` updates, for a message."""
    parameters = parameters_in_order(layer)
    owned = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
    states = [optimizer.state.get(parameter, {}) for parameter in parameters]
    described = [
        {
            "trained": parameter.requires_grad,
            "owned": id(parameter) in owned,
            "state": {name: _plain(value) for name, value in state.items()},
        }
        for parameter, state in zip(parameters, states, strict=True)
    ]
    sent = json.dumps([version, number, layer_form(layer), described]).encode()
    text = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
    values = tuple(parameter.detach().clone() for parameter in parameters)
    tensors = tuple(
        tuple(value.clone() for value in state.values() if isinstance(value, torch.Tensor)) for state in states
    )
    return text, values, tensors


@dataclass(frozen=True)
class ReceivedLayer:
    """Weights and optimizer states of a layer, in the buffers of a message."""

    version: int  # updates that it has had
    number: int
    form: Any
    described: Sequence[dict[str, Any]]  # of every parameter
    values: Sequence[torch.Tensor]
    tensors: Sequence[Sequence[torch.Tensor]]

    @classmethod
    def of(cls, tree: Any) -> ReceivedLayer:
        """What a message holds."""
        text, values, tensors = tree
        version, number, form, described = json.loads(bytes(text.tolist()))
        return cls(version, number, form, described, values, tensors)

    def is_like(self, layer: Any) -> bool:
        """Whether a layer has such parameters."""
        return bool(self.form == json.loads(json.dumps(layer_form(layer))))

    def restore(self, parameters: Sequence[nn.Parameter], optimizer: Any) -> list[bool]:
        """Give parameters their values and states, and the optimizer what it is to own; which of them are trained."""
        for parameter, value, state, found in zip(parameters, self.values, self.described, self.tensors, strict=True):
            parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]  # DeepSpeed's
            parameter.requires_grad_(state["trained"])
            with torch.no_grad():
                parameter.copy_(value)
            contents = iter(found)
            restored = {
                name: next(contents).detach().clone() if plain == _TENSOR else plain
                for name, plain in state["state"].items()
            }
            if restored:
                optimizer.state[parameter] = restored
        owned = zip(parameters, self.described, strict=True)
        optimizer.param_groups[0]["params"] += [parameter for parameter, found in owned if found["owned"]]
        return [found["trained"] for found in self.described]


def _plain(value: Any) -> Any:
    """A value of an optimizer's state for JSON: a number, or that it is a tensor, which travels beside it."""
    return _TENSOR if isinstance(value, torch.Tensor) else value
