"""One stage's instructions, carried out: what each action of the schedule means inside DeepSpeed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import suppress
from typing import Any, ClassVar

import torch
from deepspeed.runtime.engine import DeepSpeedEngine

from ds_vpipe.engine.execution import instructions as instr
from ds_vpipe.engine.execution.batch_loss import BatchLoss
from ds_vpipe.engine.execution.data import MicroBatch, labels_to_device, own_copy, to_device
from ds_vpipe.engine.execution.draining import DrainingMixin
from ds_vpipe.engine.execution.in_flight import Flight
from ds_vpipe.engine.execution.report import BatchReport
from ds_vpipe.engine.links.consensus import Agreement
from ds_vpipe.engine.links.message import Message, copied_to
from ds_vpipe.engine.modules.interleaved import InterleavedMixin
from ds_vpipe.engine.modules.recompute import one_way
from ds_vpipe.engine.modules.split_module import SplitModule
from ds_vpipe.engine.updates.batch_end import BatchEndMixin
from ds_vpipe.errors import VPipeError
from ds_vpipe.schedules.actions import Action
from ds_vpipe.schedules.one_f_one_b import version_used


class ExecutionMixin(DrainingMixin, BatchEndMixin):
    """Forward and backward passes and transfers of one stage."""

    _agreement: Agreement
    _vertical: bool
    _sets_back: bool

    # Instructions

    def _exec_load(self, index: int, part: int) -> None:
        if part != 0:
            flight = self.state.flights[self._key(index, part)]
            try:
                item = self._feed.read(flight.call)
            except StopIteration:
                raise VPipeError(
                    f"label iterator of the last stage ended at micro-batch {index}, the first stage's did not: "
                    f"give both stages iterators over the same data"
                ) from None
            flight.labels = labels_to_device(self._feed.take(item, self.batch_fn)[1], self.device)
            self._feed.forget_before(flight.call)
            return
        if self.pipeline.virtual_stages > 1 and index % self.micro_batches == 0:
            self._read_batch(index)
        call, taken = self._feed.next_again() or self._first_time(index)
        if taken is None:  # the data ended here before a rest, which the stages after this one forgot
            self._end_of_data(index - index % self.micro_batches, index, call)
        self._feed.forget_before(call)
        inputs = to_device(taken[0], self.device, copy=self._sets_back)
        flight = Flight(call, inputs, labels_to_device(taken[1], self.device))
        if self._sets_back:
            flight.taken = taken
        self.state.flights[self._key(index, part)] = flight

    def _read_batch(self, index: int) -> None:
        """Make sure of a whole batch before it begins: parts of it could not be undone on all ranks."""
        items: list[Any] = []
        call = self._feed.call
        with suppress(StopIteration):
            while len(items) < self.micro_batches:
                items.append(own_copy(self._feed.read(call)))
        if not self._agreement.all_have(len(items) == self.micro_batches):
            self._end_of_data(index, index, call, unlabelled=len(items), asked=len(items) < self.micro_batches)
        self._feed.read_again([(call, self._feed.take(item, self.batch_fn)) for item in items])

    def _first_time(self, index: int) -> tuple[int, MicroBatch]:
        """Admit a new micro-batch, if all ranks of the stage have one."""
        call, item, there = self._feed.call, None, False
        known = self._feed.has_ended(call)
        with suppress(StopIteration):
            item = self._feed.read(call)
            there = True
        if not self._agreement.all_have(there):
            if there:
                self._feed.give_back(call, item)
            limit = index - index % self.micro_batches
            if not there and limit > self.state.progress.refill:
                self._feed.end_again(call)
            self._end_of_data(limit=limit, read=index, call=call, asked=not known)
        return call, self._feed.take(item, self.batch_fn)

    def _exec_recv_activation(self, index: int, part: int) -> None:
        assert self.neighbours.activations_in is not None
        assert self.neighbours.gradients_out is not None
        message = self.neighbours.activations_in.receive(str(self.state.doing))
        if message.kind is Message.END:
            limit, read, unlabelled, asked = message.tree.tolist()
            self._end_of_data(limit, read, message.note, unlabelled, bool(asked))
        self._expect(message.kind is Message.ACTIVATION and message.micro_batch == self._number(index, part), message)
        inputs, news = message.tree
        self.state.flights[self._key(index, part)] = Flight(message.note, self._arrived(inputs))
        if self.news is not None:
            self.news.from_earlier(news)
        if self.pipeline.virtual_stages == 1:
            # The previous stage runs F(index) after B(index - W - 1), for which it has had our gradient.
            self.neighbours.gradients_out.release(index - self.depths[self.stage_id - 1] - 1)

    def _exec_forward(self, index: int, part: int) -> None:
        key, last = self._key(index, part), part == self.pipeline.num_parts - 1
        flight = self.state.flights[key]
        if isinstance(self.module, InterleavedMixin):
            self.module.chunk = part // self.num_stages
        with self.stashing_optimizer.forward(key, self._vertical_version(index)):
            outputs = self._run_stage(flight, last)
        flight.labels = None
        if self.state.batch_loss is not None and last:
            flight.loss = self.state.batch_loss.add(outputs, self.module.get_additional_losses())
        else:
            self.state.sending = outputs
            flight.keep_outputs(outputs)
        if part == self.stage_id:
            self.state.progress = dataclasses.replace(self.state.progress, forwarded=index + 1)
        if self._vertical:
            self.stashing_optimizer.keep_from(self._vertical_version(index + 1) or 0)

    def _exec_send_activation(self, index: int, part: int) -> None:
        assert self.neighbours.activations_out is not None
        outputs, self.state.sending = self.state.sending, None
        news = None if self.news is None else self.news.table
        call = self.state.flights[self._key(index, part)].call
        number = self._number(index, part + 1)
        self.neighbours.activations_out.send(Message.ACTIVATION, number, (outputs, news), note=call)

    def _exec_recv_gradient(self, index: int, part: int) -> None:
        assert self.neighbours.activations_out is not None
        assert self.neighbours.gradients_in is not None
        message = self.neighbours.gradients_in.receive(str(self.state.doing))
        self._expect(message.kind is Message.GRADIENT and message.micro_batch == self._number(index, part), message)
        # It has come the other way round, and so has everything that was sent before.
        self.neighbours.activations_out.release_through(self._number(index, part + 1))
        gradients, report, told = message.tree
        flight = self.state.flights[self._key(index, part)]
        flight.gradients, flight.told = list(self._arrived(gradients)), told
        if report is not None:
            self.state.report = BatchReport.unpack(report)

    def _exec_drop_gradient(self, index: int, part: int) -> None:
        assert self.neighbours.activations_out is not None
        assert self.neighbours.gradients_in is not None
        message = self.neighbours.gradients_in.receive(str(self.state.doing))
        self._expect(message.kind is Message.GRADIENT and message.micro_batch == index, message)
        self.neighbours.activations_out.release_through(index)

    def _exec_backward(self, index: int, part: int) -> None:
        key = self._key(index, part)
        flight = self.state.flights[key]
        self.stashing_optimizer.load_old_params(key)
        with one_way():
            if flight.loss is not None:
                loss = flight.loss if self.loss_scaling is None else self.loss_scaling.apply(flight.loss)
                flight.loss = None
                DeepSpeedEngine.backward(self, loss)
            else:
                self._backward_from_gradients(flight)
        # The next pass or update points the parameters to what it needs, and the end of the batch to the newest.
        self.stashing_optimizer.release(key)
        if part == 0:
            del self.state.flights[key]
        if part == self.stage_id:
            self.state.progress = dataclasses.replace(self.state.progress, completed=index + 1)
        ends_batch = (index + 1) % self.micro_batches == 0
        if self.state.batch_loss is not None and part == self.pipeline.num_parts - 1 and ends_batch:
            self.state.report = self._new_report(self.state.batch_loss)

    def _exec_send_gradient(self, index: int, part: int) -> None:
        assert self.neighbours.gradients_out is not None
        flight = self.state.flights.pop(self._key(index, part))
        report = self.state.report if (index + 1) % self.micro_batches == 0 else None
        words = None if report is None else report.pack()
        number = self._number(index, part - 1)
        self.neighbours.gradients_out.send(Message.GRADIENT, number, (flight.input_gradients(), words, flight.told))

    # Parts of them

    def key_of(self, action: Action) -> int:
        """Number of the micro-batch that a pass is of, among those in flight."""
        return self._key(action.index, self.stage_id if action.part is None else action.part)

    def _key(self, index: int, part: int) -> int:
        """Number of a micro-batch in flight through ``part``; its own where the stage has one part."""
        return index * self.pipeline.virtual_stages + part // self.num_stages

    def _number(self, index: int, receiver: int) -> int:
        """Number of a micro-batch's message to the part ``receiver``."""
        return index if self.pipeline.virtual_stages == 1 else index * self.pipeline.num_parts + receiver

    def _run_stage(self, flight: Flight, last: bool) -> Any:
        try:
            outputs = DeepSpeedEngine.forward(self, flight.enter(as_made=isinstance(self.module, SplitModule)))
            if not last:
                return outputs
            loss_fn = self.module.loss_fn
            loss = outputs if loss_fn is None else loss_fn(outputs, flight.labels)
        except StopIteration as error:
            raise VPipeError("a layer or the loss function raised StopIteration") from error
        return loss

    def _new_report(self, batch_loss: BatchLoss) -> BatchReport:
        scale = 1.0 if self.loss_scaling is None else self.loss_scaling.scale
        return BatchReport(batch_loss.means(), scale, self.num_stages)

    def _vertical_version(self, index: int) -> int | None:
        if not self._vertical:
            return None
        return version_used(index, self.depths[0], self.micro_batches, self.state.progress.refill)

    def _backward_from_gradients(self, flight: Flight) -> None:
        pairs = [(o, g) for o, g in zip(flight.outputs, flight.gradients, strict=True) if g is not None]
        self._running_engine_backward = True  # DeepSpeed's hooks take it for engine.backward()
        if self.using_bf16_optimizer:
            self.optimizer.clear_lp_grads()  # it adds them up in fp32, and on the last stage does this by itself
        try:
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        finally:
            self._running_engine_backward = False
        if self.using_bf16_optimizer:
            self.optimizer.update_hp_grads()
        flight.outputs, flight.gradients = [], []

    def _backward_prologue_per_tensor(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        # DeepSpeed divides by M what enters the last stage's graphs, if it is no loss; what arrives here has been.
        return grad

    def _arrived(self, tree: Any) -> Any:
        """Move a received tree to the stage's device; on the CPU it is there already."""
        if self.device.type == "cpu":
            return tree
        if isinstance(tree, torch.Tensor):
            return copied_to(tree.detach(), self.device).requires_grad_(tree.requires_grad)
        return type(tree)(self._arrived(item) for item in tree) if isinstance(tree, (tuple, list)) else tree

    EXECUTION_MAP: ClassVar[dict[type, Callable[..., None]]] = {
        **BatchEndMixin.BATCH_END_MAP,
        instr.LoadMicroBatch: _exec_load,
        instr.RecvActivation: _exec_recv_activation,
        instr.Forward: _exec_forward,
        instr.SendActivation: _exec_send_activation,
        instr.RecvGradient: _exec_recv_gradient,
        instr.DropGradient: _exec_drop_gradient,
        instr.Backward: _exec_backward,
        instr.SendGradient: _exec_send_gradient,
    }
