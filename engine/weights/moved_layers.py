"""Weights of a layer that has moved to a stage while it trains, in versions of their own.

They join the stage's versions when the pipeline is next empty. Until then the layer may be behind the stage: its last
gradients from the stage that had it are still on their way.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch

from ds_vpipe.engine.weights.versions import WeightVersions


@dataclass(eq=False)
class MovedLayer:
    """Versions of one layer's weights, and which of them the next forward pass uses."""

    parameters: Sequence[torch.nn.Parameter]
    versions: WeightVersions
    apart: bool = False  # updated by itself, and not with the stage
    used: bool = False  # whether the next forward pass runs the layer
    due: int | None = None  # version of the next forward pass; None for the same as the stage's

    def begin_forward(self, version: int) -> None:
        """Point to the version of a forward pass: that which is due, or else the stage's ``version``."""
        if self.used:
            self.versions.point_to(version if self.due is None else self.due)

    def end_forward(self, micro_batch: Hashable) -> None:
        """Note what the forward pass of ``micro_batch`` has used."""
        if self.used:
            self.versions.in_flight[micro_batch] = self.versions.pointed
        self.versions.point_to_newest()
