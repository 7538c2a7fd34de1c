"""Simulation of a schedule: throughput, bubble, staleness, memory.

Seconds and bytes of every part of the model come from a profile and the partition and recompute_ratio of the DeepSpeed
JSON, from the recording of a run, or are given as numbers.

With --replan training balances itself, as "replan" in the JSON says: what a change of speed would lead to, by the
decisions that a run would take, beside the same training without.

examples:
  python -m ds_vpipe simulate ds_config.json --profile bert.json --bandwidth 10GB
  python -m ds_vpipe simulate ds_config.json --recording timeline --schedule asp      what would that have been?
  python -m ds_vpipe simulate ds_config.json --stages 4 --forward 0.012 --backward 0.024 --send 0.003
  python -m ds_vpipe simulate --stages 4 --micro-batches 8 --schedule gpipe --forward 1,1,2,1 --backward 2,2,4,2
  python -m ds_vpipe simulate ds_config.json --profile bert.json -o simulation.json     then: report simulation.json
  python -m ds_vpipe simulate ds_config.json --profile bert.json --replan --slow 1:2:200 --freeze 12:400 -o pace.svg
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ds_vpipe.commands.argument_types import count, factor, fields, formed, numbers, output, seconds, whole
from ds_vpipe.commands.arguments import (
    Answer,
    add_move_argument,
    add_profile_arguments,
    check_workload,
    entitled,
    read_pipeline,
    read_plan,
    replicas_of,
    with_planned_depths,
    workload_from,
)
from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.config.live_moves import unfit_json
from ds_vpipe.errors import Refusal
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import ModelProfile
from ds_vpipe.planning.planner import predict
from ds_vpipe.schedules.moves import Move, moved
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload
from ds_vpipe.simulation.costs import StageCost, planned_costs, recorded_costs
from ds_vpipe.simulation.replanning import Conditions, Freezing, Slowdown, replanned
from ds_vpipe.simulation.simulator import Phase, Simulation, simulate
from ds_vpipe.staleness.automatic import settled
from ds_vpipe.tables import aligned, show_bytes
from ds_vpipe.timelines.merge import merge, read_recordings

# Sources of costs, and the options with further seconds that each of them takes.
_TAKES = {"--profile": ["update"], "--recording": [], "--forward": ["backward", "send", "update"]}
_FOR_PLANS = ["bandwidth", "host_bandwidth", "reduce_bandwidth", "memory", "latency"]
_BEYOND = 10  # batches after the pipeline is full
_EVERY = 50  # updates between two looks, where the JSON has none
_LOOKS = 4  # after the last change


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_profile_arguments(parser)
    parser.add_argument("--recording", metavar="FOLDER", help="of the same partition, to take the seconds from")
    group = parser.add_argument_group("costs without both: a number for all parts, or one for each with commas")
    for name, what in (
        ("forward", "a forward pass"),
        ("backward", "a backward pass; default: twice as long"),
        ("send", "a transfer; default 0"),
        ("update", "an update; default 0, also with --profile"),
    ):
        group.add_argument(f"--{name}", type=numbers(seconds), metavar="S", help=f"seconds of {what}")
    add_move_argument(parser)
    group = parser.add_argument_group("output")
    what = "write the timeline, for show, trace and report; with --replan .svg or .png draw seconds by update"
    group.add_argument("-o", "--output", type=output, metavar="FILE", help=what)
    group = parser.add_argument_group("a pipeline that balances itself, with --profile")
    group.add_argument("--replan", action="store_true", help='with the looks that "replan" in the JSON asks for')
    what = 'updates between two looks; default: "every" in the JSON, or 50'
    group.add_argument("--every", type=count, metavar="N", help=what)
    what = "a stage that takes FACTOR times as long from UPDATE on; may be given again"
    name = "STAGE:FACTOR:UPDATE"
    group.add_argument("--slow", action="append", default=[], type=slowdown, metavar=name, help=what)
    what = "as many first layers that are frozen from UPDATE on; may be given again"
    group.add_argument("--freeze", action="append", default=[], type=freezing, metavar="LAYERS:UPDATE", help=what)


slowdown = formed(fields(Slowdown, whole, factor, whole), "three numbers, STAGE:FACTOR:UPDATE")
freezing = formed(fields(Freezing, count, whole), "two whole numbers, LAYERS:UPDATE")


def run(arguments: argparse.Namespace) -> Answer:
    recording = None if arguments.recording is None else merge(read_recordings(arguments.recording))
    known = None if recording is None else recording.num_ranks
    config, ds_config, pipeline = read_pipeline(arguments, arguments.config, known)
    given = [name for name in _TAKES if getattr(arguments, name[2:]) is not None]
    given = given or ["--profile"] * (config.profile is not None)
    if len(given) != 1:
        remedy = "give one of them; profile makes a profile, vpipe.timeline a recording"
        allowed = "one of --profile FILE, --recording FOLDER, --forward S"
        raise Refusal("costs", " and ".join(given) or None, allowed, remedy).error()
    plans = given[0] == "--profile" or config.stage_to_depth_map == "auto"
    for name in [*_TAKES["--forward"], *_FOR_PLANS]:
        value = getattr(arguments, name)
        if value and name not in _TAKES[given[0]] + _FOR_PLANS * plans:  # it would be without effect
            option = f"--{name.replace('_', '-')}"
            raise Refusal(option, value, "none", "leave it out", f"{given[0]} has the seconds").error()
    if arguments.memory is not None and not (config.leaves_to_planner or arguments.replan):
        why, fix = "the split is given", "leave it out, or see what fits with plan --current"
        raise Refusal("--memory", arguments.memory, "the option where something is planned", fix, why).error()
    if given[0] == "--profile" and arguments.update is not None and len(arguments.update) > 1:
        allowed = "one number next to a profile, for all stages"
        raise Refusal("--update", arguments.update, allowed, "give the slowest one's").error()
    if arguments.replan:
        return _replan(arguments, config, ds_config, pipeline, given[0])
    if arguments.slow or arguments.freeze or arguments.every:
        raise Refusal("--replan", None, "the option, with --slow, --freeze and --every", "add it").error()
    profile: ModelProfile | None = None
    if given[0] != "--profile" and config.stage_to_depth_map == "auto":
        pipeline = with_planned_depths(arguments, config, ds_config, pipeline)
    if given[0] == "--forward":
        costs = _given(arguments, pipeline.num_parts)
    elif recording is not None:
        costs = recorded_costs(recording, pipeline.num_parts)
    else:
        plan, devices, profile = read_plan(arguments, config, ds_config, pipeline)
        pipeline, costs = plan.pipeline, planned_costs(plan, devices, _update_s(arguments))
    workload = workload_from(arguments, pipeline, _BEYOND)
    later = _after_moves(workload.moves, pipeline, profile, devices, _update_s(arguments)) if profile else []
    simulation = simulate(pipeline, costs, workload, later)
    config, choice = settled(config, pipeline, ds_config)
    if arguments.output is not None:
        entitled(simulation.timeline, arguments.config, arguments.split).save(arguments.output)
    lines = [choice.line] if choice.settings is not None and choice.line else []
    if config.staleness is not None and config.staleness.synchronous_updates:
        lines.append(f"the {config.staleness.synchronous_updates} synchronous updates at the start are not simulated")
    return Answer(lambda: _numbers(simulation), lambda: "\n".join([_table(simulation), *lines]))


def _after_moves(
    moves: Sequence[Move], pipeline: Pipeline, profile: ModelProfile, devices: Devices, update_s: float
) -> list[Phase]:
    """Costs of the stages from each cut-over on."""
    phases = []
    for one in moves:
        pipeline = replace(pipeline, partition=moved(pipeline.counts, one))
        costs = planned_costs(predict(profile, pipeline, devices), devices, update_s)
        phases.append(Phase(one.micro_batch, costs))
    return phases


def _update_s(arguments: argparse.Namespace) -> float:
    return 0.0 if arguments.update is None else float(arguments.update[0])


def _replan(
    arguments: argparse.Namespace, config: VPipeConfig, ds_config: DeepSpeedJson, pipeline: Pipeline, source: str
) -> Answer:
    if source != "--profile" or pipeline.virtual_stages > 1 or arguments.move:
        found = "--move" if arguments.move else source if source != "--profile" else pipeline.schedule
        allowed = "--profile, one part of the model on every rank, and no --move"
        raise Refusal("--replan", found, allowed, "change the options").error()
    given = config.model_dump(mode="json", exclude_defaults=True)
    every = arguments.every or config.replan.every or _EVERY
    config = VPipeConfig.parse({**given, "replan": {**given.get("replan", {}), "every": every}})
    plan, devices, profile = read_plan(arguments, config, ds_config, pipeline)
    conditions, settings = Conditions(profile, pipeline.num_stages, arguments.slow, arguments.freeze), config.replan
    last = max((change.update for change in conditions.changes), default=0)
    batches = arguments.batches or last + _LOOKS * settings.every
    if last >= batches:
        raise Refusal("--batches", batches, f"more than {last}, where the last change comes", "give more").error()
    check_workload(pipeline, Workload(2 * batches))
    chooses_ratio, update_s = config.recompute_ratio == "auto", _update_s(arguments)
    block, _ = settled(config, plan.pipeline, ds_config)
    course = replanned(
        conditions,
        plan.pipeline,
        devices,
        settings,
        batches,
        chooses_ratio=chooses_ratio,
        update_s=update_s,
        unfit=unfit_json(ds_config, block, plan.pipeline, replicas_of(arguments, ds_config)),
    )
    if arguments.output is not None:
        if Path(arguments.output).suffix in (".svg", ".png"):
            course.draw(arguments.output)
        else:
            entitled(course.timeline, arguments.config, arguments.split).save(arguments.output)
    return Answer(course.numbers, course.table)


def _given(arguments: argparse.Namespace, parts: int) -> tuple[StageCost, ...]:
    def spread(name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        values: tuple[float, ...] = getattr(arguments, name) or default
        if len(values) not in (1, parts):
            raise Refusal(f"--{name}", values, f"1 or {parts} numbers, one per part", "give as many").error()
        return values * parts if len(values) == 1 else values

    forward = spread("forward", ())
    backward = spread("backward", tuple(2 * seconds for seconds in forward))
    send, update = spread("send", (0.0,)), spread("update", (0.0,))
    return tuple(map(StageCost, forward, backward, send, send, update))


def _numbers(simulation: Simulation) -> dict[str, object]:
    pipeline = simulation.pipeline
    return {
        "partition": pipeline.partition and list(pipeline.partition),
        "recompute_ratio": pipeline.recompute_ratio and list(pipeline.recompute_ratio),
        "depths": list(pipeline.depths),
        "throughput": simulation.throughput,
        "overall_throughput": simulation.overall_throughput,
        "makespan_s": simulation.makespan_s,
        "micro_batches": simulation.workload.batches * pipeline.micro_batches,
        "bubble": list(simulation.bubble),
        "steady_bubble": list(simulation.steady_bubble),
        "staleness": [list(pair) for pair in simulation.staleness],
        "peak_bytes": [rank.peak_bytes for rank in simulation.ranks],
        "in_flight": [rank.in_flight for rank in simulation.ranks],
        "versions": [rank.versions for rank in simulation.ranks],
    }


def _table(simulation: Simulation) -> str:
    columns = zip(simulation.ranks, simulation.bubble, simulation.steady_bubble, simulation.staleness, strict=True)
    rows = [
        {
            "rank": rank.rank,
            "bubble %": f"{bubble:.1%}",
            "steady %": f"{max(0.0, steady):.1%}",
            "staleness": f"{mean:.2f} (max {most})",
            "in flight": rank.in_flight,
            "versions": rank.versions,
            "peak": show_bytes(rank.peak_bytes) if rank.peak_bytes else "-",
        }
        for rank, bubble, steady, (mean, most) in columns
    ]
    pace, overall = simulation.throughput, simulation.overall_throughput
    rates = f"throughput: {pace:.4g} micro-batches/s in the steady state, {overall:.4g} over everything"
    return "\n".join([aligned(rows), simulation.pipeline.line, rates])
