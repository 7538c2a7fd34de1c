"""Resuming with another split of the model, another number of stages or replicas, or another optimizer wrapper.

DeepSpeed loads optimizer states by position, which needs the very same stages. Here they are loaded by
parameter: weights, master weights and optimizer states follow their layers. What belongs to a stage rather
than to a layer (learning-rate schedule, counters, loss scale) comes from the stage of the checkpoint that held this
stage's first trained parameter.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine

from ds_vpipe.checkpoints.optimizer_states import ParameterState, form_of
from ds_vpipe.checkpoints.pipeline_checkpoint import PipelineCheckpoint, checkpoint_folder
from ds_vpipe.checkpoints.stage_layout import LAYOUT_KEY
from ds_vpipe.engine.checkpoint.parameter_states import parameter_names, stage_layout, untied_names, write_states
from ds_vpipe.engine.modules.recompute import layers_by_number
from ds_vpipe.errors import VPipeError

OWN_KEYS = frozenset((
    LAYOUT_KEY, "module", "optimizer", "lr_scheduler", "data_sampler", "random_ltd", "buffer_names", "param_shapes",
    "frozen_param_shapes", "frozen_param_fragments", "shared_params", "skipped_steps", "global_steps", "global_samples",
    "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
))  # fmt: skip
"""Keys of an engine's own entries in an ``mp_rank`` file. Others are the script's ``client_state``."""

RETURNED = frozenset(("ds_config", "ds_version"))
"""Those that ``load_checkpoint()`` returns, as DeepSpeed's: some scripts note in ``engine.config`` how far they are."""


_IMPLEMENTATION_OPTIONS = frozenset((
    "amsgrad", "bias_correction", "capturable", "decoupled_weight_decay", "differentiable", "foreach", "fused",
    "maximize",
))  # fmt: skip
"""Options in which implementations of one optimizer differ."""


def checked(engine: PipelineEngine, load_dir: str, tag: str | None, **options: Any) -> PipelineCheckpoint | None:
    """The checkpoint that :func:`load` is to load, so far as this rank can tell without loading anything.

    ``options`` are DeepSpeed's, see :func:`load_reshaped`. None if it is none of a pipeline's, or there is none.

    Raises:
        VPipeError: files are lost, or the checkpoint is of another model (number of layers or slices) or optimizer.
    """
    if engine.load_universal_checkpoint():
        if tag is not None:
            _check_universal(engine, Path(load_dir, tag))
        return None
    if tag is None and not (Path(load_dir) / "latest").is_file():
        return None
    folder, ties = checkpoint_folder(load_dir, tag), stage_layout(engine).ties
    checkpoint = PipelineCheckpoint(folder, engine.grid.get_slice_parallel_rank(), ties)
    _check(engine, checkpoint)
    if options["load_optimizer_states"] and not options["load_module_only"] and engine.basic_optimizer is not None:
        _check_options(engine, checkpoint)
    return checkpoint


def load(
    engine: PipelineEngine,
    deepspeed_load: Callable[..., Any],
    load_dir: str,
    tag: str | None,
    checkpoint: PipelineCheckpoint | None,
    **options: Any,
) -> Any:
    """``load_checkpoint()`` by DeepSpeed, or by parameter for another split, number of stages or replicas.

    ``checkpoint`` is what :func:`checked` returns, and ``options`` are DeepSpeed's.

    Raises:
        VPipeError: states do not fit, or nothing says which parameters they are of.
    """
    # The checkpoint's run had no learning-rate schedule: one that is here begins anew, at its own rates.
    begins = checkpoint is not None and checkpoint.stages[0].get("lr_scheduler") is None
    scheduled = begins and engine.lr_scheduler is not None and engine.basic_optimizer is not None
    before = [{**group} for group in engine.basic_optimizer.param_groups] if scheduled else []
    if checkpoint is not None and not same_layout(engine, checkpoint):
        if engine.global_rank == 0:
            other = "has other stages, replicas or precision; loading by parameter"
            print(f"ds_vpipe: {checkpoint.folder} {other}", flush=True)
        path, content = load_reshaped(engine, checkpoint, **options)
    else:
        options["load_lr_scheduler_states"] = options["load_lr_scheduler_states"] and not begins
        path, content = deepspeed_load(load_dir, tag, **options)
    for group, own in zip(engine.basic_optimizer.param_groups if scheduled else (), before, strict=True):
        group.update({key: own[key] for key in ({"lr"} | own.keys() - group.keys())})
    inner = OWN_KEYS - RETURNED  # others are what the script has saved
    return path, None if content is None else {key: value for key, value in content.items() if key not in inner}


