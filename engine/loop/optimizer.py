"""Optimizers of scripts that know the whole model: what they were made of is cut down to this stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_vpipe.checkpoints.stage_layout import PLACEHOLDER
from ds_vpipe.engine.engine import VPipeEngine
from ds_vpipe.engine.updates.parameter_groups import by_identity, follow, restricted


class LoopOptimizerMixin(VPipeEngine):
    """Optimizer objects and parameter groups of the whole model, and calls of ``zero_grad()`` that come too early."""

    _inside: bool

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: list[Any]) -> None:
        own = getattr(self.module, "own_parameters", None) or by_identity(self.module.parameters())
        if isinstance(client_optimizer, torch.optim.Optimizer):
            follow(client_optimizer, own, self._placeholder)
        else:
            model_parameters = restricted(model_parameters, own, self._placeholder)
        super()._configure_optimizer(client_optimizer, model_parameters)
        holders = (self.optimizer, self.basic_optimizer, self.module, getattr(self.module, "user_module", None))
        for holder in {id(found): found for found in holders if found is not None}.values():
            holder.zero_grad = self._if_inside(holder.zero_grad)

    def zero_grad(self) -> None:
        """Nothing: ``step()`` drops the gradients of a batch when it ends on this stage, not where it does so for the
        script, which would lose those of the next batch."""
        if self._inside:
            super().zero_grad()

    def _if_inside(self, zero_grad: Callable[..., None]) -> Callable[..., None]:
        def zero_grad_of_stage(*args: Any, **kwargs: Any) -> None:
            if self._inside:
                zero_grad(*args, **kwargs)

        return zero_grad_of_stage

    def _placeholder(self) -> torch.nn.Parameter:
        placeholder = torch.nn.Parameter(torch.zeros(1, dtype=self.get_data_types()[0], device=self.device))
        self.param_names[placeholder] = PLACEHOLDER
        return placeholder
