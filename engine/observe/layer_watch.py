"""Watchers of a stage's layers in a replay: values that are not finite, and norms.

A layer's output is seen where it ends. An identity behind it sees the gradient as the next layer has made it, hooks on
that layer's input included and those on this one's output not: so it is known which of both has changed it. In the
pieces of a plain module the gradient is seen on the way, before the hooks of the next piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.modules.piece_module import TIMED, Timed
from ds_vpipe.engine.modules.recompute import layer_name, layer_numbers
from ds_vpipe.engine.stage import Stage
from ds_vpipe.faults import Fault
from ds_vpipe.schedules.actions import Action, Kind

_PASSES = (Kind.FORWARD, Kind.BACKWARD)

Show = Callable[[bool, int, Any], None]
"""Gets whether it is a gradient, the position of a layer in its stage, and its output or the gradient of that."""


class _Shown(torch.autograd.Function):
    """Identity that shows the gradient."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, show: Callable[[Any], None]) -> torch.Tensor:
        ctx.show = show
        return value.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.show(gradients[0])
        return gradients[0], None


def _floating(tree: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point())


def _watched(show: Show) -> Timed:
    """Functions that run layers and show their outputs, and later the gradients of these."""

    def layer(position: int, run: Callable[[Any], Any], value: Any) -> Any:
        output = run(value)
        show(False, position, output)
        later = partial(show, True, position)
        return tree_map_only(torch.Tensor, lambda t: _Shown.apply(t, later) if t.requires_grad else t, output)

    def pieces(position: int, run: Callable[..., Any], value: Any) -> Any:
        def watch(count: int, value: Any) -> None:
            if count:
                show(False, position + count - 1, value)
                for tensor in _floating(value):
                    if tensor.requires_grad and not tensor.is_leaf:
                        tensor.register_hook(partial(show, True, position + count - 1))

        return run(value, watch=watch)

    return Timed(layer, pieces)


class LayerWatch:
    """Watcher that shows what the layers of a stage compute in the micro-batches that ``wants`` names."""

    def __init__(self, stage: Stage, wants: Callable[[int], bool], show: Callable[[Action, bool, int, Any], None]):
        self._stage, self._wants, self._show = stage, wants, show

    def before(self, action: Action) -> None:
        """Let the layers be watched in a forward pass; in a backward pass the graph has it."""
        if action.kind is Kind.FORWARD and self._wants(action.index):
            vars(self._stage.module)[TIMED] = _watched(partial(self._show, action))

    def after(self, action: Action) -> None:
        """Leave the module as it was."""
        if action.kind is Kind.FORWARD:
            vars(self._stage.module).pop(TIMED, None)