def same_layout(engine: PipelineEngine, checkpoint: PipelineCheckpoint) -> bool:
    """Whether DeepSpeed's own way of loading, by position, gives each parameter its own states."""
    live = stage_layout(engine)
    if len(checkpoint.stages) != engine.num_stages or checkpoint.stages[live.stage]["dp_world_size"] != live.replicas:
        return False
    saved = checkpoint.optimizer(live.stage)
    if not saved or engine.basic_optimizer is None:
        return bool(saved) == (engine.basic_optimizer is not None)
    if form_of(saved[0]) != form_of(engine.optimizer.state_dict()):
        return False
    if checkpoint.layouts is not None:
        return checkpoint.layouts[live.stage] == live and not _of_another_type(engine, checkpoint)
    names = [[(live.untied.get(name, name), tuple(shape)) for name, shape in group] for group in live.groups]
    try:
        same = [list(group) for group in checkpoint.groups[live.stage]] == names
        return same and not _of_another_type(engine, checkpoint)
    except VPipeError:
        return True  # nothing more is known of it; it was saved by position


def _of_another_type(engine: PipelineEngine, checkpoint: PipelineCheckpoint) -> bool:
    """Whether weights were saved in another type, by which ZeRO's files are named. The first trained one tells."""
    names = parameter_names(engine.module)
    trained = (own for own in engine.module.parameters() if own.requires_grad and own.is_floating_point())
    weights = ((checkpoint.weight(names[id(own)]), own) for own in trained)
    return next((saved.dtype != own.dtype for saved, own in weights if saved is not None), False)


def load_reshaped(
    engine: PipelineEngine, checkpoint: PipelineCheckpoint, **options: bool
) -> tuple[str, dict[str, Any]]:
    """Load a checkpoint by parameter into an engine that is not training at the moment. All ranks call it.

    Versions of weights must be made anew afterwards, and so must master weights if only weights are loaded.
    ``options`` are DeepSpeed's.

    Returns:
        A file of the checkpoint, and what it has of the stage.

    Raises:
        VPipeError: states that do not fit or are not there.
    """
    engine._curr_ckpt_path = str(checkpoint.folder)
    strict = options["load_module_strict"]
    engine.load_module_state_dict({"module": None}, strict=strict)
    # DeepSpeed has loaded tied layers of this stage, which are one module, one after the other: what they do not share
    # is the last one's, and its states are the first one's.
    firsts = {int(own.partition(".")[0]) for own in untied_names(engine.module).values()}
    for index in firsts.intersection(checkpoint.layers):
        layers_by_number(engine.module)[index].load_state_dict(checkpoint.layer(index), strict)
    trained = stage_layout(engine).names
    whole = not options["load_module_only"]
    with_states = whole and options["load_optimizer_states"] and engine.basic_optimizer is not None
    # Where only weights are loaded a checkpoint need not say which stage held a parameter.
    named = trained if with_states or checkpoint.layouts is not None else []
    stage = next((at for name in named if (at := checkpoint.stage_of(name)) is not None), 0)
    if with_states:
        _load_states(engine, checkpoint, stage, trained)
    content = checkpoint.stages[stage]
    if whole:
        take_counters(engine, content, options["load_lr_scheduler_states"])
        _take_samplers(engine, checkpoint.stages[0])
    return str(checkpoint.stage_file(stage)), content


def take_counters(engine: PipelineEngine, content: Mapping[str, Any], with_lr_scheduler: bool) -> None:
    """Restore counters and schedule of a stage from a stage's file.

    Raises:
        VPipeError: the schedule is of another number of parameter groups.
    """
    schedule = content["lr_scheduler"]
    if with_lr_scheduler and engine.lr_scheduler is not None and schedule is not None:
        rates = schedule.get("base_lrs") if isinstance(schedule, Mapping) else None  # as torch's have
        groups = len(engine.basic_optimizer.param_groups)
        if isinstance(rates, list) and len(rates) != groups:
            raise VPipeError(
                f"lr_scheduler: got the rates of {len(rates)} parameter groups, allowed are those of the {groups} that "
                f"this stage has; build the groups that were saved, or load with load_lr_scheduler_states=False"
            )
        engine.lr_scheduler.load_state_dict(schedule)
    engine.global_steps = content["global_steps"]
    engine.global_samples = content.get("global_samples", engine.global_steps * engine.train_batch_size())
    engine.skipped_steps = content["skipped_steps"]


