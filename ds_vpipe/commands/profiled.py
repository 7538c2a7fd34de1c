"""What ``plan`` and ``simulate`` have in common: a profile of the layers, a budget, and links between the stages."""

from __future__ import annotations

import argparse
from typing import Any, Literal

from ds_vpipe.commands.quantities import seconds, size, sizes
from ds_vpipe.commands.settings import Settings
from ds_vpipe.config import part_ratios
from ds_vpipe.partition import resolve_partition
from ds_vpipe.planning.optimizer_bytes import configured_optimizer_bytes
from ds_vpipe.planning.pace import Link
from ds_vpipe.planning.plan import Plan
from ds_vpipe.planning.plan_settings import PlanSettings
from ds_vpipe.planning.planner import plan, predict
from ds_vpipe.profiles.layer_profile import ModelProfile, merge_profiles
from ds_vpipe.refusal import Refusal


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say what layers cost and what there is."""
    group = parser.add_argument_group("costs; what is not given comes from the vpipe block of the DeepSpeed JSON")
    group.add_argument(
        "--profile",
        action="append",
        metavar="FILE",
        help="what layers cost, from the command profile; give it for each file if ranks measured their own layers",
    )
    group.add_argument(
        "--bandwidth",
        type=size,
        metavar="BYTES",
        help="of a link between two stages, per second, such as 10GB; default: link_bandwidth, or transfers are free",
    )
    group.add_argument("--latency", type=seconds, default=0.0, metavar="S", help="seconds of every transfer; default 0")
    group.add_argument(
        "--memory",
        type=sizes,
        metavar="BYTES",
        help="per device, such as 16GB, or one for every rank; default: memory_budget",
    )


def profile_paths(arguments: argparse.Namespace, settings: Settings) -> list[str]:
    """The profiles that are named, on the command line or in the JSON; none if there are none."""
    named = settings.block.profile
    return arguments.profile or ([] if named is None else [named])


def model_profile(arguments: argparse.Namespace, settings: Settings) -> ModelProfile:
    """Read the profile, or the profiles of all ranks.

    Raises:
        VPipeConfigError: None is named, a file is not a profile, or layers are missing.
    """
    paths = profile_paths(arguments, settings)
    if not paths:
        remedy = "make one with the command profile, and name it"
        raise Refusal("--profile", None, "a file, here or as profile in the vpipe block", remedy).error()
    return merge_profiles([ModelProfile.load(path) for path in paths])


def planner_pipeline(arguments: argparse.Namespace, settings: Settings, profile: ModelProfile) -> PlanSettings:
    """What the planner has to know besides the profile."""
    pipeline, block = settings.pipeline, settings.block
    bandwidth = block.link_bandwidth if arguments.bandwidth is None else arguments.bandwidth
    link: dict[str, Any] = {} if bandwidth is None else {"bytes_per_s": bandwidth}
    left: Literal["auto", "default"] = (
        "auto" if block.stage_to_depth_map == "auto" and pipeline.schedule == "asp" else "default"
    )
    return PlanSettings(
        num_stages=pipeline.num_stages,
        micro_batches=pipeline.micro_batches,
        schedule=pipeline.schedule,
        budget=block.memory_budget if arguments.memory is None else arguments.memory,
        depths=left if pipeline.depth_map is None else pipeline.depth_map,
        weight_sync=block.weight_sync,
        virtual_stages=pipeline.virtual_stages,
        optimizer=configured_optimizer_bytes(settings.ds_config, arguments.replicas),
        link=Link(arguments.latency, **link),
        host_transfers=profile.on_host,
        kept_weights=0 if block.staleness is None else block.staleness.kept_weights,
    )


def configured_partition(settings: Settings, profile: ModelProfile) -> tuple[int, ...] | None:
    """Layers per part that the JSON asks for; without a word from it what DeepSpeed does: even parameters.

    None if it leaves them to the planner.

    Raises:
        VPipeConfigError: The counts do not fit the profile.
    """
    weights = [layer.parameter_bytes for layer in profile.layers]
    names = [layer.name for layer in profile.layers]
    method = settings.block.partition or "parameters"
    if method == "profile":
        return None
    return resolve_partition(method, lambda: weights, names, settings.pipeline.num_parts)


def configured_ratios(settings: Settings) -> tuple[float, ...] | None:
    """Recompute ratio of every part that the JSON asks for; None if it leaves them to the planner.

    Raises:
        VPipeConfigError: Their number is not that of the parts.
    """
    ratio, parts = settings.block.recompute_ratio, settings.pipeline.num_parts
    if ratio == "auto":
        return None
    if isinstance(ratio, tuple) and len(ratio) not in (parts, settings.pipeline.num_stages):
        allowed = f"{settings.pipeline.num_stages} numbers, one for each stage"
        raise Refusal("vpipe.recompute_ratio", ratio, allowed, "correct the numbers").error()
    return part_ratios(ratio, parts)


def configured_plan(arguments: argparse.Namespace, settings: Settings, profile: ModelProfile) -> Plan:
    """What training does by the JSON: its own numbers, whether they fit or not, or what the planner makes of the rest.

    Raises:
        VPipeConfigError: A setting is wrong, or something was left to the planner and nothing fits.
    """
    pipeline = planner_pipeline(arguments, settings, profile)
    counts, ratios = configured_partition(settings, profile), configured_ratios(settings)
    if counts is None or ratios is None or pipeline.depths == "auto":
        return plan(profile, pipeline, counts, ratios)
    return predict(profile, pipeline, counts, ratios)
