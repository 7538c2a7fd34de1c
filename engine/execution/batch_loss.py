"""The mean losses of a batch, summed on the last stage, and the report that carries them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from deepspeed import comm as dist

from ds_vpipe.errors import VPipeError

_HEAD = 3  # loss scale, number of losses, statistics of a stage
Numbers = np.ndarray[Any, np.dtype[np.float64]]


class BatchLoss:
    """Sum of a batch's losses, averaged over replicas. ``group`` are those of the last stage."""

    def __init__(self, micro_batches: int, group: Any, replicas: int) -> None:
        self._micro_batches, self._group, self._replicas = micro_batches, group, replicas
        self._sums: list[torch.Tensor] = []
        self._count = 0
        self._means: torch.Tensor | None = None
        self._work: Any = None

    def add(self, loss: Any, additional: Mapping[str, Any] | None = None) -> torch.Tensor:
        """Add a micro-batch's loss, and what the model reports beside it, and return the loss.

        After the batch's last one the reduction over replicas starts, to be hidden behind the backward pass.

        Raises:
            VPipeError: a loss is not a tensor without dimensions, or their number has changed.
        """
        checked = _scalar("loss of the last stage", loss)
        values = [checked.detach()]
        values += [_scalar(f"additional loss {name!r}", value).detach() for name, value in (additional or {}).items()]
        if self._count == 0:
            self._sums = [torch.zeros_like(value) for value in values]
        if len(values) != len(self._sums):
            raise VPipeError(
                f"get_additional_losses(): got {len(values) - 1} losses, the batch's first micro-batch had "
                f"{len(self._sums) - 1}; return the same names for every micro-batch"
            )
        self._sums = [total + value for total, value in zip(self._sums, values, strict=True)]
        self._count += 1
        if self._count == self._micro_batches:
            mean, *others = (total / self._micro_batches for total in self._sums)
            self._means = torch.stack([mean, mean, *others])
            if self._replicas > 1:
                self._work = dist.all_reduce(self._means[1:], group=self._group, async_op=True)
        return checked

    def restart(self) -> None:
        """Forget what has been added: those micro-batches belong to no complete batch."""
        self._sums = []
        self._means = self._work = None
        self._count = 0

    def means(self) -> torch.Tensor:
        """Mean loss of this pipeline, of all replicas, and additional ones: ``[2 + n]``. Once per complete batch."""
        if self._means is None:
            raise VPipeError(f"mean loss of a batch: got {self._count} of {self._micro_batches} micro-batches")
        if self._work is not None:
            self._work.wait()
            self._means[1:] /= self._replicas
        return self._means.double()


class BatchReport:
    """Losses and statistics of one batch, on the way from the last stage to the first with its last gradient.

    Args:
        losses: mean loss of this pipeline, of all replicas, then the model's additional losses; ``[2 + n]``.
        loss_scale: factor of the batch's losses.
        num_stages: K.
        columns: statistics of each stage.
    """

    __slots__ = ("_numbers", "losses", "statistics")

    def __init__(self, losses: torch.Tensor, loss_scale: float, num_stages: int, columns: int) -> None:
        numbers = np.zeros(_HEAD + losses.numel() + num_stages * columns)
        numbers[:_HEAD] = (loss_scale, losses.numel(), columns)
        numbers[_HEAD : _HEAD + losses.numel()] = losses.tolist()
        self._refer_to(numbers)

    def _refer_to(self, numbers: Numbers) -> None:
        end = _HEAD + int(numbers[1])
        self._numbers = numbers
        self.losses: Numbers = numbers[_HEAD:end]  # as given, fp64
        # One row per stage, [K, columns]; a stage fills in its own before it passes the report on.
        self.statistics: Numbers = numbers[end:].reshape(-1, int(numbers[2]))

    @property
    def loss_scale(self) -> float:
        """Factor of the batch's losses."""
        return float(self._numbers[0])

    def pack(self) -> torch.Tensor:
        """One fp64 vector on the host, which shares the report's memory."""
        return torch.from_numpy(self._numbers)

    @classmethod
    def unpack(cls, numbers: torch.Tensor) -> BatchReport:
        """A report with a copy of a packed one."""
        report = cls.__new__(cls)
        report._refer_to(numbers.numpy().copy())
        return report


def _scalar(what: str, value: Any) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.dim() != 0:
        given = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise VPipeError(f"{what}: got {given}, allowed is a tensor without dimensions; return its mean or sum")
    return value
