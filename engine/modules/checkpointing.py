"""DeepSpeed's activation checkpointing by interval, so that it trains all parameters and repeats all random draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing as ds_checkpointing

from ds_vpipe.engine.links.message import Tree
from ds_vpipe.engine.modules.piece_module import PieceModule
from ds_vpipe.engine.modules.random_states import RandomStates
from ds_vpipe.engine.modules.run_again import ModuleMemory
from ds_vpipe.engine.modules.saved_tensors import RecomputedCounts
from ds_vpipe.splitting.guards import casting_as_here
from ds_vpipe.splitting.module_numbers import ModuleNumbers


def use_sound_checkpointing(module: PipelineModule, asynchronous: bool, random_states: RandomStates) -> None:
    """Let DeepSpeed's activation checkpointing by interval train all parameters and repeat all random draws.

    Its reentrant function computes a block without a graph and runs a backward pass of its own later. If no input of
    the block requires a gradient, as integers and data never do, its output has no graph, and the block's parameters
    silently get no gradient. DeepSpeed marks the first stage's floating-point inputs to get around that; integers
    cannot be marked. A synchronous pipeline keeps that function for blocks where it works; an asynchronous one, whose
    backward passes are not in the reverse order of its forward passes, does without, and so do pieces, which have to be
    run with gradients. For the second run DeepSpeed restores torch's random states and its own tracker's only. Here it
    also casts as the first, and in an asynchronous pipeline finds its numbers, such as a rate that a script has changed
    since.
    """
    pieces = module.stage_model if isinstance(module, PieceModule) else None
    if module.activation_checkpoint_func is ds_checkpointing.checkpoint:
        module.activation_checkpoint_func = (
            ds_checkpointing.non_reentrant_checkpoint if asynchronous or pieces is not None else _checkpoint_block
        )
        module.is_checkpointable_results_interval = None
        module._precompute_checkpointable_values()  # looks whether the function is DeepSpeed's non-reentrant one
    found = module.activation_checkpoint_func
    remembering, numbers = ((), None) if pieces is None else (pieces.model.modules(), pieces.numbers)
    memory = ModuleMemory(remembering, copies_all=True, numbers=numbers)

    def checkpointed(function: Callable[..., Tree], *inputs: Tree) -> Tree:
        parts = _parts_of(module, function) if asynchronous and pieces is None else ()
        return found(_alike(function, random_states, memory, ModuleNumbers(parts), module.training), *inputs)

    module.activation_checkpoint_func = checkpointed


def _parts_of(module: PipelineModule, function: Callable[..., Tree]) -> Iterator[torch.nn.Module]:
    """Modules of the block that DeepSpeed's ``forward()`` lets ``function`` run; none of a script's own forward."""
    block: Sequence[Any] = ()
    if isinstance(function, FunctionType) and function.__module__ == PipelineModule.__module__:
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        its = {name: cell.cell_contents for name, cell in cells}
        block = module.forward_funcs[its["start"] : its["end"]]
    return (part for layer in block if isinstance(layer, torch.nn.Module) for part in layer.modules())


def _alike(
    function: Callable[..., Tree],
    random_states: RandomStates,
    memory: ModuleMemory,
    numbers: ModuleNumbers,
    training: bool,
) -> Callable[..., Tree]:
    """``function``, whose later runs find what is remembered as the first, and leave it so."""
    states, first, counts, casting = random_states.read(), True, RecomputedCounts(), casting_as_here()
    remembered = memory.read()
    remembered.values.extend((place, key, value, None) for _, place, key, value in numbers.read())

    def run(*inputs: Tree) -> Tree:
        nonlocal first
        if first:
            first = False
            with counts.of_forward():
                outputs = function(*inputs)
            memory.note_changes(remembered, training)
            return outputs
        with casting(), random_states.of(states), memory.as_remembered(remembered, False), counts.of_recomputation():
            return function(*inputs)

    return run


def _checkpoint_block(function: Callable[..., Tree], *inputs: Tree) -> Tree:
    """Reentrant checkpointing where that works, else non-reentrant. None where there is no graph."""
    if not torch.is_grad_enabled():
        return function(*inputs)
    if any(isinstance(value, torch.Tensor) and value.requires_grad for value in inputs):
        return ds_checkpointing.checkpoint(function, *inputs)
    return ds_checkpointing.non_reentrant_checkpoint(function, *inputs)
