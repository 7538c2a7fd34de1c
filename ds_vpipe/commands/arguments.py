"""Arguments that commands share, and the pipeline, profile, devices and timelines that they name."""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ds_vpipe.commands.argument_types import count, depth, fields, formed, numbers, seconds, size, sizes
from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson, parse_deepspeed_json
from ds_vpipe.config.unsupported import refuse_unsupported
from ds_vpipe.errors import Refusal, read_json
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import ModelProfile
from ds_vpipe.schedules.moves import Move, check_move, moved
from ds_vpipe.schedules.pipeline import SCHEDULES, Pipeline
from ds_vpipe.schedules.program import Workload
from ds_vpipe.simulation.costs import StageCost
from ds_vpipe.simulation.simulator import simulate
from ds_vpipe.tables import counted
from ds_vpipe.timelines.merge import merge, read_recordings
from ds_vpipe.timelines.summary import summarize
from ds_vpipe.timelines.timeline import FORMAT, Recording, Timeline

if TYPE_CHECKING:
    from ds_vpipe.planning.plan import Plan

_MOST_PASSES = 2_000_000  # some tens of seconds
_MOST_PARTS = 100_000
_BARE = {"partition": None, "recompute_ratio": 0.0, "swap_ratio": 0.0, "memory_budget": None}
# What another schedule than asp does not have.
_OF_ASP = {
    "stage_to_depth_map": "default",
    "weight_sync": "stash",
    "gradient_clipping_scope": "stage",
    "staleness": None,
}
_LENGTHS = ("backward", "transfer", "update")
_OF_PLANS = (
    *("stages", "micro_batches", "replicas", "schedule", "virtual_stages", "depth", "split", "batches", "move"),
    *_LENGTHS,
)
_OTHER_FILES = (
    ({"layers", "micro_batch_size"}, "a profile of layers", "give it to simulate with --profile"),
    ({"partition"}, "a split", "give it with --split, beside a DeepSpeed JSON"),
    ({"traceEvents"}, "a trace", "open it in https://ui.perfetto.dev"),
)  # by their keys
_OBJECTS = ("optimizer", "scheduler", "zero_optimization", "fp16", "bf16")


class Answer(NamedTuple):
    """Outcome of a command: for scripts as JSON types or for people as text, and the exit status."""

    data: Callable[[], Any]
    text: Callable[[], str]
    status: int = 0


# The pipeline


