"""Layers that a stage has and runs, changed while it trains.

What a pass runs are ``module.forward_funcs``, numbered from ``module._local_start`` on. A layer that is about to leave
or has just come is a child of the module and not always among these. It travels as :class:`LayerContent`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.execution.movable_layers import layer_form
from ds_vpipe.engine.modules.built_layers import Built, Settings


def run(module: PipelineModule, functions: list[Any], start: int) -> None:
    """Let the module run these layers, the first of which has the number ``start``."""
    vars(module)["forward_funcs"] = functions
    module._set_bounds(start, start + len(functions))


def has(module: PipelineModule, number: int) -> bool:
    """Whether the module runs a layer."""
    return bool(module._local_start <= number < module._local_start + len(module.forward_funcs))


def run_with(module: PipelineModule, number: int, among: bool) -> None:
    """Let the module run its layers with one at their edge among them, which must be here then, or without."""
    functions, start = list(module.forward_funcs), module._local_start
    if among and not has(module, number):
        functions.insert(0 if number < start else len(functions), layer_of(module, number))
        start = min(start, number)
    elif not among and has(module, number):
        del functions[number - start]
        start += number == start
    run(module, functions, start)


def layer_of(module: PipelineModule, number: int) -> Any:
    """A layer that is here, whether it runs or not."""
    spec = module._layer_specs[number]
    return getattr(module, str(number)) if isinstance(spec, (LayerSpec, nn.Module)) else spec


def parameters_in_order(layer: Any) -> Sequence[nn.Parameter]:
    """Parameters of a layer, which may be a function."""
    return list(layer.parameters()) if isinstance(layer, nn.Module) else []


def add_child(module: PipelineModule, number: int, layer: nn.Module, device: torch.device) -> None:
    """Make a layer a child of the module, at its place among the others."""
    layer.to(device).train(module.training)
    children = {name: module._modules.pop(name) for name in module.fwd_map}
    children[str(number)] = layer
    for name in sorted(children, key=int):
        module.add_module(name, children[name])


def remove_layer(engine: PatchedPipelineEngine, module: PipelineModule, number: int) -> Sequence[nn.Parameter]:
    """Take a layer out of the module and its parameters, which are returned, out of the optimizer."""
    parameters = parameters_in_order(layer_of(module, number))
    run_with(module, number, False)
    module._modules.pop(str(number), None)
    gone = {id(parameter) for parameter in parameters}
    group = engine.optimizer.param_groups[0]
    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in gone]
    for parameter in parameters:
        engine.optimizer.state.pop(parameter, None)
        parameter.grad = None
    return parameters


def tell_parameters(engine: PatchedPipelineEngine, module: PipelineModule) -> None:
    """Tell DeepSpeed's engine which parameters there are."""
    there = [int(name) for name in module._modules if name.isdigit()]
    first = min([module._local_start, *there])
    last = max([module._local_start + len(module.forward_funcs) - 1, *there])
    numbers = enumerate(map(str, range(first, last + 1)))
    module.fwd_map = {name: position for position, name in numbers if name in module._modules}
    engine.layers_changed()
    engine.param_names = {parameter: name for name, parameter in module.named_parameters()}
    engine.name_parameters()


def order_parameters(engine: PatchedPipelineEngine, module: PipelineModule) -> None:
    """Give the optimizer's parameters the order of the module's, as in a run that begins with this partition."""
    group = engine.optimizer.param_groups[0]
    trained = {id(parameter) for parameter in group["params"]}
    group["params"] = [p for p in module.parameters() if id(p) in trained]
    engine.name_parameters()


class LayerContent(NamedTuple):
    """Weights and optimizer states of a layer that moves; lists have an entry for every parameter."""

    version: int  # updates that it has had
    number: int
    form: Any
    trained: list[bool]
    owned: list[bool]  # by the optimizer
    values: list[torch.Tensor]
    states: list[dict[str, Any]]
    settings: Settings
    changed: list[tuple[str, str]]  # settings that are others than when it was built

    @classmethod
    def of(cls, version: int, number: int, layer: Any, optimizer: Any, built: Built) -> LayerContent:
        """What a layer has after ``version`` updates."""
        parameters = parameters_in_order(layer)
        ids = {id(parameter) for parameter in optimizer.param_groups[0]["params"]}
        return cls(
            version,
            number,
            layer_form(layer),
            [parameter.requires_grad for parameter in parameters],
            [id(parameter) in ids for parameter in parameters],
            [parameter.detach() for parameter in parameters],
            [dict(optimizer.state.get(parameter, {})) for parameter in parameters],
            Built.of(layer).settings,
            built.changed(layer),
        )

    def restore(self, parameters: Sequence[nn.Parameter], optimizer: Any) -> None:
        """Give parameters their values and states, and the optimizer what it is to own."""
        for parameter, value, trained, state in zip(parameters, self.values, self.trained, self.states, strict=True):
            parameter.ds_pipe_replicated = False  # type: ignore[attr-defined]  # DeepSpeed's
            parameter.requires_grad_(trained)
            with torch.no_grad():
                parameter.copy_(value)
            if state:
                optimizer.state[parameter] = state
        owned = zip(parameters, self.owned, strict=True)
        optimizer.param_groups[0]["params"] += [parameter for parameter, found in owned if found]
