"""Layers that move between stages while nothing is in flight, with all that training keeps of them.

What a stage has afterwards is what it would have after a checkpoint of this moment had been loaded with the new split
(:mod:`.reshape`): optimizer states are read and written by the same functions, by parameter, and what belongs to a
stage is that of the stage that had its first trained parameter. But nothing is written: each layer that changes hands
is one message, and all others stay where they are. Random states and the count of passes, which seeds layers, go on.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec

from ds_vpipe.checkpoints.optimizer_states import ParameterState
from ds_vpipe.checkpoints.stage_layout import first_owners
from ds_vpipe.engine.checkpoint.parameter_states import parameter_names, read_states, stage_layout, write_states
from ds_vpipe.engine.checkpoint.reshape import take_counters
from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.execution.movable_layers import options_of, other_options
from ds_vpipe.engine.links.pickled import as_bytes, from_bytes
from ds_vpipe.engine.modules.built_layers import Built, take_settings
from ds_vpipe.engine.modules.partitioned import hold
from ds_vpipe.engine.modules.recompute import Segment, apply_recompute, layers_by_number, refuse_own_forward
from ds_vpipe.engine.modules.split_module import SplitModule
from ds_vpipe.engine.stage import Stage
from ds_vpipe.engine.updates.loss_scale import LossScaling
from ds_vpipe.errors import VPipeConfigError, VPipeError
from ds_vpipe.partition import bounds, checked_counts
from ds_vpipe.splitting.stage_model import Piece

_WHAT = "all stages to move layers"


def checked_split(
    stage: Stage, counts: Sequence[int], recompute_ratio: Sequence[float] | None
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Layers and recompute ratios of every stage; ratios that are None are those that it has.

    Raises:
        VPipeConfigError: they do not fit.
    """
    pipeline = stage.pipeline
    found = checked_counts(counts, stage.module._num_layers, pipeline.num_parts)
    given: Any = pipeline.recompute_ratio if recompute_ratio is None else recompute_ratio
    ratios = tuple(given) if isinstance(given, Iterable) else (given,)
    replace(pipeline, partition=found, recompute_ratio=ratios)  # which checks the ratios
    recomputes = recompute_ratio is not None and any(ratios)
    given = {"repartition(recompute_ratio)": recompute_ratio} if recomputes else {}
    refuse_own_forward(stage.module, stage.consensus, given)
    return found, ratios


def repartition(
    engine: PatchedPipelineEngine,
    stage: Stage,
    quiesce: Callable[[], None],
    found: tuple[int, ...],
    ratios: tuple[float, ...],
) -> bool:
    """Split the model anew; all ranks call this, between two batches. Returns whether layers have moved.

    ``quiesce`` empties the pipeline.

    Raises:
        VPipeError: another rank has been given something else.
    """
    stage.action = "REPARTITION"
    if len(set(stage.consensus.everyone.gather((found, ratios), "all ranks to move layers"))) > 1:
        raise VPipeError(
            f"repartition(): got {list(found)} here and another split on another rank, allowed is one; pass the same "
            f"on every rank"
        )
    quiesce()
    stage.action = "REPARTITION"
    moved = found != stage.pipeline.partition  # which a move that was under way has changed
    if moved:
        move_layers(engine, stage, found)
        if stage.peers is not None:
            stage.peers.forget()
    stage.pipeline = replace(stage.pipeline, partition=found, recompute_ratio=ratios)
    stashed, ratio, stop = stage.pipeline.weight_sync != "none", ratios[stage.number], len(stage.module.forward_funcs)
    apply_recompute(stage.module, Segment(0, stop, ratio, stage.random_states, stashed=stashed))
    return moved


