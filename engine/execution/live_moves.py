"""Moves of layers between stages while training runs, on one stage.

:mod:`ds_vpipe.schedules.moves` says what is sent when, and which version a micro-batch uses; here it is carried out.
The stage that a layer leaves goes on as before until the last micro-batch before the cut-over is done: it updates the
layer for its own forward passes, and sends the gradients as well. The stage that gets the layer has it as a module from
when it arrives, and among ``module.forward_funcs`` after the update at which the cut-over is, so that what runs between
two batches, such as an evaluation, runs it on one stage. A forward pass chooses by its micro-batch.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from deepspeed.pipe import LayerSpec
from deepspeed.utils import logger
from torch import nn
from torch.utils._pytree import tree_map_only

from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.execution.movable_layers import (
    layer_form,
    other_options,
    switches_of,
    unfit_configuration,
    unfit_layers,
)
from ds_vpipe.engine.links.link import Sender
from ds_vpipe.engine.links.message import Message, Received
from ds_vpipe.engine.stage import Stage
from ds_vpipe.engine.weights.moved_layers import MovedLayer
from ds_vpipe.errors import PipelineProtocolError, Refusal, VPipeError
from ds_vpipe.partition import bounds
from ds_vpipe.schedules.actions import Kind
from ds_vpipe.schedules.moves import Move, check_move, layer_version, moved

Gradients = list[torch.Tensor | None]


class _Layers(NamedTuple):
    """What a forward pass runs."""

    functions: list[Any]
    start: int  # number of the first in the model


class LiveMoves:
    """Moves of layers from and to one stage."""

    def __init__(self, engine: PatchedPipelineEngine, stage: Stage) -> None:
        self._engine, self._stage = engine, stage
        self.move: Move | None = None  # that is under way, if any
        self._sent = False  # whether the layer has left this stage
        self._built: Any = None  # the layer that moves, where it is to arrive
        self._trained: list[bool] = []  # which of its parameters were trained when it was sent
        self._arrived: MovedLayer | None = None  # the layer that moves, where it has arrived
        self._gradients: dict[int, Gradients] = {}  # of the layer, held until its earlier ones have been applied
        self._scheduled = 0  # updates of the layer that the schedule has asked for
        self._options: dict[int, dict[str, Any]] = {}  # of the optimizer, by update, while a layer may be late
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

    def give(self, move: Move) -> None:
        """Take on a move; all ranks call this with the same one, between the same two batches.

        Raises:
            VPipeConfigError: it cannot be carried out, on every rank.
        """
        stage, updates = self._stage, self._engine.global_steps
        self.settle(updates)
        given = (move.layer, move.source, move.target, move.micro_batch)
        if not all(stage.consensus.is_same(number, "all ranks to agree on a move") for number in given):
            remedy = "compute it from values that all ranks have"
            raise Refusal("move", str(move), "the same move on all ranks", remedy).error()
        if self.move is not None:
            begins = self.move.settled_batch(stage.pipeline)
            reason = f"{self.move} is under way"
            raise Refusal("move", str(move), f"one move at a time, after {begins} updates", "wait", reason).error()
        check_move(stage.pipeline, stage.pipeline.partition, move, updates)
        unfit, layer = unfit_configuration(self._engine, stage), None
        if unfit is None and stage.number == move.source:
            unfit, layer = unfit_layers(stage.module).get(move.layer), self._layer(move)
            others = {id(parameter) for parameter in self._owned()} - {id(p) for p in _parameters(layer)}
            if not others:
                unfit = f"stage {move.source} trains nothing but layer {move.layer}"
        elif unfit is None and stage.number == move.target:
            layer = self._build(move)
        options = {} if unfit is not None else switches_of(self._engine.optimizer.param_groups[0])
        found = stage.consensus.of_stages((unfit, layer_form(layer), options), "all ranks to agree on a move")
        unfit = next((reason for reason, *_ in found if reason is not None), None)
        if unfit is None:
            unfit = other_options([switches for *_, switches in found])
        if unfit is None and found[move.source][1] != found[move.target][1]:
            unfit = _changed(move)
        if unfit is not None:
            allowed = "layers of a PipelineModule in fp32, with an optimizer state by parameter; see docs/semantics.md"
            raise Refusal("move", str(move), allowed, "leave the layer where it is", unfit).error()
        self.move = move
        self._built = layer if stage.number == move.target else None

    def begin(self, move: Move) -> None:
        """Take on a move that all ranks have found to be possible, without asking them; else as :meth:`give`.

        Raises:
            VPipeConfigError: something has changed since then here, so that it is not.
        """
        stage = self._stage
        check_move(stage.pipeline, stage.pipeline.partition, move, self._engine.global_steps)
        unfit = unfit_configuration(self._engine, stage)
        if unfit is None and stage.number == move.source:
            unfit = unfit_layers(stage.module).get(move.layer)
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
        move, stage = self.move, self._stage
        assert move is not None
        if stage.number not in (move.source, move.target):
            yield
            return
        has_it = (micro_batch < move.micro_batch) == (stage.number == move.source)
        if self._arrived is not None:
            self._arrived.used = has_it
            self._arrived.due = self._due(micro_batch) if has_it else None
        before = _Layers(stage.module.forward_funcs, stage.module._local_start)
        self._run(self._with() if has_it else self._without())
        try:
            yield
        finally:
            self._run(before)
            self._keep_due(micro_batch + 1)

    def _due(self, micro_batch: int) -> int:
        assert self.move is not None
        pipeline, refill = self._stage.pipeline, self._stage.progress.refill
        return layer_version(pipeline, self.move.source, [self.move], micro_batch, refill)

    def _keep_due(self, micro_batch: int) -> None:
        """Keep the versions that forward passes from ``micro_batch`` on use of a layer that is updated apart."""
        arrived = self._arrived
        if arrived is not None and self.move is not None and not self._stage.pipeline.vertical:
            arrived.keep_from = self._due(max(micro_batch, self.move.micro_batch)) if arrived.apart else None

    def _with(self) -> _Layers:
        """The stage's layers with the one that moves, which must be here."""
        module, move = self._stage.module, self.move
        assert move is not None
        functions, start = list(module.forward_funcs), module._local_start
        if not start <= move.layer < start + len(functions):
            layer = self._layer(move)
            functions = [layer, *functions] if move.layer < start else [*functions, layer]
        return _Layers(functions, min(start, move.layer))

    def _without(self) -> _Layers:
        """The stage's layers without the one that moves."""
        module, move = self._stage.module, self.move
        assert move is not None
        functions, start = list(module.forward_funcs), module._local_start
        if start <= move.layer < start + len(functions):
            del functions[move.layer - start]
            start += move.layer == start
        return _Layers(functions, start)

    def _layer(self, move: Move) -> Any:
        spec = self._stage.module._layer_specs[move.layer]
        return getattr(self._stage.module, str(move.layer)) if isinstance(spec, (LayerSpec, nn.Module)) else spec

    def _run(self, layers: _Layers) -> None:
        module = self._stage.module
        vars(module)["forward_funcs"] = layers.functions
        module._set_bounds(layers.start, layers.start + len(layers.functions))

    # Around updates

    def after_reduce(self, batch: int) -> None:
        """Hold back the layer's gradient of a batch if earlier ones have not been applied."""
        move, arrived = self.move, self._arrived
        if arrived is None or move is None or not arrived.apart:
            return
        if batch * self._stage.pipeline.micro_batches >= move.micro_batch:
            self._gradients[batch] = [parameter.grad for parameter in arrived.parameters]
        for parameter in arrived.parameters:
            parameter.grad = None

    def before_update(self, batch: int) -> None:
        """Note the optimizer's options of an update, which the layer's may need later."""
        move, stage = self.move, self._stage
        if move is not None and stage.number == move.target and batch >= move.first_version(stage.pipeline):
            group = self._engine.optimizer.param_groups[0]
            options = {name: value for name, value in group.items() if name != "params"}
            self._options[batch] = tree_map_only(torch.Tensor, torch.clone, options)  # schedulers fill a rate's tensor

    def after_update(self, updates: int) -> None:
        """Hand the layer over where ``updates`` updates are made, if the cut-over is there."""
        move = self.move
        if move is None or updates * self._stage.pipeline.micro_batches < move.micro_batch:
            return
        if self._stage.number == move.source and self._sent:
            self._remove(move)
        elif self._stage.number == move.target and self._arrived is not None:
            self._run(self._with())

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
                self._update_to(micro_batch // stage.pipeline.micro_batches)
                self._run(self._with())
            self._finish()
        if stage.weights.moved:
            stage.weights.restart(stage.weights.latest_version)  # with versions of all layers together

    def _finish(self) -> None:
        move, stage = self.move, self._stage
        assert move is not None
        arrived = self._arrived
        if arrived is not None:
            if arrived.versions.latest != stage.weights.latest_version:
                raise PipelineProtocolError(f"{stage.links.me}: {move} has ended with updates of it to be made")
            arrived.used, arrived.due, arrived.apart = True, None, False
            if not stage.pipeline.vertical:
                arrived.keep_from = None
            self._order_parameters()
        partition = stage.pipeline.partition
        assert partition is not None
        stage.pipeline = replace(stage.pipeline, partition=moved(partition, move))
        stage.module.parts = bounds(moved(partition, move))
        self.move, self._sent, self._arrived = None, False, None
        self._gradients.clear()
        self._options.clear()

    def catch_up(self, updates: int) -> None:
        """Bring the layer up to ``updates`` updates, before what uses the newest weights of all stages.

        What is received on the way waits until it is due.
        """
        move, arrived = self.move, self._arrived
        size = self._stage.pipeline.micro_batches
        if move is None or arrived is None or not arrived.apart or updates * size < move.micro_batch:
            return
        while any(t not in self._gradients for t in range(arrived.versions.latest, move.micro_batch // size)):
            message = self._stage.links.previous.activations.receive(f"gradients of {move}")
            if message.kind is Message.LAYER_GRADIENT:
                self._take_gradients(message)
            else:
                self.waiting.append(message)
        self._keep_due(self._stage.progress.forwarded)
        self._update_to(updates)

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

    def _sender(self) -> Sender:
        assert self.move is not None
        links = self._stage.links
        return links.next.activations if self.move.down else links.previous.gradients

    def _number(self) -> int:
        """Message number: that of the message before it, as receipts are counted by micro-batches."""
        assert self.move is not None
        progress = self._stage.progress
        return (progress.forwarded if self.move.down else progress.completed) - 1

    def _owned(self) -> list[nn.Parameter]:
        """Parameters of the optimizer, frozen ones among them."""
        owned: list[nn.Parameter] = self._engine.optimizer.param_groups[0]["params"]
        return owned

    def _send_layer(self, index: int, part: int) -> None:
        stage, optimizer, move = self._stage, self._engine.optimizer, self.move
        assert move is not None
        stage.weights.load_new_params()
        layer, owned = self._layer(move), {id(parameter) for parameter in self._owned()}
        parameters = list(_parameters(layer))
        states = [optimizer.state.get(parameter, {}) for parameter in parameters]
        described = [
            {
                "trained": parameter.requires_grad,
                "owned": id(parameter) in owned,
                "state": {name: _plain(value) for name, value in state.items()},
            }
            for parameter, state in zip(parameters, states, strict=True)
        ]
        sent = json.dumps([index, move.layer, layer_form(layer), described]).encode()
        text = torch.frombuffer(bytearray(sent), dtype=torch.uint8)
        values = tuple(parameter.detach().clone() for parameter in parameters)
        tensors = tuple(
            tuple(value.clone() for value in state.values() if isinstance(value, torch.Tensor)) for state in states
        )
        self._sender().send(Message.LAYER, self._number(), (text, values, tensors))
        self._sent = True
        self.after_update(stage.weights.latest_version)  # the cut-over may be at the update before

    def _send_gradients(self, index: int, part: int) -> None:
        assert self.move is not None
        parameters = _parameters(self._layer(self.move))
        gradients = tuple(_copy(parameter.grad) for parameter in parameters)
        numbers = torch.tensor([index, *(parameter.requires_grad for parameter in parameters)])
        self._sender().send(Message.LAYER_GRADIENT, self._number(), (numbers, gradients))

    def _receive(self, kind: Message) -> Received:
        assert self.move is not None
        stage, links = self._stage, self._stage.links
        if self.move.down:
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
        assert self._arrived is not None
        for parameter, gradient in zip(self._arrived.parameters, self._gradients.pop(index), strict=True):
            parameter.grad = gradient

    def _receive_late_gradients(self, index: int, part: int) -> None:
        assert self._arrived is not None
        if index not in self._gradients and self._arrived.versions.latest <= index:  # else they came early
            self._take_gradients(self._receive(Message.LAYER_GRADIENT), index)

    def _take_gradients(self, message: Received, expected: int | None = None) -> None:
        numbers, gradients = message.tree
        batch = int(numbers[0])
        if expected not in (None, batch):
            raise PipelineProtocolError(f"{self._stage.links.me} expected gradients of batch {expected}, got {batch}")
        assert self._arrived is not None
        assert self.move is not None
        trained = [bool(flag) for flag in numbers[1:]]
        if trained not in (self._trained, [parameter.requires_grad for parameter in self._arrived.parameters]):
            given = f"parameters of layer {self.move.layer} that were frozen or trained again on stage"
            raise VPipeError(
                f"requires_grad: got {given} {self.move.source} alone while they moved to stage {self.move.target}, "
                f"allowed is to do so in an empty pipeline; call engine.quiesce() before, on every rank"
            )
        self._gradients[batch] = [_copy(gradient) for gradient in gradients]

    def _install(self, message: Received) -> None:
        """Make the layer a part of this stage, with the weights and the optimizer state in ``message``."""
        stage, engine, move = self._stage, self._engine, self.move
        assert move is not None
        text, values, tensors = message.tree
        version, layer, form, described = json.loads(bytes(text.tolist()))
        if layer != move.layer:
            raise PipelineProtocolError(f"{stage.links.me} expected layer {move.layer}, got layer {layer}")
        module, built, self._built = stage.module, self._built, None
        if form != json.loads(json.dumps(layer_form(self._layer(move) if built is None else built))):
            raise VPipeError(
                f"{move}: got another layer than stage {move.target} has built: {_changed(move)}; change it "
                f"where it is built, or leave vpipe.replan out"
            )
        if isinstance(built, nn.Module):
            built.to(stage.device).train(module.training)
            modules = {name: module._modules.pop(name) for name in module.fwd_map}
            modules[str(layer)] = built
            for name in sorted(modules, key=int):
                module.add_module(name, modules[name])
        parameters = list(_parameters(self._layer(move)))
        for parameter, value, state, found in zip(parameters, values, described, tensors, strict=True):
            parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]  # DeepSpeed's
            parameter.requires_grad_(state["trained"])
            with torch.no_grad():
                parameter.copy_(value)
            contents = iter(found)
            restored = {
                name: _copy(next(contents)) if plain == _TENSOR else plain for name, plain in state["state"].items()
            }
            if restored:
                engine.optimizer.state[parameter] = restored
        owned = zip(parameters, described, strict=True)
        engine.optimizer.param_groups[0]["params"] += [parameter for parameter, found in owned if found["owned"]]
        self._trained = [found["trained"] for found in described]
        self._know_parameters()
        self._arrived = arrived = stage.weights.add(parameters, version)
        size = stage.pipeline.micro_batches
        self._scheduled = version
        arrived.apart = move.down and version * size < move.micro_batch
        self._keep_due(stage.progress.forwarded)
        if stage.weights.latest_version * size >= move.micro_batch:
            self._run(self._with())

    def _remove(self, move: Move) -> None:
        """Give up the layer, if that has not been done: it has been sent and has no micro-batch in flight."""
        stage, engine = self._stage, self._engine
        module = stage.module
        if not module._local_start <= move.layer < module._local_start + len(module.forward_funcs):
            return
        parameters = list(_parameters(self._layer(move)))
        self._run(self._without())
        module._modules.pop(str(move.layer), None)
        gone = {id(parameter) for parameter in parameters}
        group = engine.optimizer.param_groups[0]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in gone]
        for parameter in parameters:
            engine.optimizer.state.pop(parameter, None)
            parameter.grad = None
        stage.weights.remove(parameters)
        self._know_parameters()

    def _know_parameters(self) -> None:
        """Let DeepSpeed's engine know which parameters there are."""
        engine, module = self._engine, self._stage.module
        module.fwd_map = {name: position for position, name in enumerate(self._numbers()) if name in module._modules}
        engine.layers_changed()
        engine.param_names = {parameter: name for name, parameter in module.named_parameters()}
        engine.name_parameters()

    def _numbers(self) -> list[str]:
        module = self._stage.module
        there = [int(name) for name in module._modules if name.isdigit()]
        first = min([module._local_start, *there])
        last = max([module._local_start + len(module.forward_funcs) - 1, *there])
        return [str(number) for number in range(first, last + 1)]

    def _order_parameters(self) -> None:
        """Give the optimizer's parameters the order of the module's, as in a run that begins with this partition."""
        group = self._engine.optimizer.param_groups[0]
        trained = {id(parameter) for parameter in group["params"]}
        group["params"] = [p for p in self._stage.module.parameters() if id(p) in trained]
        self._engine.name_parameters()

    # Updates of the layer alone

    def _step_layer(self, index: int, part: int) -> None:
        assert self.move is not None
        assert self._arrived is not None
        self._scheduled = index + 1
        if self._arrived.versions.latest == index:
            self._apply(index)
        size = self._stage.pipeline.micro_batches
        caught_up = self._arrived.versions.latest == self._stage.weights.latest_version
        if caught_up and self._scheduled * size >= self.move.micro_batch:
            self._arrived.apart = False

    def _update_to(self, updates: int) -> None:
        """Apply held gradients until the layer has had ``updates`` updates."""
        arrived = self._arrived
        assert arrived is not None
        while arrived.versions.latest < updates:
            self._apply(arrived.versions.latest)

    def _apply(self, batch: int) -> None:
        """Update ``batch`` of the layer, with the optimizer's options of that update."""
        arrived, optimizer = self._arrived, self._engine.optimizer
        assert arrived is not None
        kept, groups = [parameter.grad for parameter in arrived.parameters], optimizer.param_groups
        owned = {id(parameter) for parameter in self._owned()}
        trained = [parameter for parameter in arrived.parameters if id(parameter) in owned]
        with self._stage.weights.update_apart(arrived):
            for parameter, gradient in zip(arrived.parameters, self._gradients.pop(batch), strict=True):
                parameter.grad = gradient
            optimizer.param_groups = [{**groups[0], **self._options[batch], "params": trained}]
            try:
                type(optimizer).step(optimizer)
            finally:
                optimizer.param_groups = groups
                for parameter, gradient in zip(arrived.parameters, kept, strict=True):
                    parameter.grad = gradient


_TENSOR = "tensor"


def _changed(move: Move) -> str:
    return f"layer {move.layer} was changed after it had been built, and another stage cannot build it"


def _plain(value: Any) -> Any:
    """A value of an optimizer's state for JSON: a number, or that it is a tensor, which travels beside it."""
    return _TENSOR if isinstance(value, torch.Tensor) else value


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def _parameters(layer: Any) -> Sequence[nn.Parameter]:
    return list(layer.parameters()) if isinstance(layer, nn.Module) else []
