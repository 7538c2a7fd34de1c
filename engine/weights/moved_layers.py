"""Weights of a layer that has moved to a stage while it trains, in versions of their own.

They join the stage's versions when the pipeline is next empty. Until then the layer may be behind the stage: its last
gradients from the stage that had it are still on their way.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from ds_vpipe.engine.weights.versions import WeightVersions


@dataclass(eq=False)
class MovedLayer:
    """Versions of one layer's weights, and which of them micro-batches in flight use."""

    parameters: Sequence[torch.nn.Parameter]
    versions: WeightVersions
    apart: bool = False  # updated by itself, and not with the stage
    used: bool = False  # whether the next forward pass runs the layer
    due: int | None = None  # version of the next forward pass; None for the same as the stage's
    keep_from: int | None = None  # oldest version that later forward passes use, if any but the newest
    in_flight: dict[Hashable, int] = field(default_factory=dict)

    def begin_forward(self, version: int | None) -> None:
        """Point to the version of a forward pass: that which is due, or else the stage's ``version``."""
        if self.used:
            wanted = self.due if self.due is not None else version
            self.versions.point_to(self.versions.latest if wanted is None else wanted)

    def end_forward(self, micro_batch: Hashable) -> None:
        """Note what the forward pass of ``micro_batch`` has used."""
        if self.used:
            self.in_flight[micro_batch] = self.versions.pointed
        self.versions.point_to_newest()

    def begin_backward(self, micro_batch: Hashable) -> None:
        """Point to the version that the forward pass used, if it ran the layer."""
        if micro_batch in self.in_flight:
            self.versions.point_to(self.in_flight[micro_batch])

    def recycle(self) -> None:
        """Give up versions that nothing uses."""
        self.versions.keep_only(self.in_flight.values(), self.keep_from)

    def begin_update(self) -> None:
        """Point to the newest weights, after a copy of them if anything uses them."""
        self.versions.point_to_newest()
        if self.versions.latest in self.versions.used_by(self.in_flight.values(), self.keep_from):
            self.versions.fork()

    def end_update(self) -> None:
        """Count the update."""
        self.versions.advance()
        self.recycle()
