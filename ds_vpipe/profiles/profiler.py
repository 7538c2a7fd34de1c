"""Measures what each layer of a model costs on the device at hand.

Layers are built one at a time from their specifications and dropped again, or are those that a rank has built
already; no rank needs the whole model. A rank that profiles layers ``a`` to ``b - 1`` needs an input for layer ``a``:
the boundary that the rank before it returned, one from a file, or :func:`boundary_before`, which runs the layers before
on the meta device, where they take no memory. :func:`.layer_profile.merge_profiles` joins the ranks' parts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch

from ds_vpipe.profiles.boundary import Boundary, Tree, map_tensors, tensor_bytes, tensors_in
from ds_vpipe.profiles.layer_profile import ModelProfile
from ds_vpipe.profiles.layer_runs import (
    Layer,
    as_profile,
    build_layer,
    common_dtype,
    count_layer,
    enter,
    leave,
    left_as_it_was,
    modules_of,
    on_meta,
    parameters_of,
    run_backward,
    samples_in,
    with_loss,
)


def profile_layers(
    layers: Sequence[Any],
    inputs: Tree | Boundary,
    *,
    first_layer: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    loss_fn: Any = None,
    labels: Tree = None,
    micro_batches: int = 5,
    warm_up: int = 2,
    micro_batch_size: int | None = None,
) -> tuple[ModelProfile, Boundary]:
    """Profile consecutive layers.

    Args:
        layers: modules, functions, or specifications with a ``build()`` method. Modules keep their weights, buffers,
            gradients and modes; those on another device are moved there and stay there.
        inputs: an example for the first of ``layers``, or a description of one.
        first_layer: its index in the model.
        device: to run on.
        dtype: what floating-point parameters are turned into; None leaves them.
        loss_fn: ``loss_fn(outputs, labels)``, if the model's last layer is among ``layers``; a part of that one then.
        labels: for ``loss_fn``.
        micro_batches: passes to take the median of.
        warm_up: passes before those.
        micro_batch_size: samples in ``inputs``; by default the first dimension of its first tensor.

    Returns:
        The profile, and the boundary behind the last layer, which is the input of the next rank's first one.

    Raises:
        ValueError: ``layers`` or ``micro_batches`` is empty.
    """
    if not layers or micro_batches < 1 or warm_up < 0:
        what = f"{len(layers)} layers, {micro_batches} micro-batches, {warm_up} to warm up"
        raise ValueError(f"profile: got {what}; allowed: at least 1 layer and 1 micro-batch")
    device = torch.device(device)
    value = inputs.example(device) if isinstance(inputs, Boundary) else map_tensors(lambda t: t.to(device), inputs)
    value, labels = leave(value), map_tensors(lambda t: t.to(device), labels)
    size, input_bytes = micro_batch_size or samples_in(value), tensor_bytes(value)
    found, types = [], []
    for position, spec in enumerate(layers):
        layer, name = build_layer(spec)
        for module in modules_of(layer):
            module.to(device=device, dtype=dtype)
        run = layer if loss_fn is None or position + 1 < len(layers) else with_loss(layer, loss_fn, labels)
        with left_as_it_was(run):
            seconds = _timed(run, value, device, micro_batches, warm_up)
            counts, value = count_layer(run, value)
        types += [p.dtype for p in parameters_of(layer)]
        found.append(as_profile(name, run, counts, *seconds))
    dtype_name = common_dtype(types)
    profile = ModelProfile(tuple(found), input_bytes, size, _name(device), dtype_name, "measured", first_layer)
    return profile, Boundary.of(value)


def boundary_before(layers: Sequence[Any], inputs: Tree | Boundary, index: int) -> Boundary:
    """What crosses the boundary before layer ``index``, found on the meta device without memory or computation.

    Args:
        layers: at least the first ``index`` layers of the model: modules, functions, or specifications with a
            ``build()`` method.
        inputs: an example for layer 0, or a description of one.
        index: of the layer.

    Raises:
        NotImplementedError, RuntimeError: from a layer that looks at values, which the meta device has none of; profile
            the ranks one after the other then.
    """
    value = inputs.example("meta") if isinstance(inputs, Boundary) else map_tensors(lambda t: t.to("meta"), inputs)
    for spec in layers[:index]:
        with torch.device("meta"):
            layer, _ = build_layer(spec)
        entered, _ = enter(value)
        with left_as_it_was(bare := on_meta(layer)):
            value = leave(bare(entered))
    return Boundary.of(value)


def _timed(run: Layer, inputs: Tree, device: torch.device, micro_batches: int, warm_up: int) -> tuple[float, float]:
    """Median seconds of a forward and a backward pass."""
    forward, backward = [], []
    for _ in range(warm_up + micro_batches):
        entered, _ = enter(inputs)
        begin = _now(device)
        outputs = run(entered)
        middle = _now(device)
        run_backward(outputs)
        end = _now(device)
        forward.append(middle - begin)
        backward.append(end - middle)
    trains = any(tensor.requires_grad for tensor in tensors_in(outputs))
    return median(forward[warm_up:]), median(backward[warm_up:]) if trains else 0.0


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
