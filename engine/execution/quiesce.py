"""Bringing an asynchronous pipeline to rest between two batches, without draining it.

Between two calls of ``train_batch()`` every stage has made the same number of updates, but stages have
run ahead with forward passes of later micro-batches. To rest, they forget those: each drops what it has
in flight and what the previous stage has sent it, up to a mark that this sends last, and the first stage
puts the micro-batches back in front of its data. So it does with an end of the data that it has met and
the micro-batches left over before that. The mark tells the last stage of them, which reads as far: what
comes next may drop them, rewind the iterators or read them elsewhere, and inputs and labels stay together.
The next call fills the pipeline again from there, as after a drain, so nothing is lost but the work of
the forward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_vpipe.engine.execution.data import MicroBatchFeed
from ds_vpipe.engine.execution.drain_watch import RestWatch
from ds_vpipe.engine.execution.in_flight import StageState
from ds_vpipe.engine.links.message import Message
from ds_vpipe.engine.links.stage_links import Neighbours
from ds_vpipe.engine.updates.peer_updates import StageNews
from ds_vpipe.engine.updates.tied import TiedWeights
from ds_vpipe.engine.weights.stashing import WeightStashingOptimizer
from ds_vpipe.errors import VPipeError
from ds_vpipe.schedules.one_f_one_b import Progress


class QuiesceMixin(PipelineEngine):
    """Rest of one stage."""

    state: StageState
    neighbours: Neighbours
    stashing_optimizer: WeightStashingOptimizer
    ties: TiedWeights | None
    news: StageNews | None
    depths: Sequence[int]
    _feed: MicroBatchFeed
    _rests: RestWatch
    _abort: Callable[[BaseException], None]

    def quiesce(self, what: str = "quiesce()") -> None:
        """Leave one version of the weights and nothing in flight; all ranks call it, between two batches.

        Copies of tied weights are then equal to their owner's, and what other stages' updates told is known.

        Args:
            what: the call that needs it, for a warning if that comes in every batch.

        Raises:
            VPipeError: the pipeline has failed before.
            PipelinePeerError: a neighbour is lost or did not answer in time.
        """
        state = self.state
        if state.failure is not None:
            raise VPipeError(f"pipeline at rest after a failure: {state.failure}; restart from a checkpoint")
        if state.flights:
            self._rests.emptied(what, "call it less often", self.global_steps, sum(self.depths))
        state.doing = "QUIESCE"
        try:
            self._rest(state.progress.completed)
        except BaseException as error:
            self._abort(error)
            raise

    def _rest(self, at: int) -> None:
        state, neighbours = self.state, self.neighbours
        if self.is_first_stage():
            forgotten = [(flight.call, flight.taken) for _, flight in sorted(state.flights.items())]
            if state.data_end is not None:
                forgotten += [*state.data_end.left_over, (state.data_end.call, None)]
            self._feed.read_again(forgotten)
        ahead = torch.tensor(self._feed.ahead(), dtype=torch.int64)
        if neighbours.activations_in is not None and not self.is_first_stage():
            while True:
                message = neighbours.activations_in.receive("the mark of a pipeline at rest")
                if message.kind is Message.QUIESCE:
                    break
            ahead, news = message.tree
            if self.news is not None:
                self.news.from_earlier(news)
            if self.is_last_stage():
                self._feed.catch_up(ahead.tolist())
        if neighbours.activations_out is not None and not self.is_last_stage():
            news = None if self.news is None else self.news.table
            neighbours.activations_out.send(Message.QUIESCE, state.progress.forwarded, (ahead, news))
        state.data_end = None
        for index in list(state.flights):
            del state.flights[index]
            self.stashing_optimizer.release(index)
        self.stashing_optimizer.keep_newest()
        state.progress = Progress(at, at, None, refill=at)
        if self.ties is not None:
            self.ties.catch_up(at // self.micro_batches)
            self.ties.flush()
        for sender in (neighbours.activations_out, neighbours.gradients_out):
            if sender is not None:
                sender.flush()

    def _restart_at(self, updates: int) -> None:
        """Number micro-batches and versions as after ``updates`` updates. Only at rest."""
        at = updates * self.micro_batches
        self.state.progress = Progress(at, at, None, refill=at)
        if self.ties is not None:
            self.ties.restart(updates)