def _take_samplers(engine: PipelineEngine, content: Mapping[str, Any]) -> None:
    """Restore what chooses samples and tokens by the step from the first stage's file. Stages without data have none.

    It is the same on all stages and replicas.
    """
    if engine.random_ltd_enabled() and content.get("random_ltd") is not None:
        engine.random_ltd_scheduler.load_state_dict(content["random_ltd"])
    chooses = engine.training_dataloader is not None and engine.curriculum_learning_enabled()
    if chooses and content.get("data_sampler") is not None:
        engine.training_dataloader.data_sampler.load_state_dict(content["data_sampler"])


def _load_states(engine: PipelineEngine, checkpoint: PipelineCheckpoint, stage: int, trained: list[str]) -> None:
    names = parameter_names(engine.module)
    parameters = [(names[id(parameter)], parameter) for parameter in engine.module.parameters()]
    idle = {name for name, parameter in parameters if not (parameter.requires_grad and parameter.numel())}
    # A stage that had nothing to train has saved nothing of what is frozen here, wrappers save nothing of what has no
    # elements, and no update needs it.
    unsaved = {name for name in idle.intersection(trained) if checkpoint.stage_of(name) is None}
    states = checkpoint.states(name for name in trained if name not in unsaved)
    for index, members in enumerate(stage_layout(engine).groups):
        neighbour = next((states[name] for name, _ in members if name in states), None)
        known = neighbour or ParameterState(None, {}, (stage, index), {})
        states |= {name: dataclasses.replace(known, master=None, state={}) for name, _ in members if name in unsaved}
    if form_of(engine.optimizer.state_dict()).masters is not None:
        for name, state in states.items():
            if state.master is None:  # a plain optimizer trains the weights themselves
                states[name] = dataclasses.replace(state, master=checkpoint.weight(name))
    saved = checkpoint.optimizer(stage)
    write_states(engine, states, saved=saved[0] if saved else None)


def _check(engine: PipelineEngine, checkpoint: PipelineCheckpoint) -> None:
    live = stage_layout(engine)
    where = f"checkpoint {str(checkpoint.folder)!r}"
    if checkpoint.slices != live.slices:
        raise VPipeError(
            f"{where}: got {checkpoint.slices} tensor-parallel slices, allowed is this model's {live.slices}; load "
            f"it with the slices it was saved with"
        )
    layers = layers_by_number(engine.module).items()
    lost = [index for index, layer in layers if hasattr(layer, "load_state_dict") and index not in checkpoint.layers]
    more = max(checkpoint.layers, default=0) >= live.bounds[-1]
    if lost or more or (checkpoint.layouts is not None and checkpoint.layouts[0].bounds[-1] != live.bounds[-1]):
        raise VPipeError(
            f"{where}: got weights of layers {checkpoint.layers}, allowed are those of this model's "
            f"{live.bounds[-1]} layers; load it into the model that saved it"
        )


def _check_universal(engine: PipelineEngine, folder: Path) -> None:
    """Refuse a folder with nothing of this stage, of which DeepSpeed would name a file that is not there."""
    trained = [name for name, parameter in engine.module.named_parameters() if parameter.requires_grad]
    if trained and not any((folder / "zero" / name).is_dir() for name in trained):
        raise VPipeError(
            f"checkpoint {str(folder)!r}: got no zero/{trained[0]} in it, allowed is what ds_to_universal makes of a "
            f"checkpoint of this model's pipeline; convert one, or load weights into the model before initialize()"
        )


def _check_options(engine: PipelineEngine, checkpoint: PipelineCheckpoint) -> None:
    """Refuse states of another optimizer, which has other options than this one's updates need."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    saved = checkpoint.optimizer(min(engine.stage_id, len(checkpoint.stages) - 1))
    if not saved or not isinstance(optimizer, torch.optim.Optimizer):
        return
    # By parameter, states of one algorithm are those of its other implementations.
    ignored = frozenset() if same_layout(engine, checkpoint) else _IMPLEMENTATION_OPTIONS
    needed = (getattr(optimizer, "defaults", {}).keys() & optimizer.param_groups[0].keys()) - ignored
    for group in form_of(saved[0]).inner(saved[0])["param_groups"]:
        lost = sorted(needed - group.keys())
        others = {key for key in group.keys() - optimizer.param_groups[0].keys() - ignored if not key.endswith("_lr")}
        if lost and others:  # else one of an older version, or with a scheduler
            raise VPipeError(
                f"checkpoint {str(checkpoint.folder)!r}: got states of an optimizer without {lost[0]}, allowed are "
                f"those of {type(optimizer).__name__}; build the optimizer that was saved, or load with "
                f"load_optimizer_states=False"
            )