def add_pipeline_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that :func:`read_pipeline` reads."""
    group = parser.add_argument_group("the pipeline; what is not given comes from the DeepSpeed JSON")
    group.add_argument(
        "--stages", type=count, metavar="K", help="ranks of the pipeline; default: pipeline.stages or a list"
    )
    group.add_argument("--micro-batches", type=count, metavar="M", help="per batch; default: what the batch sizes say")
    group.add_argument(
        "--replicas", type=count, metavar="N", help="data-parallel; default: what the batch sizes say, or 1"
    )
    group.add_argument("--schedule", choices=SCHEDULES, help="order of the passes")
    group.add_argument("--virtual-stages", type=count, metavar="V", help="parts of the model per rank, for interleaved")
    group.add_argument("--depth", type=numbers(depth), metavar="W,W,...", help="warm-up depths, for asp")
    group.add_argument("--split", metavar="FILE", help="partition and ratios, a file that plan wrote")
    group.add_argument("--batches", type=count, metavar="N", help="to train; default: enough to see the pattern")


def read_file(path: str) -> dict[str, Any]:
    """The object in a JSON file."""
    return read_json(path, "file", "a file with a JSON object", "correct the path or the file", parse_deepspeed_json)


def read_pipeline(
    arguments: argparse.Namespace, path: str | None, recorded: int | None = None
) -> tuple[VPipeConfig, DeepSpeedJson, Pipeline]:
    """The ``"vpipe"`` block with the options in it, the JSON around it, and the pipeline that they describe.

    A JSON without a block is DeepSpeed's own 1F1B. The pipeline has schedule and sizes only: the partition in the JSON
    may be for another number of stages than is asked about here. Without any it has the number ``recorded``.

    Raises:
        VPipeConfigError: a size is not known, or the values are wrong or do not fit together.
    """
    if path is None and arguments.micro_batches is None:
        allowed = "a DeepSpeed JSON, or --stages K with --micro-batches M"
        raise Refusal("input", None, allowed, "give one of the two").error()
    ds_config = DeepSpeedJson({} if path is None else read_file(path))
    refuse_shapes(ds_config)
    block = ds_config.block
    if block is None:
        block = {"sync_mode": "bsp"} if path else {}
    if arguments.split is not None:
        block = {**block, "partition": arguments.split}
        for name in ("recompute_ratio", "swap_ratio"):
            block.pop(name, None)
    config, options = VPipeConfig.parse(block), dict[str, Any]()
    if arguments.schedule is not None:
        bsp = {"sync_mode": "bsp", "schedule": arguments.schedule, **_OF_ASP}
        options = {"sync_mode": "asp"} if arguments.schedule == "asp" else bsp
        if arguments.schedule != "interleaved":
            options["virtual_stages"] = 1
    options_of = {"virtual_stages": arguments.virtual_stages, "stage_to_depth_map": arguments.depth}
    given = {name: value for name, value in options_of.items() if value is not None}
    own = config.model_copy(update=given)  # another schedule has as many stages
    config = config.model_copy(update=options | given)
    bare = config.model_copy(update=_BARE)
    num_stages = arguments.stages or _num_stages(own if arguments.split is None else config, ds_config, recorded)
    parts = num_stages * config.virtual_stages
    if parts > _MOST_PARTS:
        name = "number of stages, virtual ones counted"
        raise Refusal(name, parts, f"at most {_MOST_PARTS}", "give fewer --stages or --virtual-stages").error()
    if ds_config.block is not None:
        refuse_unsupported(ds_config, config, ds_config.stages or num_stages)  # --stages is for what would be
    replicas = replicas_of(arguments, ds_config)
    if arguments.micro_batches is None:
        ranks = replicas * num_stages
        plain = ds_config.stages is not None  # the total of its script may count all ranks as replicas
        (ds_config.corrected(ranks, num_stages)[0] if plain else ds_config).refuse_batch_sizes(ranks, num_stages)
    micro_batches = arguments.micro_batches or ds_config.micro_batches(replicas)
    return config, ds_config, bare.pipeline(num_stages, micro_batches)


def refuse_shapes(ds_config: DeepSpeedJson) -> None:
    """Refuse values where DeepSpeed has objects."""
    for key in _OBJECTS:
        value = ds_config.content.get(key, {})
        if not isinstance(value, dict | bool if key == "zero_optimization" else dict):
            raise Refusal(key, value, "an object, as DeepSpeed has it", "correct the JSON").error()


def replicas_of(arguments: argparse.Namespace, ds_config: DeepSpeedJson) -> int:
    """Data-parallel replicas: those given, or those that the JSON's batch sizes fit."""
    return arguments.replicas or (1 if arguments.micro_batches else ds_config.replicas)


def _num_stages(config: VPipeConfig, ds_config: DeepSpeedJson, recorded: int | None) -> int:
    given = ds_config.stages
    ratios = config.recompute_ratio if config.virtual_stages == 1 else None  # of stages or of virtual stages
    for values, share in ((config.stage_to_depth_map, 1), (config.partition, config.virtual_stages), (ratios, 1)):
        if isinstance(values, tuple) and len(values) % share == 0:
            listed = len(values) // share
            if given not in (None, listed):
                reason = f"vpipe has a list for {listed}"
                raise Refusal("pipeline.stages", given, str(listed), "correct one of the two", reason).error()
            return listed
    if (given := given or recorded) is None:
        reason = "neither pipeline.stages nor a list in the JSON says it"
        raise Refusal("number of stages", None, "a whole number >= 1", "give --stages K", reason).error()
    return given


def workload_from(arguments: argparse.Namespace, pipeline: Pipeline, beyond: int) -> Workload:
    """The batches asked for, or those that fill the pipeline and ``beyond`` more."""
    moves: list[Move] = getattr(arguments, "move", [])
    partition = pipeline.partition
    for earlier, later in zip([None, *moves], moves, strict=False):
        check_move(pipeline, partition, later, 0, earlier)
        partition = partition and moved(partition, later)
    enough = max([pipeline.delays[0], *(one.settled_batch(pipeline) for one in moves)]) + beyond
    workload = Workload(arguments.batches or enough, (), tuple(moves))
    end = workload.batches * pipeline.micro_batches
    for one in moves:
        if one.micro_batch >= end:
            why = "the last micro-batch comes before it"
            raise Refusal("--move", str(one), f"a micro-batch below {end}", "give more --batches", why).error()
    check_workload(pipeline, workload)
    return workload


