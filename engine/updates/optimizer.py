"""Which optimizer a DeepSpeed JSON names, and what DeepSpeed puts around it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import LAMB_OPTIMIZER
from deepspeed.runtime.constants import BFLOAT16, DDP_BFLOAT16

from ds_vpipe.checkpoints.stage_layout import PLACEHOLDER
from ds_vpipe.engine.modules.fast_walks import ModuleWalksMixin
from ds_vpipe.engine.updates.lamb import Lamb
from ds_vpipe.engine.updates.placeholder import has_trainable, with_placeholder
from ds_vpipe.errors import VPipeConfigError

APEX_OPTIMIZERS = ("FusedLAMB", "FusedAdam")
"""Optimizers of NVIDIA's apex that a JSON may name, as apex spells them."""


def apex_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """The class ``apex.optimizers.<name>``.

    Raises:
        VPipeConfigError: NVIDIA's apex is not installed; the package of that name on PyPI is another one.
    """
    try:
        found = importlib.util.find_spec("apex.optimizers") is not None
    except ModuleNotFoundError:
        found = False
    if not found:
        raise VPipeConfigError(
            f"optimizer.type: got {name!r}, which needs NVIDIA's apex (apex.optimizers is not installed; PyPI's "
            f'package called apex is another one); install it from its source or write "Lamb" or "Adam"'
        )
    optimizer: type[torch.optim.Optimizer] = getattr(importlib.import_module("apex.optimizers"), name)
    return optimizer


class OptimizerMixin(ModuleWalksMixin):
    """Optimizer choice of one stage."""

    def _is_supported_optimizer(self, optimizer_name: str) -> bool:
        return optimizer_name in APEX_OPTIMIZERS or bool(super()._is_supported_optimizer(optimizer_name))

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        if not isinstance(client_optimizer, torch.optim.Optimizer):
            model_parameters = list(model_parameters)
            for group in model_parameters:
                if isinstance(group, dict):
                    group["params"] = list(group["params"])
            if not has_trainable(model_parameters):
                placeholder = torch.nn.Parameter(torch.zeros(1, dtype=self.get_data_types()[0], device=self.device))
                self.param_names[placeholder] = PLACEHOLDER
                model_parameters = with_placeholder(model_parameters, placeholder)
        super()._configure_optimizer(client_optimizer, model_parameters)

    def _configure_basic_optimizer(self, model_parameters: list[Any]) -> torch.optim.Optimizer:
        name, params = self.optimizer_name(), dict(self.optimizer_params() or {})
        ours: type[torch.optim.Optimizer] | None = None
        if name in APEX_OPTIMIZERS:
            ours = apex_optimizer(name)
        elif name == LAMB_OPTIMIZER and get_accelerator().device_name() != "cuda":
            ours = Lamb
        if ours is not None:
            if "max_grad_norm" in params:
                raise VPipeConfigError(
                    f"optimizer.params.max_grad_norm: got {params['max_grad_norm']}, allowed is no such key; "
                    f"write the DeepSpeed key gradient_clipping"
                )
            try:
                return ours(model_parameters, **params)
            except (TypeError, ValueError) as error:
                raise VPipeConfigError(f"optimizer.params: got {params}, allowed are {name}'s own: {error}") from None
        optimizer: torch.optim.Optimizer = super()._configure_basic_optimizer(model_parameters)
        return optimizer

    def _do_optimizer_sanity_check(self, basic_optimizer: Any) -> Any:
        wrapper = super()._do_optimizer_sanity_check(basic_optimizer)
        if wrapper == BFLOAT16 and not self.zero_optimization():
            # What DeepSpeed takes in pipelines cannot load its own checkpoints; this is what it takes elsewhere.
            return DDP_BFLOAT16
        return wrapper

    def _configure_fp16_optimizer(self, optimizer: torch.optim.Optimizer, low_precision_dtype: torch.dtype) -> Any:
        # DeepSpeed makes the optimizer's state by an update with zero gradients, which applies weight decay and
        # counts in Adam's bias correction. The state makes itself at the first real update.
        with _standing_still(optimizer):
            wrapped = super()._configure_fp16_optimizer(optimizer, low_precision_dtype)
        if isinstance(optimizer, Lamb):
            wrapped.fused_lamb_legacy = False  # which needs a kernel of its own
        return wrapped


@contextmanager
def _standing_still(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Let ``optimizer.step()`` do nothing for a while."""
    patched = vars(optimizer).get("step")  # by a learning-rate scheduler that has been made already
    optimizer.step = lambda *args, **kwargs: None  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        del optimizer.step
        if patched is not None:
            optimizer.step = patched  # type: ignore[method-assign]
