"""From the plain module that a script hands to ``initialize()`` to a pipeline module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule

from ds_vpipe.refusal import Refusal


def split(model: torch.nn.Module, ds_config: Mapping[str, Any], block: Mapping[str, Any]) -> PipelineModule:
    """Make a pipeline of ``model``; all ranks call this.

    Raises:
        VPipeConfigError: the model cannot be split, or nothing says into how many stages, or not into so many.
    """
    from ds_vpipe.engine.split_module import split_model  # type: ignore[import-not-found]

    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    stages = num_stages(ds_config, block, dist.get_world_size())
    pipeline: PipelineModule = split_model(model, stages)
    return pipeline


def num_stages(ds_config: Mapping[str, Any], block: Mapping[str, Any], ranks: int) -> int:
    """How many stages the JSON asks for: ``"pipeline": {"stages": K}``, or else the length of ``vpipe.partition``.

    Raises:
        VPipeConfigError: neither says it, or ``ranks`` is no multiple of it.
    """
    pipeline = ds_config.get("pipeline")
    key, stages = "pipeline.stages", pipeline.get("stages") if isinstance(pipeline, Mapping) else None
    if stages in (None, "auto"):
        partition = block.get("partition")
        if not isinstance(partition, (list, tuple)):
            reason = "the model is no PipelineModule, so the JSON has to say how many stages it is split into"
            remedy = f'add "pipeline": {{"stages": {ranks}}}, or a list of layer counts as vpipe.partition'
            raise Refusal(key, stages, "a whole number >= 1", remedy, reason).error()
        virtual = block.get("virtual_stages", 1)
        key, stages = "vpipe.partition", len(partition) // (virtual if isinstance(virtual, int) and virtual > 0 else 1)
    if not isinstance(stages, int) or isinstance(stages, bool) or stages < 1 or ranks % stages:
        allowed = f"a number of stages that divides the {ranks} ranks"
        raise Refusal(key, stages, allowed, "change it, or start another number of ranks").error()
    return stages
