"""Preparation of a pipeline module for an engine, as the ``"vpipe"`` block says.

:func:`ds_vpipe.initialize` prepares and then builds. An engine that a script builds by itself, such as
``deepspeed.PipelineEngine = VPipeEngine``, prepares its own arguments, so that both ways train the same.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe import schedule as ds_schedule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import logger

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson, load_deepspeed_json
from ds_vpipe.config.unsupported import refuse_unsupported
from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine, StageLocalGrid
from ds_vpipe.engine.execution.batch_loss import BatchLoss
from ds_vpipe.engine.execution.data import MicroBatchFeed
from ds_vpipe.engine.links.consensus import Consensus
from ds_vpipe.engine.links.device import copies_of
from ds_vpipe.engine.links.groups import Groups, Peer, use_local_device
from ds_vpipe.engine.links.stage_links import StageLinks
from ds_vpipe.engine.links.wiring import Wiring, refuse_payload
from ds_vpipe.engine.modules.built_layers import Built
from ds_vpipe.engine.modules.checkpointing import use_sound_checkpointing
from ds_vpipe.engine.modules.interleaved import InterleavedMixin
from ds_vpipe.engine.modules.partitioned import (
    VPipeModule,
    layers_here,
    refuse_training_outside_layers,
    repartition,
    stage_counts,
)
from ds_vpipe.engine.modules.random_states import RandomStates
from ds_vpipe.engine.modules.recompute import Segment, apply_recompute, layers_by_number, refuse_own_forward
from ds_vpipe.engine.modules.split_module import SplitModule
from ds_vpipe.engine.modules.swap import Swap
from ds_vpipe.engine.stage import DrainWatch, Stage
from ds_vpipe.engine.updates.loss_scale import LossScaling
from ds_vpipe.engine.updates.parameter_groups import all_members, follow, leave_out, listed, members_by_layer, regroup
from ds_vpipe.engine.updates.peer_updates import PeerUpdates
from ds_vpipe.engine.updates.tied import TiedWeights, tied_stages
from ds_vpipe.engine.weights.stashing import WeightStashingOptimizer
from ds_vpipe.errors import Refusal, VPipeConfigError
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.plan import Plan
from ds_vpipe.planning.planner import configured_plan, read_profile
from ds_vpipe.schedules.check import check_pipeline
from ds_vpipe.schedules.one_f_one_b import exchanges_by_rank
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.staleness.automatic import OF_SCRIPT, settled
from ds_vpipe.staleness.delay_warmup import DelayWarmup
from ds_vpipe.staleness.nadam import use_nadam
from ds_vpipe.staleness.soap import SOAP

_SHARE_OF_DEVICE = 0.9  # the rest is for the CUDA context, the allocator and communication
_COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
_WITHOUT_BLOCK = {"sync_mode": "bsp"}  # whoever puts the engine in the place of DeepSpeed's expects that one's results


@dataclass(frozen=True)
class Prepared:
    """Result of preparation: what an engine is built with."""

    model_parameters: Any  # for DeepSpeed; other ones than were given where layers have changed hands
    left_out: Sequence[torch.Tensor]  # parameters that were given and are not this stage's
    json: DeepSpeedJson  # around the block
    config: VPipeConfig  # the block, with numbers where it left something to the planner
    pipeline: Pipeline  # what runs
    plan: Plan | None  # where the block left something to the planner
    devices: Devices | None  # that a plan counts with, where there is a planner
    chooses_ratio: bool  # whether recomputation is the planner's to choose
    follows_depths: bool  # whether depths follow the times of passes
    optimizer_grid: Any  # the ranks that overflows and norms are reduced over
    random_states: RandomStates  # what recomputation restores
    swap: Swap | None  # moves what swapped layers save
    groups: Groups  # makes the engine's process groups
    consensus: Consensus  # of all ranks


def prepare(
    model: Any,
    json: DeepSpeedJson,
    config: VPipeConfig,
    optimizer: Any,
    parameters: Any,
    groups: Groups | None = None,
) -> Prepared:
    """Split ``model``, make it recompute, and give it the grid of its schedule; all ranks call this.

    Raises:
        VPipeConfigError: on every rank, with one line that names the key, the value and what is allowed.
    """
    _refuse_kind(model)
    use_local_device()
    grid = model.mpu()
    groups = groups or Groups(Peer(grid.get_stage_id(), grid.get_global_rank()), config.peer_timeout_s)
    with groups.building("its layers"):
        mine = {**json.of_every_rank(), "number of layers": model._num_layers, "split of the module": list(model.parts)}
        groups.refuse_unlike("configurations", mine, "start all ranks with one DeepSpeed JSON and one model")
        return _prepared(model, json, config, optimizer, parameters, groups)


def _refuse_sizes(model: PipelineModule, json: DeepSpeedJson, config: VPipeConfig, replicas: int) -> None:
    """Refuse settings that do not go with the module."""
    refuse_unsupported(json, config, model.num_stages)
    _warn_of_other_schedule(model)
    json.refuse_batch_sizes(replicas * model.num_stages, model.num_stages)
    refused = {
        "vpipe.virtual_stages": config.virtual_stages > 1,
        "vpipe.recompute_ratio": config.recomputes,
        "vpipe.swap_ratio": config.swaps,
        "what vpipe leaves to the planner": config.leaves_to_planner,
    }
    other = next((key for key, is_set in refused.items() if is_set), None)
    if other is not None and model.activation_checkpoint_interval > 0:
        raise VPipeConfigError(
            f"PipelineModule(activation_checkpoint_interval): got {model.activation_checkpoint_interval}, allowed next "
            f"to {other} is 0; leave it out and use vpipe.recompute_ratio"
        )


def _prepared(
    model: Any, json: DeepSpeedJson, config: VPipeConfig, optimizer: Any, parameters: Any, groups: Groups
) -> Prepared:
    grid, replicas = model.mpu(), max(1, model.topology().get_dim("data"))
    _refuse_sizes(model, json, config, replicas)
    consensus = Consensus(grid, groups)
    _refuse_moe(model, config, consensus)
    _refuse_layerwise_settings(model, config, consensus)
    _refuse_types(model, json, replicas, consensus)
    config.check_sizes(model.num_stages, model._num_layers)
    pipeline = config.pipeline(model.num_stages, json.micro_batches(replicas))
    plan, chooses_ratio, follows_depths = None, config.recompute_ratio == "auto", config.follows_depths
    devices = _devices(config, json, replicas, consensus) if config.leaves_to_planner or config.replan.every else None
    if devices is not None and config.leaves_to_planner:
        plan = _planned(config, pipeline, json, devices, model)
        pipeline = plan.pipeline
        config = config.settled(pipeline)
    method = config.partition_or_default(_own_counts(model))
    pipeline = replace(pipeline, partition=stage_counts(model, method, config.virtual_stages))
    groups.refuse_unlike("pipelines", asdict(pipeline), "let all ranks plan from one profile")
    parameters, left_out = _of_stage(model, optimizer, parameters)
    built = _own_counts(model)
    parameters = _split(model, pipeline, optimizer, parameters, consensus)
    if built != list(pipeline.counts) and grid.get_global_rank() == 0 and not isinstance(model, VPipeModule):
        print(  # DeepSpeed has printed its own
            f"ds_vpipe: stages have the layers {list(pipeline.counts)}, no longer {built} as the module was built",
            flush=True,
        )
    if isinstance(model, SplitModule):
        model.release()
    _refuse_tied_lamb(model, json, config, consensus)
    random_states = RandomStates()
    swap = Swap(torch.device(get_accelerator().current_device_name())) if config.swaps else None
    _recompute_and_swap(model, pipeline, random_states, swap)
    _limit_cpu_threads()
    return Prepared(
        model_parameters=parameters,
        left_out=left_out,
        json=json,
        config=config,
        pipeline=pipeline,
        plan=plan,
        devices=devices,
        chooses_ratio=chooses_ratio,
        follows_depths=follows_depths,
        optimizer_grid=StageLocalGrid(grid) if config.sync_mode == "asp" and model.num_stages > 1 else grid,
        random_states=random_states,
        swap=swap,
        groups=groups,
        consensus=consensus,
    )


def _refuse_kind(model: Any) -> None:
    """Refuse what is no module that can be split, or has been."""
    if not isinstance(model, PipelineModule):
        raise VPipeConfigError(
            f"model: got {type(model).__name__}, allowed with a vpipe block is a deepspeed.pipe.PipelineModule; "
            f"build one from a list of layers, or remove the block"
        )
    if isinstance(model, DualPipeVModule):
        raise VPipeConfigError(
            f"model: got {type(model).__name__}, allowed with a vpipe block is a plain PipelineModule; DualPipeV has a "
            f"schedule of its own, so build a PipelineModule or remove the block"
        )
    if isinstance(model, InterleavedMixin):
        raise VPipeConfigError(
            "model: got a PipelineModule that an engine has split into virtual stages before; allowed is a new one; "
            "build the module again"
        )


def _warn_of_other_schedule(model: PipelineModule) -> None:
    """Warn of a schedule that a script has put in the place of DeepSpeed's."""
    theirs = ds_schedule.TrainSchedule
    replaced = next((its for its in (theirs, theirs.steps) if its.__module__ != ds_schedule.__name__), None)
    if model.global_rank == 0 and replaced is not None:
        logger.warning(
            f"ds_vpipe: DeepSpeed's TrainSchedule was replaced by {replaced.__qualname__}, which is not used: "
            f"vpipe.sync_mode and vpipe.schedule choose the schedule; remove what replaces it, such as "
            f"--enable-zbh1-pipeline"
        )


