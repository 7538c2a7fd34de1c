"""Moves of layers between stages while training runs, on one stage.

:mod:`ds_vpipe.schedules.moves` says what is sent when, and which version a micro-batch uses; here it is carried out.
The stage that a layer leaves goes on as before until the last micro-batch before the cut-over is done: it updates the
layer for its own forward passes, and sends the gradients as well. The stage that gets the layer has it as a module from
when it arrives, and among ``module.forward_funcs`` after the update at which the cut-over is, so that what runs between
two batches, such as an evaluation, runs it on one stage. A forward pass chooses by its micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from deepspeed.utils import logger
from torch import nn
from torch.utils._pytree import tree_map_only

from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.execution import stage_layers
from ds_vpipe.engine.execution.movable_layers import layer_form, unfit_configuration, unfit_layers
from ds_vpipe.engine.execution.stage_layers import LayerContent, layer_of, parameters_in_order
from ds_vpipe.engine.links.message import Message, Received, Tree
from ds_vpipe.engine.links.pickled import as_bytes, from_bytes
from ds_vpipe.engine.modules.built_layers import Built, take_settings
from ds_vpipe.engine.stage import Stage
from ds_vpipe.engine.weights.moved_layers import MovedLayer
from ds_vpipe.errors import PipelineProtocolError, Refusal, VPipeError
from ds_vpipe.partition import bounds
from ds_vpipe.schedules.actions import Kind
from ds_vpipe.schedules.moves import Move, check_move, layer_version, moved


class LiveMoves:
    """Moves of layers from and to one stage."""

    def __init__(self, engine: PatchedPipelineEngine, stage: Stage) -> None:
        self._engine, self._stage = engine, stage
        self.move: Move | None = None  # that is under way, if any
        self._sent = False  # whether the layer has left this stage
        self._frozen: list[tuple[nn.Parameter, int]] = []  # its weights without versions, and changes of them by then
        self._built: Any = None  # the layer that moves, where it is to arrive
        self._trained: list[bool] = []  # which of its parameters were trained when it was sent
        self._arrived: MovedLayer | None = None  # the layer that moves, where it has arrived
        # By batch, where the layer has arrived: gradients that wait for earlier ones, and the optimizer's options.
        self._late: dict[int, list[torch.Tensor | None]] = {}
        self._options: dict[int, dict[str, Any]] = {}
        self.waiting: deque[Received] = deque()  # messages that were received before they were due
        self.methods: dict[Kind, Callable[[int, int], None]] = {
            Kind.SEND_LAYER_DOWN: self._send_layer,
            Kind.SEND_LAYER_UP: self._send_layer,
            Kind.RECV_LAYER_DOWN: self._receive_layer,
            Kind.RECV_LAYER_UP: self._receive_layer,
            Kind.SEND_LAYER_GRAD_DOWN: self._send_gradients,
            Kind.SEND_LAYER_GRAD_UP: self._send_gradients,
            Kind.RECV_LAYER_GRAD_DOWN: self._receive_late_gradients,
            Kind.RECV_LAYER_GRAD_UP: self._receive_gradients,
            Kind.STEP_LAYER: self._step_layer,
        }

    @property
    def _current(self) -> Move:
        """The move, where there is one."""
        assert self.move is not None
        return self.move

    @property
    def _layer(self) -> MovedLayer:
        """The layer that moves, where it has arrived."""
        assert self._arrived is not None
        return self._arrived

    def give(self, move: Move) -> None:
        """Schedule a move where layers can move at all (:func:`.refuse_moves`); all ranks call this with the same one.

        Raises:
            VPipeConfigError: it cannot be carried out, on every rank.
        """
        stage, updates = self._stage, self._engine.global_steps
        self.settle(updates)
        if any(other != move for other in stage.consensus.everyone.gather(move, "all ranks to agree on a move")):
            remedy = "compute it from values that all ranks have"
            raise Refusal("move", str(move), "the same move on all ranks", remedy).error()
        if self.move is not None:
            begins = self.move.settled_batch(stage.pipeline)
            reason = f"{self.move} is under way"
            raise Refusal("move", str(move), f"one move at a time, after {begins} updates", "wait", reason).error()
        check_move(stage.pipeline, stage.pipeline.partition, move, updates)
        unfit, layer = unfit_configuration(self._engine, stage), None
        if unfit is None and stage.number == move.source:
            unfit, layer = unfit_layers(stage.module, stage.built).get(move.layer), layer_of(stage.module, move.layer)
            owned = self._engine.optimizer.param_groups[0]["params"]
            if not {id(p) for p in owned} - {id(p) for p in parameters_in_order(layer)}:
                unfit = f"stage {move.source} trains nothing but layer {move.layer}"
        elif unfit is None and stage.number == move.target:
            layer = self._build(move)
        found = stage.consensus.pipeline.gather((unfit, layer_form(layer)), "all ranks to agree on a move")
        unfit = next((reason for reason, _ in found if reason is not None), None)
        if unfit is None and found[move.source][1] != found[move.target][1]:
            unfit = _changed(move)
        if unfit is not None:
            allowed = "layers of a PipelineModule in fp32, with an optimizer state by parameter; see docs/semantics.md"
            raise Refusal("move", str(move), allowed, "leave the layer where it is", unfit).error()
        self.move = move
        self._built = layer if stage.number == move.target else None

    def begin(self, move: Move) -> None:
        """Schedule a move that all ranks have found to be possible, without asking them; else as :meth:`give`.

        Raises:
            VPipeConfigError: something has changed since then here, so that it is not.
        """
        stage = self._stage
        check_move(stage.pipeline, stage.pipeline.partition, move, self._engine.global_steps)
        unfit = unfit_configuration(self._engine, stage)
        if unfit is None and stage.number == move.source:
            unfit = unfit_layers(stage.module, {}).get(move.layer)  # what else has changed since then goes along
        if unfit is not None:
            remedy = 'make such changes in the script before training, or write "moves": "drain"'
            raise Refusal("move", str(move), "layers as they were when it was decided", remedy, unfit).error()
        self.move = move
        self._built = self._build(move) if stage.number == move.target else None

    def _build(self, move: Move) -> Any:
        """The layer that moves, as its specification makes it."""
        spec = self._stage.module._layer_specs[move.layer]
        if not isinstance(spec, LayerSpec):
            return spec
        with self._stage.random_states.kept(self._stage.device):  # building draws random numbers
            return spec.build()

    # What a forward pass runs

    @contextmanager
    def layers_of(self, micro_batch: int) -> Iterator[None]:
        """Context of the forward pass of ``micro_batch``, with the layers that are here for it."""
        move, stage = self._current, self._stage
        if stage.number not in (move.source, move.target):
            yield
            return
        has_it = (micro_batch < move.micro_batch) == (stage.number == move.source)
        if self._arrived is not None:
            self._arrived.used = has_it
            self._arrived.due = self._due(micro_batch) if has_it else None
        module, before = stage.module, (stage.module.forward_funcs, stage.module._local_start)
        stage_layers.run_with(module, move.layer, has_it)
        try:
            yield
        finally:
            stage_layers.run(module, *before)
            self._keep_due(micro_batch + 1)

    def _due(self, micro_batch: int) -> int:
        move, pipeline, filled_from = self._current, self._stage.pipeline, self._stage.progress.filled_from
        return layer_version(pipeline, move.source, [move], micro_batch, filled_from)

    def _keep_due(self, micro_batch: int) -> None:
        """Keep the versions that forward passes from ``micro_batch`` on use of a layer that is updated apart."""
        arrived = self._arrived
        if arrived is not None and not self._stage.pipeline.vertical:
            first = max(micro_batch, self._current.micro_batch)
            arrived.versions.keep_from = self._due(first) if arrived.apart else None

    # Around updates

    def after_reduce(self, batch: int) -> None:
        """Hold back the layer's gradient of a batch if earlier ones have not been applied."""
        move, arrived = self._current, self._arrived
        if arrived is None or not arrived.apart:
            return
        if batch * self._stage.pipeline.micro_batches >= move.micro_batch:
            self._late[batch] = [parameter.grad for parameter in arrived.parameters]
        for parameter in arrived.parameters:
            parameter.grad = None

    def before_update(self, batch: int) -> None:
        """Note the optimizer's options of an update, which the layer's may need later."""
        move, stage = self._current, self._stage
        if stage.number == move.target and batch >= move.first_version(stage.pipeline):
            group = self._engine.optimizer.param_groups[0]
            options = {name: value for name, value in group.items() if name != "params"}
            self._options[batch] = tree_map_only(torch.Tensor, torch.clone, options)  # schedulers fill a rate's tensor

    def after_update(self, updates: int) -> None:
        """Hand the layer over where ``updates`` updates are made, if the cut-over is there."""
        move = self._current
        if updates * self._stage.pipeline.micro_batches < move.micro_batch:
            return
        if self._stage.number == move.source and self._sent:
            self._remove(move)
        elif self._stage.number == move.target and self._arrived is not None:
            stage_layers.run_with(self._stage.module, move.layer, True)

    def give_up(self) -> None:
        """Forget a move that has not begun, before micro-batches are numbered anew; in an empty pipeline."""
        if self.move is not None and self._engine.global_rank == 0:
            logger.warning(f"ds_vpipe: {self.move} is given up: it has not begun, and training goes on from elsewhere")
        self.move = self._built = None

    def settle(self, updates: int) -> None:
        """Forget a move if it is done everywhere after ``updates`` updates; its layer stays where it is."""
        if self.move is not None and self.move.settled_batch(self._stage.pipeline) <= updates:
            self._finish()

    def complete(self, micro_batch: int) -> None:
        """Complete a move if it has begun, in an empty pipeline that stands at ``micro_batch``."""
        move, stage = self.move, self._stage
        if move is not None and move.has_begun(stage.pipeline, micro_batch):
            if stage.number == move.source:
                self._remove(move)
            elif stage.number == move.target:
                self._apply_late(self._layer, micro_batch // stage.pipeline.micro_batches)
                stage_layers.run_with(stage.module, move.layer, True)
            self._finish()
        if stage.weights.moved:
            stage.weights.restart(stage.weights.latest_version)  # with versions of all layers together

    def _finish(self) -> None:
        move, stage, arrived = self._current, self._stage, self._arrived
        if arrived is not None:
            if arrived.versions.latest != stage.weights.latest_version:
                raise PipelineProtocolError(f"{stage.links.me}: {move} has ended with updates of it to be made")
            arrived.used, arrived.due, arrived.apart = True, None, False
            if not stage.pipeline.vertical:
                arrived.versions.keep_from = None
            stage_layers.order_parameters(self._engine, stage.module)
        partition = stage.pipeline.partition
        assert partition is not None
        stage.pipeline = replace(stage.pipeline, partition=moved(partition, move))
        stage.module.parts = bounds(moved(partition, move))
        self.move, self._sent, self._arrived = None, False, None
        self._late.clear()
        self._options.clear()

    def catch_up(self, updates: int) -> None:
        """Bring the layer up to ``updates`` updates, before what uses the newest weights of all stages.

        What is received on the way waits until it is due.
        """
        move, arrived = self.move, self._arrived
        size = self._stage.pipeline.micro_batches
        if move is None or arrived is None or not arrived.apart or updates * size < move.micro_batch:
            return
        while not self._late.keys() >= {*range(arrived.versions.latest, move.micro_batch // size)}:
            message = self._stage.links.previous.activations.receive(f"gradients of {move}")
            if message.kind is Message.LAYER_GRADIENT:
                self._take_gradients(message)
            else:
                self.waiting.append(message)
        self._keep_due(self._stage.progress.forwarded)
        self._apply_late(arrived, updates)

    # Messages

    def next_message(self, what: object) -> Received:
        """The next message from the previous stage, also one that has been received early."""
        return self.waiting.popleft() if self.waiting else self._stage.links.previous.activations.receive(what)

    def take(self, message: Received) -> None:
        """Take a message of a move that a quiesce finds among what it drops."""
        if message.kind is Message.LAYER:
            self._install(message)
        elif message.kind is Message.LAYER_GRADIENT:
            self._take_gradients(message)

    def _send(self, kind: Message, tree: Tree) -> None:
        """Send with the number of the message before, as receipts are counted by micro-batches."""
        links, progress = self._stage.links, self._stage.progress
        if self._current.down:
            links.next.activations.send(kind, progress.forwarded - 1, tree)
        else:
            links.previous.gradients.send(kind, progress.completed - 1, tree)

    def _send_layer(self, index: int, part: int) -> None:
        stage, move = self._stage, self._current
        stage.weights.load_new_params()
        layer = layer_of(stage.module, move.layer)
        content = LayerContent.of(index, move.layer, layer, self._engine.optimizer, stage.built[move.layer])
        self._send(Message.LAYER, as_bytes(content))
        self._sent = True
        self._frozen = [(one, one._version) for one in parameters_in_order(layer) if not one.requires_grad]
        self.after_update(stage.weights.latest_version)  # the cut-over may be at the update before

    def _send_gradients(self, index: int, part: int) -> None:
        parameters = parameters_in_order(layer_of(self._stage.module, self._current.layer))
        gradients = tuple(_copy(parameter.grad) for parameter in parameters)
        numbers = torch.tensor([index, *(parameter.requires_grad for parameter in parameters)], device="cpu")
        self._send(Message.LAYER_GRADIENT, (numbers, gradients))

    def _receive(self, kind: Message) -> Received:
        stage, links = self._stage, self._stage.links
        if self._current.down:
            message = self.next_message(stage.action)
        else:
            message = links.next.gradients.receive(stage.action)
        if message.kind is not kind:
            got = f"{message.kind.name}{message.micro_batch}"
            raise PipelineProtocolError(f"{links.me} expected {stage.action}, got {got}")
        return message

    def _receive_layer(self, index: int, part: int) -> None:
        self._install(self._receive(Message.LAYER))

    def _receive_gradients(self, index: int, part: int) -> None:
        """Those of a batch that this stage is about to update with."""
        self._take_gradients(self._receive(Message.LAYER_GRADIENT), index)
        _set_gradients(self._layer.parameters, self._late.pop(index))

    def _receive_late_gradients(self, index: int, part: int) -> None:
        if index not in self._late and self._layer.versions.latest <= index:  # else they came early
            self._take_gradients(self._receive(Message.LAYER_GRADIENT), index)

    def _take_gradients(self, message: Received, expected: int | None = None) -> None:
        numbers, gradients = message.tree
        batch = int(numbers[0])
        if expected not in (None, batch):
            raise PipelineProtocolError(f"{self._stage.links.me} expected gradients of batch {expected}, got {batch}")
        move = self._current
        trained = [bool(flag) for flag in numbers[1:]]
        if trained not in (self._trained, [parameter.requires_grad for parameter in self._layer.parameters]):
            given = f"parameters of layer {move.layer} that were frozen or trained again on stage"
            raise VPipeError(
                f"requires_grad: got {given} {move.source} alone while they moved to stage {move.target}, "
                f"allowed is to do so in an empty pipeline; call engine.quiesce() before, on every rank"
            )
        self._late[batch] = list(map(_copy, gradients))

    def _install(self, message: Received) -> None:
        """Make the layer a part of this stage, with the weights and the optimizer state in ``message``."""
        stage, engine, move, module = self._stage, self._engine, self._current, self._stage.module
        received: LayerContent = from_bytes(message.tree)
        built, self._built = self._built, None
        if received.number != move.layer:
            raise PipelineProtocolError(f"{stage.links.me} expected layer {move.layer}, got layer {received.number}")
        if received.form != layer_form(layer_of(module, move.layer) if built is None else built):
            raise VPipeError(
                f"{move}: got another layer than stage {move.target} has built: {_changed(move)}; change it "
                f"where it is built, or leave vpipe.replan out"
            )
        stage.built[move.layer] = Built.of(built)
        if isinstance(built, nn.Module):
            stage_layers.add_child(module, move.layer, built, stage.device)
            take_settings(built, move.layer, received.settings, received.changed)
        parameters = parameters_in_order(layer_of(module, move.layer))
        received.restore(parameters, engine.optimizer)
        self._trained = received.trained
        stage_layers.tell_parameters(engine, module)
        self._arrived = arrived = stage.weights.add(parameters, received.version)
        size = stage.pipeline.micro_batches
        arrived.apart = move.down and received.version * size < move.micro_batch
        self._keep_due(stage.progress.forwarded)
        if stage.weights.latest_version * size >= move.micro_batch:
            stage_layers.run_with(module, move.layer, True)

    def _remove(self, move: Move) -> None:
        """Give up the layer, if that has not been done: it has been sent and has no micro-batch in flight."""
        stage = self._stage
        if stage_layers.has(stage.module, move.layer):
            for weight, count in self._frozen:
                if weight._version != count:
                    name = self._engine.param_names.get(weight, f"one of shape {list(weight.shape)}")
                    raise VPipeError(
                        f"{move}: got a forward pass or a script that writes into {name} while it moves, allowed are "
                        f"updates, as the next stage does not get what was written; compute a new tensor from it, or "
                        f'move the layer by engine.repartition() or "moves": "drain"'
                    )
            self._frozen = []  # which would keep them in memory
            stage.weights.remove(stage_layers.remove_layer(self._engine, stage.module, move.layer))
            stage_layers.tell_parameters(self._engine, stage.module)

    # Updates of the layer alone

    def _step_layer(self, index: int, part: int) -> None:
        layer, size = self._layer, self._stage.pipeline.micro_batches
        self._apply_late(layer, index + 1)  # unless an evaluation was first
        caught_up = layer.versions.latest == self._stage.weights.latest_version
        if caught_up and (index + 1) * size >= self._current.micro_batch:
            layer.apart = False

    def _apply_late(self, layer: MovedLayer, updates: int) -> None:
        """Apply gradients that are here until the layer has had ``updates`` updates, with the options of each."""
        optimizer = self._engine.optimizer
        while (batch := layer.versions.latest) < updates:
            kept, groups = [parameter.grad for parameter in layer.parameters], optimizer.param_groups
            owned = {id(parameter) for parameter in groups[0]["params"]}
            trained = [parameter for parameter in layer.parameters if id(parameter) in owned]
            with self._stage.weights.update(layer):
                _set_gradients(layer.parameters, self._late.pop(batch))
                optimizer.param_groups = [{**groups[0], **self._options[batch], "params": trained}]
                try:
                    type(optimizer).step(optimizer)
                finally:
                    optimizer.param_groups = groups
                    _set_gradients(layer.parameters, kept)


def _set_gradients(parameters: Sequence[nn.Parameter], gradients: Iterable[torch.Tensor | None]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def _changed(move: Move) -> str:
    return f"layer {move.layer} was changed after it had been built, and another stage cannot build it"


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()
