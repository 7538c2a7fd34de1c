"""What ``plan`` and ``simulate`` have in common: a profile of the layers, a budget, and links between the stages."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ds_vpipe.commands.quantities import seconds, size, sizes
from ds_vpipe.commands.settings import Settings
from ds_vpipe.errors import Refusal
from ds_vpipe.planning.plan_settings import PlanSettings, configured_settings
from ds_vpipe.profiles.layer_profile import ModelProfile, merge_profiles


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


def planner_settings(arguments: argparse.Namespace, settings: Settings, profile: ModelProfile) -> PlanSettings:
    """What training plans for by the JSON, with the options in the place of its keys."""
    pipeline = settings.pipeline
    options = {"memory_budget": arguments.memory, "link_bandwidth": arguments.bandwidth}
    found = configured_settings(
        settings.block.model_copy(update={key: value for key, value in options.items() if value is not None}),
        settings.ds_config,
        pipeline.num_stages,
        pipeline.micro_batches,
        replicas=arguments.replicas,
        host_transfers=profile.on_host,
    )
    return replace(found, link=replace(found.link, latency_s=arguments.latency))
