"""What a stage does once per batch, after its backward passes: reduction, update, tied weights, news."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch

from ds_vpipe.engine.execution import instructions as instr
from ds_vpipe.engine.links.message import Message
from ds_vpipe.engine.links.stage_links import Neighbours
from ds_vpipe.engine.updates.update import UpdateMixin
from ds_vpipe.errors import PipelineProtocolError
from ds_vpipe.schedules.pipeline import Pipeline


class BatchEndMixin(UpdateMixin):
    """The instructions between a batch's last backward pass and the next batch."""

    neighbours: Neighbours
    pipeline: Pipeline

    def _exec_reduce(self, index: int, part: int) -> None:
        if not self.asynchronous and self.module.tied_comms:
            for weight, _ in self.module.get_tied_weights_and_groups():
                if weight.grad is None and not self.using_bf16_optimizer:
                    weight.grad = torch.zeros_like(weight)  # DeepSpeed would leave it out, and the other stages wait
            self._exec_reduce_tied_grads()
        if self.is_data_parallel or self.zero_optimization():
            self._exec_reduce_grads()
        else:
            self._fill_gradients()

    def _exec_update(self, index: int, part: int) -> None:
        if self.pipeline.virtual_stages > 1:  # all activations have come back, and nobody waits for gradients any more
            for sender in (self.neighbours.activations_out, self.neighbours.gradients_out):
                if sender is not None:
                    sender.flush()
        self._exec_optimizer_step()

    def _exec_send_tied_gradients(self, index: int, part: int) -> None:
        assert self.ties is not None
        self.ties.send_gradients(index)

    def _exec_recv_tied_gradients(self, index: int, part: int) -> None:
        assert self.ties is not None
        self.ties.add_gradients(index)

    def _exec_send_tied_weights(self, index: int, part: int) -> None:
        assert self.ties is not None
        self.ties.send_weights(index + 1, self.micro_batches, self.state.progress.refill)

    def _exec_recv_tied_weights(self, index: int, part: int) -> None:
        assert self.ties is not None
        self.ties.receive_weights(index, self.micro_batches, self.state.progress.refill)

    def _exec_send_news(self, index: int, part: int) -> None:
        assert self.news is not None
        assert self.neighbours.gradients_out is not None
        last_of_batch = self.state.progress.completed - 1
        self.neighbours.gradients_out.send(Message.NEWS, last_of_batch, self.news.table)

    def _exec_recv_news(self, index: int, part: int) -> None:
        assert self.news is not None
        assert self.neighbours.gradients_in is not None
        message = self.neighbours.gradients_in.receive(str(self.state.doing))
        self._expect(message.kind is Message.NEWS, message)
        self.news.from_later(message.tree)

    def _expect(self, holds: bool, message: Any) -> None:
        if not holds:
            raise PipelineProtocolError(
                f"{self.neighbours.me} expected {self.state.doing}, got {message.kind.name}{message.micro_batch}: "
                f"do all ranks run the same script with the same configuration?"
            )

    BATCH_END_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        instr.ReduceGradients: _exec_reduce,
        instr.Update: _exec_update,
        instr.SendTiedGradients: _exec_send_tied_gradients,
        instr.RecvTiedGradients: _exec_recv_tied_gradients,
        instr.SendTiedWeights: _exec_send_tied_weights,
        instr.RecvTiedWeights: _exec_recv_tied_weights,
        instr.SendNews: _exec_send_news,
        instr.RecvNews: _exec_recv_news,
    }
