"""Small agreements among ranks, on the CPU and with a time limit."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_vpipe.errors import PipelinePeerError


class Agreement:
    """Minima over the replicas of a stage or over all ranks, and what one stage of a pipeline decides for all.

    Args:
        grid: DeepSpeed's process grid.
        timeout_s: limit of every wait, in seconds.
    """

    def __init__(self, grid: Any, timeout_s: float) -> None:
        limit = timedelta(seconds=timeout_s)
        self._me = f"stage {grid.get_stage_id()} (rank {grid.get_global_rank()})"
        self._replicas = None
        if grid.data_parallel_size > 1:
            for ranks in grid.dp_groups:  # all ranks name all groups in the same order, as torch wants it
                group = dist.new_group(ranks, backend="gloo", timeout=limit)
                if grid.get_global_rank() in ranks:
                    self._replicas = group
        self._pipeline = None
        if grid.pipe_parallel_size > 1:
            for ranks in grid.pipe_groups:
                group = dist.new_group(ranks, backend="gloo", timeout=limit)
                if grid.get_global_rank() in ranks:
                    self._pipeline = group
        self._everyone = dist.new_group(backend="gloo", timeout=limit) if grid.world_size > 1 else None

    def all_have(self, mine: bool) -> bool:
        """True if all replicas of this stage pass True: a micro-batch is admitted only if every replica has one.

        Raises:
            PipelinePeerError: a replica is lost or did not answer in time.
        """
        return bool(self._minimum(int(mine), self._replicas, "the stage's replicas to read a micro-batch"))

    def lowest(self, value: int) -> int:
        """The smallest ``value`` of all ranks, between batches only.

        Raises:
            PipelinePeerError: a rank is lost or did not answer in time.
        """
        return self._minimum(value, self._everyone, "all ranks to read their evaluation data")

    def of_pipeline(self, value: Any, source: int) -> Any:
        """The ``value`` that the rank ``source`` of this pipeline passes; all stages call it, between batches only.

        Raises:
            PipelinePeerError: a rank is lost or did not answer in time.
        """
        values = [value]
        try:
            dist.broadcast_object_list(values, source, group=self._pipeline)
        except RuntimeError as error:
            what = "all stages to agree on what a checkpoint holds"
            raise PipelinePeerError(f"{self._me} waited for {what}: {' '.join(str(error).split())}") from error
        return values[0]

    def _minimum(self, value: int, group: dist.ProcessGroup | None, what: str) -> int:
        if group is None:
            return value
        result = torch.tensor(value)
        try:
            dist.all_reduce(result, op=dist.ReduceOp.MIN, group=group)
        except RuntimeError as error:
            raise PipelinePeerError(f"{self._me} waited for {what}: {' '.join(str(error).split())}") from error
        return int(result.item())
