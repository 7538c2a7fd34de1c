"""The asynchronous pipeline engine: stage programs of :mod:`ds_vpipe.schedule`, carried out inside DeepSpeed.

:class:`VPipeEngine` replaces what DeepSpeed's ``PipelineEngine`` does within a batch and leaves the rest
to it: configuration, optimizers and precision, reduction over replicas, learning-rate schedules,
reporting, checkpoints. A call of ``train_batch()`` runs this stage's program up to its next update::

    call t, stage s of K     F .. F   (warm-up, after a start or a drain only)
                             F B  F B  ..  F B   M pairs; forwards run W micro-batches ahead
                             REDUCE STEP         this stage's own update t

Data end in band: in place of an activation the first stage sends END, and every stage drains to the
last complete batch. The mean loss of a batch rides with the gradient of its last micro-batch, so that
every stage has it before its own update without a message or a wait of its own. A failing stage sends
ABORT on all its links, in place of whatever its neighbours wait for.
"""

from __future__ import annotations

import atexit
import dataclasses
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.runtime.pipe.schedule import PipeSchedule

from ds_vpipe.config import StageSettings, VPipeConfig
from ds_vpipe.engine import instructions as instr
from ds_vpipe.engine.admission import Agreement
from ds_vpipe.engine.draining import DrainingMixin, EndOfData
from ds_vpipe.engine.evaluation import EvaluationMixin
from ds_vpipe.engine.feed import MicroBatchFeed, to_device
from ds_vpipe.engine.flight import Flight, StageState
from ds_vpipe.engine.losses import BatchLoss
from ds_vpipe.engine.neighbours import Neighbours
from ds_vpipe.engine.optimizers import OptimizerMixin
from ds_vpipe.engine.stashing import WeightStashingOptimizer
from ds_vpipe.engine.wire import Message
from ds_vpipe.errors import PipelinePeerError, PipelineProtocolError, VPipeConfigError, VPipeError
from ds_vpipe.schedule import version_used

_EXIT_GRACE_S = 60.0


