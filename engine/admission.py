"""Agreement of the first stage's data-parallel replicas on how many micro-batches are admitted."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class ReplicaAgreement:
    """A micro-batch is admitted only if every replica of the first stage has one.

    Args:
        grid: DeepSpeed's process grid.
        timeout_s: limit of the wait for the other replicas, in seconds.
    """

    def __init__(self, grid: Any, timeout_s: float) -> None:
        self._group = None
        if grid.data_parallel_size > 1:
            for ranks in grid.dp_groups:  # all ranks name all groups in the same order, as torch wants it
                group = dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout_s))
                if grid.get_global_rank() in ranks:
                    self._group = group

    def all_have(self, mine: bool) -> bool:
        """True if all replicas pass True. One small reduction on the CPU, over the first stage only."""
        if self._group is None:
            return mine
        flag = torch.tensor(int(mine))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group)
        return bool(flag.item())
