"""How a stage learns that the data have ended, and undoes what belongs to no complete batch.

The first stage admits micro-batches one by one and finds out in the middle of a batch. What it and the
stages after it have done of that batch by then is known without asking: END takes the place of a
micro-batch in the order of :mod:`ds_vpipe.schedules.schedule`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_vpipe.engine.feed import MicroBatchFeed
from ds_vpipe.engine.flight import StageState
from ds_vpipe.engine.neighbours import Neighbours
from ds_vpipe.engine.rests import RestWatch
from ds_vpipe.engine.stashing import WeightStashingOptimizer
from ds_vpipe.engine.ties import TiedWeights
from ds_vpipe.engine.wire import Message
from ds_vpipe.schedules.schedule import Progress


class EndOfData(Exception):  # noqa: N818 - no error: like StopIteration
    """The first stage has no more micro-batches, so the rest of the current batch's program is another."""


class DrainingMixin(PipelineEngine):
    """Reaction of one stage to the end of the data."""

    state: StageState
    neighbours: Neighbours
    stashing_optimizer: WeightStashingOptimizer
    depths: Sequence[int]
    asynchronous: bool
    ties: TiedWeights | None
    _feed: MicroBatchFeed
    _rests: RestWatch

    def _end_of_data(self, limit: int, read: int, fill: int, call: int, unlabelled: int = 0) -> None:
        """Pass the news on to the next stage and change course.

        Args:
            limit: no micro-batch from here on belongs to a complete batch.
            read: the first stage has sent micro-batches up to here all the same.
            fill: the first micro-batch after the pipeline was filled last.
            call: the ``train_batch()`` call in which the first stage found out.
            unlabelled: micro-batches that the first stage has read and sent to nobody.

        Raises:
            StopIteration: not even one batch since the pipeline was empty.
            EndOfData: there is more to do.
        """
        state = self.state
        self._drop(limit, read)
        if self.neighbours.activations_out is not None and not self.is_last_stage():
            self.neighbours.activations_out.send(
                Message.END, read, torch.tensor([limit, read, fill, unlabelled]), note=call
            )
        elif not self.is_first_stage():
            for _ in range(unlabelled):
                with suppress(StopIteration):
                    self._feed.read(call)
            self._feed.expect_end(call)
        if state.progress.completed < limit:
            state.progress = dataclasses.replace(state.progress, limit=limit)
            self._warn_of_drain()
            raise EndOfData
        # Nothing is left in flight here, and the next message is about the next filling of the pipeline. A stage
        # that has no use for the slot in which END arrives reads it only in the next call.
        state.progress = Progress(limit, limit, None, refill=limit)
        if self.ties is not None:
            self.ties.catch_up(limit // self.micro_batches)
        if fill == limit:
            raise StopIteration
        raise EndOfData

    def _drop(self, limit: int, read: int) -> None:
        """Undo what this stage has done of the micro-batches from ``limit`` to ``read``, an incomplete batch.

        END takes the place of micro-batch ``read``, before which stage s has run ``B(read - W_s - 1)``. The next
        stage has therefore sent gradients up to ``read - W_{s+1} - 1``, of which those are still to come that no
        backward pass here has asked for.
        """
        state, depth = self.state, self.depths[self.stage_id]
        for index in [index for index in state.flights if index >= limit]:
            del state.flights[index]
            self.stashing_optimizer.release(index)
        if self.neighbours.gradients_in is not None and not self.is_last_stage():
            for index in range(max(limit, read - depth), read - self.depths[self.stage_id + 1]):
                self.neighbours.gradients_in.receive(f"RECV_GRAD{index}")
        if state.progress.completed > limit:
            self.optimizer.zero_grad()
            self.zero_grad()
        if state.progress.forwarded > limit and state.batch_loss is not None:
            state.batch_loss.restart()
        state.progress = dataclasses.replace(
            state.progress,
            forwarded=min(state.progress.forwarded, limit),
            completed=min(state.progress.completed, limit),
        )

    def _warn_of_drain(self) -> None:
        if self.asynchronous and self.num_stages > 1:
            remedy = "pass one iterator over the whole data set, the same object in every call"
            self._rests.emptied("the end of an iterator given to train_batch()", remedy, self.global_steps, 0)
