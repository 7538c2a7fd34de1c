"""The pipeline that a command is about: from the DeepSpeed JSON, from options, or from both, options first."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_vpipe.commands.quantities import count, numbers
from ds_vpipe.config import VPipeConfig, block_of
from ds_vpipe.deepspeed_json import DeepSpeedJson
from ds_vpipe.errors import Refusal
from ds_vpipe.schedules.pipeline import SCHEDULES, Pipeline, Schedule
from ds_vpipe.schedules.programs import Workload

_MOST_PASSES = 2_000_000  # some tens of seconds
_OBJECTS = ("optimizer", "zero_optimization", "fp16", "bf16")


@dataclass(frozen=True)
class Settings:
    """What is going to be trained.

    Attributes:
        pipeline: Schedule and sizes.
        block: The ``"vpipe"`` block with the options in it; that of DeepSpeed's own engine if there is none.
        ds_config: The whole DeepSpeed JSON; empty if there is none.
    """

    pipeline: Pipeline
    block: VPipeConfig
    ds_config: dict[str, Any]


def add_pipeline_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say which pipeline it is."""
    group = parser.add_argument_group("the pipeline; what is not given comes from the DeepSpeed JSON")
    group.add_argument("--stages", type=count, metavar="K", help="ranks of the pipeline; default: entries of partition")
    group.add_argument(
        "--micro-batches", type=count, metavar="M", help="micro-batches per batch; default: what the batch sizes say"
    )
    group.add_argument(
        "--replicas", type=count, default=1, metavar="N", help="data-parallel replicas, which share a batch and ZeRO-1"
    )
    group.add_argument("--schedule", choices=SCHEDULES, help="order of the passes")
    group.add_argument("--virtual-stages", type=count, metavar="V", help="parts of the model per rank, for interleaved")
    group.add_argument(
        "--depth", type=numbers(int), metavar="W,W,...", help="warm-up depth of every stage, for asp, such as 3,2,1,0"
    )
    group.add_argument("--split", metavar="FILE", help="partition and recompute_ratio, a file that plan wrote")
    group.add_argument(
        "--batches", type=count, metavar="N", help="batches to train; default: enough to see the pattern"
    )


def read_json(path: str) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        VPipeConfigError: The file cannot be read or holds no JSON object.
    """
    allowed, remedy = "a file with a JSON object", "correct the path or the file"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise Refusal("file", path, allowed, remedy, error.strerror or str(error)).error() from None
    except ValueError as error:
        raise Refusal("file", path, allowed, remedy, f"it is not JSON: {error}").error() from None
    if not isinstance(content, dict):
        raise Refusal("file", path, allowed, remedy, "it holds no object").error()
    return content


def settings_from(arguments: argparse.Namespace, config: str | None) -> Settings:
    """Put the pipeline together.

    Args:
        arguments: With the options of :func:`add_pipeline_arguments`.
        config: Path of a DeepSpeed JSON, or None.

    Raises:
        VPipeConfigError: A size is not known, or the values are wrong or do not fit together.
    """
    ds_config = {} if config is None else read_json(config)
    for key in _OBJECTS:
        if not isinstance(ds_config.get(key, {}), dict | bool if key == "zero_optimization" else dict):
            raise Refusal(key, ds_config[key], "an object, as DeepSpeed has it", "correct the JSON").error()
    given = block_of(ds_config)
    if arguments.split is not None:
        given = {**(given or {}), "partition": arguments.split}
        given.pop("recompute_ratio", None)
    block = VPipeConfig.parse(given if given is not None else {"sync_mode": "bsp"} if config else {})
    schedule: Schedule = arguments.schedule or ("asp" if block.sync_mode == "asp" else block.schedule)
    virtual_stages = arguments.virtual_stages or block.virtual_stages
    depth = arguments.depth
    if depth is None and schedule == "asp" and isinstance(block.stage_to_depth_map, tuple):
        depth = block.stage_to_depth_map
    pipeline = Pipeline(
        schedule=schedule,
        num_stages=arguments.stages if arguments.stages is not None else _stages(block, depth, virtual_stages),
        micro_batches=arguments.micro_batches or DeepSpeedJson(ds_config).micro_batches(arguments.replicas),
        depth_map=depth,
        virtual_stages=virtual_stages,
        vertical=schedule == "asp" and block.weight_sync == "vertical",
    )
    mode: dict[str, object] = {"sync_mode": "asp"} if schedule == "asp" else {"sync_mode": "bsp", "schedule": schedule}
    given_depth = {} if pipeline.depth_map is None else {"stage_to_depth_map": pipeline.depth_map}
    block = block.model_copy(update={**mode, **given_depth, "virtual_stages": virtual_stages})
    return Settings(pipeline, block, ds_config)


def workload_from(arguments: argparse.Namespace, pipeline: Pipeline, beyond: int) -> Workload:
    """The batches asked for, or those that fill the pipeline and ``beyond`` more."""
    filling = 0 if pipeline.synchronous else -(-pipeline.depths[0] // pipeline.micro_batches)
    workload = Workload(filling + beyond if arguments.batches is None else arguments.batches)
    check_size(pipeline, workload)
    return workload


def check_size(pipeline: Pipeline, workload: Workload) -> None:
    """Refuse what would take minutes or more memory than there is.

    Raises:
        VPipeConfigError: There are too many passes.
    """
    passes = 2 * pipeline.num_parts * pipeline.micro_batches * workload.batches
    if passes > _MOST_PASSES:
        sizes = f"{pipeline.num_parts} parts, {pipeline.micro_batches} micro-batches, {workload.batches} batches"
        allowed = f"at most {_MOST_PASSES} passes to look at"
        remedy = "give fewer --batches, micro-batches or stages"
        raise Refusal("schedule", passes, allowed, remedy, f"passes of {sizes}").error()


def _stages(block: VPipeConfig, depth: tuple[int, ...] | None, virtual_stages: int) -> int:
    ratios = block.recompute_ratio if virtual_stages == 1 else None  # of stages or of parts
    for values, share in ((depth, 1), (block.partition, virtual_stages), (ratios, 1)):
        if isinstance(values, tuple):
            return len(values) // share
    remedy = "give --stages K"
    raise Refusal("number of stages", None, "a whole number >= 1", remedy, "no list in the JSON says it").error()