def _refuse_moe(model: PipelineModule, config: VPipeConfig, consensus: Consensus) -> None:
    """On every rank: DeepSpeed's groups of experts, which all ranks would have to make, are not made without them."""
    has_experts = any(isinstance(module, MoE) for module in model.modules())
    if config.sync_mode == "asp" and consensus.any_has(has_experts, "all ranks to look for MoE layers"):
        raise VPipeConfigError(
            'vpipe.sync_mode: got "asp" for a model with DeepSpeed\'s MoE layers, whose experts are reduced '
            'over ranks of several stages; allowed: "bsp"; write "bsp" or remove the vpipe block'
        )


def _refuse_layerwise_settings(model: PipelineModule, config: VPipeConfig, consensus: Consensus) -> None:
    """Refuse on every rank settings that run layers one by one, without a forward of the script's."""
    rows = (
        ("vpipe.virtual_stages", config.virtual_stages, config.virtual_stages > 1),
        ("vpipe.recompute_ratio", config.recompute_ratio, config.recomputes),
        ("vpipe.swap_ratio", config.swap_ratio, config.swaps),
        ("vpipe.replan.every", config.replan.every, config.replan.every > 0),
    )
    refuse_own_forward(model, consensus, {key: value for key, value, is_set in rows if is_set})


