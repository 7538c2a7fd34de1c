"""The fastest split and recomputation that fit the memory of every device.

Weight versions, micro-batches in flight and transfers are counted. If nothing fits, or not the split of --current, one
line says by how many bytes and where.

examples:
  python -m ds_vpipe plan ds_config.json --stages 4 --profile bert.json --memory 16GB -o split.json
      then in the JSON: "vpipe": {"partition": "split.json"}
  python -m ds_vpipe plan ds_config.json --profile bert.json --memory 16GB,16GB,8GB,8GB --bandwidth 10GB
  python -m ds_vpipe plan ds_config.json --profile bert.json --current      what the JSON's own split needs
  python -m ds_vpipe plan ds_config.json --profile bert.json --keep recompute_ratio --json
  python -m ds_vpipe plan ds_config.json --profile bert.json --ranks 8 --bandwidth 10GB --reduce-bandwidth 100GB
      in how many stages, with how many replicas of each?

exit status: 0 a plan, 1 --current does not fit, 2 nothing fits or something is wrong
"""

import argparse
from copy import copy
from dataclasses import replace
from typing import Any

from ds_vpipe.commands.argument_types import count, output
from ds_vpipe.commands.arguments import (
    Answer,
    add_profile_arguments,
    check_counted,
    read_costs,
    read_file,
    read_pipeline,
    replicas_of,
)
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.config.partition_file import is_partition_file
from ds_vpipe.errors import Refusal, VPipeConfigError
from ds_vpipe.planning.layer_profile import ModelProfile
from ds_vpipe.planning.pace import FREE_LINK, micro_batches_for
from ds_vpipe.planning.plan import Plan
from ds_vpipe.planning.planner import configured_partition, configured_plan, plan
from ds_vpipe.schedules.counts import kept_states
from ds_vpipe.staleness.automatic import settled
from ds_vpipe.tables import aligned, counted, show_bytes

_IDLE = 0.1  # share of time that a synchronous pipeline may idle, for the suggestion


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_profile_arguments(parser)
    group = parser.add_argument_group("the plan")
    group.add_argument("--current", action="store_true", help="predict for the JSON's own split, do not search")
    keep = ("partition", "recompute_ratio")
    group.add_argument("--keep", action="append", default=[], choices=keep, help="take it from the JSON")
    group.add_argument("--swap", action="store_true", help="choose swap ratios too, which needs --host-bandwidth")
    group.add_argument("--hide-transfers", action="store_true", help="choose depths too, for asp (more staleness)")
    what = "choose the numbers of stages and replicas too, for so many ranks and the same micro-batches per update"
    group.add_argument("--ranks", type=count, metavar="N", help=what)
    group.add_argument(
        "-o", "--output", type=output, metavar="FILE", help='write a split file, for "partition": "FILE"'
    )


def run(arguments: argparse.Namespace) -> Answer:
    if arguments.output is not None and not is_partition_file(arguments.output):
        why = "a partition is read from such a file only"
        raise Refusal("--output", arguments.output, "a name that ends in .json", "rename it", why).error()
    _check_choice(arguments)
    chosen, answer = _planned(arguments) if arguments.ranks is None else _plan_for_ranks(arguments)
    if arguments.output is not None:
        chosen.save_split(arguments.output)
    return answer


