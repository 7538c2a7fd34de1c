"""Everything each rank of a pipeline does, transfers included: what the engine carries out one batch at a time.

The engine asks for :func:`rank_actions` from where a rank stands to the end of the batch. Whole programs, as checks,
simulation and pictures need them, are the same function called batch after batch, with the data ending at
batch ends that are known beforehand. Of four batches of two micro-batches through two ranks, asynchronous, data
ending after the first two (transfers are not drawn)::

    rank 0   F0 F1 B0 F2 B1 STEP0 F3 B2 B3 STEP1 | F4 F5 B4 F6 B5 STEP2 F7 B6 B7 STEP3
    rank 1   F0 B0 F1 B1 STEP0 F2 B2 F3 B3 STEP1 | F4 B4 F5 B5 STEP2 F6 B6 F7 B7 STEP3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ds_vpipe.refusal import Refusal
from ds_vpipe.schedules.actions import Action
from ds_vpipe.schedules.interleaved import interleaved_actions
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.schedule import Exchanges, Progress, compute_actions, with_communication

Programs = tuple[tuple[Action, ...], ...]
"""The actions of every rank, in order."""

_NOTHING_ELSE = Exchanges()


@dataclass(frozen=True, slots=True)
class Workload:
    """How much is trained, and where the data end on the way.

    Attributes:
        batches: complete batches that are trained in all.
        data_ends: batches trained when an iterator ends; the pipeline drains there and is filled again.
        drain: the data end after the last batch. Otherwise forward passes of later batches have begun by then.

    Raises:
        VPipeConfigError: there is no batch, or the ends do not rise from 1 to below ``batches``.
    """

    batches: int
    data_ends: tuple[int, ...] = ()
    drain: bool = True

    def __post_init__(self) -> None:
        if self.batches < 1:
            raise Refusal("batches", self.batches, "a whole number >= 1", "train at least one").error()
        ends = (0, *self.data_ends, self.batches)
        if any(before >= after for before, after in pairwise(ends)):
            allowed = f"numbers that rise from 1 to {self.batches - 1}, for {self.batches} batches"
            raise Refusal("data_ends", list(self.data_ends), allowed, "change them").error()

    def refill(self, batch: int) -> int:
        """The first batch after the pipeline was last filled, as seen from ``batch``."""
        return max((end for end in self.data_ends if end <= batch), default=0)


def batch_actions(pipeline: Pipeline, rank: int, progress: Progress) -> Iterator[Action]:
    """What is left of the current batch on ``rank``: forward and backward passes, one reduction and update.

    Args:
        pipeline: the schedule and its sizes.
        rank: the rank within the pipeline.
        progress: how far the rank has come. A synchronous pipeline drains at the end of the batch whatever the
            limit; an interleaved one is interpreted from the start of a batch only.

    Raises:
        ValueError: the schedule is interleaved and micro-batches are in flight or a batch has begun.
    """
    micro_batches = pipeline.micro_batches
    batch, begun = divmod(progress.completed, micro_batches)
    if pipeline.schedule == "interleaved":
        if begun or not progress.drained:
            raise ValueError(
                f"interleaved schedule: got {progress}, expected the start of a batch and nothing in flight"
            )
        if progress.limit is not None and progress.limit <= progress.completed:
            return iter(())
        return interleaved_actions(batch, rank, pipeline.num_stages, micro_batches, pipeline.virtual_stages)
    if pipeline.synchronous and progress.limit is None:
        progress = replace(progress, limit=(batch + 1) * micro_batches)
    return compute_actions(progress, pipeline.depths[rank], micro_batches)


def rank_actions(
    pipeline: Pipeline, rank: int, progress: Progress, exchanges: Exchanges = _NOTHING_ELSE
) -> Iterator[Action]:
    """Everything ``rank`` does from ``progress`` to the end of the current batch; see :func:`batch_actions`."""
    actions = batch_actions(pipeline, rank, progress)
    return with_communication(actions, rank, pipeline.num_stages, exchanges, pipeline.virtual_stages)


def after_batch(pipeline: Pipeline, rank: int, progress: Progress) -> Progress:
    """Where ``rank`` stands after :func:`rank_actions` from ``progress``, if the limit leaves the batch whole."""
    completed = (progress.completed // pipeline.micro_batches + 1) * pipeline.micro_batches
    if pipeline.synchronous:
        return replace(progress, forwarded=completed, completed=completed)
    ahead = completed + pipeline.depths[rank]
    ahead = ahead if progress.limit is None else min(ahead, progress.limit)
    return replace(progress, forwarded=max(progress.forwarded, ahead), completed=completed)


def rank_program(
    pipeline: Pipeline, rank: int, workload: Workload, exchanges: Exchanges = _NOTHING_ELSE
) -> Iterator[Action]:
    """Everything ``rank`` does to train ``workload``."""
    start = 0
    for end in (*workload.data_ends, workload.batches):
        refill = start * pipeline.micro_batches
        ends_here = end < workload.batches or workload.drain
        limit = end * pipeline.micro_batches if ends_here and not pipeline.synchronous else None
        progress = Progress(refill, refill, limit, refill)
        for _ in range(start, end):
            yield from rank_actions(pipeline, rank, progress, exchanges)
            progress = after_batch(pipeline, rank, progress)
        start = end


def programs(pipeline: Pipeline, workload: Workload, exchanges: Sequence[Exchanges] | None = None) -> Programs:
    """Everything each rank does to train ``workload``; ``exchanges`` of every rank, if there are any."""
    by_rank = exchanges or (_NOTHING_ELSE,) * pipeline.num_stages
    return tuple(tuple(rank_program(pipeline, rank, workload, by_rank[rank])) for rank in range(pipeline.num_stages))
