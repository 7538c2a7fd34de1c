"""Recomputation of a stage's last layers in the backward pass, by ratio.

The last ``int(ratio * n)`` of a stage's ``n`` layers form one checkpointed segment, so that its
activations are not kept between forward and backward pass. Checkpointing is non-reentrant, which works
with integer inputs and therefore on the first stage too, and restores the random state. Source: Chen et
al., Training Deep Nets with Sublinear Memory Cost (2016); the ratio per stage is vPipe's (TPDS 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, Protocol, runtime_checkable

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.utils import set_random_seed
from torch.utils.checkpoint import checkpoint


@runtime_checkable
class RunsSeveral(Protocol):
    """A module that runs consecutive layers of ``forward_funcs`` together at less cost than one by one."""

    def run_several(self, start: int, stop: int, value: Any) -> Any:
        """Run layers ``start`` to ``stop - 1``."""


def recomputed_layers(ratio: float, num_layers: int) -> int:
    """How many of a stage's layers, counted from its end, are recomputed."""
    return int(ratio * num_layers)


def apply_recompute(module: PipelineModule, ratio: float) -> None:
    """Make ``module`` recompute the last part of its layers. Ratio 0 leaves it alone."""
    count = recomputed_layers(ratio, len(module.forward_funcs))
    if count:
        module.forward = MethodType(partial(_forward, first_recomputed=len(module.forward_funcs) - count), module)


def _forward(module: PipelineModule, inputs: Any, *, first_recomputed: int) -> Any:
    module.micro_offset += 1
    return run_layers(module, inputs, 0, first_recomputed, len(module.forward_funcs), module.micro_offset + 1)


def run_layers(
    module: PipelineModule, inputs: Any, start: int, first_recomputed: int, stop: int, seed_offset: int
) -> Any:
    """Run layers ``start`` to ``stop - 1`` of ``forward_funcs``; those from ``first_recomputed`` on are recomputed."""
    outputs = _run(module, start, first_recomputed, seed_offset, inputs)
    if first_recomputed == stop:
        return outputs
    if not torch.is_grad_enabled():
        return _run(module, first_recomputed, stop, seed_offset, outputs)
    segment: Callable[[Any], Any] = partial(_run_again, module, first_recomputed, stop, seed_offset)
    return checkpoint(segment, outputs, use_reentrant=False, preserve_rng_state=True)


def _run_again(module: PipelineModule, start: int, stop: int, seed_offset: int, value: Any) -> Any:
    """The checkpointed segment. Its first layer may work in place, but not on the input kept for recomputation."""
    return _run(module, start, stop, seed_offset, _alias_free(value))


def _alias_free(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return type(value)(_alias_free(item) for item in value) if isinstance(value, (tuple, list)) else value


def _run(module: PipelineModule, start: int, stop: int, seed_offset: int, value: Any) -> Any:
    if isinstance(module, RunsSeveral) and start < stop:
        return module.run_several(start, stop, value)
    numbers = layer_numbers(module)
    for position in range(start, stop):
        module.curr_layer = numbers[position]
        if module.seed_layers:
            (module.seed_fn or set_random_seed)(module.base_seed * seed_offset + module.curr_layer)
        value = module.forward_funcs[position](value)
    return value


def layer_numbers(module: PipelineModule) -> Sequence[int]:
    """Numbers in the model of the layers in ``module.forward_funcs``."""
    several: Sequence[int] | None = getattr(module, "numbers", None)
    return range(module._local_start, module._local_start + len(module.forward_funcs)) if several is None else several
