"""The mean losses of a batch, summed on the last stage, and the report that carries them back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from deepspeed import comm as dist

from ds_vpipe.errors import VPipeError

_HEAD = 3  # loss scale, checksum of the labels, statistics of a stage
Numbers = np.ndarray[Any, np.dtype[np.float64]]


class BatchLoss:
    """Sum of a batch's losses, averaged over replicas; ``group`` is the last stage's group of these."""

    def __init__(self, micro_batches: int, group: Any, replicas: int) -> None:
        self._micro_batches, self._group, self._replicas = micro_batches, group, replicas
        self.outputs: list[Any] = []  # what the loss function has returned, as DeepSpeed's engine keeps it
        self._sums: list[torch.Tensor] = []
        self._count = 0
        self._means: torch.Tensor | None = None
        self._work: Any = None

    def add(self, loss: Any, additional: Mapping[str, Any] | None = None) -> torch.Tensor:
        """Add a micro-batch's loss, and what the model reports beside it, and return the loss.

        Of several losses the first is trained. After the batch's last one the reduction over replicas starts, to be
        hidden behind the backward pass.

        Raises:
            VPipeError: a loss is not a tensor of one element, or their number has changed.
        """
        several = isinstance(loss, (tuple, list)) and len(loss) > 0
        checked = _scalar("loss of the last stage", loss[0] if several else loss)
        self.outputs.append([value.detach() for value in loss] if several else loss.detach())
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
        self.outputs, self._sums = [], []
        self._means = self._work = None
        self._count = 0

    @property
    def total(self) -> torch.Tensor:
        """Sum of this pipeline's trained losses."""
        return self._sums[0]

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
        numbers: loss scale, checksum of the labels, number of a stage's statistics, then those of all stages; on the
            host.
        losses: mean loss of this pipeline, of all replicas, then the model's additional losses; ``[2 + n]``, fp64,
            where the stage computes: the host does not wait for them.
    """

    __slots__ = ("_numbers", "losses", "statistics")

    def __init__(self, numbers: Numbers, losses: torch.Tensor) -> None:
        self._numbers, self.losses = numbers, losses
        # One row per stage, [K, columns]; a stage fills in its own before it passes the report on.
        self.statistics: Numbers = numbers[_HEAD:].reshape(-1, int(numbers[2]))

    @classmethod
    def of(cls, losses: torch.Tensor, loss_scale: float, labels_sum: int, num_stages: int, columns: int) -> BatchReport:
        """A new report on the last stage, with room for ``columns`` statistics of each stage."""
        numbers = np.zeros(_HEAD + num_stages * columns)
        numbers[:_HEAD] = (loss_scale, labels_sum, columns)
        return cls(numbers, losses)

    @property
    def loss_scale(self) -> float:
        """Factor of the batch's losses."""
        return float(self._numbers[0])

    @property
    def labels_sum(self) -> int:
        """Sum of the checksums of the batch's labels on the last stage."""
        return int(self._numbers[1])

    def pack(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Numbers and losses to be sent; the numbers are a vector that shares the report's memory."""
        return torch.from_numpy(self._numbers), self.losses


def _scalar(what: str, value: Any) -> torch.Tensor:
    """The value without dimensions, of which a tensor of one element may have some, as in DeepSpeed's engine."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        given = f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        raise VPipeError(f"{what}: got {given}, allowed is a tensor of one element; return its mean or sum")
    return value.reshape(())