class VPipeEngine(EvaluationMixin, DrainingMixin, OptimizerMixin):
    """DeepSpeed's pipeline engine with an asynchronous 1F1B schedule and weight stashing.

    Built by :func:`ds_vpipe.initialize`. ``train_batch()``, ``eval_batch()`` and the rest of the
    interface are ``PipelineEngine``'s.

    Attributes:
        stashing_optimizer: the versions of this stage's weights, around ``optimizer``.
        depth: this stage's warm-up depth.
        state: how far this stage has come, and its micro-batches in flight.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vpipe_config = VPipeConfig.parse(self.config["vpipe"])
        self.settings: StageSettings = self.vpipe_config.resolve(self.num_stages, self.module._num_layers)
        self.asynchronous = self.vpipe_config.sync_mode == "asp"
        self.depths = self.settings.depth
        self.depth = self.depths[self.stage_id]
        self.state = StageState()
        self.neighbours = Neighbours(self.grid, self.depths, self.vpipe_config.peer_timeout_s, self.device)
        self.stashing_optimizer = self._make_stashing_optimizer()
        self._vertical = self.vpipe_config.weight_sync == "vertical"
        if self.module.activation_checkpoint_func is ds_checkpointing.checkpoint:
            # The reentrant one loses the gradients of a first stage whose inputs are integers.
            self.module.activation_checkpoint_func = ds_checkpointing.non_reentrant_checkpoint
            self.module.is_checkpointable_results_interval = None
            self.module._precompute_checkpointable_values()
        self._feed = MicroBatchFeed()
        self._agreement = Agreement(self.grid, self.vpipe_config.peer_timeout_s)
        atexit.register(_at_exit, weakref.ref(self))

    # Batches

    def train_batch(self, data_iter: Iterator[Any] | None = None) -> torch.Tensor:
        """Train this stage up to its next update and return the mean loss of exactly that batch.

        The first stage reads up to its depth of micro-batches ahead; pass the same iterator in every
        call. Only the first stage uses inputs and only the last labels.

        Args:
            data_iter: iterator over ``(inputs, labels)`` micro-batches; None on stages in between, or to
                use the data set given to ``initialize()``.

        Raises:
            StopIteration: on every rank, if the data do not suffice for the batch. All complete batches
                have been trained, and training may go on with a new iterator.
            PipelinePeerError: another stage failed, is lost, or did not answer in time.
        """
        if self.optimizer is None:
            raise VPipeConfigError(
                "optimizer: got none, allowed is one that initialize() is given or that the DeepSpeed JSON names; "
                'add "optimizer": {"type": ..., "params": {...}} to the JSON'
            )
        if self.state.failure is not None:
            raise VPipeError(f"train_batch() after a failure: {self.state.failure}; restart from a checkpoint")
        progress = self.state.progress
        if progress.completed == progress.limit:
            self.state.progress = dataclasses.replace(progress, limit=None, refill=progress.completed)
        if self.state.progress.drained:
            self.state.refilled_in = self._feed.call + 1
        self._feed.post_process = self.batch_fn
        reads = self.is_first_stage() or self.is_last_stage()
        self._feed.next_call((self.data_iterator if data_iter is None else data_iter) if reads else None)
        try:
            return super().train_batch(data_iter)
        except StopIteration:
            self.timers(TRAIN_BATCH_TIMER).reset()
            raise
        except BaseException as error:
            self._abort(error)
            raise

    def _train_schedule(self) -> PipeSchedule:
        if not self.asynchronous:
            batch_end = (self.state.progress.completed // self.micro_batches + 1) * self.micro_batches
            if self.state.progress.limit is None:
                self.state.progress = dataclasses.replace(self.state.progress, limit=batch_end)
        return instr.StageSchedule(self.state.progress, self.depth, self.micro_batches, self.num_stages, self.stage_id)

    def _exec_schedule(self, pipe_schedule: PipeSchedule) -> None:
        if not isinstance(pipe_schedule, instr.StageSchedule):
            super()._exec_schedule(pipe_schedule)
            return
        state = self.state
        state.losses = None
        if self.is_last_stage():
            state.batch_loss = BatchLoss(self.micro_batches, self.mpu.get_data_parallel_group(), self.dp_world_size)
        while True:
            try:
                for step in pipe_schedule:
                    for instruction in step:
                        state.doing = instruction
                        self._INSTRUCTION_MAP[type(instruction)](self, **instruction.kwargs)
                return
            except EndOfData:
                pipe_schedule = self._train_schedule()

    def _aggregate_total_loss(self) -> torch.Tensor:
        if self.state.losses is None:
            raise PipelineProtocolError(f"{self.neighbours.me}: batch without a loss")
        self.dp_group_loss, loss = self.state.losses.unbind()
        return loss.clone()

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """As DeepSpeed's, before the first ``train_batch()``.

        Raises:
            VPipeConfigError: training has begun.
            ValueError: the size is not a multiple of micro-batch size and replicas.
        """
        if self._feed.call >= 0:
            raise VPipeConfigError(
                f"set_train_batch_size({train_batch_size}): got a call after train_batch(), allowed is one before it "
                f"(later ones are not supported yet); build a new engine"
            )
        super().set_train_batch_size(train_batch_size)

    def load_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """As DeepSpeed's, before the first ``train_batch()`` or with ``sync_mode`` bsp.

        Raises:
            VPipeConfigError: micro-batches may be in flight.
        """
        if self.asynchronous and self._feed.call >= 0:
            raise VPipeConfigError(
                "load_checkpoint(): got a call after train_batch(), allowed with sync_mode 'asp' is one before it "
                "(later ones are not supported yet); build a new engine and load there"
            )
        loaded = super().load_checkpoint(*args, **kwargs)
        self.stashing_optimizer = self._make_stashing_optimizer()  # loading may have replaced what it points to
        return loaded

    def _make_stashing_optimizer(self) -> WeightStashingOptimizer:
        stash = self.vpipe_config.weight_sync != "none"
        return WeightStashingOptimizer(self.optimizer, self.module.parameters(), stash=stash)

    def destroy(self) -> None:
        """Leave the pipeline: let the neighbours have what was sent, and drop the micro-batches in flight."""
        if "state" in self.__dict__:
            self._finish_sends()
            # Their graphs refer to the engine through hooks, in cycles that Python cannot see.
            self.state.flights.clear()
        super().destroy()

    # Instructions

    def _exec_load(self, index: int) -> None:
        if not self.is_first_stage():
            flight = self.state.flights[index]
            try:
                item = self._feed.read(flight.call)
            except StopIteration:
                raise VPipeError(
                    f"label iterator of the last stage ended at micro-batch {index}, the first stage's did not: "
                    f"give both stages iterators over the same data"
                ) from None
            flight.labels = to_device(item[1], self.device)
            self._feed.forget_before(flight.call)
            return
        call, item = self._feed.call, None
        with suppress(StopIteration):
            item = self._feed.read(call)
        if not self._agreement.all_have(item is not None):
            if item is not None:
                self._feed.give_back(call, item)
            limit = index - index % self.micro_batches
            if item is None and limit > self.state.progress.refill:
                self._feed.end_again(call)
            self._end_of_data(limit=limit, read=index, fill=self.state.progress.refill, call=call)
        self._feed.forget_before(call)
        labels = to_device(item[1], self.device) if self.is_last_stage() else None
        self.state.flights[index] = Flight(call, to_device(item[0], self.device), labels)

    def _exec_recv_activation(self, index: int) -> None:
        assert self.neighbours.activations_in is not None
        assert self.neighbours.gradients_out is not None
        message = self.neighbours.activations_in.receive(str(self.state.doing))
        if message.kind is Message.END:
            limit, read, fill = message.tree.tolist()
            self._end_of_data(limit, read, fill, call=message.note)
        self._expect(message.kind is Message.ACTIVATION and message.micro_batch == index, message)
        self.state.flights[index] = Flight(message.note, self._arrived(message.tree))
        # The previous stage runs F(index) after B(index - W - 1), for which it has had our gradient.
        self.neighbours.gradients_out.release(index - self.depths[self.stage_id - 1] - 1)

    def _exec_forward(self, index: int) -> None:
        flight = self.state.flights[index]
        with self.stashing_optimizer.forward(index, self._vertical_version(index)):
            outputs = self._run_stage(flight)
        flight.labels = None
        if self.state.batch_loss is not None:
            flight.loss = self.state.batch_loss.add(outputs)
        else:
            self.state.sending = outputs
            flight.keep_outputs(outputs)
        self.state.progress = dataclasses.replace(self.state.progress, forwarded=index + 1)
        if self._vertical:
            self.stashing_optimizer.keep_from(self._vertical_version(index + 1) or 0)

    def _exec_send_activation(self, index: int) -> None:
        assert self.neighbours.activations_out is not None
        outputs, self.state.sending = self.state.sending, None
        self.neighbours.activations_out.send(Message.ACTIVATION, index, outputs, note=self.state.flights[index].call)

    def _exec_recv_gradient(self, index: int) -> None:
        assert self.neighbours.activations_out is not None
        assert self.neighbours.gradients_in is not None
        message = self.neighbours.gradients_in.receive(str(self.state.doing))
        self._expect(message.kind is Message.GRADIENT and message.micro_batch == index, message)
        self.neighbours.activations_out.release(index)
        gradients, losses = self._arrived(message.tree)
        self.state.flights[index].gradients = list(gradients)
        if losses is not None:
            self.state.losses = losses

    def _exec_backward(self, index: int) -> None:
        flight = self.state.flights[index]
        self.stashing_optimizer.load_old_params(index)
        if flight.loss is not None:
            DeepSpeedEngine.backward(self, flight.loss)
            flight.loss = None
        else:
            self._backward_from_gradients(flight)
        self.stashing_optimizer.load_new_params()
        self.stashing_optimizer.release(index)
        if self.is_first_stage():
            del self.state.flights[index]
        self.state.progress = dataclasses.replace(self.state.progress, completed=index + 1)
        if self.state.batch_loss is not None and self.state.progress.completed % self.micro_batches == 0:
            self.state.losses = self.state.batch_loss.means()

    def _exec_send_gradient(self, index: int) -> None:
        assert self.neighbours.gradients_out is not None
        flight = self.state.flights.pop(index)
        losses = self.state.losses if self.state.progress.completed % self.micro_batches == 0 else None
        self.neighbours.gradients_out.send(Message.GRADIENT, index, (flight.input_gradients(), losses))

    def _exec_reduce(self, index: int) -> None:
        if not self.asynchronous and self.module.tied_comms:
            self._exec_reduce_tied_grads()
        if self.is_data_parallel or self.zero_optimization():
            self._exec_reduce_grads()
        else:
            self._get_gradients_for_reduction()  # zeros where a parameter got no gradient, as a reduction makes them

    def _exec_update(self, index: int) -> None:
        self._exec_optimizer_step()

    # Parts of them

    def _run_stage(self, flight: Flight) -> Any:
        try:
            outputs = DeepSpeedEngine.forward(self, flight.enter())
            if not self.is_last_stage():
                return outputs
            loss_fn = self.module.loss_fn
            loss = outputs if loss_fn is None else loss_fn(outputs, flight.labels)
        except StopIteration as error:
            raise VPipeError("a layer or the loss function raised StopIteration") from error
        self._refuse_additional_losses()
        return loss

    def _refuse_additional_losses(self) -> None:
        additional = self.module.get_additional_losses()
        if additional is not None:
            raise VPipeError(
                f"get_additional_losses(): got {sorted(additional)}, allowed is None (others are not supported yet); "
                f"add them to the loss, or remove the vpipe block"
            )

    def _vertical_version(self, index: int) -> int | None:
        if not self._vertical:
            return None
        return version_used(index, self.depths[0], self.micro_batches, self.state.progress.refill)

    def _backward_from_gradients(self, flight: Flight) -> None:
        pairs = [(o, g) for o, g in zip(flight.outputs, flight.gradients, strict=True) if g is not None]
        self._running_engine_backward = True  # DeepSpeed's hooks take it for engine.backward()
        try:
            if pairs:
                torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
        finally:
            self._running_engine_backward = False
        flight.outputs, flight.gradients = [], []

    def _arrived(self, tree: Any) -> Any:
        """Move a received tree to the stage's device; on the CPU it is there already."""
        if self.device.type == "cpu":
            return tree
        if isinstance(tree, torch.Tensor):
            return tree.detach().to(self.device, non_blocking=True).requires_grad_(tree.requires_grad)
        return type(tree)(self._arrived(item) for item in tree) if isinstance(tree, (tuple, list)) else tree

    def _expect(self, holds: bool, message: Any) -> None:
        if not holds:
            raise PipelineProtocolError(
                f"{self.neighbours.me} expected {self.state.doing}, got {message.kind.name}{message.micro_batch}: "
                f"do all ranks run the same script with the same configuration?"
            )

    def _abort(self, error: BaseException) -> None:
        if isinstance(error, PipelinePeerError):
            self.state.failure = error.reason
        else:
            text = " ".join(str(error).split())
            self.state.failure = f"{self.neighbours.me} failed in {self.state.doing}: {type(error).__name__}: {text}"
        self.neighbours.abort(self.state.failure)

    def _finish_sends(self) -> None:
        """A stage that is done stays until its neighbours have what they still need of it."""
        if self.state.failure is not None:
            return
        deadline = time.monotonic() + _EXIT_GRACE_S
        if self.neighbours.gradients_out is not None:
            self.neighbours.gradients_out.wait_for_all(deadline)
        if self.neighbours.activations_out is not None and self.state.progress.drained:
            self.neighbours.activations_out.wait_for_all(deadline)  # the news that the data have ended

    _INSTRUCTION_MAP = {  # noqa: RUF012 - the name and the form are DeepSpeed's
        **PipelineEngine._INSTRUCTION_MAP,
        **EvaluationMixin.EVALUATION_MAP,
        instr.LoadMicroBatch: _exec_load,
        instr.RecvActivation: _exec_recv_activation,
        instr.Forward: _exec_forward,
        instr.SendActivation: _exec_send_activation,
        instr.RecvGradient: _exec_recv_gradient,
        instr.Backward: _exec_backward,
        instr.SendGradient: _exec_send_gradient,
        instr.ReduceGradients: _exec_reduce,
        instr.Update: _exec_update,
    }


def _at_exit(engine: weakref.ref[VPipeEngine]) -> None:
    alive = engine()
    if alive is not None:
        alive._finish_sends()