def _planned(arguments: argparse.Namespace) -> tuple[Plan, Answer]:
    """The plan for known numbers of stages and replicas, and what is said of it."""
    config, ds_config, bare = read_pipeline(arguments, arguments.config)
    check_counted(bare)
    profile, devices = read_costs(arguments, config, ds_config)
    if arguments.current:
        configured = config.pipeline(bare.num_stages, bare.micro_batches)
        found = configured_plan(config, configured, devices, profile)
    else:
        counts, ratios = None, None
        if "partition" in arguments.keep:
            counts = configured_partition(config, bare, profile)
        if "recompute_ratio" in arguments.keep:
            ratios = config.pipeline(bare.num_stages, bare.micro_batches).recompute_ratio
        if arguments.hide_transfers and bare.schedule != "asp":
            why = f'schedule "{bare.schedule}" has no depths to choose'
            raise Refusal("--hide-transfers", True, 'the option with schedule "asp"', "leave it out", why).error()
        if arguments.hide_transfers and devices.link == FREE_LINK:
            why, allowed = "transfers take no time unless one is given", "the option with --bandwidth or --latency"
            raise Refusal("--hide-transfers", True, allowed, "give one, or leave it out", why).error()
        hide = arguments.hide_transfers or config.stage_to_depth_map == "auto"
        searched = config.model_copy(update={"partition": None, "recompute_ratio": 0.0})
        swap = searched.pipeline(bare.num_stages, bare.micro_batches).swap_ratio
        if arguments.swap:
            swap = None
            if devices.host_bandwidth is None:
                remedy = "give --host-bandwidth 20GB, or host_bandwidth in the vpipe block"
                raise Refusal("--host-bandwidth", None, "bytes per second, with --swap", remedy).error()
        chosen = replace(bare, partition=counts, recompute_ratio=ratios, swap_ratio=swap)
        if hide:  # a list in the JSON would be left only for depths with which the plan is faster
            chosen = replace(chosen, depth_map=None)
        found = plan(profile, chosen, devices, hide_transfers=hide)
    _, choice = settled(config, found.pipeline, ds_config)
    if found.depths:
        price, fewest = "at most one update stale", max(1, found.depths[0])  # gradients are ceil(W_0 / M) updates old
    else:
        price = f"at most {_IDLE:.0%} idle"
        fewest = micro_batches_for(found.pipeline.num_stages, _IDLE, found.pipeline.virtual_stages)
    enough = f"{fewest} micro-batches per batch or more" if fewest > 1 else "any number of micro-batches"
    lines = [f"{price}: {enough}", *_lacking(found)]
    if found.depths and found.depths != bare.depths:
        lines.append(f'depths are not in split files; for the JSON: "stage_to_depth_map": {list(found.depths)}')
    every = config.recovery.every
    if every:
        kept = ", ".join(show_bytes(size) for size in _kept_bytes(found, profile, every))
        often = counted(every, "update")
        lines.append(f"recovery, a state every {often}: at most {kept} of host memory, a number for each stage")
    if choice.settings is not None and choice.line:
        lines.append(choice.line)
    replicas = replicas_of(arguments, ds_config)
    answer = Answer(
        data=lambda: {**found.to_json(), "replicas": replicas, "suggested_micro_batches": fewest},
        text=lambda: "\n".join([found.table(), *lines]),
        status=0 if found.fits else 1,
    )
    return found, answer


def _plan_for_ranks(arguments: argparse.Namespace) -> tuple[Plan, Answer]:
    """Fastest plan over all numbers of stages that divide ``--ranks``, with its answer.

    Raises:
        VPipeConfigError: none can be planned.
    """
    ranks, options = arguments.ranks, copy(arguments)
    ds_config = DeepSpeedJson({} if arguments.config is None else read_file(arguments.config))
    replicas = replicas_of(arguments, ds_config)
    if arguments.micro_batches is None and ds_config.stages is None:  # the total of a plain script may count all ranks
        ds_config.refuse_batch_sizes(replicas, 1)
    interleaved = (arguments.schedule or (ds_config.block or {}).get("schedule")) == "interleaved"
    per_update = replicas * (arguments.micro_batches or ds_config.micro_batches(replicas))  # of all replicas
    plans: list[tuple[float, Plan, Answer]] = []
    rows: list[dict[str, Any]] = []
    refusals = []
    for stages in (number for number in range(1, ranks + 1) if ranks % number == 0):
        options.stages, options.replicas, options.micro_batches = stages, ranks // stages, per_update * stages // ranks
        if interleaved and stages == 1:  # which has nothing to interleave
            options.schedule, options.virtual_stages = "1f1b", None
        else:
            options.schedule, options.virtual_stages = arguments.schedule, arguments.virtual_stages
        try:
            if per_update % options.replicas:
                allowed, remedy = f"a multiple of {options.replicas}, the replicas", "raise gradient_accumulation_steps"
                raise Refusal("micro-batches per update", per_update, allowed, remedy).error()
            found, answer = _planned(options)
        except VPipeConfigError as error:
            refusals.append(f"stages {stages}: {error}")
            continue
        seconds = found.seconds_per_micro_batch / options.replicas  # of any replica
        peak = max(memory.total for memory in found.rank_memory())
        sizes = {"stages": stages, "replicas": options.replicas, "micro_batches": options.micro_batches}
        rows.append({**sizes, "seconds_per_micro_batch": seconds, "peak_bytes": peak})
        plans.append((seconds, found, answer))
    if not plans:
        raise VPipeConfigError(refusals[-1])
    _, found, answer = min(plans, key=lambda plan: plan[0])
    needed = ['the schedule is not in split files; for the JSON: "schedule": "1f1b", no "virtual_stages"']
    change = needed if interleaved and found.pipeline.num_stages == 1 else []

    def text() -> str:
        names = ("stages", "replicas", "M", "ms per micro-batch", "peak")
        shown = [(*sizes, f"{1e3 * seconds:.2f}", show_bytes(peak)) for *sizes, seconds, peak in map(dict.values, rows)]
        table = aligned([dict(zip(names, row, strict=True)) for row in shown])
        return "\n".join([table, *refusals, "", answer.text(), *change])

    return found, answer._replace(data=lambda: {**answer.data(), "divisions": rows, "refused": refusals}, text=text)


