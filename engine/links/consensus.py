"""Agreements among ranks, on the CPU with a time limit."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ds_vpipe.engine.links.groups import Groups
from ds_vpipe.errors import PipelinePeerError, VPipeError, flat, one_line

_FILES_LIMIT_S = 30 * 60.0  # slow file systems are ordinary


class Consensus:
    """Agreements of a stage, of a pipeline, and of all ranks.

    Each raises :class:`PipelinePeerError` if a rank is lost or did not answer in time. All but :meth:`all_have` are for
    between batches only. Arguments ``what`` name the wait.

    Attributes:
        pipeline: group of this pipeline's stages, in order.
        everyone: group of all ranks.
    """

    def __init__(self, grid: Any, groups: Groups) -> None:
        self._raised: weakref.ref[VPipeError] | None = None
        self._me = groups.me
        topology = grid.topology()  # not the grid's own lists: one of a script's class, as CoLLiE's, may have none
        replicas = next(ranks for ranks in topology.get_axis_comm_lists("data") if groups.me.rank in ranks)
        self._replicas = self._stage = groups.of("replicas", replicas)
        if grid.get_slice_parallel_world_size() > 1:
            self._stage = groups.of("a stage", sorted(topology.filter_match(pipe=groups.me.stage)))
        pipeline = next(ranks for ranks in topology.get_axis_comm_lists("pipe") if groups.me.rank in ranks)
        self.pipeline = groups.of("pipeline", pipeline)
        self._files_limit_s = max(groups.timeout_s, _FILES_LIMIT_S)
        self.everyone = groups.of("all ranks", range(grid.world_size), longest_s=self._files_limit_s)

    @property
    def one_rank(self) -> bool:
        """Whether this rank is alone in its stage, and has nobody to ask for :meth:`all_have`."""
        return len(self._stage.ranks) == 1

    def all_have(self, mine: bool) -> bool:
        """Whether all ranks of this stage pass True: a micro-batch is admitted only if every replica has one.

        Of a tensor slice one rank may read for all, and the others must learn of the end.
        """
        return bool(self._stage.minimum(int(mine), "the stage's ranks to read a micro-batch"))

    def any_has(self, mine: bool, what: str) -> bool:
        """Whether any rank passes True."""
        return self.everyone.minimum(-int(mine), what) < 0

    def of_replicas(self, value: Any) -> list[Any]:
        """The values of all replicas of this stage, in order."""
        return self._replicas.gather(value, "the stage's replicas to exchange optimizer states")

    def bytes_of_stage(self, tensor: torch.Tensor, stage: int, receivers: Sequence[int], what: str) -> None:
        """Copy a tensor from one stage of this pipeline to others.

        Args:
            tensor: contiguous, in host memory, on ``stage`` and the receivers; others need not call this.
            stage: that has the values.
            receivers: stages that get them.
        """
        flat, group = tensor.view(-1).view(torch.uint8), self.pipeline
        ranks = group.ranks
        if len(receivers) == len(ranks):
            group.broadcast(flat, ranks[stage], what)
        elif group.me.rank == ranks[stage]:
            for receiver in receivers:
                group.wait(group.send(flat, ranks[receiver], 0), what)
        else:
            group.wait(group.recv(flat, ranks[stage], 0), what)

    @contextmanager
    def all_or_none(self, what: str) -> Iterator[None]:
        """A block that fails on all ranks or on none.

        For work with files. Blocks may be nested; a failure is reported once. A rank that fails between the block's
        own collectives reports it at the end, where those that wait for it meet it. Not around waits on links, which do
        not hear of a failure here.

        Args:
            what: start of the line of a failure.

        Raises:
            VPipeError: the work failed here.
            PipelinePeerError: it failed on another rank.
        """
        try:
            yield
        except PipelinePeerError:
            raise  # all ranks have it
        except Exception as error:
            if self._raised is not None and error is self._raised():
                raise
            text = flat(str(error)) if isinstance(error, VPipeError) else one_line(error)
            line = f"{what}: {self._me} failed: {text}"
            with suppress(RuntimeError):  # what happened here matters more than who cannot be reached
                self._lines(line, what)
            raised = error if isinstance(error, VPipeError) else VPipeError(line)
            self._raised = weakref.ref(raised)  # a reference would keep all frames of the traceback
            if raised is error:
                raise
            raise raised from error
        lines = self._lines(None, what)
        if lines:
            raise PipelinePeerError(lines[0])

    def _lines(self, mine: str | None, what: str) -> list[str]:
        lines = self.everyone.gather(mine, f"all ranks in {what}", self._files_limit_s)
        return [line for line in lines if line is not None]