def move_layers(engine: PatchedPipelineEngine, stage: Stage, counts: Sequence[int]) -> None:
    """Split the model anew. All ranks call this, with nothing in flight and one version of the weights.

    ``counts`` are such that tied layers stay where they are.

    Raises:
        VPipeConfigError: a layer was changed after it had been built, so that another stage cannot build it.
    """
    module, consensus = stage.module, stage.consensus
    layout = stage_layout(engine)
    trains, scaling = engine.optimizer is not None, stage.loss_scaling
    states = read_states(engine, consensus.of_replicas) if trains else {}
    names = parameter_names(module)
    for name in (names[id(weight)] for weight in stage.ties.copied):
        if name in states:  # with a master that nothing updates here
            states[name] = replace(states[name], master=None)
    counters = {
        "lr_scheduler": None if engine.lr_scheduler is None else engine.lr_scheduler.state_dict(),
        **{name: getattr(engine, name) for name in ("global_steps", "global_samples", "skipped_steps")},
    }
    everywhere = consensus.pipeline.gather((layout, counters, None if scaling is None else scaling.state()), _WHAT)
    before, received = layers_by_number(module), dict[int, Any]()
    for index, source, target in _moves(module.parts, bounds(counts)):
        if source == stage.number:
            _send(stage, target, _content(before[index], f"{index}.", states, stage.built[index]))
        elif target == stage.number:
            received[index] = _receive(stage, source)
    del before
    with consensus.all_or_none("repartition()"):
        with stage.random_states.kept(stage.device):
            hold(module, counts)
        module.to(stage.device)
        now = layers_by_number(module)
        for index, content in received.items():
            stage.built[index] = Built.of(now[index])
            states |= _fill(module, index, now[index], content)
        engine.layers_changed()
        if trains:
            owners = first_owners([found.groups for found, *_ in everywhere])
            engine.train_others(_groups(module, owners, len(layout.groups)))
            if scaling is not None:
                stage.loss_scaling = LossScaling(engine.optimizer)
                stage.loss_scaling.restore(everywhere[-1][2])
            write_states(engine, states)
            first = next(iter(stage_layout(engine).names), None)
            take_counters(engine, everywhere[0 if first is None else owners[first][0]][1], with_lr_scheduler=True)
        stage.weights.take_over(engine.optimizer, module.parameters())


def refuse_moves(engine: PatchedPipelineEngine, stage: Stage, call: str) -> None:
    """Refuse ``call`` where layers cannot move; all ranks call this."""
    groups = [] if engine.basic_optimizer is None else engine.basic_optimizer.param_groups
    mine = (
        [options_of(engine, number) for number in range(len(groups))],
        bool(stage_layout(engine).aliases),
        next(_unfit(stage.module), None),
    )
    found = stage.consensus.everyone.gather(mine, f"all ranks in {call}")
    reasons = [*_fixed(engine, stage), *filter(None, (unfit for *_, unfit in found))]
    counts = sorted({len(options) for options, *_ in found})
    if len(counts) > 1:
        reasons.append(f"the optimizer has {counts} parameter groups on different stages, allowed is one number")
    else:
        reasons += filter(None, map(other_options, zip(*(options for options, *_ in found), strict=True)))
    if any(aliased for _, aliased, _ in found) and not isinstance(stage.module, SplitModule):
        reasons.append("layers of a stage share a parameter without being tied, allowed are TiedLayerSpecs")
    if reasons:
        raise VPipeConfigError(f"{call}: layers cannot move: {reasons[0]}; change that, or leave the split as it is")


def _unfit(module: PipelineModule) -> Iterator[str]:
    """Reasons for which parameters here cannot become others on another stage."""
    for name, parameter in module.named_parameters():
        if type(parameter) is not torch.nn.Parameter:
            yield f"{name} is a {type(parameter).__name__}, such as a quantized weight, allowed are parameters"
        if parameter._backward_hooks:
            yield f"{name} has hooks, which would stay behind, allowed are hooks of modules"


def _fixed(engine: PatchedPipelineEngine, stage: Stage) -> Iterator[str]:
    """Reasons for which layers cannot move, the same on all ranks."""
    module, ends = stage.module, {0, len(stage.module._layer_specs) - 1}
    if stage.pipeline.virtual_stages > 1:
        yield f"the schedule is {stage.pipeline.schedule!r}, allowed are schedules with one part per stage"
    if stage.swap is not None:
        yield "swap_ratio is not 0, allowed is 0"
    if getattr(engine.optimizer, "optimizer", engine.basic_optimizer) is not engine.basic_optimizer:
        yield "DeepSpeed has replaced the optimizer by another one (Adagrad with ZeRO-1), allowed is one that it keeps"
    if getattr(engine.optimizer, "cpu_offload", False):
        yield "the optimizer is offloaded, allowed is one on the stage's device"
    if engine.torch_autocast_enabled() and engine.zero_optimization():
        yield "torch_autocast is enabled with ZeRO-1, allowed is one of the two"
    if module.activation_checkpoint_interval > 0:
        yield "activation_checkpoint_interval is not 0, allowed is vpipe.recompute_ratio"
    if engine.is_compiled:
        yield "the engine is compiled, allowed is one that is not"
    for name, pieces in module.tied_layers().items() if isinstance(module, SplitModule) else ():
        if not ends.issuperset(pieces):
            yield f"{name} is used in pieces {pieces}, allowed are weights shared by the first and the last piece"
    owners: dict[int, int] = {}
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec) and index not in ends:
            yield f"layer {index} is tied ({spec.key!r}), allowed are ties of the first and the last layer"
        for parameter in spec.parameters() if isinstance(spec, torch.nn.Module) else ():
            if owners.setdefault(id(parameter), index) != index:
                yield f"layers {owners[id(parameter)]} and {index} share a parameter, allowed are TiedLayerSpecs"


