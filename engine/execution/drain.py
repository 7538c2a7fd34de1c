"""Drain and quiesce: how a stage gets rid of what is in flight, and how the pipeline is filled again.

At the end of the data a stage *drains*. The first stage admits micro-batches one by one and finds out in the middle of
a batch. What it and the stages after it have done of that batch by then is known without asking: END takes the place
of a micro-batch in the order of :mod:`ds_vpipe.schedules.one_f_one_b`. Each stage undoes what belongs to no complete
batch, and the rest of its program follows from :func:`ds_vpipe.schedules.program.at_data_end`.

Between two calls of ``train_batch()`` a pipeline can *quiesce* without draining. Every stage has made the same number
of updates then, but stages have run ahead with forward passes of later micro-batches. They forget those: each drops
what it has in flight and what the previous stage has sent it, up to a mark that this sends last, and the first stage
puts the micro-batches back in front of its data. So it does with an end of the data that it has met, and with the
micro-batches left over before that. The mark tells the last stage of them, which reads as far: what comes next may drop
them, rewind the iterators or read them elsewhere, and inputs and labels stay together. The next call fills the pipeline
again from there, so nothing is lost but the work of the forward passes.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import torch

from ds_vpipe.engine.execution.data import EndOfData
from ds_vpipe.engine.links.message import Message
from ds_vpipe.engine.stage import DataEnd, Stage
from ds_vpipe.schedules.one_f_one_b import Progress
from ds_vpipe.schedules.program import at_data_end


def next_drain(stage: Stage, batch: int) -> int | None:
    """The first batch after a given one before which the pipeline is to be empty; None if there is none.

    Batches are numbered from 0 since the start of training.
    """
    return stage.delay_warmup.drain_interval(batch)[1] if stage.asynchronous else batch + 1


def limit_to_drain(stage: Stage, batch: int) -> None:
    """Let no forward pass go beyond the next drain."""
    progress, drain = stage.progress, next_drain(stage, batch)
    if drain is not None and progress.limit is None:
        size = stage.pipeline.micro_batches
        end = progress.completed // size + drain - batch
        stage.progress = replace(progress, limit=end * size)


def end_data(stage: Stage, end: EndOfData, batch: int) -> None:
    """Pass the end of the data on to the next stage, undo what belongs to no complete batch, and change course."""
    if not stage.is_last:
        numbers = torch.tensor([end.limit, end.read, end.unlabelled, end.asked])
        stage.links.next.activations.send(Message.END, end.read, numbers, note=end.call)
    elif not stage.is_first:
        for _ in range(end.unlabelled):
            with suppress(StopIteration):
                stage.feed.read(end.call)
        if end.asked:
            stage.feed.expect_end(end.call)
    stage.data_end = DataEnd(end.call, _forget_incomplete(stage, end.limit))
    stage.progress = at_data_end(stage.pipeline, stage.number, stage.progress, end.limit, end.read)
    if stage.progress.completed < end.limit and stage.asynchronous and stage.pipeline.num_stages > 1:
        remedy = "pass one iterator over the whole data set, the same object in every call"
        stage.drains.emptied("the end of an iterator given to train_batch()", remedy, batch, 0)


def _forget_incomplete(stage: Stage, limit: int) -> list[tuple[int, object]]:
    """Undo passes of the incomplete batch from ``limit`` on; returns its micro-batches."""
    left_over = []
    for key in sorted(key for key in stage.in_flight if key[0] >= limit):
        record = stage.in_flight.pop(key)
        left_over.append((record.call, record.taken))
        stage.weights.release(key)
    if stage.progress.completed > limit:
        stage.weights.drop_gradients()
    if stage.progress.forwarded > limit and stage.losses is not None:
        stage.losses.restart()
    return left_over


def refill(stage: Stage) -> None:
    """Begin to fill the pipeline again, which has drained at the end of the data.

    Raises:
        StopIteration: not even one batch since the pipeline was empty. An end that was met in an earlier call
            and forgotten in a quiesce says nothing about the iterator of this one, which is asked first.
    """
    data_end, stage.data_end = stage.data_end, None
    before, limit = stage.progress, stage.progress.completed
    _stand_at(stage, limit)
    stage.ties.catch_up(limit // stage.pipeline.micro_batches)
    if before.refill == limit and data_end is not None and data_end.call == stage.feed.call:
        raise StopIteration


def quiesce(stage: Stage) -> None:
    """Leave one version of the weights and nothing in flight; all ranks call it, between two batches.

    Raises:
        PipelinePeerError: a neighbour is lost or did not answer in time.
    """
    at = stage.progress.completed
    if stage.is_first:
        forgotten = [(record.call, record.taken) for _, record in sorted(stage.in_flight.items())]
        if stage.data_end is not None:
            forgotten += [*stage.data_end.left_over, (stage.data_end.call, None)]
        stage.feed.read_again(forgotten)
    ahead = torch.tensor(stage.feed.ahead(), dtype=torch.int64)
    if not stage.is_first:
        message = stage.links.previous.activations.receive("the mark of a quiesce")
        while message.kind is not Message.QUIESCE:
            message = stage.links.previous.activations.receive("the mark of a quiesce")
        ahead, table = message.tree
        if stage.peers is not None:
            stage.peers.from_earlier(table)
        if stage.is_last:
            stage.feed.catch_up(ahead.tolist())
    if not stage.is_last:
        table = None if stage.peers is None else stage.peers.table
        stage.links.next.activations.send(Message.QUIESCE, stage.progress.forwarded, (ahead, table))
    stage.data_end = None
    for key in list(stage.in_flight):
        del stage.in_flight[key]
        stage.weights.release(key)
    stage.weights.keep_newest()
    _stand_at(stage, at)
    stage.ties.catch_up(at // stage.pipeline.micro_batches)
    stage.ties.flush()
    stage.links.flush()


def restart_at(stage: Stage, updates: int) -> None:
    """Number micro-batches and versions as after ``updates`` updates; only while nothing is in flight."""
    _stand_at(stage, updates * stage.pipeline.micro_batches)
    stage.ties.restart(updates)


def _stand_at(stage: Stage, micro_batch: int) -> None:
    stage.progress = Progress(micro_batch, micro_batch, None, refill=micro_batch)