def add_move_argument(parser: argparse._ActionsContainer) -> None:
    """Add the option for moves of layers, which :func:`workload_from` reads."""
    what = "a layer that moves to a neighbouring stage at a micro-batch while training runs; may be given again"
    name = "LAYER:STAGE:STAGE:MICRO_BATCH"
    parser.add_argument("--move", action="append", default=[], type=move, metavar=name, help=what)


move = formed(fields(Move, int, int, int, int), "four whole numbers, LAYER:STAGE:STAGE:MICRO_BATCH")


def check_workload(pipeline: Pipeline, workload: Workload) -> None:
    """Refuse a workload that would take minutes or more memory than there is."""
    passes = 2 * pipeline.num_parts * pipeline.micro_batches * workload.batches
    if passes > _MOST_PASSES:
        allowed, remedy = f"at most {_MOST_PASSES} passes to look at", "give fewer --batches, micro-batches or stages"
        given = (pipeline.num_parts, "part"), (pipeline.micro_batches, "micro-batch"), (workload.batches, "batch")
        sizes = ", ".join(counted(number, noun) for number, noun in given)
        raise Refusal("schedule", passes, allowed, remedy, f"passes of {sizes}").error()


def check_counted(pipeline: Pipeline) -> None:
    """Refuse a pipeline of which the planner would count too many passes."""
    check_workload(pipeline, Workload(1 + pipeline.delays[0]))


# Profile and devices


def add_config_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a DeepSpeed JSON, and the options that :func:`read_pipeline` reads."""
    parser.add_argument("config", nargs="?", metavar="DS_CONFIG", help="a DeepSpeed JSON")
    add_pipeline_arguments(parser)


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Add :func:`add_config_arguments`, and the options that :func:`read_costs` reads."""
    add_config_arguments(parser)
    group = parser.add_argument_group("costs; what is not given comes from the vpipe block of the DeepSpeed JSON")
    for name, of, what in (
        ("bandwidth", size, "of a link, per second, such as 10GB; default: link_bandwidth, or transfers are free"),
        ("host-bandwidth", size, "between device and host, per second; default: host_bandwidth"),
        ("reduce-bandwidth", size, "between replicas of a stage, per second; default: reductions are free"),
        ("memory", sizes, "per device, such as 16GB, or one for every rank; default: memory_budget"),
    ):
        group.add_argument(f"--{name}", type=of, metavar="BYTES", help=what)
    group.add_argument("--profile", metavar="FILE", help="of layers, from the command profile; default: profile")
    group.add_argument("--latency", type=seconds, default=0.0, metavar="S", help="seconds of every transfer; default 0")


def read_costs(
    arguments: argparse.Namespace, config: VPipeConfig, ds_config: DeepSpeedJson
) -> tuple[ModelProfile, Devices]:
    """The profile that is named, and the devices that training plans for by the JSON.

    Raises:
        VPipeConfigError: none is named, the file is not a profile, or not one of what the JSON trains.
    """
    from ds_vpipe.planning.planner import read_profile  # only where it is asked for: it takes numpy's time

    options = vars(arguments)  # of commands that plan; others take everything from the JSON
    profile = read_profile(options.get("profile") or config.profile, ds_config if ds_config.content else None)
    names = {"memory_budget": "memory", "link_bandwidth": "bandwidth", "host_bandwidth": "host_bandwidth"}
    given = {key: options[name] for key, name in names.items() if options.get(name) is not None}
    replicas, latency_s = replicas_of(arguments, ds_config), options.get("latency", 0.0)
    devices = Devices.of(
        config.model_copy(update=given),
        ds_config,
        replicas=replicas,
        host_transfers=profile.on_host,
        latency_s=latency_s,
        reduce_bandwidth=options.get("reduce_bandwidth"),
    )
    return profile, devices


def read_plan(
    arguments: argparse.Namespace, config: VPipeConfig, ds_config: DeepSpeedJson, pipeline: Pipeline
) -> "tuple[Plan, Devices, ModelProfile]":
    """The plan of the block for the pipeline's sizes, with the devices and the profile that it counts with.

    Raises:
        VPipeConfigError: as a start would raise it, for want of a profile or of memory, or for what is in them.
    """
    from ds_vpipe.planning.planner import configured_plan

    check_counted(pipeline)
    profile, devices = read_costs(arguments, config, ds_config)
    configured = config.pipeline(pipeline.num_stages, pipeline.micro_batches)
    return configured_plan(config, configured, devices, profile), devices, profile


