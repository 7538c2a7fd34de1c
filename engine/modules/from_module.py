"""From the plain module that a script hands to ``initialize()`` to a pipeline module."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule

from ds_vpipe.config import VPipeConfig
from ds_vpipe.engine.links.groups import use_local_device
from ds_vpipe.engine.modules.split_module import split_model, stages_in
from ds_vpipe.errors import Refusal, VPipeConfigError


def split(
    model: torch.nn.Module,
    ds_config: Mapping[str, Any],
    config: VPipeConfig,
    training_data: Any = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> PipelineModule:
    """Make a pipeline of ``model``; all ranks call this, with or without a process group.

    Args:
        model: whose forward returns the loss.
        ds_config: the DeepSpeed JSON, which says how many stages there are.
        config: its ``"vpipe"`` block.
        training_data: as given to ``initialize()``; its first samples are an example of a call.
        collate_fn: likewise.

    Raises:
        VPipeConfigError: the model is no module or cannot be split, or nothing says into how many stages, or not into
            so many.
    """
    if not isinstance(model, torch.nn.Module):
        given = type(model).__name__
        raise VPipeConfigError(f"initialize(model): got {given}, allowed is a torch.nn.Module; pass the model to train")
    deepspeed.init_distributed(dist_backend=get_accelerator().communication_backend_name())
    use_local_device()
    stages, ranks = stages_in(ds_config, config.partition, config.virtual_stages), dist.get_world_size()
    if ranks % stages:
        allowed = f"a number of stages that divides the {ranks} ranks"
        raise Refusal("pipeline.stages", stages, allowed, "change it, or start another number of ranks").error()
    pipeline: PipelineModule = split_model(model, stages, training_data=training_data, collate_fn=collate_fn)
    return pipeline
