"""The profiler: seconds and bytes of every layer, measured or computed.

Layers are built one at a time from their specifications and dropped again, or are those that a rank has built already;
no rank needs the whole model. Measured layers run on the device at hand. Computed ones run on the meta device, where
tensors have shapes but no memory, for models and devices that are not there: bytes are those that autograd saves there,
as on a real device, and seconds are a roofline's (:mod:`.meters`). Attention and dropout run there as on the CPU,
which may keep more than fused kernels of an accelerator do.

A layer keeps for its backward pass the distinct storages of all tensors that autograd saves, without parameters and
buffers. They are split into those of the layer's input, of its output, and others.
"""

import copy
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_vpipe.errors import Refusal, one_line
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile
from ds_vpipe.planning.meters import OpMeter, Roofline, storages_of
from ds_vpipe.splitting.guards import own_buffers

Layer = Callable[[Any], Any]
Tree = Any  # tensors, possibly in tuples, lists and dicts; anything else is passed on as it is


def profile_layers(
    layers: Sequence[Any],
    inputs: Tree,
    *,
    device: torch.device | str = "cpu",
    roofline: Roofline | None = None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
    loss_fn: Any = None,
    labels: Tree = None,
    micro_batches: int = 5,
    warm_up: int = 2,
    micro_batch_size: int | None = None,
) -> ModelProfile:
    """Profile of consecutive layers.

    Args:
        layers: modules, functions, or specifications with a ``build()`` method. Modules keep their weights, buffers,
            gradients and modes; measured ones are moved to ``device`` and stay there.
        inputs: an example for the first of ``layers``; an example is made of meta tensors.
        device: to measure on.
        roofline: of the device to compute for; None to measure.
        dtype: of parameters that are floating-point; None leaves them.
        autocast: type that passes are autocast to; to measure only.
        loss_fn: ``loss_fn(outputs, labels)``, if the model's last layer is among ``layers``; a part of that one then.
        labels: for ``loss_fn``.
        micro_batches: passes to take the median of, after ``warm_up`` passes.
        micro_batch_size: samples in ``inputs``; by default the first dimension of its first tensor.

    Raises:
        NotImplementedError, RuntimeError: computed, from a layer that looks at values: the meta device has none.
        VPipeConfigError: computed, a module cannot be copied.
    """
    device = torch.device(device if roofline is None else "meta")
    value, labels = (_as_leaves(tree, functools.partial(_example, device=device)) for tree in (inputs, labels))
    score = None if loss_fn is None else built(loss_fn, meta=roofline is not None)[0]
    size = micro_batch_size or next((int(tensor.shape[0]) for tensor in tensors_of(value) if tensor.dim()), 1)
    input_bytes = tree_bytes(value)
    found, types = [], []
    meta: AbstractContextManager[Any] = nullcontext() if roofline is None else device
    for position, spec in enumerate(layers):
        layer, name = built(spec, meta=roofline is not None)
        for module in modules_of(layer):
            module.to(device=device, dtype=dtype)
        run = layer
        if score is not None and position + 1 == len(layers):
            run = functools.partial(_scored, layer, score, labels)
        if autocast is not None:
            run = functools.partial(_cast, run, device.type, autocast)
        with meta, _training(run):
            seconds = None if roofline is not None else _timed(run, value, device, micro_batches, warm_up)
            costs, value = _counted(run, name, value, roofline)
        types += [p.dtype for p in parameters_of(layer)]
        found.append(costs if seconds is None else replace(costs, forward_s=seconds[0], backward_s=seconds[1]))
    return ModelProfile(
        layers=tuple(found),
        input_bytes=input_bytes,
        micro_batch_size=size,
        device=_name(device) if roofline is None else str(roofline),
        dtype=common_dtype(types),
        source="measured" if roofline is None else "analytic",
    )


# Layers


