"""``plan``: which split and recomputation fit and are fastest?"""

from __future__ import annotations

import argparse
from dataclasses import replace

from ds_vpipe.commands.inputs import print_json
from ds_vpipe.commands.profiled import (
    add_profile_arguments,
    model_profile,
    planner_settings,
)
from ds_vpipe.commands.settings import add_pipeline_arguments, settings_from
from ds_vpipe.errors import Refusal
from ds_vpipe.planning.configured_plan import configured_partition, configured_plan, configured_ratios
from ds_vpipe.planning.plan import Plan
from ds_vpipe.planning.planner import plan
from ds_vpipe.planning.recompute_choice import CHECKPOINT_MODES, checkpoint_ratios
from ds_vpipe.schedules.bubble import optimal_microbatches

DESCRIPTION = """\
Find the layers of every stage and how many of them to recompute: the fastest that fit the memory of every device,
weight versions, micro-batches in flight and transfers counted. If nothing fits, one line says by how many bytes and
where.
"""
EXAMPLES = """\
examples:
  python -m ds_vpipe plan ds_config.json --stages 4 --profile bert.json --memory 16GB -o split.json
      then in the JSON: "vpipe": {"partition": "split.json"}
  python -m ds_vpipe plan ds_config.json --profile bert.json --memory 16GB,16GB,8GB,8GB --bandwidth 10GB
  python -m ds_vpipe plan ds_config.json --profile bert.json --current      what the JSON's own split needs

  python -m ds_vpipe plan ds_config.json --profile bert.json --checkpoint except_last --keep partition --json

exit status: 0 a plan, 1 --current does not fit, 2 nothing fits or something is wrong
"""
_IDLE = 0.1  # share of time that a synchronous pipeline may idle, for the suggestion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("config", nargs="?", metavar="DS_CONFIG", help="a DeepSpeed JSON")
    add_pipeline_arguments(parser)
    add_profile_arguments(parser)
    group = parser.add_argument_group("the plan")
    group.add_argument("--current", action="store_true", help="predict for the JSON's own split, do not search")
    group.add_argument(
        "--keep", action="append", default=[], choices=("partition", "recompute_ratio"), help="take it from the JSON"
    )
    group.add_argument("--checkpoint", choices=CHECKPOINT_MODES, help="recompute as torchgpipe does, search the split")
    group.add_argument("--hide-transfers", action="store_true", help="choose depths too, for asp (more staleness)")
    group.add_argument("-o", "--output", metavar="FILE", help='write a split file, for "partition": "FILE"')
    group.add_argument("--json", action="store_true", help="print the plan as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Plan, and return the exit status."""
    settings = settings_from(arguments, arguments.config)
    _check_choice(arguments)
    profile = model_profile(arguments, settings)
    pipeline = planner_settings(arguments, settings, profile)
    if arguments.current:
        found = configured_plan(settings.block, pipeline, profile)
    else:
        counts = configured_partition(settings.block, pipeline, profile) if "partition" in arguments.keep else None
        ratios = configured_ratios(settings.block, pipeline) if "recompute_ratio" in arguments.keep else None
        if arguments.checkpoint is not None:
            ratios = checkpoint_ratios(arguments.checkpoint, settings.pipeline.num_parts)
        pipeline = replace(pipeline, depths="auto") if arguments.hide_transfers else pipeline
        found = plan(profile, pipeline, counts, ratios)
    suggested = _suggested(found, settings.pipeline.num_stages)
    if arguments.output is not None:
        found.save_split(arguments.output)
    if arguments.json:
        print_json({**found.to_json(), "suggested_micro_batches": suggested})
    else:
        print(found.table())
        price = "at most one update stale" if found.depths else f"at most {_IDLE:.0%} idle"
        print(f"{price}: {suggested} micro-batches per batch or more")
        if found.depths and found.depths != settings.pipeline.depths:
            print(f'depths are not in split files; for the JSON: "stage_to_depth_map": {list(found.depths)}')
    over = [stage for stage in found.stages if stage.budget is not None and stage.memory.total > stage.budget]
    return 1 if over else 0


def _check_choice(arguments: argparse.Namespace) -> None:
    """Refuse options of which one would be without effect."""
    given = {
        "--checkpoint": arguments.checkpoint is not None,
        "--hide-transfers": arguments.hide_transfers,
        "--keep": bool(arguments.keep),
    }
    ignored = [name for name, there in given.items() if there and arguments.current]
    if arguments.checkpoint is not None and "recompute_ratio" in arguments.keep:
        ignored = ["--checkpoint", "--keep recompute_ratio"]
    if ignored:
        allowed = "--current without the others, and one of --checkpoint and --keep recompute_ratio"
        raise Refusal("options of plan", " ".join(ignored), allowed, "leave one of them out").error()


def _suggested(found: Plan, num_stages: int) -> int:
    """Fewest micro-batches per batch for at most one stale update (asp), or for a small bubble."""
    if found.depths:
        return max(1, found.depths[0])  # gradients are ceil(W_0 / M) updates old at most
    return optimal_microbatches(num_stages, _IDLE, found.virtual_stages)
