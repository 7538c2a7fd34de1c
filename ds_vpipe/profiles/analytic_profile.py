"""What each layer of a model costs, computed instead of measured, for models and devices that are not there.

Layers run on the meta device, one at a time, where tensors have shapes but no memory. Bytes are what autograd saves
there, as on a real device; seconds are those of a device model, operation by operation, with the arithmetic counted by
the formulas of ``torch.utils.flop_counter``. Attention and dropout run as on the CPU, which may keep more than fused
kernels of an accelerator do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ds_vpipe.profiles.boundary import Boundary, Tree, map_tensors, tensor_bytes
from ds_vpipe.profiles.layer_profile import ModelProfile
from ds_vpipe.profiles.layer_runs import (
    as_profile,
    build_layer,
    common_dtype,
    count_layer,
    leave,
    left_as_it_was,
    modules_of,
    on_meta,
    parameters_of,
    samples_in,
    with_loss,
)
from ds_vpipe.profiles.op_meter import DeviceModel

DEFAULT_DEVICE = DeviceModel()


def analytic_profile(
    layers: Sequence[Any],
    inputs: Tree | Boundary,
    *,
    device: DeviceModel = DEFAULT_DEVICE,
    first_layer: int = 0,
    dtype: torch.dtype | None = None,
    loss_fn: Any = None,
    labels: Tree = None,
    micro_batch_size: int | None = None,
) -> tuple[ModelProfile, Boundary]:
    """Compute the profile of consecutive layers.

    Args:
        layers: modules, functions, or specifications with a ``build()`` method; modules stay as they are.
        inputs: an example for the first of ``layers``, or a description of one.
        device: how fast the device is.
        first_layer: index of the first of ``layers`` in the model.
        dtype: of parameters that are floating-point; None leaves them.
        loss_fn: ``loss_fn(outputs, labels)``, if the model's last layer is among ``layers``; a part of that one then.
        labels: for ``loss_fn``.
        micro_batch_size: samples in ``inputs``; by default the first dimension of its first tensor.

    Returns:
        The profile, and the boundary behind the last layer.

    Raises:
        NotImplementedError, RuntimeError: from a layer that looks at values, which the meta device has none of.
        ValueError: there are no layers.
    """
    if not layers:
        raise ValueError("profile: got 0 layers; allowed: at least 1")
    value = inputs.example("meta") if isinstance(inputs, Boundary) else map_tensors(lambda t: t.to("meta"), inputs)
    value, labels = leave(value), map_tensors(lambda t: t.to("meta"), labels)
    size, input_bytes = micro_batch_size or samples_in(value), tensor_bytes(value)
    found, types = [], []
    for position, spec in enumerate(layers):
        with torch.device("meta"):
            built, name = build_layer(spec)
            layer = on_meta(built)
            for module in modules_of(layer):
                module.to(dtype=dtype)
            run = layer if loss_fn is None or position + 1 < len(layers) else with_loss(layer, loss_fn, labels)
            with left_as_it_was(run):
                counts, value = count_layer(run, value, device)
        types += [p.dtype for p in parameters_of(layer)]
        found.append(as_profile(name, run, counts, counts.forward_s, counts.backward_s))
    dtype_name = common_dtype(types)
    profile = ModelProfile(tuple(found), input_bytes, size, device.name, dtype_name, "analytic", first_layer)
    return profile, Boundary.of(value)