def _refuse_tied_lamb(model: PipelineModule, json: DeepSpeedJson, config: VPipeConfig, consensus: Consensus) -> None:
    """Refuse on every rank steps by the norm of ZeRO's vector where copies, which nobody reads, are in it."""
    by_norm = json.zero_stage == 1 and "lamb" in (json.optimizer or "").lower() and config.sync_mode == "asp"
    if by_norm and consensus.any_has(bool(model.tied_comms), "all ranks to look for tied weights"):
        allowed = f'0 next to optimizer.type "{json.optimizer}" and weights that are tied over stages'
        why = "LAMB's steps would depend on a stage's whole vector, the copy of a tied weight in it"
        raise Refusal("zero_optimization.stage", 1, allowed, "use stage 0, or another optimizer", why).error()


def _refuse_types(model: PipelineModule, json: DeepSpeedJson, replicas: int, consensus: Consensus) -> None:
    """Refuse parameters of types in which they are not trained.

    Flat buffers would hold the real parts of complex ones alone, and float64 in float32; gradients of neither can be
    reduced, and our optimizers know no complex ones.
    """
    real = (json.optimizer or "").lower() in ("lamb", "soap")
    flat = ("zero_optimization.stage", json.zero_stage or 0, 0)
    reduced = ("replicas", replicas, 1)
    in_fp32 = ("DeepSpeed JSON", f"training in {json.dtype}", "training in float32")
    by_optimizer = ("optimizer.type", json.optimizer, "AdamW" if real else json.optimizer)
    for kind, types, remedy, settings in (
        ("complex parameters", _COMPLEX, "real parameters and use torch.view_as_complex()",
         (by_optimizer, flat, in_fp32, reduced)),
        ("parameters in float64", (torch.float64,), "parameters in float32 and cast them",
         (flat, reduced) if json.dtype == "float32" else ()),
    ):  # fmt: skip
        unfit = next((setting for setting in settings if setting[1] != setting[2]), None)
        has_them = any(parameter.dtype in types and parameter.requires_grad for parameter in model.parameters())
        if unfit is not None and consensus.any_has(has_them, f"all ranks to look for {kind}"):
            key, value, allowed = unfit
            raise Refusal(key, value, f"{allowed} for a model with {kind}", f"let layers have {remedy}").error()


