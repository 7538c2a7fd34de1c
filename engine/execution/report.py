"""What is known of a batch once the last stage has done with it: it travels with the batch's last gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ds_vpipe.engine.observe.statistics import COLUMNS

_HEAD = 2  # loss scale, number of losses
Numbers = np.ndarray[Any, np.dtype[np.float64]]


class BatchReport:
    """News of one batch on its way from the last stage to the first: one vector on the host.

    Args:
        losses: mean loss of this pipeline, of all replicas, then the model's additional losses; ``[2 + n]``.
        loss_scale: what the batch's losses were multiplied with.
        num_stages: K.

    Attributes:
        losses: as given, fp64.
        statistics: one row per stage, ``[K, COLUMNS]``; a stage fills in its own before it passes the report on.
    """

    __slots__ = ("_numbers", "losses", "statistics")

    def __init__(self, losses: torch.Tensor, loss_scale: float, num_stages: int) -> None:
        numbers = np.zeros(_HEAD + losses.numel() + num_stages * COLUMNS)
        numbers[:_HEAD] = (loss_scale, losses.numel())
        numbers[_HEAD : _HEAD + losses.numel()] = losses.tolist()
        self._refer_to(numbers)

    def _refer_to(self, numbers: Numbers) -> None:
        end = _HEAD + int(numbers[1])
        self._numbers = numbers
        self.losses: Numbers = numbers[_HEAD:end]
        self.statistics: Numbers = numbers[end:].reshape(-1, COLUMNS)

    @property
    def loss_scale(self) -> float:
        """What the batch's losses were multiplied with."""
        return float(self._numbers[0])

    def pack(self) -> torch.Tensor:
        """As one fp64 vector, which shares the report's memory."""
        return torch.from_numpy(self._numbers)

    @classmethod
    def unpack(cls, words: torch.Tensor) -> BatchReport:
        """A report with a copy of what :meth:`pack` gave."""
        report = cls.__new__(cls)
        report._refer_to(words.numpy().copy())
        return report
