"""Executor of a stage's actions: one method per kind of action.

Methods take the index of an action and a part of the model. The part is the stage's number unless ranks have virtual
stages; the model begins with part 0 and ends with part ``num_parts - 1``.

With weight stashing a forward pass uses the newest version, which is ``max(r, index - W) // M`` by the order of passes.

An update goes by way of DeepSpeed's timers and events: :meth:`Executor.step` calls its ``_exec_optimizer_step()``,
which calls the engine's ``_take_model_step()``, and the optimizer's step runs within :meth:`Executor.updating`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, Protocol

import torch
from deepspeed.utils import logger

from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.execution import drain
from ds_vpipe.engine.execution.batch_loss import BatchReport
from ds_vpipe.engine.execution.data import EndOfData, MicroBatch, labels_to_device, own_copy, to_device
from ds_vpipe.engine.execution.live_moves import LiveMoves
from ds_vpipe.engine.links.message import Message, Received
from ds_vpipe.engine.modules.interleaved import InterleavedMixin
from ds_vpipe.engine.modules.recompute import backward_errors
from ds_vpipe.engine.modules.split_module import SplitModule
from ds_vpipe.engine.stage import InFlight, Stage
from ds_vpipe.engine.updates.peer_updates import PeerUpdates
from ds_vpipe.errors import PipelinePeerError, PipelineProtocolError, VPipeError
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.one_f_one_b import version_used
from ds_vpipe.schedules.program import rank_actions

Methods = Mapping[Kind, Callable[[int, int], None]]
"""The method of each kind of action; its arguments are the action's index and part of the model."""


class Watcher(Protocol):
    """Observer of every action of a stage, without effect on it."""

    def before(self, action: Action) -> None:
        """The action begins."""

    def after(self, action: Action) -> None:
        """The action has ended, or was given up."""


def carry_out(stage: Stage, actions: Iterable[Action], methods: Methods, watchers: Sequence[Watcher] = ()) -> None:
    """Carry out actions in order, as training, evaluation and looping scripts do.

    Raises:
        EndOfData: the first stage has no more micro-batches.
        VPipeError: the script's code raised StopIteration.
        PipelinePeerError: another rank failed, is lost, or did not answer in time.
    """
    for action in actions:
        stage.action = action
        if (failure := stage.groups.failures.state.reason) is not None:  # of which a device's collective says nothing
            raise PipelinePeerError(f"{stage.links.me} stopped at {action}: {failure}", failure)
        for sender in stage.links.copied_before.get(action.kind, ()):
            sender.wait_until_copied()
        for watcher in watchers:
            watcher.before(action)
        try:
            methods[action.kind](*stage.key(action))
        except StopIteration as error:  # the data end by EndOfData; the caller would take this for their end
            raise VPipeError("a layer, the loss function or the optimizer raised StopIteration") from error
        finally:
            for watcher in reversed(watchers):
                watcher.after(action)