def _check_choice(arguments: argparse.Namespace) -> None:
    """Refuse options of which one would be without effect."""
    ignored = [name for name in ("hide_transfers", "keep", "swap", "ranks") if getattr(arguments, name)]
    sizes = [name for name in ("stages", "depth", "split", "keep") if getattr(arguments, name)]
    if arguments.ranks is not None and sizes:
        why, given = "that is for one number of stages", f"--{sizes[0]} with --ranks"
        raise Refusal("options of plan", given, "one of them", "leave the other out", why).error()
    if arguments.ranks is not None and arguments.reduce_bandwidth is None:
        why, remedy = "reductions would take no time", "give that of the links between replicas, such as 10GB"
        raise Refusal("--reduce-bandwidth", None, "bytes per second, with --ranks", remedy, why).error()
    if arguments.current and ignored:
        given = f"--{ignored[0].replace('_', '-')} with --current"
        raise Refusal("options of plan", given, "--current alone", "leave one of them out").error()
    if arguments.hide_transfers and arguments.depth is not None:
        why = "depths are chosen"
        raise Refusal("--depth", arguments.depth, "none with --hide-transfers", "leave one of them out", why).error()
    if arguments.batches is not None:
        raise Refusal("--batches", arguments.batches, "none", "leave it out", "a plan is of any number").error()
    if arguments.split is not None and not arguments.current and "partition" not in arguments.keep:
        allowed = "the option with --current or --keep partition"
        raise Refusal("--split", arguments.split, allowed, "leave it out", "another split is searched").error()


def _lacking(found: Plan) -> list[str]:
    """Message on the stage that exceeds its memory budget most, if any does."""
    needs = [memory.total for memory in found.rank_memory()]
    lacking, rank = max((need - found.budget_of(rank), rank) for rank, need in enumerate(needs))
    if lacking <= 0:
        return []
    given = f"memory budget: got {found.budget_of(rank)} bytes for stage {rank}; this split does not fit: it needs"
    remedy = "plan without --current for one that fits, or give more memory"
    return [f"{given} {needs[rank]} bytes there, {lacking} bytes ({show_bytes(lacking)}) too many; {remedy}"]


def _kept_bytes(found: Plan, profile: ModelProfile, every: int) -> list[int]:
    """Most that the states of each stage take."""
    sizes = []
    for number, stage in enumerate(found.stages):
        states, versions = kept_states(found.pipeline, number, every)
        frozen = sum(layer.frozen_bytes for layer in profile.layers[stage.start : stage.stop])
        sizes.append(states * stage.memory.optimizer + versions * (stage.memory.weights - frozen) + frozen)
    return sizes
