"""What a DeepSpeed JSON means for planning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ds_vpipe.optimizer_bytes import configured_optimizer_bytes
from ds_vpipe.pace import FREE_LINK, Link
from ds_vpipe.planner import Pipeline


def configured_pipeline(
    ds_config: Mapping[str, Any],
    num_stages: int,
    micro_batches: int,
    *,
    replicas: int = 1,
    budget: int | Sequence[int] | None = None,
    link: Link = FREE_LINK,
    host_transfers: bool = False,
) -> Pipeline:
    """What to plan for, from the JSON that training reads.

    Args:
        ds_config: the JSON; its ``"vpipe"`` block may say ``"auto"`` for depths, ratios and partition.
        num_stages: K.
        micro_batches: M, ``gradient_accumulation_steps`` as DeepSpeed has worked it out.
        replicas: data-parallel ranks per stage, among which ZeRO-1 divides.
        budget: bytes per device, one number or one for each rank; None for no limit.
        link: between two stages.
        host_transfers: messages are kept in the memory that is planned, as on the CPU.
    """
    block = ds_config.get("vpipe") or {}
    asynchronous = block.get("sync_mode", "asp") == "asp"
    return Pipeline(
        num_stages=num_stages,
        micro_batches=micro_batches,
        schedule="asp" if asynchronous else block.get("schedule", "1f1b"),
        budget=budget,
        depths=block.get("stage_to_depth_map", "default") if asynchronous else "default",
        weight_sync=block.get("weight_sync", "stash") if asynchronous else "none",
        virtual_stages=block.get("virtual_stages", 1),
        optimizer=configured_optimizer_bytes(ds_config, replicas),
        link=link,
        host_transfers=host_transfers,
    )


def settled_split(ds_config: Mapping[str, Any], parts: int) -> tuple[list[int] | None, list[float] | None]:
    """Partition and recompute ratios that the ``"vpipe"`` block settles, for :func:`ds_vpipe.planner.plan`.

    ``"partition": "profile"`` and ``"recompute_ratio": "auto"`` leave them to the planner, None here. Ratios that are
    not given are 0, as everywhere. A partition in other words ("uniform", ...) is for the caller to resolve first.
    """
    block = ds_config.get("vpipe") or {}
    counts, ratio = block.get("partition"), block.get("recompute_ratio", 0)
    ratios = None if ratio == "auto" else list(ratio) if isinstance(ratio, (list, tuple)) else [float(ratio)] * parts
    return (list(counts) if isinstance(counts, (list, tuple)) else None), ratios
