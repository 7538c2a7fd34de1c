"""Updates of a layer that is behind the stage to which it has moved."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.stage import Stage
from ds_vpipe.engine.weights.moved_layers import MovedLayer


class LateUpdates:
    """Gradients of a layer, held until its earlier ones have been applied, and the optimizer's options for each.

    Args:
        engine: has the optimizer.
        stage: to which the layer has moved.
    """

    def __init__(self, engine: PatchedPipelineEngine, stage: Stage) -> None:
        self._engine, self._stage = engine, stage
        self._gradients: dict[int, list[torch.Tensor | None]] = {}  # by batch
        self._options: dict[int, dict[str, Any]] = {}  # likewise

    def note_options(self, batch: int) -> None:
        """Keep the options with which the stage makes its update of a batch."""
        options = {name: value for name, value in self._engine.optimizer.param_groups[0].items() if name != "params"}
        self._options[batch] = tree_map_only(torch.Tensor, torch.clone, options)  # schedulers fill a rate's tensor

    def hold(self, batch: int, gradients: Iterable[torch.Tensor | None]) -> None:
        """Hold the gradients of a batch."""
        self._gradients[batch] = list(gradients)

    def has(self, batch: int) -> bool:
        """Whether the gradients of a batch are here."""
        return batch in self._gradients

    def put(self, batch: int, layer: MovedLayer) -> None:
        """Make held gradients those of the layer's parameters."""
        for parameter, gradient in zip(layer.parameters, self._gradients.pop(batch), strict=True):
            parameter.grad = gradient

    def apply(self, layer: MovedLayer, updates: int) -> None:
        """Apply held gradients until the layer has had ``updates`` updates, with the options of each."""
        optimizer = self._engine.optimizer
        while (batch := layer.versions.latest) < updates:
            kept, groups = [parameter.grad for parameter in layer.parameters], optimizer.param_groups
            owned = {id(parameter) for parameter in groups[0]["params"]}
            trained = [parameter for parameter in layer.parameters if id(parameter) in owned]
            with self._stage.weights.update(layer):
                self.put(batch, layer)
                optimizer.param_groups = [{**groups[0], **self._options[batch], "params": trained}]
                try:
                    type(optimizer).step(optimizer)
                finally:
                    optimizer.param_groups = groups
                    for parameter, gradient in zip(layer.parameters, kept, strict=True):
                        parameter.grad = gradient

    def clear(self) -> None:
        """Forget everything: the move is over."""
        self._gradients.clear()
        self._options.clear()