def _recompute_and_swap(model: PipelineModule, pipeline: Pipeline, random_states: RandomStates, swap: Any) -> None:
    """Give the stage's layers, part by part, their shares of what is recomputed and swapped."""
    ratios, swap_ratios = (
        (found or ())[model.stage_id :: model.num_stages] for found in (pipeline.recompute_ratio, pipeline.swap_ratio)
    )
    ends, stashed = getattr(model, "_vpipe_ends", [len(model.forward_funcs)]), pipeline.weight_sync != "none"
    segments = [
        Segment(start, end, ratio, random_states, swapped, swap, stashed)
        for (start, end), ratio, swapped in zip(pairwise([0, *ends]), ratios, swap_ratios, strict=True)
    ]
    if isinstance(model, InterleavedMixin):
        model._vpipe_segments = segments
    else:
        apply_recompute(model, segments[0])


def prepared_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[dict[str, Any], Prepared]:
    """Arguments of a ``PipelineEngine`` that a script builds, as :func:`ds_vpipe.initialize` would pass them.

    Without a ``"vpipe"`` block the engine is synchronous, as the one whose place it takes.
    """
    names = [*inspect.signature(PipelineEngine.__init__).parameters][1:2]
    names += [*inspect.signature(DeepSpeedEngine.__init__).parameters][1:]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    ds_config = given.get("config")
    if ds_config is None:
        ds_config = given["config_class"]._param_dict
    elif not isinstance(ds_config, Mapping):
        ds_config = load_deepspeed_json(ds_config)
    if DeepSpeedJson(ds_config).block is None:
        ds_config = {**ds_config, "vpipe": _WITHOUT_BLOCK}
    optimizer, model = given.get("optimizer"), given["model"]
    json = DeepSpeedJson(ds_config).next_to(optimizer)
    prepared = prepare(model, json, VPipeConfig.parse(json.block), optimizer, given.get("model_parameters"))
    parameters = prepared.model_parameters
    return {**given, "config": ds_config, "model_parameters": parameters, "mpu": model.mpu()}, prepared


def with_staleness(engine: PatchedPipelineEngine, prepared: Prepared) -> Prepared:
    """Prepared settings with those of ``"staleness"`` that the block leaves open; rank 0 prints which."""
    pipeline = replace(prepared.pipeline, micro_batches=engine.micro_batches)
    brought = None if engine.client_optimizer is None else OF_SCRIPT
    brought = "SOAP" if isinstance(engine.basic_optimizer, SOAP) else brought
    config, choice = settled(prepared.config, pipeline, prepared.json, brought)
    if engine.global_rank == 0 and choice.is_warning:
        logger.warning(f"ds_vpipe: {choice.line}")
    elif engine.global_rank == 0 and choice.line:
        print(f"ds_vpipe: {choice.line}", flush=True)
    return replace(prepared, config=config)