class Executor:
    """Training of one stage. Actions change the stage's state; DeepSpeed's engine runs passes and updates."""

    def __init__(self, engine: PatchedPipelineEngine, stage: Stage, statistics: int, moves: LiveMoves) -> None:
        self._engine, self._stage, self._moves = engine, stage, moves
        self._statistics = statistics  # how many numbers each stage adds to the report of a batch
        self._several_parts = stage.pipeline.virtual_stages > 1
        self._warned_of_labels = False
        self.watchers: list[Watcher] = []  # observers of every action; the first begins first and ends last
        # Scripts that loop over engine(...) have three methods of their own (engine/loop/rounds.py).
        self.methods: dict[Kind, Callable[[int, int], None]] = {
            Kind.LOAD: self.load,
            Kind.RECV_ACT: self.receive_activation,
            Kind.FORWARD: self.forward,
            Kind.SEND_ACT: self.send_activation,
            Kind.RECV_GRAD: self.receive_gradient,
            Kind.DROP_GRAD: self.drop_gradient,
            Kind.BACKWARD: self.backward,
            Kind.SEND_GRAD: self.send_gradient,
            Kind.REDUCE: self.reduce,
            Kind.STEP: self.step,
            Kind.SEND_TIED_GRAD: self.send_tied_gradients,
            Kind.RECV_TIED_GRAD: self.receive_tied_gradients,
            Kind.SEND_TIED: self.send_tied_weights,
            Kind.RECV_TIED: self.receive_tied_weights,
            **moves.methods,
        }
        if stage.peers is not None:
            self.methods[Kind.SEND_PEERS] = partial(self.send_peer_updates, stage.peers)
            self.methods[Kind.RECV_PEERS] = partial(self.receive_peer_updates, stage.peers)

    def run(self, actions: Iterable[Action]) -> None:
        """Carry out training actions under observation."""
        carry_out(self._stage, actions, self.methods, self.watchers)

    def train_batch(self) -> None:
        """Carry out the actions up to the stage's next update, if necessary with an end of the data and a refill.

        Raises:
            StopIteration: the data end before the batch is complete.
        """
        stage, engine = self._stage, self._engine
        batch, size = engine.global_steps, stage.pipeline.micro_batches
        end = (stage.progress.completed // size + 1) * size
        stage.report, stage.labels_sum = None, 0
        if stage.is_last:
            stage.losses = stage.batch_loss()
        if self._moves.move is not None:
            self._moves.settle(batch)
        if stage.ties.weights_out:
            stage.ties.refuse_written(stage.weights.written())
        with stage.weights.in_batch():
            while True:  # once, unless the data end or a drain is due: then the rest of the batch, and a refill
                if stage.is_drained_between:
                    drain.limit_to_drain(stage, batch)
                moves = () if self._moves.move is None else (self._moves.move,)
                try:
                    self.run(rank_actions(stage.pipeline, stage.number, stage.progress, stage.exchanges, moves))
                except EndOfData as data_end:
                    drain.end_data(stage, data_end, batch)
                    continue  # with the actions that are left now that the limit is known
                if stage.progress.completed == end:
                    break
                self._moves.complete(stage.progress.completed)
                drain.refill(stage)
        if (losses := stage.losses) is not None:  # for scripts that look at them
            engine.fwd_outputs, engine.loss, engine.total_loss = losses.outputs, losses.outputs[-1], losses.total
        if stage.progress.completed == stage.progress.limit:
            stage.ties.catch_up(stage.progress.completed // size)

    def _read_with_the_first_stage(self, done: int) -> None:
        """Read labels ahead as far as the first stage reads inputs in this call, after which ``done`` are trained.

        A loader may start over there. If this stage asked it in the next call, it might go by what the script has done
        in between, such as `set_epoch()`, or random states after an evaluation, and give labels of other samples.
        """
        feed, progress, size = self._stage.feed, self._stage.progress, self._stage.pipeline.micro_batches
        depth = self._stage.pipeline.depths[0]
        end = done + depth if progress.limit is None else min(done + depth, progress.limit)
        calls = feed.calls_admitted_again[done - progress.filled_from :]
        for index in range(done + len(calls), end):
            # The first stage reads F(index) in the batch of B(index - depth), or in the first one after a refill. After
            # a recovery that batch may belong to a call of the process before, which has no number here.
            calls.append(max(0, feed.call + 1 + max(index - depth, progress.filled_from) // size - done // size))
        feed.catch_up(calls)

    # Passes and transfers

    def load(self, index: int, part: int) -> None:
        """Read inputs (first stage) or labels (last stage)."""
        if part == 0:
            self._load_inputs(index)
        else:
            self._load_labels(index, self._stage.in_flight[index, part])

    def _load_inputs(self, index: int) -> None:
        stage, feed = self._stage, self._stage.feed
        if self._several_parts and index % stage.pipeline.micro_batches == 0:
            self._read_batch(index)
        call, taken = feed.next_in_front() or self._admit(index)
        if taken is None:  # the data end here, as before a quiesce, in which the later stages forgot it
            raise EndOfData(index - index % stage.pipeline.micro_batches, index, call)
        feed.forget_before(call)
        inputs = to_device(taken.inputs, stage.copies, copy=stage.may_withdraw)
        record = InFlight(call, inputs, labels_to_device(taken.labels, stage.copies), labels_sum=taken.labels_sum)
        record.micro_batch = taken if stage.may_withdraw else None
        stage.in_flight[index, 0] = record

    def _load_labels(self, index: int, record: InFlight) -> None:
        stage, feed = self._stage, self._stage.feed
        try:
            item = feed.read(record.call)
        except StopIteration:
            raise VPipeError(
                f"label iterator of the last stage ended at micro-batch {index}, the first stage's did not: "
                f"give both stages iterators over the same data"
            ) from None
        _, labels, record.labels_sum = feed.take(item, feed.batch_fn(record.call))
        record.labels = labels_to_device(labels, stage.copies)
        if self._ends_batch(index) and not feed.has_batch_fn:
            self._read_with_the_first_stage(index + 1)
        feed.forget_before(record.call)

    def _read_batch(self, index: int) -> None:
        """Read a whole batch before it begins: an incomplete one could not be undone on all ranks."""
        feed, size = self._stage.feed, self._stage.pipeline.micro_batches
        items: list[Any] = []
        call = feed.call
        with suppress(StopIteration):
            while len(items) < size:
                items.append(own_copy(feed.read(call)))
        if not feed.all_have(len(items) == size):
            raise EndOfData(index, index, call, unlabelled=len(items), asked=len(items) < size)
        feed.put_in_front([(call, feed.take(item, feed.batch_fn(call))) for item in items])

    def _admit(self, index: int) -> tuple[int, MicroBatch]:
        """Admit a new micro-batch, if all ranks of the stage have one."""
        stage, feed = self._stage, self._stage.feed
        call, item, there = feed.call, None, False
        known = feed.has_ended(call)
        with suppress(StopIteration):
            item = feed.read(call)
            there = True
        if not feed.all_have(there):
            if there:
                feed.give_back(call, item)
            limit = index - index % stage.pipeline.micro_batches
            if not there and limit > stage.progress.filled_from:
                feed.repeat_end(call)
            raise EndOfData(limit, index, call, asked=not known)
        return call, feed.take(item, feed.batch_fn(call))

    def receive_activation(self, index: int, part: int) -> None:
        """Wait for the input of a micro-batch, or for the end of the data."""
        stage, links = self._stage, self._stage.links.previous
        stage.weights.check()
        message = self._moves.waiting.popleft() if self._moves.waiting else links.activations.receive(stage.action)
        if message.kind is Message.END:
            limit, read, unlabelled, asked = message.tree.tolist()
            raise EndOfData(limit, read, message.note, unlabelled, bool(asked))
        self._expect(message, Message.ACTIVATION, self._number(index, part))
        inputs, table = message.tree
        stage.in_flight[index, part] = InFlight(message.note, stage.arrived(inputs))
        if stage.peers is not None:
            stage.peers.from_earlier(table)
        if not self._several_parts:
            # The previous stage, of depth W, ran F(index) after B(index - W - 1): it has received that gradient.
            links.gradients.release(index - stage.pipeline.depths[stage.number - 1] - 1)

    def forward(self, index: int, part: int) -> None:
        """Forward pass with the weights of the micro-batch's version."""
        stage, record = self._stage, self._stage.in_flight[index, part]
        last = part == stage.pipeline.num_parts - 1
        choose_part(stage, part)
        layers = nullcontext() if self._moves.move is None else self._moves.layers_of(index)
        version = self._version_due(index)
        may_write = not (stage.pipeline.vertical or stage.ties.weights_in or stage.ties.weights_out)
        with (
            layers,
            stage.weights.forward((index, part), version),
            nullcontext() if may_write else self._refuse_writes(),
        ):
            if stage.swap is not None and stage.pipeline.in_flight(stage.number) > 1:  # else its backward pass is next
                record.swapped = stage.swap.begin(stage.module, stage.weights.versions)
            output = self._engine.run_forward(record.enter(keep_strides=isinstance(stage.module, SplitModule)))
            if last and stage.module.loss_fn is not None:
                output = stage.module.loss_fn(output, record.labels)
            output = stage.weights.unshared(output)
        record.labels = None
        if last and stage.losses is not None:
            record.loss = stage.losses.add(output, stage.module.get_additional_losses())
        else:
            record.keep_output(self._engine.as_sent(output))
        if part == stage.number:
            stage.progress = stage.progress._replace(forwarded=index + 1)
        if version is not None:
            stage.weights.keep_from(self._version_due(index + 1))

    def _version_due(self, index: int) -> int | None:
        """Version of a forward pass; None for the newest."""
        stage, pipeline = self._stage, self._stage.pipeline
        if not pipeline.vertical and index >= stage.first_after_recovery:
            return None
        depth = pipeline.depths[0 if pipeline.vertical else stage.number]
        return version_used(index, depth, pipeline.micro_batches, stage.progress.filled_from)

    def _refuse_writes(self) -> AbstractContextManager[None]:
        """Context of a forward pass that may not write into weights: newer versions or tied copies would lack it."""
        stage, depths = self._stage, self._stage.pipeline.depths
        uses_older = stage.pipeline.vertical and depths[stage.number] != depths[0]
        return refuse_writes(stage.weights.trained if uses_older else stage.ties.weights, self._engine)

    def send_activation(self, index: int, part: int) -> None:
        """Start sending the output to the next stage."""
        stage, record = self._stage, self._stage.in_flight[index, part]
        output, record.output = record.output, None
        table = None if stage.peers is None else stage.peers.table
        number = self._number(index, part + 1)
        stage.links.next.activations.send(Message.ACTIVATION, number, (output, table), note=record.call)

    def receive_gradient(self, index: int, part: int) -> None:
        """Wait for the gradient of the output."""
        stage, record = self._stage, self._stage.in_flight[index, part]
        stage.weights.load_old_params((index, part))  # also in B, but here the time is one of waiting
        if record.swapped is not None:
            record.swapped.fetch()
        tree, numbers = self._gradient_message(index, part).tree
        gradients, losses, record.script_loss = stage.arrived(tree)
        record.gradients = list(gradients)
        if numbers is not None:
            stage.report = BatchReport(numbers.numpy().copy(), losses.clone())

    def drop_gradient(self, index: int, part: int) -> None:
        """Wait for a gradient of an incomplete batch at the end of the data, and drop it."""
        self._gradient_message(index, part)

    def _gradient_message(self, index: int, part: int) -> Received:
        links = self._stage.links.next
        message = links.gradients.receive(self._stage.action)
        self._expect(message, Message.GRADIENT, self._number(index, part))
        # The gradient answers an activation: the next stage has received that one and all that were sent before it.
        links.activations.release(self._number(index, part + 1))
        return message

    def backward(self, index: int, part: int) -> None:
        """Backward pass with the weights that the forward pass used."""
        stage, record = self._stage, self._stage.in_flight[index, part]
        scaling = stage.loss_scaling
        stage.weights.load_old_params((index, part))
        if record.swapped is not None:
            record.swapped.fetch()
        with backward_errors():
            if record.loss is not None:
                loss, record.loss = record.loss, None
                self._engine.run_backward(loss if scaling is None else scaling.apply(loss))
            else:
                self._engine.run_backward_from(record.outputs, record.gradients)
        if part == stage.number:
            stage.progress = stage.progress._replace(completed=index + 1)
        record.keep_input_gradients(stage.weights.unshared)
        stage.labels_sum += record.labels_sum
        if part == 0:
            del stage.in_flight[index, part]
            stage.weights.release((index, part))
        if stage.losses is not None and part == stage.pipeline.num_parts - 1 and self._ends_batch(index):
            scale = 1.0 if scaling is None else scaling.scale
            stages = stage.pipeline.num_stages
            stage.report = BatchReport.of(stage.losses.means(), scale, stage.labels_sum, stages, self._statistics)
        if part == 0 and self._ends_batch(index) and stage.report is not None:
            self._compare_labels(stage.report.labels_sum)

    def _compare_labels(self, last: int) -> None:
        """Warn once if first and last stage have different labels; ``last`` is the last stage's sum, 0 for none."""
        first, batch = self._stage.labels_sum, self._engine.global_steps
        if first and last and first != last and not self._warned_of_labels:
            self._warned_of_labels = True
            logger.warning(
                f"ds_vpipe: train_batch(): the first and the last stage were given different labels in batch {batch}, "
                f"so inputs may meet labels of other samples: their iterators differ, as loaders do that shuffle or "
                f"mask by a process's random numbers; pass them generator=torch.Generator().manual_seed(...) on every "
                f"rank; if the first stage's labels are placeholders, pass None there"
            )

    def send_gradient(self, index: int, part: int) -> None:
        """Start sending the gradient of the input to the previous stage."""
        stage, record = self._stage, self._stage.in_flight[index, part]
        numbers, losses = stage.report.pack() if stage.report is not None and self._ends_batch(index) else (None, None)
        tree = (record.input_gradients(), losses, record.script_loss), numbers
        stage.links.previous.gradients.send(Message.GRADIENT, self._number(index, part - 1), tree)
        del stage.in_flight[index, part]  # after the send, as the previous stage waits for that
        stage.weights.release((index, part))

    # Once per batch

    def reduce(self, index: int, part: int) -> None:
        """Average a batch's gradients over the stage's replicas."""
        self._engine.reduce_gradients(together=not self._stage.asynchronous)
        if self._moves.move is not None:
            self._moves.after_reduce(index)

    def step(self, index: int, part: int) -> None:
        """One optimizer update of the stage; the optimizer's own step runs within :meth:`updating`."""
        if self._several_parts:  # all activations have come back, and nobody waits for gradients any more
            self._stage.links.flush()
        self._engine.run_update()
        if self._moves.move is not None:
            self._moves.after_update(index + 1)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Context of an optimizer step: sets loss scale and version before, tied weights and peer updates after."""
        stage, scaling = self._stage, self._stage.loss_scaling
        if scaling is not None and stage.report is not None:
            scaling.scale = stage.report.loss_scale
        if not stage.asynchronous:
            self._engine.fill_groups()
        if self._moves.move is not None:
            self._moves.before_update(stage.weights.latest_version)
        with stage.weights.update():
            if stage.ties.weights_in:
                stage.ties.hold()
            yield
            if stage.ties.weights_in:
                stage.ties.overwrite()
        overflow = bool(getattr(self._engine.optimizer, "overflow", False))
        if stage.peers is not None:
            overflow = stage.peers.after_update(overflow)
        if scaling is not None and (stage.is_last or not stage.asynchronous):
            scaling.after_update(overflow)

    def send_tied_gradients(self, index: int, part: int) -> None:
        """Start sending the gradients of copies of tied weights to their owners."""
        self._stage.ties.send_gradients(index, self._engine.take_gradient)

    def receive_tied_gradients(self, index: int, part: int) -> None:
        """Wait for the copies' gradients and add them to the owner's."""
        self._stage.ties.add_gradients(index, self._engine.add_gradient)

    def send_tied_weights(self, index: int, part: int) -> None:
        """Start sending updated tied weights to the stages that hold copies."""
        self._stage.ties.send_weights(index + 1, self._stage.pipeline.micro_batches, self._stage.progress.filled_from)

    def receive_tied_weights(self, index: int, part: int) -> None:
        """Wait for the owner's weights of the version that is due."""
        self._stage.ties.receive_weights(index, self._stage.pipeline.micro_batches, self._stage.progress.filled_from)

    def send_peer_updates(self, peers: PeerUpdates, index: int, part: int) -> None:
        """Start sending overflows and norms of this and later stages' updates to the previous stage."""
        last_of_batch = self._stage.progress.completed - 1
        self._stage.links.previous.gradients.send(Message.PEERS, last_of_batch, peers.table)

    def receive_peer_updates(self, peers: PeerUpdates, index: int, part: int) -> None:
        """Wait for overflows and norms of later stages' updates."""
        message = self._stage.links.next.gradients.receive(self._stage.action)
        self._expect(message, Message.PEERS)
        peers.from_later(message.tree)

    # Helpers

    def _ends_batch(self, index: int) -> bool:
        return (index + 1) % self._stage.pipeline.micro_batches == 0

    def _number(self, index: int, receiver: int) -> int:
        """Message number of a micro-batch on its way to the part ``receiver``."""
        return index * self._stage.pipeline.num_parts + receiver if self._several_parts else index

    def _expect(self, message: Received, kind: Message, number: int | None = None) -> None:
        if message.kind is not kind or number not in (None, message.micro_batch):
            raise PipelineProtocolError(
                f"{self._stage.links.me} expected {self._stage.action}, got {message.kind.name}{message.micro_batch}: "
                f"do all ranks run the same script with the same configuration, and make the same calls?"
            )


def choose_part(stage: Stage, part: int) -> None:
    """Select the layers of ``part`` in a module that has several parts."""
    if isinstance(stage.module, InterleavedMixin):
        stage.module._vpipe_chunk = part // stage.pipeline.num_stages


@contextmanager
def refuse_writes(weights: Sequence[torch.Tensor], engine: PatchedPipelineEngine) -> Iterator[None]:
    """Context of a forward pass that writes into none of ``weights``.

    Raises:
        VPipeError: it has.
    """
    counts = [weight._version for weight in weights]
    yield
    for weight, count in zip(weights, counts, strict=True):
        if weight._version != count:
            name = engine.param_names.get(weight, f"one of shape {list(weight.shape)}")
            raise VPipeError(
                f"weights: got a forward pass that writes into {name}, as that of nn.Embedding(max_norm=...), "
                f"allowed are writes into weights of one stage in their newest version; compute a new tensor from "
                f'it or, if it is not tied, write "stash" for vpipe.weight_sync'
            )