class FaultWatch:
    """Watcher that keeps the first value of a stage that is not finite.

    Masks may hold infinities, and so may gradients in fp16, whose loss scale is then lowered: of what needs no gradient
    NaNs count alone, and gradients in fp16 not at all.
    """

    def __init__(self, engine: PatchedPipelineEngine, stage: Stage, found: Callable[[], None]) -> None:
        self._engine, self._stage, self._found = engine, stage, found
        self._layers = LayerWatch(stage, lambda index: self.fault is None, self._see)
        self._gradients = stage.loss_scaling is None
        self._begun = False
        self._version = 0  # that the micro-batch of the action has used; a backward pass gives it up
        self.fault: Fault | None = None

    def before(self, action: Action) -> None:
        """Look at the weights, which have been finite after the last update."""
        weights = self._stage.weights
        if action.kind in (Kind.BACKWARD, Kind.RECV_GRAD):
            self._version = weights.version_of(self._stage.key(action))
        else:
            self._version = weights.latest_version
        if action.kind in _PASSES:
            self._see_weights(action, "weights")
            self._begun = True
        self._layers.before(action)

    def after(self, action: Action) -> None:
        """Look at what has come, and at the results of a pass or an update."""
        self._layers.after(action)
        kind, stage = action.kind, self._stage
        if kind is Kind.STEP:
            self._see_weights(action, "update")
        record = None if kind is Kind.STEP else stage.in_flight.get(stage.key(action))
        if kind is Kind.BACKWARD and self._gradients:
            if record is not None:  # not on the first stage
                self._see(action, True, -1, record.input_gradients())
            for name, parameter in reversed(list(stage.module.named_parameters())):
                self._look(action, "backward", _layer_of(name), f"the gradient of {name}", parameter.grad)
        if record is None:
            return
        if kind is Kind.LOAD:
            self._look(action, "data", None, "an input", record.inputs if stage.is_first else None, masks=True)
            self._look(action, "data", None, "a label", record.labels, masks=True)
        elif kind is Kind.RECV_ACT:
            self._look(action, "received", None, "an activation of the previous stage", record.inputs, masks=True)
        elif kind is Kind.RECV_GRAD and self._gradients:
            self._look(action, "received", None, "a gradient of the next stage", record.gradients)
        elif kind is Kind.FORWARD:
            # Where a module runs its layers by a forward of its own, no layer has been seen.
            self._look(action, "forward", None, "the output of the stage", record.output, masks=True)
            self._look(action, "forward", None, "the loss", record.loss)

    def _see(self, action: Action, gradient: bool, position: int, value: Any) -> None:
        """An output of a layer, or its gradient, which the layer behind it has made."""
        numbers = layer_numbers(self._stage.module)
        if not gradient:
            what = f"the output of {layer_name(self._stage.module.forward_funcs[position])}"
            self._look(action, "forward", numbers[position], what, value, masks=True)
        elif self._gradients and position + 1 < len(numbers):
            what = f"the gradient of the input of {layer_name(self._stage.module.forward_funcs[position + 1])}"
            self._look(action, "backward", numbers[position + 1], what, value)
        elif self._gradients and self._stage.is_last:
            self._look(action, "backward", None, "the gradient of the loss function", value)

    def _see_weights(self, action: Action, where: str) -> None:
        for name, parameter in self._stage.module.named_parameters():
            self._look(action, where, _layer_of(name), name, parameter)

    def _look(self, action: Action, where: str, layer: int | None, what: str, tree: Any, masks: bool = False) -> None:
        """Keep what is not finite in a tree, of which a part may be ``masks``."""
        if self.fault is not None:
            return
        looked_at = [(t.detach(), masks and not t.requires_grad) for t in _floating(tree)]
        wrong = [t for t, mask in looked_at if (t.isnan().any() if mask else not t.isfinite().all())]
        if wrong:
            engine, stage, size = self._engine, self._stage, self._stage.pipeline.micro_batches
            index = (action.index + 1) * size - 1 if action.kind is Kind.STEP else action.index
            value = "NaN" if any(t.isnan().any() for t in wrong) else "infinite"
            self.fault = Fault(
                # Both counts are of one update: in a loop the script's, which is ahead of this stage's. They differ
                # where M has been another one.
                micro_batch=index + engine.consumed_micro_batches - engine.global_steps * size,
                index=index,
                where=where,
                stage=stage.number,
                replica=engine.grid.data_parallel_id,
                layer=layer,
                what=f"{what} is {value}",
                version=self._version,
                micro_batches=size,
                begins=where == "weights" and not self._begun,
            )
            self._found()


class NormWatch(LayerWatch):
    """Watcher that adds up squares of every layer's activations and gradients in ``batch`` and in the one before.

    Masks may hold infinities: what needs no gradient does not count beside what does.
    """

    def __init__(self, stage: Stage, batch: int) -> None:
        self._first = batch - 1
        both = batch - 1, batch
        super().__init__(stage, lambda index: index // stage.pipeline.micro_batches in both, self._see)
        self._found: dict[int, dict[str, Any]] = {}

    def _see(self, action: Action, gradient: bool, position: int, value: Any) -> None:
        stage = self._stage
        number = layer_numbers(stage.module)[position]
        new = {"layer": number, "name": layer_name(stage.module.forward_funcs[position]), "stage": stage.number}
        row = self._found.setdefault(number, {**new, "activation": [0.0, 0.0], "gradient": [0.0, 0.0]})
        batch = action.index // stage.pipeline.micro_batches - self._first
        tensors = [*_floating(value)]
        tensors = [tensor for tensor in tensors if tensor.requires_grad] or tensors
        squares = sum(float(tensor.detach().double().square().sum()) for tensor in tensors)
        row["gradient" if gradient else "activation"][batch] += squares

    def rows(self) -> list[dict[str, Any]]:
        """Sums of squares of every layer that this stage has run."""
        return list(self._found.values())


def _layer_of(name: str) -> int | None:
    """The layer that a parameter's name begins with; a tied one's is that of the tie."""
    first = name.partition(".")[0]
    return int(first) if first.isdecimal() else None
