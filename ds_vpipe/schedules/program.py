"""Programs: all actions of each rank of a pipeline, transfers included.

A rank is a place in the pipeline here, 0 to K-1, as DeepSpeed's ``stage_id``; replicas run the same program.

The engine asks for :func:`rank_actions`, from a rank's progress to the end of the batch. Checks, simulation and
pictures need whole programs: the same functions called batch after batch, and once more at each end of the data. An
example: an asynchronous pipeline of two ranks with depths 2 and 0 trains four batches of two micro-batches. The first
iterator ends after five micro-batches, the second (right of the bar) after four more; transfers are left out::

    rank 0   F0 F1 F2 B0 F3 B1 STEP0 F4 B2 B3 STEP1 DROP_GRAD4 | F4 F5 F6 B4 F7 B5 STEP2 B6 B7 STEP3
    rank 1   F0 B0 F1 B1 STEP0 F2 B2 F3 B3 STEP1 F4 B4         | F4 B4 F5 B5 STEP2 F6 B6 F7 B7 STEP3

A rank learns of the end of the data where it would have run the first missing micro-batch, ``F5``: rank 0 before
``B3``, rank 1 after ``B4``. Micro-batch 4 belongs to no complete batch: its passes are undone, and its number is used
again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.interleaved import interleaved_actions
from ds_vpipe.schedules.moves import Move, with_moves
from ds_vpipe.schedules.one_f_one_b import Exchanges, Progress, compute_actions, with_communication
from ds_vpipe.schedules.pipeline import Pipeline

Programs = tuple[tuple[Action, ...], ...]  # the actions of every rank, in order

_NOTHING_ELSE = Exchanges()
_ADMITTING = frozenset({Kind.LOAD, Kind.RECV_ACT, Kind.FORWARD})


class Filling(NamedTuple):
    """Micro-batches between two times at which the pipeline is empty."""

    start: int  # number of the first micro-batch, a multiple of M
    end: int  # number of the first micro-batch that the data do not have
    limit: int  # end of the last complete batch


@dataclass(frozen=True, slots=True)
class Workload:
    """Batches to train, and the ends of the data before the last.

    Micro-batches of an incomplete batch are trained on no rank, and their numbers are used again.
    """

    batches: int  # complete ones that are trained in all
    # For each iterator that ends before the last batch, the number of the first missing micro-batch; they never fall.
    data_ends: tuple[int, ...] = ()
    moves: tuple[Move, ...] = ()  # of layers, in order; ds_vpipe.schedules.moves.check_move() says which are possible

    def fillings(self, pipeline: Pipeline) -> Iterator[Filling]:
        """Fillings between ends of the data, in order, without those in which nothing runs."""
        size, start = pipeline.micro_batches, 0
        total = self.batches * size
        for end in self.data_ends:
            limit = end - end % size
            if pipeline.schedule == "interleaved":
                end = limit  # it looks for a whole batch before it begins one
            if start < end:
                yield Filling(start, end, limit)
            start = limit
        if start < total:
            yield Filling(start, total, total)


def batch_actions(pipeline: Pipeline, rank: int, progress: Progress) -> Iterator[Action]:
    """Rest of the current batch on ``rank``: forward and backward passes, reduction, update.

    A synchronous pipeline drains at the end of the batch whatever the limit.

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
        progress = progress._replace(limit=(batch + 1) * micro_batches)
    return compute_actions(progress, pipeline.depths[rank], micro_batches)


def rank_actions(
    pipeline: Pipeline,
    rank: int,
    progress: Progress,
    exchanges: Exchanges = _NOTHING_ELSE,
    moves: Sequence[Move] = (),
) -> Iterator[Action]:
    """Actions of ``rank`` from ``progress`` to the end of the batch: :func:`batch_actions` with transfers."""
    actions = batch_actions(pipeline, rank, progress)
    actions = with_communication(actions, rank, pipeline.num_stages, exchanges, pipeline.virtual_stages)
    return with_moves(actions, pipeline, rank, progress, moves) if moves else actions


def after_batch(pipeline: Pipeline, rank: int, progress: Progress) -> Progress:
    """Progress of ``rank`` after :func:`rank_actions`, if the batch is complete."""
    completed = (progress.completed // pipeline.micro_batches + 1) * pipeline.micro_batches
    if pipeline.synchronous:
        return progress._replace(forwarded=completed, completed=completed)
    ahead = completed + pipeline.depths[rank]
    ahead = ahead if progress.limit is None else min(ahead, progress.limit)
    return progress._replace(forwarded=max(progress.forwarded, ahead), completed=completed)


def at_data_end(pipeline: Pipeline, rank: int, progress: Progress, limit: int, end: int) -> Progress:
    """Progress of ``rank`` once it knows that micro-batch ``end`` is missing.

    By then it has run its backward passes up to ``B(end - W - 1)``, and the next rank, of depth ``W'``, will have sent
    its gradients up to micro-batch ``end - W' - 1``. Micro-batches from ``limit`` on belong to no complete batch.
    """
    depths = pipeline.depths
    owed = range(max(limit, end - depths[rank]), end - depths[rank + 1]) if rank + 1 < len(depths) else range(0)
    forwarded, completed = min(progress.forwarded, limit), min(progress.completed, limit)
    return progress._replace(forwarded=forwarded, completed=completed, limit=limit, owed=owed, end=end)


def rank_program(
    pipeline: Pipeline, rank: int, workload: Workload, exchanges: Exchanges = _NOTHING_ELSE
) -> Iterator[Action]:
    """All actions with which ``rank`` trains ``workload``."""
    for filling in workload.fillings(pipeline):
        yield from _filling_actions(pipeline, rank, filling, exchanges, workload.moves)


def _filling_actions(
    pipeline: Pipeline, rank: int, filling: Filling, exchanges: Exchanges, moves: Sequence[Move]
) -> Iterator[Action]:
    start, end, limit = filling
    progress = Progress(start, start, None, start)
    while progress.completed < limit or progress.limit is None:
        completed = progress.completed
        for action in rank_actions(pipeline, rank, progress, exchanges, moves):
            if action.index == end and action.kind in _ADMITTING and progress.limit is None:
                reached = progress._replace(forwarded=end, completed=completed)
                progress = at_data_end(pipeline, rank, reached, limit, end)
                break
            yield action
            if action.kind is Kind.BACKWARD:
                completed = action.index + 1
        else:
            progress = after_batch(pipeline, rank, progress)
    yield from rank_actions(pipeline, rank, progress, exchanges, moves)


def programs(pipeline: Pipeline, workload: Workload, exchanges: Sequence[Exchanges] | None = None) -> Programs:
    """Programs of all ranks for ``workload``."""
    by_rank = exchanges or (_NOTHING_ELSE,) * pipeline.num_stages
    return tuple(tuple(rank_program(pipeline, rank, workload, by_rank[rank])) for rank in range(pipeline.num_stages))
