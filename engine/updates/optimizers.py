"""Optimizers of a DeepSpeed JSON that DeepSpeed does not make: SOAP, apex's, and LAMB without a GPU."""

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.config import LAMB_OPTIMIZER
from torch import nn

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.staleness.soap import SOAP, TensorwiseAdam

APEX_OPTIMIZERS = ("FusedLAMB", "FusedAdam")
"""Optimizers of NVIDIA's apex that a JSON may name, as apex spells them."""

OWN_OPTIMIZERS = (*APEX_OPTIMIZERS, "SOAP")
"""Optimizers that a JSON may name besides those that DeepSpeed knows."""


def own_optimizer(
    name: str | None, params: dict[str, Any], model_parameters: list[Any], on_host: bool = False
) -> torch.optim.Optimizer | None:
    """Optimizer by its name and ``params`` in the JSON; None if DeepSpeed makes it.

    With ``on_host`` it updates tensors in host memory, wherever the model is.

    Raises:
        VPipeConfigError: the optimizer is not installed, or does not take the parameters.
    """
    kind: Any
    name = as_spelled(name)
    if name in APEX_OPTIMIZERS:
        if not _apex_installed():
            raise VPipeConfigError(
                f"optimizer.type: got {name!r}, which needs NVIDIA's apex (apex.optimizers is not installed; PyPI's "
                f'package called apex is another one); install it from its source or write "Lamb" or "Adam"'
            )
        kind = getattr(importlib.import_module("apex.optimizers"), name)
    elif name == LAMB_OPTIMIZER and (on_host or get_accelerator().device_name() != "cuda"):
        kind = Lamb
    elif name == "SOAP":
        kind = SOAP
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


def reset_of_powers(engine: Any) -> Callable[[], object]:
    """Reset of the powers of betas that DeepSpeed's own Adam keeps.

    After it they are computed anew, as in a new process. Else it multiplies those of the update before, and the last
    bits are others. An update with other betas does it.
    """
    optimizer = getattr(engine.optimizer, "optimizer", engine.basic_optimizer)
    optimizer = getattr(optimizer, "aux_optimizer", None) or optimizer  # Muon's, for what is no matrix
    nothing = [torch.zeros(1, dtype=torch.float32, device="cpu") for _ in range(4)]
    if isinstance(optimizer, DeepSpeedCPUAdam):
        return partial(optimizer.ds_opt_adam.adam_update, optimizer.opt_id, 1, 0.0, 0.0, 0.0, 1.0, 0.0, True, *nothing)
    if isinstance(optimizer, FusedAdam) and get_accelerator().device_name() == "cpu":  # kernels of GPUs keep none
        parameter = nn.Parameter(nothing[0])  # all optimizers of a kind share one memory of powers
        parameter.grad = nothing[1]
        return FusedAdam([parameter], betas=(0.0, 0.0), adam_w_mode=bool(optimizer.adam_w_mode)).step
    return lambda: None


def as_spelled(name: str | None) -> str | None:
    """Name of an optimizer as it is written here; case does not count, as in DeepSpeed."""
    return next((own for own in OWN_OPTIMIZERS if name is not None and own.lower() == name.lower()), name)


def _apex_installed() -> bool:
    with suppress(ModuleNotFoundError):
        return importlib.util.find_spec("apex.optimizers") is not None
    return False


class Lamb(TensorwiseAdam):
    """LAMB in plain torch: Adam's direction, scaled per tensor to a fraction of its norm.

    You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes (ICLR 2020),
    algorithm 2. Arguments are those of DeepSpeed's ``FusedLamb``, so a JSON works on both devices.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        bias_correction: correct the moments for their start at zero.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment, under the root with ``eps_inside_sqrt``.
        weight_decay: decoupled decay, part of the direction that is scaled.
        max_coeff: upper limit of the trust ratio.
        min_coeff: lower limit of the trust ratio.
        amsgrad: not part of LAMB.

    Raises:
        ValueError: ``amsgrad`` is set, or a number is outside its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise ValueError("optimizer.params.amsgrad: got true, allowed is false; LAMB has no AMSGrad variant")
        self._eps_inside_sqrt = eps_inside_sqrt
        self._ratios: list[torch.Tensor] = []
        own = {"bias_correction": bias_correction, "max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, lr, betas, eps, weight_decay, **own)

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        self._ratios.clear()
        return super().step(closure)

    def get_lamb_coeffs(self) -> list[float]:
        """Trust ratios of the last update, one per tensor that had a gradient, as ``FusedLamb`` gives them."""
        return [ratio.item() for ratio in self._ratios]

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Needs two tensors of the parameter's size at most."""
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        correction = (1 - beta1 ** state["step"], 1 - beta2 ** state["step"]) if group["bias_correction"] else (1, 1)
        root = square / correction[1]
        root = root.add_(group["eps"]).sqrt_() if self._eps_inside_sqrt else root.sqrt_().add_(group["eps"])
        direction = (mean / correction[0]).div_(root)
        del root
        if group["weight_decay"]:
            direction.add_(parameter, alpha=group["weight_decay"])
        weight_norm, direction_norm = parameter.norm(), direction.norm()
        ratio = torch.where(
            (weight_norm > 0) & (direction_norm > 0),
            (weight_norm / direction_norm).clamp(group["min_coeff"], group["max_coeff"]),
            torch.ones_like(weight_norm),
        )
        self._ratios.append(ratio)
        parameter.sub_(direction.mul_(ratio * group["lr"]))
