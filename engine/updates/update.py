"""One update of a stage: loss scale, clipping by the stage's or the whole model's norm, tied weights, versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.utils import is_model_parallel_parameter

from ds_vpipe.config import VPipeConfig
from ds_vpipe.engine.execution.in_flight import StageState
from ds_vpipe.engine.updates.loss_scale import LossScaling
from ds_vpipe.engine.updates.optimizer import OptimizerMixin
from ds_vpipe.engine.updates.peer_updates import StageNews
from ds_vpipe.engine.updates.tied import TiedWeights, tied_parameters, tied_stages
from ds_vpipe.engine.weights.stashing import WeightStashingOptimizer
from ds_vpipe.staleness.mitigation import StalenessMitigation


class UpdateMixin(OptimizerMixin):
    """Update and gradient clipping of one stage.

    Attributes:
        loss_scaling: with fp16, else None.
        ties: tied weights shared with other stages, in an asynchronous pipeline that has some, else None.
        news: what other stages' updates told, in an asynchronous pipeline that needs to know, else None.
        mitigation: what is done about stale gradients, where there are any, else None.
    """

    vpipe_config: VPipeConfig
    stashing_optimizer: WeightStashingOptimizer
    state: StageState
    asynchronous: bool
    loss_scaling: LossScaling | None
    ties: TiedWeights | None
    news: StageNews | None
    mitigation: StalenessMitigation | None
    _clips_globally: bool

    def _prepare_updates(self) -> None:
        """Set up what updates need, once the optimizer exists."""
        pipelined = self.asynchronous and self.num_stages > 1
        scaled = self.optimizer is not None and self.fp16_enabled()
        self.loss_scaling = LossScaling(self.optimizer) if scaled else None
        dynamic = self.loss_scaling is not None and self.dynamic_loss_scale()
        self.news = (
            StageNews(self.num_stages, self.stage_id) if pipelined and (self._clips_globally or dynamic) else None
        )
        self._own_norm = 0.0
        self._tied_anywhere = bool(tied_stages(self.module))  # on all ranks alike, as a norm is summed over them
        shared = {id(parameter) for key in self.module.tied_comms for parameter in tied_parameters(self.module, key)}
        for tied in self.module.tied_comms.values():
            for parameter in tied["module"].parameters():
                if id(parameter) not in shared:
                    parameter.ds_pipe_replicated = False  # DeepSpeed means the whole layer; this is not shared
        if hasattr(self.optimizer, "unscale_and_clip_grads"):
            clip = self.optimizer.unscale_and_clip_grads

            def clip_by_scope(*args: Any, **kwargs: Any) -> Any:
                *tensors, norm = args
                return clip(*tensors, self._norm_to_clip_by(norm), **kwargs)

            self.optimizer.unscale_and_clip_grads = clip_by_scope

    def _take_model_step(self, lr_kwargs: dict[str, Any] | None) -> None:
        if self.loss_scaling is not None and self.state.report is not None:
            self.loss_scaling.scale = self.state.report.loss_scale
        if self.mitigation is not None:
            self.mitigation.updates = self.stashing_optimizer.latest_version
        if isinstance(self.optimizer, FP16_UnfusedOptimizer) and not self.asynchronous:
            for group in self.optimizer.fp16_groups:  # its norm is summed over stages, which wait for each other
                if all(parameter.grad is None for parameter in group):
                    group[0].grad = torch.zeros_like(group[0])
        with self.stashing_optimizer.update():
            super()._take_model_step(lr_kwargs)
            if self.ties is not None:
                self.ties.overwrite()
        overflow = bool(getattr(self.optimizer, "overflow", False))
        if self.news is not None:
            self.news.tell(overflow=overflow, norm=self._own_norm)
            overflow = self.news.new_overflow()
        if self.loss_scaling is not None and (self.is_last_stage() or not self.asynchronous):
            self.loss_scaling.after_update(overflow)

    def clip_fp32_gradients(self) -> None:
        """Scale the gradients so that their norm is at most ``gradient_clipping``.

        The norm is, in an asynchronous pipeline, the stage's own or with ``gradient_clipping_scope``
        ``delayed_global`` the whole model's as far as it is known; in a synchronous one the whole model's.
        (DeepSpeed's own fp32 clipping counts only the first stage's gradients.)
        """
        gradients = [p.grad for p in self.stage_parameters if p.grad is not None]
        norm = self._gradient_norm()
        if self._clips_globally:
            norm = self._scaled_norm_of_all(norm)
        self._global_grad_norm = norm
        if gradients:
            torch._foreach_mul_(gradients, torch.clamp(self.gradient_clipping() / (norm + 1e-6), max=1.0))

    def _gradient_norm(self) -> torch.Tensor:
        """Norm of the gradients in ``p.grad``, every parameter once: of this stage, or in bsp of the whole model."""
        first_in_slice = self.grid.get_slice_parallel_rank() == 0
        counted = [
            p.grad
            for p in self.stage_parameters
            if p.grad is not None
            and not getattr(p, "ds_pipe_replicated", False)
            and (first_in_slice or is_model_parallel_parameter(p))
        ]
        total = torch.stack(fp32_norms(counted)).pow(2.0).sum() if counted else torch.zeros((), device=self.device)
        if self.is_model_parallel:
            dist.all_reduce(total, group=self.grid.get_slice_parallel_group())
        if self.is_pipe_parallel and not self.asynchronous:
            dist.all_reduce(total, group=self.grid.get_pipe_parallel_group())
        return total.pow(0.5)

    def _norm_to_clip_by(self, norm: Any) -> Any:
        """What a mixed-precision optimizer clips by, from its own norm; both times the loss scale."""
        if isinstance(self.optimizer, FP16_UnfusedOptimizer) and (self._tied_anywhere or self.is_model_parallel):
            norm = float(self._gradient_norm())  # its own counts weights that ranks share once for each
        if self._clips_globally:
            norm = self._scaled_norm_of_all(norm)
        scale = 1.0 if self.loss_scaling is None else self.loss_scaling.scale
        self.optimizer._global_grad_norm = norm / scale
        return norm

    def _scaled_norm_of_all(self, own: Any) -> Any:
        """The norm that gradients are clipped by, from this stage's own; both times the loss scale."""
        assert self.news is not None
        scale = 1.0 if self.loss_scaling is None else self.loss_scaling.scale
        self._own_norm = float(own) / scale
        total = (float(own) ** 2 + scale**2 * self.news.squared_norm_elsewhere()) ** 0.5
        return torch.as_tensor(own).new_tensor(total) if isinstance(own, torch.Tensor) else total


_NORMED_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16)  # without a copy


@torch.no_grad()
def fp32_norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The Euclidean norm of each, in fp32. There may be hundreds of small ones, of which each call would cost more."""
    dense = [torch.view_as_real(g) if g.is_complex() else g for g in gradients if g.layout is torch.strided]
    dense = [g if g.dtype in _NORMED_IN_FP32 else g.float() for g in dense]
    norms = iter(torch._foreach_norm(dense, 2.0, torch.float32) if dense else ())
    return [next(norms) if g.layout is torch.strided else g.float().norm() for g in gradients]