def stage_of(engine: PatchedPipelineEngine, prepared: Prepared) -> Stage:
    """The stage of an engine that DeepSpeed has built around the prepared module; all ranks make one.

    Raises:
        VPipeConfigError: the schedule cannot be carried out, or the settings do not work with the model or the
            optimizer; on every rank.
    """
    config, module, grid, groups = prepared.config, engine.module, engine.grid, prepared.groups
    pipeline = replace(prepared.pipeline, micro_batches=engine.micro_batches)
    asynchronous = not pipeline.synchronous
    pipelined = asynchronous and pipeline.num_stages > 1
    clips_globally = pipelined and config.gradient_clipping_scope == "delayed_global" and engine.gradient_clipping() > 0
    tied = tied_stages(module) if asynchronous else {}
    exchanges = exchanges_by_rank(pipeline.num_stages, tied.values(), clips_globally)
    check_pipeline(pipeline, exchanges)
    number = engine.stage_id
    copies = copies_of(engine.device)
    refuse_payload(config.link, copies, groups.me, prepared.consensus.everyone.gather)
    wiring = Wiring(groups, copies, config.link)
    links = StageLinks(grid, pipeline, groups.me, wiring)
    _say_what_runs(engine, pipeline, links, prepared.consensus)
    delay_warmup = DelayWarmup.of(config.staleness, pipeline.delays[0])
    stash = config.weight_sync != "none"
    weights = WeightStashingOptimizer(engine.optimizer, module.parameters(), stash=stash, version=engine.global_steps)
    use_sound_checkpointing(module, pipelined, prepared.random_states)
    if number < pipeline.num_stages - 1 and not isinstance(module, SplitModule):
        refuse_training_outside_layers(module)
    scaled = engine.optimizer is not None and engine.fp16_enabled()
    dynamic = scaled and engine.dynamic_loss_scale()
    stage = Stage(
        pipeline=pipeline,
        first_partition=pipeline.counts,
        number=number,
        exchanges_by_rank=exchanges,
        module=module,
        built={number: Built.of(layer) for number, layer in layers_by_number(module).items()},
        device=engine.device,
        copies=copies,
        groups=groups,
        consensus=prepared.consensus,
        wiring=wiring,
        links=links,
        ties=TiedWeights(module, tied, grid, pipeline.depths, wiring),
        feed=MicroBatchFeed(
            copies,
            inputs=number == 0,
            labels=number == pipeline.num_stages - 1,
            # A rank alone in its stage: its own answer.
            all_have=bool if prepared.consensus.one_rank else prepared.consensus.all_have,
        ),
        weights=weights,
        loss_scaling=LossScaling(engine.optimizer) if scaled else None,
        peers=PeerUpdates(pipeline.num_stages, number) if pipelined and (clips_globally or dynamic) else None,
        staleness=config.staleness,
        delay_warmup=delay_warmup,
        random_states=prepared.random_states,
        swap=prepared.swap,
        drains=DrainWatch(engine.global_rank == 0),
        batch_loss=lambda: BatchLoss(engine.micro_batches, engine.mpu.get_data_parallel_group(), engine.dp_world_size),
        may_withdraw=pipelined,
    )
    if engine.optimizer is not None:
        use_optimizer(engine, stage, config)
    return stage


def _say_what_runs(engine: PatchedPipelineEngine, pipeline: Pipeline, links: StageLinks, consensus: Consensus) -> None:
    """Say on rank 0 what trains, and what carries tensors from each stage to the next; all ranks call this."""
    mine = links.next.activations.payload if links.after else None
    payloads = consensus.pipeline.gather(mine, "all stages to make their links")
    if engine.global_rank == 0:
        print(f"ds_vpipe: {pipeline.line}", flush=True)  # DeepSpeed's logger shows warnings alone
    if engine.global_rank == 0 and mine is not None:
        found = ", ".join(f"{stage} {payload}" for stage, payload in enumerate(payloads) if payload is not None)
        print(f"ds_vpipe: links from each stage to the next: {found}", flush=True)


def use_optimizer(engine: PatchedPipelineEngine, stage: Stage, config: VPipeConfig) -> None:
    """Let the engine's optimizer take NAdam's steps, if the block says so and this stage is late.

    Raises:
        VPipeConfigError: the optimizer has no moments; on every rank.
    """
    if engine.basic_optimizer is None:  # a wrapper for half precision around none
        return
    engine.trains = stage.consensus.any_has(engine.trains, "all ranks to take an optimizer")
    # The base optimizer, wherever DeepSpeed has it.
    use_nadam(engine.basic_optimizer, config.staleness, stage.pipeline.delays[stage.number])


def refuse_late_optimizer(
    engine: PatchedPipelineEngine, stage: Stage, optimizer: Any, parameters: list[Any] | None
) -> None:
    """Refuse an optimizer after :func:`stage_of` that this engine cannot take; all ranks call this."""
    found = None
    if engine.get_data_types()[0] != torch.float32:
        found = "with fp16 or bf16 in the JSON, allowed there is an optimizer given to initialize()"
    groups = optimizer.param_groups if isinstance(optimizer, torch.optim.Optimizer) else parameters or []
    mine = {id(parameter) for parameter in engine.stage_parameters}
    if stage.consensus.any_has(any(id(p) not in mine for p in all_members(groups)), "all ranks to take an optimizer"):
        found = "with parameters that their stage does not have, allowed are those of engine.module after initialize()"
    if found is not None:
        raise VPipeConfigError(
            f"_configure_optimizer() after initialize(): got an optimizer {found}; pass it to initialize(optimizer=...)"
        )


def _devices(config: VPipeConfig, json: DeepSpeedJson, replicas: int, consensus: Consensus) -> Devices:
    on_gpu = get_accelerator().device_name() == "cuda"
    room = int(_SHARE_OF_DEVICE * get_accelerator().total_memory()) if on_gpu else 0
    room = consensus.everyone.minimum(room, "all ranks to look at their devices")  # else they might decide differently
    return Devices.of(config, json, replicas=replicas, device_bytes=room or None, host_transfers=not on_gpu)