def with_planned_depths(
    arguments: argparse.Namespace, config: VPipeConfig, ds_config: DeepSpeedJson, pipeline: Pipeline
) -> Pipeline:
    """The pipeline with the depths that a start plans, where the block leaves anything to the planner.

    Raises:
        VPipeConfigError: see :func:`read_plan`.
    """
    if not config.leaves_to_planner:
        return pipeline
    plan, *_ = read_plan(arguments, config, ds_config, pipeline)
    return replace(pipeline, depth_map=plan.depths or None)


# Timelines


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of :func:`timelines_from`."""
    what = "a DeepSpeed JSON, a timeline, or a recording: the folder of a run, or the files in it"
    parser.add_argument("paths", nargs="*", metavar="PATH", help=what)
    add_pipeline_arguments(parser)
    group = parser.add_argument_group("length of things in a schedule drawn without a profile, in forward passes")
    group.add_argument("--backward", type=seconds, metavar="X", help="a backward pass; default 2")
    group.add_argument("--transfer", type=seconds, metavar="X", help="a transfer; default 0")
    group.add_argument("--update", type=seconds, metavar="X", help="an update; default 0")
    add_move_argument(group)
    group = parser.add_argument_group("recordings")
    group.add_argument("--replica", type=int, metavar="N", help="which data-parallel replica; default 0")


def timelines_from(arguments: argparse.Namespace) -> list[Timeline]:
    """The timelines that are named, in order. Files of single ranks together are one recording.

    Raises:
        VPipeConfigError: a file is none of the kinds allowed, or nothing is named.
    """
    timelines: list[Timeline] = []
    recordings: list[Recording] = []
    place, replica = 0, arguments.replica or 0  # the place is that of the first file of a single rank
    planned, recorded = not arguments.paths, False
    if planned:
        timelines.append(_planned(arguments, None))
    for path in arguments.paths:
        if Path(path).is_dir():
            timelines.append(merge(read_recordings(path), replica))
            recorded = True
            continue
        content = read_file(path)
        for keys, what, remedy in _OTHER_FILES:
            if content.keys() >= keys:
                allowed = "a DeepSpeed JSON, a timeline, or a recording"
                raise Refusal("input", path, allowed, remedy, f"it is {what}").error()
        if content.get("format") != FORMAT:
            timelines.append(_planned(arguments, path))
            planned = True
            continue
        timeline = Timeline.from_json(content, f"{path}: timeline")
        if isinstance(timeline, Recording):
            place = place if recordings else len(timelines)
            recordings.append(timeline)
        else:
            timelines.append(timeline)
    unused = dict.fromkeys(() if planned else _OF_PLANS, ("a DeepSpeed JSON", "timelines are drawn as they are"))
    if not (recorded or recordings):
        unused["replica"] = "a recording", "nothing else has replicas"
    for name, (files, why) in unused.items():
        if (value := getattr(arguments, name)) not in (None, []):
            option, allowed = f"--{name.replace('_', '-')}", f"the option with {files}"
            raise Refusal(option, value, allowed, "leave it out", why).error()
    if recordings:
        timelines.insert(place, merge(recordings, replica))
    return timelines


def planned_timeline(
    pipeline: Pipeline, workload: Workload, backward: float = 2.0, transfer: float = 0.0, update: float = 0.0
) -> Timeline:
    """Plan of a pipeline with equal parts. Lengths in forward passes of a part."""
    cost = StageCost(1.0, backward, transfer, transfer, update)
    timeline = simulate(pipeline, [cost] * pipeline.num_parts, workload).timeline
    return replace(timeline, source="plan", meta={**timeline.meta, "time_unit": "forward passes"})


def entitled(timeline: Timeline, *files: str | None) -> Timeline:
    """``timeline``, titled with the names of its files, if any."""
    names = " with ".join(Path(file).stem for file in files if file is not None)
    return replace(timeline, title=f"{names}: {timeline.title}") if names else timeline


def summaries(timelines: Sequence[Timeline]) -> list[dict[str, object]]:
    """Numbers of timelines, for scripts."""
    return [{"title": t.title, "source": t.source, "meta": dict(t.meta), **asdict(summarize(t))} for t in timelines]


def _planned(arguments: argparse.Namespace, config: str | None) -> Timeline:
    block, ds_config, pipeline = read_pipeline(arguments, config)
    if block.stage_to_depth_map == "auto":
        pipeline = with_planned_depths(arguments, block, ds_config, pipeline)
    workload = workload_from(arguments, pipeline, 1 if pipeline.synchronous else 4)
    lengths = {name: value for name in _LENGTHS if (value := getattr(arguments, name)) is not None}
    timeline = planned_timeline(pipeline, workload, **lengths)
    return entitled(timeline, config, arguments.split)
