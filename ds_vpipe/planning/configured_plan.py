"""What a ``"vpipe"`` block leaves to the planner: ``"partition": "profile"``, ``"auto"`` ratios, ``"auto"`` depths.

Every rank reads the same profile and comes to the same plan, so that nothing has to be sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_vpipe.batch_sizes import micro_batches_of
from ds_vpipe.config import VPipeConfig, part_ratios
from ds_vpipe.partition import resolve_partition
from ds_vpipe.planning.optimizer_bytes import training_dtype
from ds_vpipe.planning.plan import Plan
from ds_vpipe.planning.plan_settings import configured_settings
from ds_vpipe.planning.planner import plan
from ds_vpipe.profiles.layer_profile import ModelProfile
from ds_vpipe.refusal import Refusal


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
    dtype = training_dtype(ds_config)
    if profile.dtype != dtype:
        reason = f"it is of {profile.dtype} and the JSON trains in {dtype}"
        fix = f"make the profile anew with: python -m ds_vpipe profile, and layers in {dtype}"
        raise Refusal("vpipe.profile", config.profile, f"a profile in {dtype}", fix, reason).error()
    pipeline = configured_settings(
        ds_config,
        num_stages,
        micro_batches_of(ds_config, replicas),
        replicas=replicas,
        budget=device_bytes if config.memory_budget is None else config.memory_budget,
        host_transfers=host_transfers,
    )
    counts: Sequence[int] | None = None
    if config.partition is None:
        counts = own_counts
    elif config.partition != "profile":
        weights = [layer.parameter_bytes for layer in profile.layers]
        names = [layer.name for layer in profile.layers]
        counts = resolve_partition(config.partition, lambda: weights, names, pipeline.parts)
    ratio = config.recompute_ratio
    ratios = None if ratio == "auto" else part_ratios(ratio, pipeline.parts)
    found = plan(profile, pipeline, counts, ratios)
    settled = {
        "partition": found.partition,
        "recompute_ratio": found.recompute_ratio if ratios is None else ratio,
        "stage_to_depth_map": found.depths or "default",
    }
    return config.model_copy(update=settled), found
