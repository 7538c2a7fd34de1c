"""One layer, run as a stage of a pipeline runs it, with what it keeps and needs counted.

What a layer keeps for its backward pass is what autograd saves: the distinct storages of all saved tensors, without
parameters. They are split into those of the layer's input, of its output, and others.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ds_vpipe.profiles.boundary import Tree, map_tensors, tensor_bytes, tensors_in
from ds_vpipe.profiles.layer_profile import LayerProfile
from ds_vpipe.profiles.op_meter import UNTIMED, DeviceModel, OpMeter, storage_key

Layer = Callable[[Any], Any]


@dataclass(frozen=True)
class Counts:
    """What :func:`count_layer` finds out about a layer, in bytes and seconds; see :class:`LayerProfile`.

    Attributes:
        kept: saved for the backward pass, without input and parameters.
        input_kept: saved of the input.
        output_kept: saved of the output.
        workspace: most that exists beyond what is kept.
        boundary: the output.
        forward_s: on the device model.
        backward_s: on the device model.
    """

    kept: int
    input_kept: int
    output_kept: int
    workspace: int
    boundary: int
    forward_s: float
    backward_s: float


def build_layer(spec: Any) -> tuple[Layer, str]:
    """The layer that ``spec`` is or builds, and its name.

    Args:
        spec: a module or function, or something with a ``build()`` method and maybe a ``forward_fn``, as the layer
            specifications of DeepSpeed are.
    """
    if isinstance(spec, torch.nn.Module) or not hasattr(spec, "build"):
        name = type(spec).__name__ if isinstance(spec, torch.nn.Module) else getattr(spec, "__name__", "function")
        return spec, name
    module = spec.build()
    forward = getattr(spec, "forward_fn", None)
    return (module if forward is None else functools.partial(forward, module)), type(module).__name__


def modules_of(layer: Layer) -> list[torch.nn.Module]:
    """The modules that hold a layer's parameters: itself, or what a partial function or bound method belongs to."""
    if isinstance(layer, torch.nn.Module):
        return [layer]
    if isinstance(layer, functools.partial):
        held = [layer.func, *layer.args, *layer.keywords.values()]
        return [module for item in held if callable(item) for module in modules_of(item)]
    owner = getattr(layer, "__self__", None)
    return [owner] if isinstance(owner, torch.nn.Module) else []


def parameters_of(layer: Layer) -> list[torch.nn.Parameter]:
    """A layer's parameters, each once."""
    found = {id(p): p for module in modules_of(layer) for p in module.parameters()}
    return list(found.values())


def on_meta(layer: Layer) -> Layer:
    """The layer with parameters and buffers without values; nothing that has values is copied."""
    bare: dict[int, torch.Tensor] = {}
    for module in modules_of(layer):
        for parameter in module.parameters():
            empty = torch.empty_like(parameter, device="meta", requires_grad=False)
            bare[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in module.buffers():
            bare[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(layer, bare) if bare else layer


def with_loss(layer: Layer, loss_fn: Any, labels: Tree) -> Layer:
    """A layer with the loss function behind it."""
    return functools.partial(_scored, layer, loss_fn, labels)


def _scored(layer: Layer, loss_fn: Any, labels: Tree, inputs: Tree) -> Tree:
    return loss_fn(layer(inputs), labels)


def enter(inputs: Tree) -> tuple[Tree, list[torch.Tensor]]:
    """What a stage's first layer gets, which it may change in place, and the leaves that collect the gradients."""
    leaves: list[torch.Tensor] = []

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        leaf = tensor.detach().requires_grad_(tensor.requires_grad)
        leaves.append(leaf)
        return leaf.clone()

    return map_tensors(copy, inputs), leaves


def leave(outputs: Tree) -> Tree:
    """Outputs as the next layer's inputs, without what led to them."""
    return map_tensors(lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), outputs)


def run_backward(outputs: Tree) -> None:
    """Backward pass from gradients of one."""
    ends = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])


