"""Which function checkpoints activations where the DeepSpeed JSON or the module asks for that by interval.

DeepSpeed's default is reentrant: it computes a block without a graph and runs a backward pass of its own
later. If no input of the block requires a gradient, as integers and data never do, its output has no
graph either, and the block's parameters silently get no gradient. DeepSpeed marks the first stage's
floating-point inputs to get around that; integers cannot be marked.

For the second run DeepSpeed puts back torch's random states and its own tracker's, and no others.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing

from ds_vpipe.engine.links.message import Tree
from ds_vpipe.engine.modules.random_states import RandomStates


def use_sound_checkpointing(module: PipelineModule, asynchronous: bool, random_states: RandomStates) -> None:
    """Replace DeepSpeed's reentrant function in ``module``, and let whichever it has repeat all random draws.

    A synchronous pipeline keeps it for blocks where it works, as DeepSpeed's engine does; an asynchronous
    one, whose backward passes are not in the reverse order of its forward passes, does without.
    """
    if module.activation_checkpoint_func is ds_checkpointing.checkpoint:
        module.activation_checkpoint_func = (
            ds_checkpointing.non_reentrant_checkpoint if asynchronous else checkpoint_block
        )
        module.is_checkpointable_results_interval = None
        module._precompute_checkpointable_values()  # looks whether the function is DeepSpeed's non-reentrant one
    checkpoint = module.activation_checkpoint_func
    module.activation_checkpoint_func = lambda function, *inputs: checkpoint(
        with_same_draws(function, random_states), *inputs
    )


def with_same_draws(function: Callable[..., Tree], random_states: RandomStates) -> Callable[..., Tree]:
    """``function``, every later run of which begins with the random states of now."""
    states, first = random_states.read(), True

    def run(*inputs: Tree) -> Tree:
        nonlocal first
        with nullcontext() if first else random_states.of(states):
            first = False
            return function(*inputs)

    return run


def checkpoint_block(function: Callable[..., Tree], *inputs: Tree) -> Tree:
    """Reentrant checkpointing where that works, else non-reentrant; none where there is no graph."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
        return ds_checkpointing.checkpoint(function, *inputs)
    return ds_checkpointing.non_reentrant_checkpoint(function, *inputs)
