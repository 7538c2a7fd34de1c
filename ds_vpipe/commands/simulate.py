"""Simulation of a schedule: throughput, bubble, staleness, memory.

Seconds and bytes of every part of the model come from a profile and the partition and recompute_ratio of the DeepSpeed
JSON, from the recording of a run, or are given as numbers.

examples:
  python -m ds_vpipe simulate ds_config.json --profile bert.json --bandwidth 10GB
  python -m ds_vpipe simulate ds_config.json --recording timeline --schedule asp      what would that have been?
  python -m ds_vpipe simulate ds_config.json --stages 4 --forward 0.012 --backward 0.024 --send 0.003
  python -m ds_vpipe simulate --stages 4 --micro-batches 8 --schedule gpipe --forward 1,1,2,1 --backward 2,2,4,2
  python -m ds_vpipe simulate ds_config.json --profile bert.json -o simulation.json     then: report simulation.json
"""

import argparse

from ds_vpipe.commands.arguments import (
    Answer,
    add_move_argument,
    add_profile_arguments,
    entitled,
    numbers,
    read_costs,
    read_pipeline,
    seconds,
    workload_from,
)
from ds_vpipe.errors import Refusal
from ds_vpipe.simulation.costs import StageCost, planned_costs, recorded_costs
from ds_vpipe.simulation.simulator import Simulation, simulate
from ds_vpipe.tables import aligned, show_bytes
from ds_vpipe.timelines.merge import merge, read_recordings

# Sources of costs, and the options with further seconds that each of them takes.
_TAKES = {"--profile": ["update"], "--recording": [], "--forward": ["backward", "send", "update"]}
_BEYOND = 10  # batches after the pipeline is full


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
    group.add_argument("-o", "--output", metavar="FILE", help="write the timeline, for show, trace and report")


def run(arguments: argparse.Namespace) -> Answer:
    config, ds_config, pipeline = read_pipeline(arguments, arguments.config)
    given = [name for name in _TAKES if getattr(arguments, name[2:]) is not None]
    given = given or ["--profile"] * (config.profile is not None)
    if len(given) != 1:
        remedy = "give one of them; profile makes a profile, vpipe.timeline a recording"
        allowed = "one of --profile FILE, --recording FOLDER, --forward S"
        raise Refusal("costs", " and ".join(given) or None, allowed, remedy).error()
    for name in _TAKES["--forward"]:
        value = getattr(arguments, name)
        if value is not None and name not in _TAKES[given[0]]:  # it would be without effect
            raise Refusal(f"--{name}", value, "none", "leave it out", f"{given[0]} has the seconds").error()
    if given[0] == "--forward":
        costs = _given(arguments, pipeline.num_parts)
    elif given[0] == "--recording":
        costs = recorded_costs(merge(read_recordings(arguments.recording)), pipeline.num_parts)
    else:
        from ds_vpipe.planning.planner import configured_plan

        profile, devices = read_costs(arguments, config, ds_config)
        configured = config.pipeline(pipeline.num_stages, pipeline.micro_batches)
        plan = configured_plan(config, configured, devices, profile)
        pipeline, update_s = plan.pipeline, 0.0 if arguments.update is None else arguments.update[0]
        costs = planned_costs(plan, devices.loads(pipeline), update_s)
    simulation = simulate(pipeline, costs, workload_from(arguments, pipeline, _BEYOND))
    if arguments.output is not None:
        entitled(simulation.timeline, arguments.config, arguments.split).save(arguments.output)
    return Answer(lambda: _numbers(simulation), lambda: _table(simulation))


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
    return {
        "throughput": simulation.throughput,
        "overall_throughput": simulation.overall_throughput,
        "makespan_s": simulation.makespan_s,
        "micro_batches": simulation.workload.batches * simulation.pipeline.micro_batches,
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
    return f"{aligned(rows)}\n{rates}"
