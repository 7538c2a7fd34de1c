"""Which optimizer a DeepSpeed JSON names, and how a stage steps and clips by itself."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import LAMB_OPTIMIZER
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import is_model_parallel_parameter

from ds_vpipe.engine.lamb import Lamb
from ds_vpipe.engine.stashing import WeightStashingOptimizer
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


class OptimizerMixin(PipelineEngine):
    """Optimizer choice, update and gradient clipping of one stage."""

    stashing_optimizer: WeightStashingOptimizer
    asynchronous: bool

    def _is_supported_optimizer(self, optimizer_name: str) -> bool:
        return optimizer_name in APEX_OPTIMIZERS or bool(super()._is_supported_optimizer(optimizer_name))

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

    def _take_model_step(self, lr_kwargs: dict[str, Any] | None) -> None:
        with self.stashing_optimizer.update():
            super()._take_model_step(lr_kwargs)

    def clip_fp32_gradients(self) -> None:
        """Scale the gradients so that their norm is at most ``gradient_clipping``.

        The norm is the stage's own in an asynchronous pipeline, and the whole model's in a synchronous
        one. (DeepSpeed's own fp32 clipping counts only the first stage's gradients.)
        """
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        counted = [
            p.grad.detach().float().norm()
            for p in self.module.parameters()
            if p.grad is not None and self._counts_in_norm(p)
        ]
        total = torch.stack(counted).pow(2.0).sum() if counted else torch.zeros((), device=self.device)
        if self.is_model_parallel:
            dist.all_reduce(total, group=self.grid.get_slice_parallel_group())
        if self.is_pipe_parallel and not self.asynchronous:
            dist.all_reduce(total, group=self.grid.get_pipe_parallel_group())
        norm = total.pow(0.5)
        self._global_grad_norm = norm
        if gradients:
            torch._foreach_mul_(gradients, torch.clamp(self.gradient_clipping() / (norm + 1e-6), max=1.0))

    def _counts_in_norm(self, parameter: torch.nn.Parameter) -> bool:
        if getattr(parameter, "ds_pipe_replicated", False):
            return False
        return self.grid.get_slice_parallel_rank() == 0 or bool(is_model_parallel_parameter(parameter))