def modules_of(layer: Layer) -> list[torch.nn.Module]:
    """The modules that hold a layer's parameters: itself, or those that a partial function or bound method uses."""
    if isinstance(layer, torch.nn.Module):
        return [layer]
    if isinstance(layer, functools.partial):
        held = [layer.func, *layer.args, *layer.keywords.values()]
        return [module for item in held if callable(item) for module in modules_of(item)]
    owner = getattr(layer, "__self__", None)
    return [owner] if isinstance(owner, torch.nn.Module) else []


def parameters_of(layer: Layer) -> list[torch.nn.Parameter]:
    """A layer's parameters, each once."""
    return list(dict.fromkeys(p for module in modules_of(layer) for p in module.parameters()))


def buffers_of(layer: Layer) -> list[torch.Tensor]:
    """A layer's buffers, each once. Quantized weights may be among them."""
    return list(dict.fromkeys(b for module in modules_of(layer) for b in module.buffers()))


def built(spec: Any, meta: bool) -> tuple[Layer, str]:
    """The layer that ``spec`` is or builds, and its name. With ``meta`` without values, of which none is copied.

    A specification has a ``build()`` method and maybe a ``forward_fn``, as those of DeepSpeed have.
    """
    if isinstance(spec, torch.nn.Module) or not hasattr(spec, "build"):
        layer, named = spec, spec
    else:
        with torch.device("meta") if meta else nullcontext():
            layer = named = spec.build()
        if getattr(spec, "forward_fn", None) is not None:
            layer = functools.partial(spec.forward_fn, named)
    name = type(named).__name__ if isinstance(named, torch.nn.Module) else getattr(named, "__name__", "function")
    return copy_of(layer, meta=True) if meta else layer, name


def copy_of(layer: Layer, meta: bool) -> Layer:
    """Copy of a layer's modules, with ``meta`` without values. A function stays itself.

    Raises:
        VPipeConfigError: a module cannot be copied.
    """
    known: dict[int, torch.Tensor] = {}
    for module in (module for top in modules_of(layer) for module in top.modules()):
        for tensor in tensors_of(vars(module)):
            if not tensor.is_leaf:  # what the last pass has left, which torch does not copy
                known[id(tensor)] = tensor.detach().clone()
        for parameter in module.parameters(recurse=False) if meta else ():
            empty = torch.empty_like(parameter, device="meta", requires_grad=False)
            known[id(parameter)] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
        for buffer in module.buffers(recurse=False) if meta else ():
            known[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        return copy.deepcopy(layer, known) if modules_of(layer) else layer
    except Exception as error:  # of the class of whatever is held
        name, allowed = type(modules_of(layer)[0]).__name__, "one that copy.deepcopy() copies"
        fix = "give its class a __getstate__() that leaves that out"
        raise Refusal("layer", name, allowed, fix, one_line(error)).error() from error


def _scored(layer: Layer, loss_fn: Any, labels: Tree, inputs: Tree) -> Any:
    return loss_fn(layer(inputs), labels)


def _cast(run: Layer, device_type: str, dtype: torch.dtype, inputs: Tree) -> Any:
    with torch.autocast(device_type, dtype):  # anew for every pass, as in training, which casts weights in each
        return run(inputs)


# Trees of tensors


def tensors_of(tree: Tree) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def tree_bytes(tree: Tree) -> int:
    """Bytes of a tree's tensors as they are sent."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(tree))  # sparse ones have no nbytes


def _as_leaves(tree: Tree, change: Callable[[torch.Tensor], torch.Tensor] = torch.detach) -> Tree:
    """Changed tensors of a tree as leaves. Each requires a gradient if it did."""
    return tree_map_only(torch.Tensor, lambda t: change(t.detach()).requires_grad_(t.requires_grad), tree)


def _example(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Values for a meta tensor: numbers in [0, 1) as probabilities are, true, and 0 for integers, a valid index."""
    if not tensor.is_meta or device.type == "meta":
        return tensor.to(device)
    if tensor.is_floating_point() or tensor.is_complex():
        return torch.rand(tensor.shape, device=device).to(tensor.dtype)
    return torch.full(tensor.shape, tensor.dtype == torch.bool, dtype=tensor.dtype, device=device)


# Passes


def enter(inputs: Tree) -> tuple[Tree, list[torch.Tensor]]:
    """Inputs that a layer may change in place, and their leaves."""
    leaves = _as_leaves(inputs)
    return tree_map_only(torch.Tensor, torch.clone, leaves), tensors_of(leaves)


def run_backward(outputs: Tree) -> None:
    """Backward pass from gradients of one."""
    ends = [tensor for tensor in tensors_of(outputs) if tensor.requires_grad]
    if ends:
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])