@contextmanager
def left_as_it_was(layer: Layer) -> Iterator[None]:
    """Train a layer for a while; its modes, buffers and gradients and all random states are restored."""
    modules = [module for top in modules_of(layer) for module in top.modules()]
    modes = [(module, module.training) for module in modules]
    parameters = parameters_of(layer)
    gradients = [p.grad for p in parameters]
    buffers = [(b, b.detach().clone()) for module in modules for b in module.buffers(recurse=False)]
    devices = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices), torch.enable_grad():
        for module in modules:
            module.training = True
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        try:
            yield
        finally:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient
            for module, mode in modes:
                module.training = mode
            for buffer, value in buffers:
                with torch.no_grad():
                    buffer.copy_(value)


def count_layer(layer: Layer, inputs: Tree, device: DeviceModel = UNTIMED) -> tuple[Counts, Tree]:
    """Run a layer forward and backward once, inside :func:`left_as_it_was`, and count.

    Returns:
        What it found, and the outputs as the next layer's inputs.
    """
    entered, leaves = enter(inputs)
    parameters = {storage_key(parameter) for parameter in parameters_of(layer)}
    incoming = {storage_key(tensor) for tensor in tensors_in(entered)}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if storage_key(tensor) not in parameters:
            saved[storage_key(tensor)] = tensor.detach()
        return tensor

    gradients = [p.grad for p in parameters_of(layer) if p.grad is not None]
    meter = OpMeter(device, outside=[*tensors_in(entered), *leaves, *parameters_of(layer), *gradients])
    with meter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = layer(entered)
        outgoing = {storage_key(tensor) for tensor in tensors_in(outputs)}
        sizes = {key: tensor.untyped_storage().nbytes() for key, tensor in saved.items()}
        kept = sum(size for key, size in sizes.items() if key not in incoming)
        forward_peak, after, forward_s = meter.peak_bytes, meter.live_bytes, meter.seconds
        following = map_tensors(lambda tensor: tensor.detach().clone().requires_grad_(tensor.requires_grad), outputs)
        boundary = tensor_bytes(outputs)
        copies = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(following))
        saved.clear()
        meter.start_over()
        run_backward(outputs)
        workspace = max(forward_peak - kept, meter.peak_bytes - after - copies, 0)
        backward_s = meter.seconds
    return (
        Counts(
            kept=kept,
            input_kept=sum(size for key, size in sizes.items() if key in incoming),
            output_kept=sum(size for key, size in sizes.items() if key in outgoing and key not in incoming),
            workspace=workspace,
            boundary=boundary,
            forward_s=forward_s,
            backward_s=backward_s,
        ),
        following,
    )


def as_profile(name: str, layer: Layer, counts: Counts, forward_s: float, backward_s: float) -> LayerProfile:
    """What was found out about a layer."""
    parameters = parameters_of(layer)
    return LayerProfile(
        name=name,
        forward_s=forward_s,
        backward_s=backward_s,
        parameter_bytes=_bytes(parameters),
        activation_bytes=counts.kept,
        boundary_bytes=counts.boundary,
        input_kept_bytes=counts.input_kept,
        output_kept_bytes=counts.output_kept,
        workspace_bytes=counts.workspace,
        frozen_bytes=_bytes(p for p in parameters if not p.requires_grad),
        largest_weight_bytes=max((_bytes([p]) for p in parameters if p.requires_grad), default=0),
    )


def samples_in(value: Tree) -> int:
    """First dimension of the first tensor that has any."""
    return next((int(tensor.shape[0]) for tensor in tensors_in(value) if tensor.dim()), 1)


def common_dtype(types: Iterable[torch.dtype]) -> str:
    """The name of the type that most floating-point parameters have; ``float32`` if there are none."""
    floating = [dtype for dtype in types if dtype.is_floating_point]
    return str(max(floating, key=floating.count, default=torch.float32)).removeprefix("torch.")


def _bytes(parameters: Iterable[torch.nn.Parameter]) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)
