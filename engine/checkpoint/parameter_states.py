"""States of a running stage's optimizer by parameter, whatever wrapper DeepSpeed has put around it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import logger
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils._pytree import tree_map_only

from ds_vpipe.checkpoints.optimizer_states import Form, Groups, ParameterState, carry_scale, form_of, pack, unpack
from ds_vpipe.checkpoints.stage_layout import PLACEHOLDER, StageLayout
from ds_vpipe.engine.links.pickled import as_bytes, from_bytes
from ds_vpipe.engine.modules.recompute import layer_numbers, layers_by_number
from ds_vpipe.engine.modules.split_module import SplitModule
from ds_vpipe.engine.updates.tied import TiedWeights, tied_parameters
from ds_vpipe.errors import VPipeError

_GROUPS = ("round_robin_bit16_groups", "fp16_groups", "bf16_groups")  # where the wrappers keep a group's own parameters


def stage_layout(engine: PipelineEngine) -> StageLayout:
    """Parameters of this stage's optimizer, in its order.

    Raises:
        VPipeError: the optimizer trains something that is no parameter of the module.
    """
    module = engine.module
    untied = untied_names(module)
    names = parameter_names(module)
    names |= {id(p): PLACEHOLDER for p, name in engine.param_names.items() if name == PLACEHOLDER}
    groups = []
    for members in _parameters(engine.optimizer):
        if any(id(parameter) not in names for parameter in members):
            raise VPipeError(
                "optimizer: got a tensor that is no parameter of the module, allowed are its parameters; a checkpoint "
                "has no name for others, so register it in a layer"
            )
        groups.append([(names[id(parameter)], tuple(parameter.shape)) for parameter in members])
    ties = {index: spec.key for index, spec in enumerate(module._layer_specs) if isinstance(spec, TiedLayerSpec)}
    aliases = {name: names[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
    for index in layer_numbers(module):
        for name, own in untied.items():
            if name.startswith(f"tied_modules.{ties.get(index)}."):
                aliases.setdefault(f"{index}.{own.partition('.')[2]}", aliases.get(name, own))
    return StageLayout(
        stage=engine.stage_id,
        bounds=tuple(module.parts),
        replicas=engine.dp_world_size,
        slice_index=engine.grid.get_slice_parallel_rank(),
        slices=engine.grid.get_slice_parallel_world_size(),
        groups=groups,
        ties=ties,
        aliases={name: own for name, own in aliases.items() if name != own and name not in untied},
        untied={own: name for name, own in untied.items()},
        copies=module.copies() if isinstance(module, SplitModule) else None,
        files=tuple(index for index, layer in layers_by_number(module).items() if hasattr(layer, "state_dict")),
    )


def parameter_names(module: PipelineModule) -> dict[int, str]:
    """Names of the module's parameters as layouts have them, by id, in the module's order."""
    untied = untied_names(module)
    return {id(parameter): untied.get(name, name) for name, parameter in module.named_parameters()}


def read_states(engine: PipelineEngine, gather: Callable[[Any], list[Any]]) -> dict[str, ParameterState]:
    """Optimizer states of this stage's parameters by name, on the CPU.

    Args:
        engine: its optimizer, which it must have.
        gather: the values that all replicas of the stage pass, in order; called where replicas hold different parts.
    """
    mine = tree_map_only(torch.Tensor, lambda tensor: tensor.detach().cpu(), engine.optimizer.state_dict())
    return unpack(gather(mine) if form_of(mine).partitioned else [mine], stage_layout(engine).groups, engine.stage_id)


def write_states(
    engine: PipelineEngine, states: Mapping[str, ParameterState], saved: Mapping[str, Any] | None = None
) -> None:
    """Give the optimizer other states, hyperparameters and master weights.

    Args:
        engine: its optimizer's parameters must all be in ``states``, with their weights as ``master``.
        states: by name of the parameter; may hold more.
        saved: state dict of an optimizer from which the loss scale is taken over, if it has the same form, and the
            options of groups of which nothing is here.

    Raises:
        VPipeError: the states do not fit, see :func:`ds_vpipe.checkpoints.optimizer_states.pack`.
    """
    optimizer = engine.optimizer
    template = optimizer.state_dict()
    form = form_of(template)
    groups = stage_layout(engine).groups
    # Placeholders keep what they have, and their groups their options: all have one name.
    states = {**states, PLACEHOLDER: ParameterState(None, {}, (engine.stage_id, 0), {})}
    packed = pack(template, states, groups, _replica(engine, form), warn=logger.warning)
    if saved is not None:
        carry_scale(packed, saved)
        _carry_options(packed, saved, groups)
    load_packed(optimizer, packed, masters=engine.zero_load_from_fp32_weights())
    if form.masters is None or not form.partitioned or engine.zero_load_from_fp32_weights():
        # Those that were saved may be of another type, and rounded to it. So a stale one has to be None.
        with torch.no_grad():
            for members, named in zip(_parameters(optimizer), groups, strict=True):
                for parameter, (name, _) in zip(members, named, strict=True):
                    master = states[name].master
                    if master is not None:
                        parameter.copy_(master)


def _carry_options(packed: Mapping[str, Any], saved: Mapping[str, Any], groups: Groups) -> None:
    """Give groups that have nothing but a placeholder the options of the saved groups of the same numbers."""
    mine, theirs = (form_of(one).inner(one)["param_groups"] for one in (packed, saved))
    for group, found, members in zip(mine, theirs, groups, strict=False):
        if len(mine) == len(theirs) and all(name == PLACEHOLDER for name, _ in members):
            group.update({key: found[key] for key in found.keys() & group.keys() - {"params", "param_names"}})


def load_packed(optimizer: Any, packed: Mapping[str, Any], *, masters: bool = True) -> None:
    """Load a state dict that is this rank's, with or without the ``masters`` of a partitioned form."""
    if form_of(packed).partitioned:  # DeepSpeed wants those of all replicas, and takes this one's alone
        partitions = [packed] * dist.get_world_size(group=optimizer.dp_process_group)
        optimizer.load_state_dict(partitions, load_from_fp32_weights=masters)
    else:
        optimizer.load_state_dict(packed)


