"""Settings with which layers cannot move while training runs, for the engine and on paper."""

from __future__ import annotations

from ds_vpipe.config.block import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.schedules.pipeline import Pipeline


def unfit_settings(
    *,
    flat: bool,
    optimizer: str | None,
    clips: bool,
    replicated: bool,
    recomputes: bool,
    swaps: bool,
    mitigates: bool,
) -> str | None:
    """Why layers cannot move while training runs, by settings alone; None if they can.

    ``optimizer`` is what it is called, unless its state is known to be by parameter.
    """
    reasons = {
        "weights are in flat buffers, or in other types than fp32": flat,
        f"the optimizer is {optimizer}": optimizer is not None,
        "gradients are clipped": clips,
        "stages have replicas or slices": replicated,
        "layers are recomputed": recomputes,
        "activations are swapped": swaps,
        '"staleness" is in use, by default too ("off" ends it)': mitigates,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def unfit_json(json: DeepSpeedJson, block: VPipeConfig, pipeline: Pipeline, replicas: int) -> str | None:
    """Why layers cannot move with a DeepSpeed JSON, or None.

    ``block`` is its block, whose staleness is settled, and ``pipeline`` the planned one.
    """
    optimizer = json.optimizer  # None if the script brings one
    if optimizer is not None and optimizer.lower() in ("adam", "adamw"):
        optimizer = None if json.optimizer_params.get("torch_adam") else f"{optimizer} without torch_adam"
    return unfit_settings(
        flat=bool(json.zero_stage) or json.dtype != "float32" or json.is_set("torch_autocast.enabled"),
        optimizer=None if optimizer == "SGD" else optimizer,
        clips=bool(json.clipping),
        replicated=replicas > 1,
        recomputes=any(pipeline.recompute_ratio or ()) or json.whole("pipeline.activation_checkpoint_interval") > 0,
        swaps=any(pipeline.swap_ratio or ()),
        mitigates=block.staleness is not None,
    )
