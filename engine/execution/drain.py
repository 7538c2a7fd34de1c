"""Drain, quiesce and refill of a pipeline.

**Drain**, at the end of the data: finish the complete batches in flight. The first stage admits micro-batches one by
one, so it may find the end inside a batch. It then sends END in place of the missing micro-batch. What each stage has
done by then follows from the order in :mod:`ds_vpipe.schedules.one_f_one_b`, so no stage has to ask another. Each
stage undoes its passes of the incomplete batch, and :func:`ds_vpipe.schedules.program.at_data_end` says what is left.

**Quiesce**, between two calls of ``train_batch()``: withdraw the micro-batches in flight without finishing them. All
stages have made the same number of updates then, but have run forward passes of later micro-batches. Each stage drops
its records of those, and all activations that the previous stage has sent before the message QUIESCE. The first stage
puts the withdrawn micro-batches back in front of its data, with an end of the data that it has met and the
micro-batches of the incomplete batch before that. QUIESCE says how many they are, and the last stage reads as many
labels: inputs and labels stay together even if these micro-batches are then dropped, or the iterators rewound. The next
call fills the pipeline again from there. Nothing is lost but the work of the forward passes.
"""

from contextlib import suppress

import torch

from ds_vpipe.engine.execution.data import EndOfData
from ds_vpipe.engine.execution.live_moves import LiveMoves
from ds_vpipe.engine.links.message import Message
from ds_vpipe.engine.stage import KnownEnd, Stage
from ds_vpipe.schedules.one_f_one_b import Progress
from ds_vpipe.schedules.program import at_data_end


def next_drain(stage: Stage, batch: int) -> int | None:
    """First later batch that begins with an empty pipeline, or None.

    Batches are numbered from 0 since the start of training.
    """
    return stage.delay_warmup.drain_interval(batch)[1] if stage.asynchronous else batch + 1


def limit_to_drain(stage: Stage, batch: int) -> None:
    """Let no forward pass go beyond the next drain."""
    progress, drain = stage.progress, next_drain(stage, batch)
    if drain is not None and progress.limit is None:
        size = stage.pipeline.micro_batches
        end = progress.completed // size + drain - batch
        stage.progress = progress._replace(limit=end * size)


def end_data(stage: Stage, end: EndOfData, batch: int) -> None:
    """Pass the end of the data on to the next stage, undo passes of the incomplete batch, and set the limit."""
    if not stage.is_last:
        numbers = torch.tensor([end.limit, end.read, end.unlabelled, end.asked], device="cpu")
        stage.links.next.activations.send(Message.END, end.read, numbers, note=end.call)
    elif not stage.is_first:
        for _ in range(end.unlabelled):
            with suppress(StopIteration):
                stage.feed.read(end.call)
        if end.asked:
            stage.feed.read_past_end(end.call)
    stage.data_end = KnownEnd(end.call, _forget_incomplete(stage, end.limit))
    stage.progress = at_data_end(stage.pipeline, stage.number, stage.progress, end.limit, end.read)
    if stage.progress.completed < end.limit and stage.asynchronous and stage.pipeline.num_stages > 1:
        remedy = "pass one iterator over the whole data set, the same object in every call"
        stage.drains.emptied("the end of an iterator given to train_batch()", remedy, batch, 0)


def _forget_incomplete(stage: Stage, limit: int) -> list[tuple[int, object]]:
    """Undo passes of the incomplete batch from ``limit`` on; returns its micro-batches."""
    left_over = []
    for key in sorted(key for key in stage.in_flight if key[0] >= limit):
        record = stage.in_flight.pop(key)
        left_over.append((record.call, record.micro_batch))
        stage.weights.release(key)
    if stage.progress.completed > limit:
        stage.weights.drop_gradients()
        stage.labels_sum = 0
    if stage.progress.forwarded > limit and stage.losses is not None:
        stage.losses.restart()
    return left_over


def refill(stage: Stage) -> None:
    """Begin to fill the pipeline again, which has drained at the end of the data.

    Raises:
        StopIteration: the data ended without one complete batch since the pipeline was last empty. An end that was
            met in an earlier call counts only after the iterator of this call has been asked.
    """
    data_end, stage.data_end = stage.data_end, None
    stage.feed.calls_admitted_again = []
    before, limit = stage.progress, stage.progress.completed
    _stand_at(stage, limit)
    stage.weights.keep_newest()
    stage.ties.catch_up(limit // stage.pipeline.micro_batches)
    if before.filled_from == limit and data_end is not None and data_end.call == stage.feed.call:
        raise StopIteration


def quiesce(stage: Stage, moves: LiveMoves, what: str) -> None:
    """Withdraw the micro-batches in flight and keep one weight version; all ranks call it, between two batches.

    A layer that has begun to move has moved afterwards. ``what`` is the call that needs it.
    """
    at = stage.progress.completed
    if stage.is_first:
        forgotten = [(record.call, record.micro_batch) for _, record in sorted(stage.in_flight.items())]
        if stage.data_end is not None:
            forgotten += [*stage.data_end.left_over, (stage.data_end.call, None)]
        stage.feed.put_in_front(forgotten)
    calls = torch.tensor(stage.feed.calls_in_front(), dtype=torch.int64, device="cpu")
    if not stage.is_first:
        mark = f"the mark of {what}, which every rank has to call,"
        while (message := moves.next_message(mark)).kind is not Message.QUIESCE:
            moves.take(message)
        calls = message.tree
        if stage.is_last:
            stage.feed.calls_admitted_again = calls.tolist()
            stage.feed.catch_up(stage.feed.calls_admitted_again)
    if not stage.is_last:
        stage.links.next.activations.send(Message.QUIESCE, stage.progress.forwarded, calls)
    stage.data_end = None
    for key in list(stage.in_flight):
        del stage.in_flight[key]
        stage.weights.release(key)
    stage.weights.keep_newest()
    moves.complete(at)
    _stand_at(stage, at)
    stage.ties.catch_up(at // stage.pipeline.micro_batches)
    stage.ties.flush()  # a device may still read weights, into which the script may write now
    stage.links.flush()


def restart_at(stage: Stage, updates: int) -> None:
    """Number micro-batches and versions as after ``updates`` updates; only while nothing is in flight."""
    _stand_at(stage, updates * stage.pipeline.micro_batches)
    stage.ties.restart(updates)


def _stand_at(stage: Stage, micro_batch: int) -> None:
    stage.progress = Progress(micro_batch, micro_batch, None, filled_from=micro_batch)