def with_owners_states(
    engine: PipelineEngine, ties: TiedWeights, gather: Callable[[Any], list[Any]]
) -> dict[str, Any] | None:
    """The optimizer's state dict with the owners' states of tied weights. None on a stage without copies of any.

    DeepSpeed's own engine updates every copy of a tied weight by itself and keeps them equal by equal states. Here a
    stage with a copy never updates it, so that its optimizer's state of it has no use; the owner's in a checkpoint is
    for DeepSpeed's engine. All stages call this with nothing in flight; ``gather``: see :func:`read_states`.
    """
    if engine.optimizer is None or not (ties.weights_in or ties.weights_out):
        return None
    states = read_states(engine, gather)
    names = {id(parameter): name for name, parameter in engine.module.named_parameters()}

    def states_of(weights: Sequence[torch.nn.Parameter]) -> torch.Tensor:
        found = (states.get(names[id(weight)]) for weight in weights)  # those that the optimizer has
        return as_bytes([state and (state.master, state.state) for state in found])

    template = engine.optimizer.state_dict()
    form = form_of(template)
    received = ties.exchange(states_of)
    for weights, data in received:
        for weight, sent in zip(weights, from_bytes(data), strict=True):
            name = names[id(weight)]
            if sent is not None and name in states:
                master, state = sent
                states[name] = _replaced(states[name], master, state, keep_numbers=form.flat)
    if not received:
        return None
    return pack(template, states, stage_layout(engine).groups, _replica(engine, form))


def _replaced(
    own: ParameterState, master: torch.Tensor | None, state: Mapping[str, Any], keep_numbers: bool
) -> ParameterState:
    """The owner's state in place of a copy's. Numbers that its whole parameter group shares stay the copy's."""
    values = {
        key: own.state[key]
        if keep_numbers and key in own.state and not (isinstance(value, torch.Tensor) and value.dim() > 0)
        else value
        for key, value in state.items()
    }
    return dataclasses.replace(own, master=master, state=values)


def _replica(engine: PipelineEngine, form: Form) -> int:
    return dist.get_rank(group=engine.optimizer.dp_process_group) if form.partitioned else 0


def untied_names(module: PipelineModule) -> dict[str, str]:
    """What tied layers here have in their state dicts and is not tied itself: a name by the first layer of the key."""
    first: dict[str, int] = {}
    for index in layer_numbers(module):
        spec = module._layer_specs[index]
        if isinstance(spec, TiedLayerSpec):
            first.setdefault(spec.key, index)
    untied: dict[str, str] = {}
    for key, index in first.items():
        layer = module.tied_modules[key]
        tied = {id(parameter) for parameter in tied_parameters(module, key)}
        tensors = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
        names = [name for name, tensor in tensors if id(tensor) not in tied]
        for path, part in layer.named_modules():
            if type(part).get_extra_state is not torch.nn.Module.get_extra_state:
                names.append(f"{path}.{_EXTRA_STATE_KEY_SUFFIX}".lstrip("."))
        untied |= {f"tied_modules.{key}.{name}": f"{index}.{name}" for name in names}
    return untied


def _parameters(optimizer: Any) -> list[list[torch.nn.Parameter]]:
    """The module's parameters in the order in which the optimizer holds them, per group."""
    if optimizer is None:
        return []
    for attribute in _GROUPS:
        if hasattr(optimizer, attribute):
            return list(getattr(optimizer, attribute))
    return [group["params"] for group in optimizer.param_groups]
