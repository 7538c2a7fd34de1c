"""What is known of a batch once the last stage has done with it: it travels with the batch's last gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class BatchReport:
    """News of one batch on its way from the last stage to the first.

    Attributes:
        losses: mean loss of this pipeline, of all replicas, then the model's additional losses; ``[2 + n]``, fp64.
        loss_scale: what the batch's losses were multiplied with.
        statistics: one row per stage; a stage fills in its own before it passes the report on. ``[K, columns]``, fp64.
    """

    losses: torch.Tensor
    loss_scale: float
    statistics: torch.Tensor

    def pack(self) -> torch.Tensor:
        """As one fp64 vector."""
        head = torch.tensor([self.loss_scale, self.losses.numel(), self.statistics.shape[0]], dtype=torch.float64)
        return torch.cat([head, self.losses.to("cpu"), self.statistics.flatten()])

    @classmethod
    def unpack(cls, words: torch.Tensor) -> BatchReport:
        """The inverse of :meth:`pack`."""
        loss_scale, count, stages = words[:3].tolist()
        losses, statistics = words[3 : 3 + int(count)], words[3 + int(count) :]
        return cls(losses.clone(), loss_scale, statistics.reshape(int(stages), -1).clone())
