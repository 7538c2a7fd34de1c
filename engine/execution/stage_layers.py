"""Layers that a stage has and runs, changed while it trains.

What a pass runs are ``module.forward_funcs``, numbered from ``module._local_start`` on. A layer that is about to leave
or has just come is a child of the module and not always among these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import nn

from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine


class Layers(NamedTuple):
    """What a forward pass runs."""

    functions: list[Any]
    start: int  # number of the first in the model


def layers_of(module: PipelineModule) -> Layers:
    """The layers that the module runs now."""
    return Layers(module.forward_funcs, module._local_start)


def run(module: PipelineModule, layers: Layers) -> None:
    """Let the module run these layers."""
    vars(module)["forward_funcs"] = layers.functions
    module._set_bounds(layers.start, layers.start + len(layers.functions))


def has(module: PipelineModule, number: int) -> bool:
    """Whether the module runs a layer."""
    return bool(module._local_start <= number < module._local_start + len(module.forward_funcs))


def with_layer(module: PipelineModule, number: int) -> Layers:
    """The module's layers with one at their edge, which must be here."""
    functions, start = list(module.forward_funcs), module._local_start
    if not has(module, number):
        layer = layer_of(module, number)
        functions = [layer, *functions] if number < start else [*functions, layer]
    return Layers(functions, min(start, number))


def without_layer(module: PipelineModule, number: int) -> Layers:
    """The module's layers without one at their edge."""
    functions, start = list(module.forward_funcs), module._local_start
    if has(module, number):
        del functions[number - start]
        start += number == start
    return Layers(functions, start)


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
    run(module, without_layer(module, number))
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
