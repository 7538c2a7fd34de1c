"""Gradient clipping of a stage, by its own norm or the model's as far as known."""

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.utils import is_model_parallel_parameter

from ds_vpipe.engine.updates.loss_scale import LossScaling
from ds_vpipe.engine.updates.peer_updates import PeerUpdates
from ds_vpipe.engine.updates.tied import tied_parameters, tied_stages


class GradientClipping:
    """Gradient norm of one stage, and clipping.

    In an asynchronous pipeline the norm is the stage's own, or with ``gradient_clipping_scope`` ``delayed_global`` the
    whole model's as far as it is known; in a synchronous one the whole model's.

    The norm of DeepSpeed's optimizer in mixed precision is replaced. ``peers`` has norms of other stages, if the whole
    model's is wanted in an asynchronous pipeline.
    """

    def __init__(
        self, engine: PipelineEngine, synchronous: bool, peers: PeerUpdates | None, loss_scaling: LossScaling | None
    ) -> None:
        self._engine, self._synchronous, self._peers, self._loss_scaling = engine, synchronous, peers, loss_scaling
        module, optimizer = engine.module, engine.optimizer
        self._parameters = tuple(module.parameters())
        self._tied_anywhere = bool(tied_stages(module))  # on all ranks alike, as a norm is summed over them
        shared = {id(parameter) for key in module.tied_comms for parameter in tied_parameters(module, key)}
        for tied in module.tied_comms.values():
            for parameter in tied["module"].parameters():
                if id(parameter) not in shared:
                    parameter.ds_pipe_replicated = False  # DeepSpeed means the whole layer; this is not shared
        if hasattr(optimizer, "unscale_and_clip_grads"):
            clip = optimizer.unscale_and_clip_grads

            def clip_by_scope(*args: Any, **kwargs: Any) -> Any:
                *tensors, norm = args
                return clip(*tensors, self._norm_to_clip_by(norm), **kwargs)

            optimizer.unscale_and_clip_grads = clip_by_scope

    def clip(self, limit: float) -> torch.Tensor:
        """Scale fp32 gradients so that their norm is at most ``limit``; returns the norm."""
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm: torch.Tensor = self._norm_of_all(self._norm())
        if gradients:
            torch._foreach_mul_(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
        return norm

    def _norm(self) -> torch.Tensor:
        """Norm of the gradients in ``p.grad``, each parameter once: of this stage, or in bsp of the whole model."""
        engine, first_in_slice = self._engine, self._engine.grid.get_slice_parallel_rank() == 0
        counted = [
            p.grad
            for p in self._parameters
            if p.grad is not None
            and not getattr(p, "ds_pipe_replicated", False)
            and (first_in_slice or is_model_parallel_parameter(p))
        ]
        total = torch.stack(fp32_norms(counted)).pow(2.0).sum() if counted else torch.zeros((), device=engine.device)
        if engine.is_model_parallel:
            dist.all_reduce(total, group=engine.grid.get_slice_parallel_group())
        if engine.is_pipe_parallel and self._synchronous:
            dist.all_reduce(total, group=engine.grid.get_pipe_parallel_group())
        return total.pow(0.5)

    def _norm_to_clip_by(self, norm: Any) -> Any:
        """Norm for a mixed-precision optimizer, from its own; both times the loss scale. None if it computes none."""
        if norm is None:
            return None
        optimizer = self._engine.optimizer
        if isinstance(optimizer, FP16_UnfusedOptimizer) and (self._tied_anywhere or self._engine.is_model_parallel):
            norm = float(self._norm())  # its own counts weights that ranks share once for each
        norm = self._norm_of_all(norm)
        optimizer._global_grad_norm = norm / self._scale
        return norm

    def _norm_of_all(self, own: Any) -> Any:
        """Norm to clip by, from this stage's own; both times the loss scale."""
        if self._peers is None:
            return own
        self._peers.own_norm = float(own) / self._scale
        total = (float(own) ** 2 + self._scale**2 * self._peers.squared_norm_elsewhere()) ** 0.5
        return own.new_tensor(total) if isinstance(own, torch.Tensor) else total

    @property
    def _scale(self) -> float:
        return 1.0 if self._loss_scaling is None else self._loss_scaling.scale


_NORMED_IN_FP32 = (torch.float32, torch.bfloat16, torch.float16)  # without a copy


@torch.no_grad()
def fp32_norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Euclidean norms in fp32. There may be hundreds of small ones, so that calls cost more than arithmetic."""
    dense = [torch.view_as_real(g) if g.is_complex() else g for g in gradients if g.layout is torch.strided]
    dense = [g if g.dtype in _NORMED_IN_FP32 else g.float() for g in dense]
    norms = iter(torch._foreach_norm(dense, 2.0, torch.float32) if dense else ())
    return [next(norms) if g.layout is torch.strided else g.float().norm() for g in gradients]
