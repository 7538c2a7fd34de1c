"""What ``plan`` and ``simulate`` have in common: a profile of the layers, a budget, and links between the stages."""

from __future__ import annotations

import argparse
from typing import Any

from ds_vpipe.commands.quantities import count, seconds, size, sizes
from ds_vpipe.commands.settings import Settings
from ds_vpipe.partition import resolve_partition
from ds_vpipe.planning.optimizer_bytes import configured_optimizer_bytes
from ds_vpipe.planning.pace import Link
from ds_vpipe.planning.plan_settings import PlanSettings
from ds_vpipe.profiles.layer_profile import ModelProfile, merge_profiles


def add_profile_arguments(parser: argparse.ArgumentParser, required: bool) -> None:
    """The options that say what layers cost and what there is."""
    group = parser.add_argument_group("costs")
    group.add_argument(
        "--profile",
        action="append",
        required=required,
        metavar="FILE",
        help="what layers cost, from the command profile; give it for each file if ranks measured their own layers",
    )
    group.add_argument(
        "--bandwidth", type=size, metavar="BYTES", help="of a link between two stages, per second, such as 10GB"
    )
    group.add_argument("--latency", type=seconds, default=0.0, metavar="S", help="seconds of every transfer; default 0")
    group.add_argument(
        "--replicas", type=count, default=1, metavar="N", help="data-parallel replicas, which share ZeRO-1"
    )
    group.add_argument("--memory", type=sizes, metavar="BYTES", help="per device, such as 16GB, or one for every rank")


def model_profile(arguments: argparse.Namespace) -> ModelProfile:
    """Read the profile, or the profiles of all ranks.

    Raises:
        VPipeConfigError: A file is not a profile, or layers are missing.
    """
    return merge_profiles([ModelProfile.load(path) for path in arguments.profile])


def planner_pipeline(arguments: argparse.Namespace, settings: Settings) -> PlanSettings:
    """What the planner has to know besides the profile."""
    pipeline = settings.pipeline
    link: dict[str, Any] = {} if arguments.bandwidth is None else {"bytes_per_s": arguments.bandwidth}
    return PlanSettings(
        num_stages=pipeline.num_stages,
        micro_batches=pipeline.micro_batches,
        schedule=pipeline.schedule,
        budget=arguments.memory,
        depths="default" if pipeline.depth_map is None else pipeline.depth_map,
        weight_sync=settings.block.weight_sync,
        virtual_stages=pipeline.virtual_stages,
        optimizer=configured_optimizer_bytes(settings.ds_config, arguments.replicas),
        link=Link(arguments.latency, **link),
    )


def configured_partition(settings: Settings, profile: ModelProfile) -> tuple[int, ...]:
    """Layers per part that the JSON asks for; without a word from it what DeepSpeed does: even parameters.

    Raises:
        VPipeConfigError: The counts do not fit the profile.
    """
    weights = [layer.parameter_bytes for layer in profile.layers]
    names = [layer.name for layer in profile.layers]
    method = settings.block.partition or "parameters"
    if method == "profile":  # what there is without a plan
        method = "parameters"
    return resolve_partition(method, lambda: weights, names, settings.pipeline.num_parts)


def configured_ratios(settings: Settings) -> tuple[float, ...]:
    """Recompute ratio of every part that the JSON asks for.

    Raises:
        VPipeConfigError: Their number is not that of the parts.
    """
    ratio, parts = settings.block.recompute_ratio, settings.pipeline.num_parts
    if ratio == "auto":  # what there is without a plan
        ratio = 0.0
    return ratio if isinstance(ratio, tuple) else (ratio,) * parts
