"""Rounds of a script that loops over forward, backward and step: passes, updates, losses, and drains between them."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import torch

from ds_vpipe.engine.engine import VPipeEngine
from ds_vpipe.engine.execution.data import EndOfData
from ds_vpipe.engine.execution.drain import next_drain, restart_at
from ds_vpipe.engine.links.message import Message
from ds_vpipe.engine.links.stage_links import LossLinks
from ds_vpipe.engine.loop.call_order import CallOrder
from ds_vpipe.engine.loop.other_outputs import OtherOutputs
from ds_vpipe.engine.loop.script_loss import LossGate, LossTensor
from ds_vpipe.engine.loop.script_rates import ScriptRates
from ds_vpipe.engine.modules.random_states import own_random_numbers
from ds_vpipe.engine.modules.run_again import ModuleMemory
from ds_vpipe.errors import CallOrderError, OutputError, PipelineProtocolError
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.one_f_one_b import Progress
from ds_vpipe.schedules.rounds import Round, drain_actions, next_round, waits_for_loss

_SAME_ROUNDS = "every rank has to run the same number of rounds before it evaluates, saves or ends"


class Rounds:
    """The rounds of one stage, under two counts: the script's, alike on all ranks, and inside an update the stage's.

    The engine's ``global_steps`` and ``global_samples`` are the script's, but inside an update.
    """

    def __init__(self, engine: VPipeEngine) -> None:
        self._engine, self._stage = engine, engine.stage
        self.order = CallOrder()  # the call that is due
        self.is_within_engine = False  # an action is being carried out: DeepSpeed asks, not the script
        self.in_batch = 0  # micro-batches of the script's batch that have had their step()
        self._micro_steps = engine.micro_steps  # after the latest step(); a script may set it
        self._drops: dict[int, list[Callable[[], None]]] = defaultdict(list)  # zero_grad() before a backward pass
        self._joins = False  # gradients of a batch that was left count in the next one
        self.own_counts = (0, 0)  # global_steps and global_samples of this stage's updates
        self._round = Round((), (), ())
        self._gates: dict[int, LossGate] = {}  # on the last stage, by micro-batch
        self._newest: tuple[int, torch.Tensor] | None = None  # loss that is known here, and of which micro-batch
        self._script_loss: LossTensor | None = None  # which it has not given back yet
        self._casts_to: torch.dtype | None = None  # in the script's latest micro-batch
        self._rates = ScriptRates()
        # Gradients of a batch that has not ended here, with autograd's count of changes.
        self._gathered: list[tuple[torch.nn.Parameter, torch.Tensor, int]] = []
        stage = self._stage
        self.layers_changed()
        self._loss_links = LossLinks(engine.grid, stage.links.me, stage.wiring)
        self.others = OtherOutputs(stage, self._loss_links, engine.failures)
        stage.script_senders = tuple(self._loss_links.senders.values())
        stage.may_withdraw = False  # a drain finishes what is in flight
        stage.feed.next_call(itertools.repeat((None, None)))  # labels travel with the inputs
        engine.executor.methods |= {
            Kind.FORWARD: self._forward,
            Kind.RECV_GRAD: self._receive_gradient,
            Kind.BACKWARD: self._backward,
        }

    def layers_changed(self) -> None:
        """Record the modules that a script switches between training and evaluation."""
        whole = self._engine.module.user_module.modules()
        self._switched = tuple(dict.fromkeys((*self._engine.modules(), *whole)))
        self._modes = [module.training for module in self._switched]

    @property
    def ends_batch(self) -> bool:
        """Whether the script's micro-batch ends a batch, on all ranks alike."""
        steps = self._engine.micro_steps
        done = self.in_batch if steps == self._micro_steps else steps  # which the script has set
        return (done + 1) % self._stage.pipeline.micro_batches == 0

    # What a script does to a batch that is not complete

    def zero_grad(self, function: Callable[[], None]) -> None:
        """Let ``function`` drop the gradients of the batch so far on this stage, before its next backward pass.

        Where a batch has ended for the script nothing is left to do: each stage drops its gradients after its update.
        """
        if self.order.due == "step()" or self._has_gradients:
            self._drops[self._stage.progress.forwarded - (self.order.due == "backward()")].append(function)

    @property
    def _has_gradients(self) -> bool:
        return bool(self.in_batch) or self._joins

    def refuse_step(self, ends_batch: bool) -> None:
        """Refuse a ``step()`` that has nothing to update, or that ends another batch than DeepSpeed's would."""
        if self._engine.micro_steps != self._micro_steps:
            raise CallOrderError(
                f"engine.micro_steps: got {self._engine.micro_steps} between engine(...) and step(), allowed is to set "
                f"it between step() and engine(...); move it there"
            )
        if ends_batch and self._stage.progress.forwarded in self._drops:
            del self._drops[self._stage.progress.forwarded]
            raise CallOrderError(
                "zero_grad(): called between backward() and step() of a batch's last micro-batch, which would leave "
                "nothing to update, allowed is after step(); move it there"
            )

    def begin_batch_anew(self) -> None:
        """Leave a batch that is not complete, as a script asks for by ``engine.micro_steps = 0``; gradients stay.

        Raises:
            CallOrderError: the script has set another number, in the middle of a batch.
        """
        steps, size, stage = self._engine.micro_steps, self._stage.pipeline.micro_batches, self._stage
        as_counted = steps == self._micro_steps or steps % size == self.in_batch
        if not as_counted and steps % size:
            raise CallOrderError(
                f"engine.micro_steps: got {steps} after {self.in_batch} of a batch's {size} micro-batches, allowed is "
                f"what has been counted, or a multiple of {size}, which begins a batch; write 0"
            )
        self._micro_steps = steps
        if as_counted:
            return
        self._engine.drain("engine.micro_steps")
        with self._engine.failures.aborting(), self.within_engine():
            stage.links.flush()
            for function in self._drops.pop(stage.progress.forwarded, ()):
                function()
        restart_at(stage, stage.progress.forwarded // size)
        self.in_batch, self._joins = 0, True
        self._note_gradients()

    # A round

    def run_forward(self, packed: Any) -> LossTensor:
        """Forward portion of the next round, with the inputs ``packed``; returns the loss."""
        stage = self._stage
        self._keep_gradients("engine(...)")
        self._engine.observation.log_messages()
        self._modes = [module.training for module in self._switched]
        kind = stage.device.type
        self._casts_to = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        progress, micro_batch = stage.progress, stage.progress.forwarded
        self._round = next_round(stage.pipeline, stage.number, progress, stage.exchanges)
        waits = waits_for_loss(stage.pipeline, stage.number, progress)
        if stage.is_last and micro_batch % stage.pipeline.micro_batches == 0:
            stage.losses = stage.batch_loss()
        if stage.is_first:
            stage.feed.put_in_front([(stage.feed.call, stage.feed.take((packed, None), None))])
        self._carry_out("forward", self._round.forward)
        self.others.round_begins(waits)
        if stage.is_last:
            gate, loss = self._gates[micro_batch], stage.in_flight[micro_batch, stage.number].loss
        else:
            if waits:
                found, names = self._loss_links.wait(micro_batch)
                self._newest = (micro_batch, stage.arrived(found))
                self.others.announced(names)
            assert self._newest is not None
            gate, loss = LossGate(), self._newest[1]
        assert loss is not None
        self._script_loss = script_loss = gate.gated(loss, self.others.one_of_several)
        self.others.put_beside(script_loss, gate, micro_batch)
        return script_loss

    def run_backward(self, loss: torch.Tensor) -> None:
        """Backward portion of the round, from the script's loss."""
        stage = self._stage
        self._keep_gradients("backward()")
        if self._script_loss is not None:
            self._script_loss.let_go()
        self._script_loss = None  # whose graph would live until the next forward pass
        self.others.round_ends()
        if stage.is_last:
            record = stage.in_flight[stage.progress.forwarded - 1, stage.number]
            record.loss = loss
            record.script_loss = self.others.beside(record.script_loss)
        self._carry_out("backward", self._round.backward)
        self._note_gradients()

    def run_step(self) -> None:
        """The update that is due in the round, if any, and the script's counts."""
        engine, stage = self._engine, self._stage
        self._keep_gradients("step()", dropped=False)
        if self._round.step:
            self._gathered = []
        ends_batch = self.ends_batch
        if ends_batch and engine.lr_scheduler is None and engine.optimizer is not None:
            self._rates.queue(engine.optimizer.param_groups)
        self._carry_out("step", self._round.step)
        if ends_batch:
            engine.basic_optimizer._opt_called = True  # else schedulers of torch warn where the update comes later
            engine.global_steps += 1
            engine.global_samples += engine.train_batch_size()
        self.in_batch, self._joins = (self.in_batch + 1) % stage.pipeline.micro_batches, False
        engine.micro_steps += 1
        self._micro_steps = engine.micro_steps

    def complete_batch(self, packed: Any) -> None:
        """Complete the script's batch with the inputs ``packed``, whose gradients count as zero.

        These passes leave nothing behind: no random numbers that are drawn, no statistics in batch norms.
        """
        stage = self._stage
        modules = (module for module in self._switched if module is not self._engine)  # not its counts
        memory = ModuleMemory(modules, copies_all=True)
        with torch.enable_grad(), stage.random_states.kept(stage.device):
            while self.in_batch:
                with memory.as_remembered(memory.read(), knows_modules=False), self._casting(self._casts_to):
                    loss = self.run_forward(packed)
                    for name in self.others.asked:  # as the script does in every micro-batch
                        with suppress(OutputError):
                            getattr(loss, name)
                self.run_backward(loss * 0)
                self.run_step()

    def is_drain_due(self) -> bool:
        """Whether the pipeline is to be empty before the next batch."""
        steps = self._engine.global_steps
        return self._stage.asynchronous and not self.in_batch and next_drain(self._stage, steps - 1) == steps

    def forget_batch(self) -> None:
        """Forget a batch that is not complete."""
        if self._engine.optimizer is not None:
            with self.within_engine():
                self._stage.weights.drop_gradients()
        self._gathered = []
        self._drops.clear()
        self.in_batch = 0

    def loaded(self) -> None:
        """A checkpoint has been loaded: go on from its counts."""
        self._rates.forget()
        self.forget_batch()
        self.own_counts = self._engine.global_steps, self._engine.global_samples

    def _note_gradients(self) -> None:
        if self._stage.pipeline.num_stages > 1:
            there = ((parameter, parameter.grad) for parameter in self._engine.stage_parameters)
            self._gathered = [(one, grad, grad._version) for one, grad in there if grad is not None]

    def _keep_gradients(self, call: str, dropped: bool = True) -> None:
        """Refuse gradients that the script has changed: each stage has another batch's, and parts.

        Those that it has dropped where a batch has ended for it are put back: the batch has not ended here.
        """
        for parameter, gradient, version in self._gathered:
            if parameter.grad is None and dropped and not self._has_gradients:
                parameter.grad = gradient
            if parameter.grad is not gradient or gradient._version != version:
                raise CallOrderError(
                    f"{call}: got gradients that were changed after backward(), allowed are those of backward(), which "
                    f'need not be of a whole batch on this stage; clip by "gradient_clipping" in the DeepSpeed JSON, '
                    f"and drop those of a batch that has not ended by engine.zero_grad()"
                )

    # A drain

    def drain(self) -> None:
        """Run the backward passes that are left. Every rank comes to it at the same line.

        Between two rounds the stages are at different micro-batches. A mark goes from the first stage to the last, in
        the place of an activation, and back at the end: a rank that ran a different number of micro-batches receives
        it out of order and raises. A batch that is not complete keeps the gradients of its micro-batches and no update
        is made of them. Afterwards the pipeline is filled again, with the versions that follow from where it was empty.
        """
        self._keep_gradients("drain()")
        if not self._stage.weights.has_memory():
            self._stage.weights.check(anew=True)
        # Wherever the script asks for it, these are passes and updates of training.
        with torch.inference_mode(False), torch.enable_grad(), self._casting(None), self._as_in_training():
            self._finish_all()
        self._note_gradients()

    def _casting(self, dtype: torch.dtype | None) -> torch.autocast:
        """Autocast to ``dtype``, or none."""
        return torch.autocast(self._stage.device.type, dtype, enabled=dtype is not None)

    @contextmanager
    def _as_in_training(self) -> Iterator[None]:
        """The modes of the latest round, for layers that are run again: eval() may have been called since."""
        present = [module.training for module in self._switched]
        self._switch(self._modes)
        try:
            yield
        finally:
            self._switch(present)

    def _switch(self, modes: list[bool]) -> None:
        for module, mode in zip(self._switched, modes, strict=True):
            if module.training is not mode:
                module.training = mode

    def _finish_all(self) -> None:
        stage, links = self._stage, self._stage.links
        stage.action = "DRAIN"
        given = stage.progress.forwarded
        if not stage.is_first:
            message = links.previous.activations.receive("the mark of a drain from the first stage on")
            if message.kind is not Message.END or message.micro_batch != given:
                before = f"{message.micro_batch} micro-batches" if message.kind is Message.END else "more"
                raise PipelineProtocolError(
                    f"{links.me} drains after {given} micro-batches, stage {stage.number - 1} has been handed "
                    f"{before}; {_SAME_ROUNDS}"
                )
        if not stage.is_last:
            links.next.activations.send(Message.END, given, torch.tensor([given, given, 0, False], device="cpu"))
        self._carry_out("drain", drain_actions(stage.pipeline, stage.number, stage.progress, stage.exchanges))
        if not stage.is_last:
            links.next.gradients.receive("the mark of a drain from the last stage on")
        if not stage.is_first:
            links.previous.gradients.send(Message.END, given, None)
        stage.progress = Progress(given, given, None, filled_from=given)
        stage.weights.keep_newest()
        stage.ties.catch_up(given // stage.pipeline.micro_batches)
        for sender in stage.script_senders:
            sender.flush()

    # Actions

    def _carry_out(self, portion: str, actions: Iterable[Action]) -> None:
        """Carry out a portion. Afterwards the parameters are the newest, as the script expects them."""
        stage, run = self._stage, self._engine.executor.run
        try:
            with stage.under_way(), self.random_numbers(portion):
                for action in actions:
                    with self.within_engine():
                        self._update(action) if action.kind is Kind.STEP else run([action])
        except EndOfData as end:
            raise PipelineProtocolError(
                f"{stage.links.me} was handed micro-batch {end.read}, before which stage {stage.number - 1} drains; "
                f"{_SAME_ROUNDS}"
            ) from None
        finally:
            stage.weights.load_new_params()

    def random_numbers(self, *what: int | str) -> AbstractContextManager[None]:
        """The stage's own random numbers. Without other stages the script's, as with DeepSpeed."""
        stage = self._stage
        if stage.pipeline.num_stages == 1:
            return nullcontext()
        return own_random_numbers(stage.device, stage.number, self._engine.global_samples, self.in_batch, *what)

    @contextmanager
    def within_engine(self) -> Iterator[None]:
        """A block in which DeepSpeed asks the engine, and not the script."""
        self.is_within_engine = True
        try:
            yield
        finally:
            self.is_within_engine = False

    def _update(self, action: Action) -> None:
        """An update and its log lines, under the stage's own counts."""
        engine = self._engine
        seen_by_script = engine.global_steps, engine.global_samples
        engine.global_steps, engine.global_samples = self.own_counts
        try:
            with self._rates.of_next_update(engine.optimizer.param_groups):
                engine.executor.run([action])
            engine.agg_train_loss = engine._aggregate_total_loss()
            if engine.global_rank == 0 and engine.monitor.enabled:
                event = ("Train/Samples/train_loss", engine.agg_train_loss.item(), engine.global_samples)
                engine.monitor.write_events([event])
            engine.observation.publish()
            self._stage.report = None
        finally:
            self.own_counts = engine.global_steps, engine.global_samples
            engine.global_steps, engine.global_samples = seen_by_script

    def _forward(self, index: int, part: int) -> None:
        stage = self._stage
        self._engine.executor.forward(index, part)
        if not stage.is_last:
            return
        record, stages = stage.in_flight[index, part], range(stage.pipeline.num_stages - 1)
        assert record.loss is not None
        record.script_loss = record.loss.detach().float()
        self._gates[index] = LossGate()
        there = Progress(index, index, None, stage.progress.filled_from)
        waiting = [number for number in stages if waits_for_loss(stage.pipeline, number, there)]
        self._loss_links.send(index, (record.script_loss, self.others.forwarded(waiting)), waiting)

    def _receive_gradient(self, index: int, part: int) -> None:
        self._engine.executor.receive_gradient(index, part)
        sent = self._stage.in_flight[index, part].script_loss
        loss, *others = sent if isinstance(sent, (tuple, list)) else (sent,)
        assert loss is not None
        if self._newest is None or index > self._newest[0]:
            self._newest = (index, loss)
            self.others.arrived(others)

    def _backward(self, index: int, part: int) -> None:
        for function in self._drops.pop(index, ()):
            function()
        if not self._stage.is_last:
            self._engine.executor.backward(index, part)
            return
        gate = self._gates.pop(index)
        gate.open = True
        self._engine.executor.backward(index, part)
        gate.open = False
        if not gate.used:
            raise CallOrderError(
                f"backward(loss): got a tensor that is not made of the loss of micro-batch {index}; allowed is what "
                f"engine(...) returned last, or what is computed from it"
            )