@contextmanager
def _training(layer: Layer) -> Iterator[None]:
    """Train a layer for a while. Its modes, buffers and gradients and all random states are restored."""
    modules = [module for top in modules_of(layer) for module in top.modules()]
    modes = [(module, module.training) for module in modules]
    parameters = parameters_of(layer)
    gradients = [p.grad for p in parameters]
    devices = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    with ExitStack() as stack, torch.random.fork_rng(devices=devices), torch.enable_grad():
        for top in modules_of(layer):
            stack.enter_context(own_buffers(top))
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


def _timed(run: Layer, inputs: Tree, device: torch.device, micro_batches: int, warm_up: int) -> tuple[float, float]:
    """Median seconds of a forward and a backward pass."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    forward, backward = [], []
    for _ in range(warm_up + micro_batches):
        entered, _ = enter(inputs)
        begin = now()
        outputs = run(entered)
        middle = now()
        run_backward(outputs)
        forward.append(middle - begin)
        backward.append(now() - middle)
    trains = any(tensor.requires_grad for tensor in tensors_of(outputs))
    return median(forward[warm_up:]), median(backward[warm_up:]) if trains else 0.0


def _counted(layer: Layer, name: str, inputs: Tree, roofline: Roofline | None) -> tuple[LayerProfile, Tree]:
    """Costs of one forward and backward pass, and the next layer's inputs."""
    entered, leaves = enter(inputs)
    weights = parameters_of(layer)
    frozen = [p for p in weights if not p.requires_grad] + buffers_of(layer)
    resident, incoming = storages_of([*weights, *frozen]).keys(), storages_of(tensors_of(entered)).keys()
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.update(storages_of([tensor]))
        return tensor

    gradients = [p.grad for p in weights if p.grad is not None]
    meter = OpMeter(roofline, outside=[*tensors_of(entered), *leaves, *weights, *frozen, *gradients])
    with meter:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = layer(entered)
        outgoing = storages_of(tensors_of(outputs)).keys()
        sizes = {key: storage.nbytes() for key, storage in saved.items() if key not in resident}
        kept = sum(size for key, size in sizes.items() if key not in incoming)
        forward_peak, after, forward_s = meter.peak_bytes, meter.live_bytes, meter.seconds
        following = _as_leaves(outputs, torch.clone)
        boundary = tree_bytes(outputs)
        copies = sum(storage.nbytes() for storage in storages_of(tensors_of(following)).values())
        saved.clear()
        meter.start_over()
        run_backward(outputs)
        workspace = max(forward_peak - kept, meter.peak_bytes - after - copies, 0)
    costs = LayerProfile(
        name=name,
        forward_s=forward_s,
        backward_s=meter.seconds,
        parameter_bytes=tree_bytes([*weights, *buffers_of(layer)]),
        activation_bytes=kept,
        boundary_bytes=boundary,
        input_kept_bytes=sum(size for key, size in sizes.items() if key in incoming),
        output_kept_bytes=sum(size for key, size in sizes.items() if key in outgoing and key not in incoming),
        workspace_bytes=workspace,
        frozen_bytes=tree_bytes(frozen),
        largest_weight_bytes=max((tree_bytes(p) for p in weights if p.requires_grad), default=0),
    )
    return costs, following


def common_dtype(types: Iterable[torch.dtype]) -> str:
    """The type of most floating-point parameters. ``float32`` if there are none."""
    floating = [dtype for dtype in types if dtype.is_floating_point]
    return str(max(floating, key=floating.count, default=torch.float32)).removeprefix("torch.")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
