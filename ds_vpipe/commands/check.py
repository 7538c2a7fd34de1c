"""Check of a DeepSpeed JSON and of the schedule that it asks for.

Nothing is started. Checked are keys and values, those of DeepSpeed by itself, its settings that do not work with
pipelines, and of the schedule the order of the passes, weight versions, buffers, that every receive has its send, and
that no rank waits for ever.

examples:
  python -m ds_vpipe check ds_config.json --stages 4
  python -m ds_vpipe check --stages 8 --micro-batches 16 --schedule interleaved --virtual-stages 2
  python -m ds_vpipe check ds_config.json --json

exit status: 0 sound, 1 the schedule has a fault, 2 the configuration is wrong
"""

import argparse
from dataclasses import asdict

from ds_vpipe.commands.arguments import (
    Answer,
    add_config_arguments,
    check_workload,
    read_pipeline,
    replicas_of,
    with_planned_depths,
)
from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import BLOCK, MICRO, STEPS, TOTAL, DeepSpeedJson
from ds_vpipe.config.unsupported import refuse_unsupported
from ds_vpipe.errors import VPipeConfigError, one_line
from ds_vpipe.lr_policies import lr_policy
from ds_vpipe.schedules.check import check_programs, shortened, typical_workload
from ds_vpipe.schedules.program import Workload, programs
from ds_vpipe.staleness.automatic import settled
from ds_vpipe.tables import counted


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_arguments(parser)


def run(arguments: argparse.Namespace) -> Answer:
    config, ds_config, pipeline = read_pipeline(arguments, arguments.config)
    refuse_unsupported(ds_config, config, pipeline.num_stages)
    lr_policy(dict(ds_config.content))
    if ds_config.content:
        _refuse_as_deepspeed(ds_config)
    own = arguments.schedule is None and arguments.virtual_stages is None  # else it may not be the block's pipeline
    if ds_config.block is not None:
        block, kinds = VPipeConfig.parse(ds_config.block), ("sync_mode", "schedule", "virtual_stages")
        own = all(getattr(config, kind) == getattr(block, kind) for kind in kinds)
    if own:
        config.check_sizes(pipeline.num_stages)
    if own or config.stage_to_depth_map == "auto":
        pipeline = with_planned_depths(arguments, config, ds_config, pipeline)
    config, choice = settled(config, pipeline, ds_config)
    shape = shortened(pipeline) if arguments.batches is None else pipeline
    workload = typical_workload(shape) if arguments.batches is None else Workload(arguments.batches)
    check_workload(shape, workload)
    actions = programs(shape, workload)
    faults = check_programs(shape, actions, workload)
    replicas = replicas_of(arguments, ds_config)
    count = sum(len(program) for program in actions)

    def text() -> str:
        if faults:
            return "\n".join(map(str, faults))
        shared = f" of {replicas} replicas" if replicas > 1 else ""
        batch = f"{counted(pipeline.micro_batches, 'micro-batch')} per batch"
        sizes = f"{counted(pipeline.num_stages, 'stage')}{shared}, {batch}"
        short = f" of {shape.micro_batches}" if shape != pipeline else ""  # which show all that there is
        looked_at = f"{count} actions in {counted(workload.batches, 'batch')}{short} checked"
        sound = f"sound: {pipeline.schedule}, {sizes}, {looked_at}"
        return "\n".join(filter(None, (sound, choice.line)))

    rows = [{**asdict(fault), "action": fault.action and str(fault.action)} for fault in faults]
    data = {"ok": not faults, "replicas": replicas, "actions": count, "batches": workload.batches, "faults": rows}
    data |= {"staleness": config.to_dict()["staleness"], "staleness_line": choice.line}
    return Answer(lambda: data, text, 1 if faults else 0)


def _refuse_as_deepspeed(ds_config: DeepSpeedJson) -> None:
    """Let DeepSpeed read the JSON, but for the sizes of batches, for which it would count ranks."""
    from deepspeed.runtime.config import DeepSpeedConfig  # only here: it takes seconds

    own = {key: value for key, value in ds_config.content.items() if key not in (BLOCK, TOTAL, STEPS)}
    try:
        DeepSpeedConfig({**own, MICRO: 1})
    except Exception as error:  # it has no class for them
        raise VPipeConfigError(f"DeepSpeed refuses the JSON: {one_line(error)}") from error
