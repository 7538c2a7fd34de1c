"""Content of a message with a layer: its weights and optimizer states, as they are after some updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ds_vpipe.engine.execution.movable_layers import layer_form
from ds_vpipe.engine.execution.stage_layers import parameters_in_order
from ds_vpipe.engine.modules.built_layers import Built, Settings


class LayerContent(NamedTuple):
    """Weights and optimizer states of a layer that moves; lists have an entry for every parameter."""

    version: int  # updates that it has had
    number: int
    form: Any
    trained: list[bool]
    owned: list[bool]  # by the optimizer
    values: list[torch.Tensor]
    states: list[dict[str, Any]]
    settings: Settings
    changed: list[tuple[str, str]]  # settings that are others than when it was built

    @classmethod
    def of(cls, version: int, number: int, layer: Any, optimizer: Any, built: Built) -> LayerContent:
        """What a layer has after ``version`` updates."""
        parameters = parameters_in_order(layer)
        ids = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
        return cls(
            version,
            number,
            layer_form(layer),
            [parameter.requires_grad for parameter in parameters],
            [id(parameter) in ids for parameter in parameters],
            [parameter.detach() for parameter in parameters],
            [dict(optimizer.state.get(parameter, {})) for parameter in parameters],
            Built.of(layer).settings,
            built.changed(layer),
        )

    def restore(self, parameters: Sequence[nn.Parameter], optimizer: Any) -> None:
        """Give parameters their values and states, and the optimizer what it is to own."""
        for parameter, value, trained, state in zip(parameters, self.values, self.trained, self.states, strict=True):
            parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]  # DeepSpeed's
            parameter.requires_grad_(trained)
            with torch.no_grad():
                parameter.copy_(value)
            if state:
                optimizer.state[parameter] = state
        owned = zip(parameters, self.owned, strict=True)
        optimizer.param_groups[0]["params"] += [parameter for parameter, found in owned if found]