def _moves(old: Sequence[int], new: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Layers that change hands, each with its stage before and its stage now. In the same order on all ranks."""
    for index in range(new[-1]):
        source, target = bisect(old, index) - 1, bisect(new, index) - 1
        if source != target:
            yield index, source, target


def _content(layer: Any, prefix: str, states: Mapping[str, ParameterState], built: Built) -> dict[str, Any]:
    """All that training keeps of a layer."""
    if not isinstance(layer, torch.nn.Module):
        return {}
    weights, tensors = layer.state_dict(), dict((*layer.named_parameters(), *layer.named_buffers()))
    return {
        "weights": weights,
        "unsaved": {name: tensor.detach() for name, tensor in tensors.items() if name not in weights},
        "types": {name: tensor.dtype for name, tensor in tensors.items()},
        "trained": {name: parameter.requires_grad for name, parameter in layer.named_parameters()},
        "marks": {name: _marks(parameter) for name, parameter in layer.named_parameters()},
        "numbers": layer.numbers if isinstance(layer, Piece) else [],
        "now": Built.of(layer),
        "changed": built.changed(layer),
        "states": {name: vars(state) for name, state in states.items() if name.startswith(prefix)},
    }


def _marks(parameter: torch.nn.Parameter) -> dict[str, Any]:
    """What others have written on a parameter, such as whether DeepSpeed's Muon trains it; not what belongs to a rank.

    ``ds_`` is DeepSpeed's own beginning.
    """
    named = ((name, value) for name, value in vars(parameter).items() if not name.startswith(("_", "ds_")))
    return {name: value for name, value in named if isinstance(value, (bool, int, float, str))}


def _fill(module: PipelineModule, index: int, layer: Any, content: Mapping[str, Any]) -> dict[str, ParameterState]:
    """Give a layer that was built the values of the one that it replaces. Returns the states of its parameters."""
    if not content:
        return {}
    shapes = [  # extra state of a layer has none
        {name: getattr(value, "shape", None) for name, value in found.items()}
        for found in (layer.state_dict(), content["weights"])
    ]
    tensors = dict((*layer.named_parameters(), *layer.named_buffers()))
    other_structure = Built.of(layer).structure != content["now"].structure
    if shapes[0] != shapes[1] or tensors.keys() != content["types"].keys() or other_structure:
        raise VPipeConfigError(
            f"repartition: got bounds {list(module.parts)}, which move layer {index} ({type(layer).__name__}), but it "
            f"was changed after it had been built (parameters, buffers, modules or hooks), and another stage cannot "
            f"build it; allowed are layers as their specification builds them; change it there, or leave vpipe.replan "
            f"out"
        )
    for name, tensor in tensors.items():
        tensor.data = tensor.data.to(content["types"][name])
    layer.load_state_dict(content["weights"])
    for name, value in content["unsaved"].items():  # buffers that are not persistent, or what a hook leaves out
        tensors[name].data = value.to(tensors[name].device)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad_(content["trained"][name])
        vars(parameter).update(content["marks"][name])
    if isinstance(layer, Piece):
        layer.numbers = content["numbers"]
    take_settings(layer, index, content["now"].settings, content["changed"])
    return {name: ParameterState(**state) for name, state in content["states"].items()}


def _send(stage: Stage, target: int, content: Mapping[str, Any]) -> None:
    data = as_bytes(content)
    for tensor in (torch.tensor([len(data)], device="cpu"), data):
        stage.consensus.bytes_of_stage(tensor, stage.number, [target], _WHAT)


def _receive(stage: Stage, source: int) -> Any:
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    stage.consensus.bytes_of_stage(size, source, [stage.number], _WHAT)
    data = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    stage.consensus.bytes_of_stage(data, source, [stage.number], _WHAT)
    return from_bytes(data)


def _groups(
    module: PipelineModule, owners: Mapping[str, tuple[int, int]], count: int
) -> list[list[torch.nn.Parameter]]:
    """The module's trained parameters in their former groups."""
    groups: list[list[torch.nn.Parameter]] = [[] for _ in range(count)]
    parameters = {id(parameter): parameter for parameter in module.parameters()}
    for key, name in parameter_names(module).items():
        if name in owners:
            groups[owners[name][1]].append(parameters[key])
    return groups
