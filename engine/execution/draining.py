"""How a stage learns that the data have ended, and undoes what belongs to no complete batch.

The first stage admits micro-batches one by one and finds out in the middle of a batch. What it and the
stages after it have done of that batch by then is known without asking: END takes the place of a
micro-batch in the order of :mod:`ds_vpipe.schedules.one_f_one_b`. The rest of the program follows from
:func:`ds_vpipe.schedules.program.at_data_end`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NoReturn

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_vpipe.engine.execution.data import MicroBatchFeed
from ds_vpipe.engine.execution.drain_watch import RestWatch
from ds_vpipe.engine.execution.in_flight import DataEnd, StageState
from ds_vpipe.engine.links.message import Message
from ds_vpipe.engine.links.stage_links import Neighbours
from ds_vpipe.engine.updates.tied import TiedWeights
from ds_vpipe.engine.weights.stashing import WeightStashingOptimizer
from ds_vpipe.schedules.one_f_one_b import Progress
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import at_data_end


class EndOfData(Exception):  # noqa: N818 - no error: like StopIteration
    """The first stage has no more micro-batches, so the rest of the current batch's program is another."""


class DrainingMixin(PipelineEngine):
    """Reaction of one stage to the end of the data."""

    state: StageState
    neighbours: Neighbours
    stashing_optimizer: WeightStashingOptimizer
    pipeline: Pipeline
    asynchronous: bool
    ties: TiedWeights | None
    _feed: MicroBatchFeed
    _rests: RestWatch

    def _end_of_data(self, limit: int, read: int, call: int, unlabelled: int = 0, asked: bool = True) -> NoReturn:
        """Pass the news on to the next stage and change course.

        Args:
            limit: no micro-batch from here on belongs to a complete batch.
            read: the first stage has sent micro-batches up to here all the same.
            call: the ``train_batch()`` call in which the first stage found out.
            unlabelled: micro-batches that the first stage has read and sent to nobody.
            asked: the first stage has asked its iterator for one more, and the last one has yet to do the same.

        Raises:
            EndOfData: always; the rest of the batch's program is another.
        """
        state = self.state
        if self.neighbours.activations_out is not None and not self.is_last_stage():
            end = torch.tensor([limit, read, unlabelled, asked])
            self.neighbours.activations_out.send(Message.END, read, end, note=call)
        elif not self.is_first_stage():
            for _ in range(unlabelled):
                with suppress(StopIteration):
                    self._feed.read(call)
            if asked:
                self._feed.expect_end(call)
        state.data_end = DataEnd(call, self._forget_incomplete(limit))
        state.progress = at_data_end(self.pipeline, self.stage_id, state.progress, limit, read)
        if state.progress.completed < limit:
            self._warn_of_drain()
        raise EndOfData

    def _forget_incomplete(self, limit: int) -> list[tuple[int, Any]]:
        """Undo what this stage has done of an incomplete batch, from ``limit`` on; returns its micro-batches."""
        state = self.state
        left_over = []
        for index in sorted(index for index in state.flights if index >= limit):
            flight = state.flights.pop(index)
            left_over.append((flight.call, flight.taken))
            self.stashing_optimizer.release(index)
        if state.progress.completed > limit:
            self.optimizer.zero_grad()
            self.zero_grad()
        if state.progress.forwarded > limit and state.batch_loss is not None:
            state.batch_loss.restart()
        return left_over

    def _refill(self) -> None:
        """Begin to fill the pipeline again, which has drained at the end of the data.

        Raises:
            StopIteration: not even one batch since the pipeline was empty. An end that was met in an earlier call
                and forgotten at rest says nothing about the iterator of this one, which is asked first.
        """
        data_end, self.state.data_end = self.state.data_end, None
        progress, limit = self.state.progress, self.state.progress.completed
        self.state.progress = Progress(limit, limit, None, refill=limit)
        if self.ties is not None:
            self.ties.catch_up(limit // self.micro_batches)
        if progress.refill == limit and data_end is not None and data_end.call == self._feed.call:
            raise StopIteration

    def _warn_of_drain(self) -> None:
        if self.asynchronous and self.num_stages > 1:
            remedy = "pass one iterator over the whole data set, the same object in every call"
            self._rests.emptied("the end of an iterator given to train_batch()", remedy, self.global_steps, 0)
