"""What a ``"vpipe"`` block leaves to the planner: ``"partition": "profile"``, ``"auto"`` ratios, ``"auto"`` depths.

Every rank reads the same profile and comes to the same plan, so that nothing has to be sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_vpipe.config import VPipeConfig, part_ratios
from ds_vpipe.deepspeed_json import DeepSpeedJson
from ds_vpipe.errors import Refusal
from ds_vpipe.partition import resolve_partition
from ds_vpipe.planning.plan import Plan
from ds_vpipe.planning.plan_settings import PlanSettings, configured_settings
from ds_vpipe.planning.planner import plan, predict
from ds_vpipe.profiles.layer_profile import ModelProfile


def planned(
    config: VPipeConfig,
    ds_config: Mapping[str, Any],
    num_stages: int,
    own_counts: Sequence[int],
    *,
    replicas: int = 1,
    device_bytes: int | None = None,
    host_transfers: bool = False,
) -> tuple[VPipeConfig, Plan]:
    """Put what the planner finds in the place of ``"profile"`` and ``"auto"``.

    Args:
        config: the block; ``config.leaves_to_planner`` is true.
        ds_config: the DeepSpeed JSON around it.
        num_stages: K.
        own_counts: layers per stage as the module was built.
        replicas: data-parallel ranks per stage.
        device_bytes: budget per device if the block has none; None for no limit.
        host_transfers: messages are kept in the memory that is planned, as on the CPU.

    Returns:
        A block with numbers only, and the plan.

    Raises:
        VPipeConfigError: the profile is of another model, or nothing fits; the line says by how many bytes.
    """
    assert config.profile is not None
    profile = ModelProfile.load(config.profile)
    if len(profile) != sum(own_counts):
        reason = f"it has {len(profile)} layers but the model has {sum(own_counts)}"
        fix = "make the profile anew with: python -m ds_vpipe profile"
        raise Refusal("vpipe.profile", config.profile, "a profile of this model", fix, reason).error()
    json = DeepSpeedJson(ds_config)
    if profile.dtype != json.dtype:
        reason = f"it is of {profile.dtype} and the JSON trains in {json.dtype}"
        fix = f"make the profile anew with: python -m ds_vpipe profile, and layers in {json.dtype}"
        raise Refusal("vpipe.profile", config.profile, f"a profile in {json.dtype}", fix, reason).error()
    pipeline = configured_settings(
        config,
        ds_config,
        num_stages,
        json.micro_batches(replicas),
        replicas=replicas,
        device_bytes=device_bytes,
        host_transfers=host_transfers,
    )
    found = configured_plan(config, pipeline, profile, own_counts)
    settled = {
        "partition": found.partition,
        "recompute_ratio": found.recompute_ratio if config.recompute_ratio == "auto" else config.recompute_ratio,
        "stage_to_depth_map": found.depths or "default",
    }
    return config.model_copy(update=settled), found


def configured_plan(
    config: VPipeConfig, pipeline: PlanSettings, profile: ModelProfile, own_counts: Sequence[int] | None = None
) -> Plan:
    """What training does by a block: its own numbers, whether they fit or not, or what the planner makes of the rest.

    Raises:
        VPipeConfigError: A setting is wrong, or something was left to the planner and nothing fits.
    """
    counts = configured_partition(config, pipeline, profile, own_counts)
    ratios = configured_ratios(config, pipeline)
    if counts is None or ratios is None or pipeline.depths == "auto":
        return plan(profile, pipeline, counts, ratios)
    return predict(profile, pipeline, counts, ratios)


def configured_partition(
    config: VPipeConfig, pipeline: PlanSettings, profile: ModelProfile, own_counts: Sequence[int] | None = None
) -> Sequence[int] | None:
    """Layers per part that a block asks for; None if it leaves them to the planner.

    Without a word from it they are ``own_counts``, those of the module, or DeepSpeed's default: even parameters.

    Raises:
        VPipeConfigError: The counts do not fit the profile.
    """
    method = config.partition or own_counts or "parameters"
    if method == "profile":
        return None
    weights = [layer.parameter_bytes for layer in profile.layers]
    return resolve_partition(method, lambda: weights, [layer.name for layer in profile.layers], pipeline.parts)


def configured_ratios(config: VPipeConfig, pipeline: PlanSettings) -> tuple[float, ...] | None:
    """Recompute ratio of every part that a block asks for; None if it leaves them to the planner.

    Raises:
        VPipeConfigError: Their number is not that of the parts.
    """
    ratio = config.recompute_ratio
    if ratio == "auto":
        return None
    if isinstance(ratio, tuple) and len(ratio) not in (pipeline.parts, pipeline.num_stages):
        allowed = f"{pipeline.num_stages} numbers, one for each stage"
        raise Refusal("vpipe.recompute_ratio", ratio, allowed, "correct the numbers").error()
    return part_ratios(ratio, pipeline.parts)