def _planned(
    config: VPipeConfig, pipeline: Pipeline, json: DeepSpeedJson, devices: Devices, model: PipelineModule
) -> Plan:
    profile = read_profile(config.profile, json, model._num_layers)
    plan = configured_plan(config, pipeline, devices, profile, _own_counts(model))
    if model.global_rank == 0:
        print(f"ds_vpipe: planned from {config.profile}\n{plan.table()}", flush=True)
    return plan


def _own_counts(model: PipelineModule) -> list[int]:
    """Layers per stage as the module was built."""
    return [stop - start for start, stop in pairwise(model.parts)]


def _of_stage(model: PipelineModule, optimizer: Any, parameters: Any) -> tuple[Any, list[torch.Tensor]]:
    """``parameters`` without those of other stages, which the script's optimizer loses too, and what was left out.

    A script may build its layers around a whole model and pass that one's parameters. Those of other stages get no
    gradient here, so that DeepSpeed's optimizers leave them as they are; a checkpoint would have no names for them.
    """
    given, parameters = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None, listed(parameters)
    if isinstance(model, SplitModule) or (given is None and parameters is None):
        return parameters, []
    mine = {id(parameter) for parameter in model.parameters()}

    def own(members: Iterable[Any]) -> list[Any]:
        return [parameter for parameter in members if id(parameter) in mine]

    if given is not None:
        return parameters, follow(given, own)
    groups = [isinstance(item, dict) for item in parameters]
    if any(groups):  # a mixture is torch's to refuse
        return parameters, leave_out(parameters, own) if all(groups) else []
    return own(parameters), [parameter for parameter in parameters if id(parameter) not in mine]


def _split(model: PipelineModule, pipeline: Pipeline, optimizer: Any, parameters: Any, consensus: Consensus) -> Any:
    """Split ``model`` as ``pipeline`` says; returns ``parameters``, which follow their layers as the optimizer's do."""
    counts, virtual = pipeline.counts, pipeline.virtual_stages
    optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    parameters = listed(parameters)
    if optimizer is None and parameters is None:
        repartition(model, counts, virtual)
        return None
    groups = parameters if optimizer is None else optimizer.param_groups
    in_groups = any(isinstance(item, dict) for item in groups)
    groups = groups if in_groups else [{"params": parameters}]
    layers = layers_here(model)
    members, gone = members_by_layer(groups, layers), [p for layer in layers.values() for p in layer.parameters()]
    if not repartition(model, counts, virtual):
        return parameters
    used = optimizer is not None and bool(optimizer.state)
    what = "all ranks to give optimizers the layers of a new split"
    found = consensus.everyone.gather((members, len(groups), used), what)
    regroup(groups, {place: at for mine, *_ in found for place, at in mine.items()}, gone, layers_here(model))
    idle = optimizer is not None and not any(group["params"] for group in groups)
    idles = consensus.any_has(idle, what)
    for wrong, words in (
        (
            any(used for *_, used in found),
            "the optimizer given to initialize() has made updates, or is an Adagrad, which has states before the "
            "first; allowed is one without states",
        ),
        (len({n for _, n, _ in found}) > 1, "stages have different numbers of parameter groups, allowed is one"),
        (idles, "leaves a stage nothing to train, allowed with an optimizer given to initialize() is something"),
    ):
        if wrong:
            key = f"vpipe.virtual_stages: got {virtual}, so" if virtual > 1 else "vpipe.partition: got"
            raise VPipeConfigError(
                f"{key} {list(counts)}, which moves layers between stages, but {words}; leave the split as it is, or "
                f"pass a function that makes the optimizer: initialize(optimizer=lambda parameters: ...)"
            )
    return parameters if optimizer is not None or in_groups else groups[0]["params"]


def _limit_cpu_threads() -> None:
    """Share the cores among the ranks of a machine, unless the user has decided that."""
    ranks = int(os.environ.get("LOCAL_SIZE", "1"))
    if "OMP_NUM_THREADS" in os.environ or ranks < 2 or torch.cuda.is_available():
        return
    threads = max(1, (os.cpu_count() or 1) // ranks)
    if torch.get_num_threads() > threads:
        torch.set_num_threads(threads)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            said = f"OMP_NUM_THREADS is not set; {ranks} ranks here, {threads} CPU thread(s) each"
            print(f"ds_vpipe: {said}", flush=True)
