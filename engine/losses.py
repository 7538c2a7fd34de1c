"""The mean loss of a batch, summed on the last stage as DeepSpeed sums it, bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist

from ds_vpipe.errors import VPipeError


class BatchLoss:
    """Adds up the losses of one batch and averages them over data-parallel replicas.

    Args:
        micro_batches: micro-batches per batch.
        group: the last stage's replicas.
        replicas: how many there are.
    """

    def __init__(self, micro_batches: int, group: Any, replicas: int) -> None:
        self._micro_batches, self._group, self._replicas = micro_batches, group, replicas
        self._sum: torch.Tensor | None = None
        self._count = 0
        self._means: torch.Tensor | None = None
        self._work: Any = None

    def add(self, loss: Any) -> torch.Tensor:
        """Add a micro-batch's loss and return it.

        After the batch's last one the reduction over replicas starts, to be hidden behind the backward pass.

        Raises:
            VPipeError: the loss is not a tensor without dimensions.
        """
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            given = f"shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise VPipeError(
                f"loss of the last stage: got {given}, allowed is a tensor without dimensions; return its mean or sum"
            )
        value = loss.detach()
        self._sum = (torch.zeros_like(value) if self._sum is None else self._sum) + value
        self._count += 1
        if self._count == self._micro_batches:
            mean = self._sum / self._micro_batches
            self._means = torch.stack([mean, mean])
            if self._replicas > 1:
                self._work = dist.all_reduce(self._means[1:], group=self._group, async_op=True)
        return loss

    def restart(self) -> None:
        """Forget what has been added: those micro-batches belong to no complete batch."""
        self._sum = self._means = self._work = None
        self._count = 0

    def means(self) -> torch.Tensor:
        """This pipeline's mean loss and that of all replicas, ``[2]`` in fp32. Once per complete batch."""
        if self._means is None:
            raise VPipeError(f"mean loss of a batch: got {self._count} of {self._micro_batches} micro-batches")
        if self._work is not None:
            self._work.wait()
            self._means[1] /= self._replicas
        return self._means.float()
