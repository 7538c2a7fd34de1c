"""Timelines named on a command line: files of timelines and recordings, or the plan of a DeepSpeed JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ds_vpipe.commands.arguments import (
    add_pipeline_arguments,
    numbers,
    read_json,
    read_pipeline,
    seconds,
    workload_from,
)
from ds_vpipe.errors import Refusal
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload
from ds_vpipe.simulation.costs import StageCost
from ds_vpipe.simulation.simulator import simulate
from ds_vpipe.timelines.merge import merge, read_recordings
from ds_vpipe.timelines.summary import summarize
from ds_vpipe.timelines.timeline import FORMAT, Recording, Timeline

_PLAN_UNIT = "forward passes"


def add_input_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of :func:`timelines_from`."""
    what = "a DeepSpeed JSON, a timeline, or a recording: the folder of a run, or the files in it"
    parser.add_argument("paths", nargs="*", metavar="PATH", help=what)
    add_pipeline_arguments(parser)
    group = parser.add_argument_group("length of things in a schedule drawn without a profile, in forward passes")
    group.add_argument("--backward", type=seconds, default=2.0, metavar="X", help="a backward pass; default 2")
    group.add_argument("--transfer", type=seconds, default=0.0, metavar="X", help="a transfer; default 0")
    group.add_argument("--update", type=seconds, default=0.0, metavar="X", help="an update; default 0")
    group = parser.add_argument_group("recordings")
    group.add_argument("--replica", type=int, default=0, metavar="N", help="which data-parallel replica; default 0")
    what = "seconds to add to each rank's clock; default: estimated from the messages between ranks"
    group.add_argument("--offsets", type=numbers(float), metavar="S,S,...", help=what)


def timelines_from(arguments: argparse.Namespace) -> list[Timeline]:
    """The timelines that are named, in order; files of single ranks together are one recording.

    Raises:
        VPipeConfigError: a file is none of the kinds allowed, or nothing is named.
    """
    if not arguments.paths:
        if arguments.stages is None or arguments.micro_batches is None:
            allowed = "a path, or --stages K with --micro-batches M"
            raise Refusal("input", None, allowed, "name what to draw").error()
        return [_planned(arguments, None)]
    timelines: list[Timeline] = []
    recordings: list[Recording] = []
    place = 0  # of the first file of a single rank
    for path in arguments.paths:
        if Path(path).is_dir():
            timelines.append(merge(read_recordings(path), arguments.offsets, arguments.replica))
            continue
        content = read_json(path)
        timeline = Timeline.from_json(content) if content.get("format") == FORMAT else _planned(arguments, path)
        if isinstance(timeline, Recording):
            place = place if recordings else len(timelines)
            recordings.append(timeline)
        else:
            timelines.append(timeline)
    if recordings:
        timelines.insert(place, merge(recordings, arguments.offsets, arguments.replica))
    return timelines


def planned_timeline(
    pipeline: Pipeline, workload: Workload, backward: float = 2.0, transfer: float = 0.0, update: float = 0.0
) -> Timeline:
    """Plan of a pipeline with equal parts; lengths in forward passes of a part."""
    cost = StageCost(1.0, backward, transfer, transfer, update)
    timeline = simulate(pipeline, [cost] * pipeline.num_parts, workload).timeline
    return replace(timeline, source="plan", meta={**timeline.meta, "time_unit": _PLAN_UNIT})


def entitled(timeline: Timeline, *files: str | None) -> Timeline:
    """``timeline`` with the names of the files that it comes from, if any, before its title."""
    names = " with ".join(Path(file).stem for file in files if file is not None)
    return replace(timeline, title=f"{names}: {timeline.title}") if names else timeline


def summaries(timelines: Sequence[Timeline]) -> list[dict[str, object]]:
    """Numbers of timelines, for scripts."""
    return [{"title": t.title, "source": t.source, "meta": dict(t.meta), **summarize(t).to_json()} for t in timelines]


def _planned(arguments: argparse.Namespace, config: str | None) -> Timeline:
    _, _, pipeline = read_pipeline(arguments, config)
    workload = workload_from(arguments, pipeline, 1 if pipeline.synchronous else 4)
    timeline = planned_timeline(pipeline, workload, arguments.backward, arguments.transfer, arguments.update)
    return entitled(timeline, config, arguments.split)
