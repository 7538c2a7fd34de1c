"""Optimizers of a DeepSpeed JSON that DeepSpeed does not make: apex's, and LAMB without a GPU."""

from __future__ import annotations

import importlib
import importlib.util
from contextlib import suppress
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import LAMB_OPTIMIZER

from ds_vpipe.engine.updates.lamb import Lamb
from ds_vpipe.errors import VPipeConfigError

APEX_OPTIMIZERS = ("FusedLAMB", "FusedAdam")
"""Optimizers of NVIDIA's apex that a JSON may name, as apex spells them."""


def own_optimizer(
    name: str | None, params: dict[str, Any], model_parameters: list[Any]
) -> torch.optim.Optimizer | None:
    """Optimizer by its name in the JSON; None if DeepSpeed makes it.

    Raises:
        VPipeConfigError: the optimizer is not installed, or does not take the parameters.
    """
    kind: Any
    if name in APEX_OPTIMIZERS:
        if not _apex_installed():
            raise VPipeConfigError(
                f"optimizer.type: got {name!r}, which needs NVIDIA's apex (apex.optimizers is not installed; PyPI's "
                f'package called apex is another one); install it from its source or write "Lamb" or "Adam"'
            )
        kind = getattr(importlib.import_module("apex.optimizers"), name)
    elif name == LAMB_OPTIMIZER and get_accelerator().device_name() != "cuda":
        kind = Lamb
    else:
        return None
    if "max_grad_norm" in params:
        raise VPipeConfigError(
            f"optimizer.params.max_grad_norm: got {params['max_grad_norm']}, allowed is no such key; "
            f"write the DeepSpeed key gradient_clipping"
        )
    try:
        return kind(model_parameters, **params)
    except (TypeError, ValueError) as error:
        raise VPipeConfigError(f"optimizer.params: got {params}, allowed are {name}'s own: {error}") from None


def _apex_installed() -> bool:
    with suppress(ModuleNotFoundError):
        return importlib.util.find_spec("apex.optimizers") is not None
    return False
