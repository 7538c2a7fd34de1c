"""Optimizer states of tied weights in a checkpoint: the owner's, wherever there is a copy.

DeepSpeed's own engine updates every copy of a tied weight by itself and keeps them equal by equal states.
Here a stage with a copy never updates it, so what its optimizer holds of it means nothing. Going on with
a checkpoint takes neither; it is for whoever loads it into DeepSpeed's engine.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_vpipe.checkpoints.optimizer_states import ParameterState, form_of, pack
from ds_vpipe.engine.checkpoint.parameter_states import read_states, stage_layout
from ds_vpipe.engine.updates.tied import TiedWeights


@contextmanager
def saved_as(optimizer: Any, states: dict[str, Any] | None) -> Iterator[None]:
    """Let ``optimizer.state_dict()`` be ``states`` for a while; None leaves it alone."""
    if states is None:
        yield
        return
    optimizer.state_dict = lambda: states
    try:
        yield
    finally:
        del optimizer.state_dict


def with_owners_states(
    engine: PipelineEngine, ties: TiedWeights, gather: Callable[[Any], list[Any]]
) -> dict[str, Any] | None:
    """The optimizer's state dict with the owners' states of the copies, at rest; None on a stage without copies.

    Args:
        engine: all of whose stages call this.
        ties: its tied weights.
        gather: see :func:`~ds_vpipe.engine.checkpoint.parameter_states.read_states`.
    """
    if engine.optimizer is None or not (ties.weights_in or ties.weights_out):
        return None
    states = read_states(engine, gather)
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}

    def states_of(weights: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        found = [states[names[id(weight)]] for weight in weights]
        buffer = io.BytesIO()
        torch.save([(state.master, state.state) for state in found], buffer)
        return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)

    template = engine.optimizer.state_dict()
    form = form_of(template)
    received = ties.exchange(states_of)
    for weights, data in received:
        content = torch.load(io.BytesIO(data.numpy().tobytes()), weights_only=True)
        for weight, (master, state) in zip(weights, content, strict=True):
            name = names[id(weight)]
            states[name] = _replaced(states[name], master, state, keep_numbers=form.flat)
    if not received:
        return None
    replica = dist.get_rank(group=engine.optimizer.dp_process_group) if form.partitioned else 0
    return pack(template, states, stage_layout(engine).groups, replica)


def _replaced(
    own: ParameterState, master: torch.Tensor | None, state: Mapping[str, Any], keep_numbers: bool
) -> ParameterState:
    """The owner's values in place of a copy's; numbers that its whole parameter group shares stay the copy's."""
    values = {
        key: own.state[key]
        if keep_numbers and key in own.state and not (isinstance(value, torch.Tensor) and value.dim() > 0)
        else value
        for key, value in state.items()
    }
    return dataclasses.replace(own, master=master, state=values)
