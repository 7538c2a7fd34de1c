"""Small agreements among ranks, on the CPU and with a time limit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ds_vpipe.engine.link import cause
from ds_vpipe.errors import PipelinePeerError, VPipeError

_FILES_LIMIT = timedelta(minutes=30)  # slow file systems are ordinary; DeepSpeed's own default


class Agreement:
    """Minima over the ranks of a stage or over all ranks, and what one stage of a pipeline decides for all.

    Args:
        grid: DeepSpeed's process grid.
        timeout_s: limit of every wait, in seconds.
    """

    def __init__(self, grid: Any, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        limit = timedelta(seconds=timeout_s)
        self._told: weakref.ref[VPipeError] | None = None
        self._me = f"stage {grid.get_stage_id()} (rank {grid.get_global_rank()})"
        self._replicas = None
        if grid.data_parallel_size > 1:
            for ranks in grid.dp_groups:  # all ranks name all groups in the same order, as torch wants it
                group = dist.new_group(ranks, backend="gloo", timeout=limit)
                if grid.get_global_rank() in ranks:
                    self._replicas = group
        self._stage = self._replicas
        if grid.get_slice_parallel_world_size() > 1:
            for stage in range(grid.pipe_parallel_size):
                ranks = sorted(grid.topology().filter_match(pipe=stage))
                group = dist.new_group(ranks, backend="gloo", timeout=limit)
                if grid.get_global_rank() in ranks:
                    self._stage = group
        self._pipeline = None
        if grid.pipe_parallel_size > 1:
            for ranks in grid.pipe_groups:
                group = dist.new_group(ranks, backend="gloo", timeout=limit)
                if grid.get_global_rank() in ranks:
                    self._pipeline = group
        self._everyone = self._at_files = None
        if grid.world_size > 1:
            self._everyone = dist.new_group(backend="gloo", timeout=limit)
            self._at_files = dist.new_group(backend="gloo", timeout=max(limit, _FILES_LIMIT))

    def all_have(self, mine: bool) -> bool:
        """True if all ranks of this stage pass True: a micro-batch is admitted only if every replica has one.

        Of a tensor slice one rank may read for all, so that the others have to hear of the end.

        Raises:
            PipelinePeerError: one of them is lost or did not answer in time.
        """
        return bool(self._minimum(int(mine), self._stage, "the stage's ranks to read a micro-batch"))

    def lowest(self, value: int, what: str) -> int:
        """The smallest ``value`` of all ranks, between batches only; ``what`` is the name of the wait.

        Raises:
            PipelinePeerError: a rank is lost or did not answer in time.
        """
        return self._minimum(value, self._everyone, what)

    def is_same(self, value: int, what: str) -> bool:
        """True if all ranks pass the same ``value``, between batches only; ``what`` is the name of the wait.

        Raises:
            PipelinePeerError: a rank is lost or did not answer in time.
        """
        return self.lowest(value, what) == -self.lowest(-value, what)

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
            raise PipelinePeerError(f"{self._me} waited for {what}: {cause(error, self._timeout_s)}") from error
        return values[0]

    def of_replicas(self, value: Any) -> list[Any]:
        """The values that all replicas of this stage pass, in order, between batches only.

        Raises:
            PipelinePeerError: a replica is lost or did not answer in time.
        """
        if self._replicas is None:
            return [value]
        values = [None] * dist.get_world_size(self._replicas)
        try:
            dist.all_gather_object(values, value, group=self._replicas)
        except RuntimeError as error:
            what = "the stage's replicas to tell their optimizer states"
            raise PipelinePeerError(f"{self._me} waited for {what}: {cause(error, self._timeout_s)}") from error
        return values

    def of_stages(self, value: Any, what: str) -> list[Any]:
        """The values that all stages of this pipeline pass, in order; ``what`` is the name of the wait.

        Raises:
            PipelinePeerError: a rank is lost or did not answer in time.
        """
        values = [None] * dist.get_world_size(self._pipeline)
        try:
            dist.all_gather_object(values, value, group=self._pipeline)
        except RuntimeError as error:
            raise PipelinePeerError(f"{self._me} waited for {what}: {cause(error, self._timeout_s)}") from error
        return values

    def bytes_of_stage(self, tensor: torch.Tensor, stage: int, receivers: Sequence[int], what: str) -> None:
        """Bring a contiguous tensor in host memory from one stage of this pipeline to others.

        Args:
            tensor: on ``stage`` and the receivers; others need not call this.
            stage: that has the values.
            receivers: stages that get them.
            what: the name of the wait.

        Raises:
            PipelinePeerError: a rank is lost or did not answer in time.
        """
        flat, ranks = tensor.view(-1).view(torch.uint8), dist.get_process_group_ranks(self._pipeline)
        try:
            if len(receivers) == len(ranks):
                dist.broadcast(flat, ranks[stage], group=self._pipeline)
            elif dist.get_rank() == ranks[stage]:
                for receiver in receivers:
                    dist.send(flat, ranks[receiver], group=self._pipeline)
            else:
                dist.recv(flat, ranks[stage], group=self._pipeline)
        except RuntimeError as error:
            raise PipelinePeerError(f"{self._me} waited for {what}: {cause(error, self._timeout_s)}") from error

    @property
    def pipeline(self) -> tuple[str, list[int]]:
        """A name of this pipeline, the same on its ranks, and these."""
        assert self._pipeline is not None
        return self._pipeline.group_name, dist.get_process_group_ranks(self._pipeline)

    def of_first_rank(self, value: Any) -> Any:
        """The ``value`` that rank 0 passes; all ranks call it, between batches only.

        Raises:
            PipelinePeerError: a rank is lost or did not answer in time.
        """
        values = [value]
        if self._everyone is None:
            return value
        try:
            dist.broadcast_object_list(values, 0, group=self._everyone)
        except RuntimeError as error:
            what = "the first rank to name the folder of a checkpoint"
            raise PipelinePeerError(f"{self._me} waited for {what}: {cause(error, self._timeout_s)}") from error
        return values[0]

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A block of work with files that all ranks do, between batches: if it fails on one it fails on all.

        Blocks may be nested; a failure is told once. A rank that fails between the block's own collectives tells
        it at the end, where those that wait for it meet it.

        Args:
            what: begins the line of a failure.

        Raises:
            VPipeError: the work failed here.
            PipelinePeerError: it failed on another rank, or a rank is lost or did not answer in time.
        """
        try:
            yield
        except PipelinePeerError:
            raise  # everyone has it
        except Exception as error:
            if self._told is not None and error is self._told():
                raise
            text = _flat(error) if isinstance(error, VPipeError) else f"{type(error).__name__}: {_flat(error)}"
            line = f"{what}: {self._me} failed: {text}"
            with suppress(RuntimeError):  # what happened here matters more than who cannot be told
                self._lines(line)
            told = error if isinstance(error, VPipeError) else VPipeError(line)
            self._told = weakref.ref(told)  # a reference would keep all frames of the traceback
            if told is error:
                raise
            raise told from error
        try:
            lines = self._lines(None)
        except RuntimeError as error:
            raise PipelinePeerError(f"{self._me} waited for all ranks in {what}: {cause(error, None)}") from error
        if lines:
            raise PipelinePeerError(lines[0])

    def _lines(self, mine: str | None) -> list[str]:
        lines = [mine]
        if self._at_files is not None:
            lines *= dist.get_world_size(self._at_files)
            dist.all_gather_object(lines, mine, group=self._at_files)
        return [line for line in lines if line is not None]

    def _minimum(self, value: int, group: dist.ProcessGroup | None, what: str) -> int:
        if group is None:
            return value
        result = torch.tensor(value)
        try:
            dist.all_reduce(result, op=dist.ReduceOp.MIN, group=group)
        except RuntimeError as error:
            raise PipelinePeerError(f"{self._me} waited for {what}: {cause(error, self._timeout_s)}") from error
        return int(result.item())


def _flat(error: BaseException) -> str:
    return " ".join(str(error).split())
