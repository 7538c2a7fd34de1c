"""SOAP, Adam in the eigenbasis of its gradients' second moments, with Nesterov momentum.

Vyas et al., SOAP: Improving and Stabilizing Shampoo using Adam (2024). Late gradients harm Adam most where a matrix's
curvature is not aligned with its rows and columns; after the rotation it is. Jung et al., Mitigating Staleness in
Asynchronous Pipeline Parallelism via Basis Rotation (ICML 2026), whose algorithm this is: the first moment stays in the
basis of the weights, the second one in the rotated basis. New is Nesterov's momentum in the form of
``torch.optim.NAdam``, which gives the newest gradient more weight.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ds_vpipe.staleness.nadam import momentum

Bases = tuple[torch.Tensor | None, torch.Tensor | None]
"""Orthogonal matrices for the rows and for the columns of a gradient; None leaves that side as it is."""


class TensorwiseAdam(torch.optim.Optimizer):
    """Base of optimizers with Adam's hyperparameters, and ``own`` ones, that update one tensor after the other.

    Raises:
        ValueError: a number of Adam's is outside its range.
    """

    def __init__(
        self, params: Any, lr: float, betas: Sequence[float], eps: float, weight_decay: float, **own: Any
    ) -> None:
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas: got {betas}, allowed are two numbers in [0, 1)")
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name}: got {value}, allowed is a number >= 0")
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, **own})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """One update of all parameters that have a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)
        return loss

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        raise NotImplementedError


class SOAP(TensorwiseAdam):
    """SOAP with Nesterov momentum and decoupled weight decay.

    Matrices are rotated; other tensors are trained by NAdam. An n x m matrix needs 2 n² + 2 m² elements of state
    besides Adam's two of its own size, and QR decompositions of n x n and m x m every ``precondition_frequency``
    updates.

    Args:
        params: parameters or parameter groups.
        lr: learning rate.
        betas: decay of the first and second moment.
        eps: added to the root of the second moment.
        weight_decay: decoupled decay.
        momentum_decay: speed at which the momentum grows towards ``betas[0]``.
        shampoo_beta: decay of the second moments of rows and columns, whose eigenvectors are the bases.
        precondition_frequency: updates from one refresh of the bases to the next.
        max_precond_dim: largest side of a matrix that is rotated; a longer one, such as a vocabulary, is left as it is.

    Raises:
        ValueError: a number outside its range.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.99, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        momentum_decay: float = 4e-3,
        shampoo_beta: float = 0.95,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10000,
    ) -> None:
        if not 0 <= shampoo_beta < 1:
            raise ValueError(f"shampoo_beta: got {shampoo_beta}, allowed is a number in [0, 1)")
        for name, value in {
            "precondition_frequency": precondition_frequency,
            "max_precond_dim": max_precond_dim,
        }.items():
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}: got {value}, allowed is an int >= 1")
        bases = {"shampoo_beta": shampoo_beta, "precondition_frequency": precondition_frequency}
        own = {"momentum_decay": momentum_decay, **bases, "max_precond_dim": max_precond_dim}
        super().__init__(params, lr, betas, eps, weight_decay, **own)
        if any(parameter.is_complex() for group in self.param_groups for parameter in group["params"]):
            raise ValueError("params: got complex ones, allowed are real ones; use torch.view_as_complex() of them")

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            # Of the momenta up to here, which schedulers such as OneCycle change from update to update.
            state["step"], state["mu_product"] = 0, 1.0
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2), speed = state["step"], group["betas"], group["momentum_decay"]
        now, ahead = momentum(beta1, speed, step), momentum(beta1, speed, step + 1)
        state["mu_product"] *= now
        product = state["mu_product"]
        bases = _bases(state, gradient, group)
        rotated = _rotate(gradient, bases)
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(rotated, rotated, value=1 - beta2)
        of_gradient, of_mean = (1 - now) / (1 - product), ahead / (1 - product * ahead)
        direction = _rotate(gradient * of_gradient + state["exp_avg"] * of_mean, bases)
        direction = direction / (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        rate = float(group["lr"])
        parameter.mul_(1 - rate * group["weight_decay"])
        parameter.add_(_rotate(direction, _transposed(bases)), alpha=-rate)


def _bases(state: dict[str, Any], gradient: torch.Tensor, group: dict[str, Any]) -> Bases:
    """Bases for this update, made or refreshed if it is time."""
    if gradient.dim() != 2:
        return None, None
    due = state["step"] % group["precondition_frequency"] == 0
    for side, factor in (("rows", gradient), ("columns", gradient.T)):
        if factor.size(0) > group["max_precond_dim"]:
            continue
        moment, basis = f"{side}_moment", f"{side}_basis"
        if moment not in state:
            state[moment] = gradient.new_zeros(factor.size(0), factor.size(0))
        state[moment].lerp_(factor @ factor.T, 1 - group["shampoo_beta"])
        if basis not in state:
            # In double precision, since the first moment has the rank of one gradient. What is not finite has no
            # eigenvectors and becomes weights that are not, as with Adam; fp16 skips the update before that.
            values = state[moment].double()
            vectors = torch.linalg.eigh(values).eigenvectors if values.isfinite().all() else values * torch.nan
            state[basis] = vectors.flip(1).to(gradient.dtype).contiguous()
        elif due:
            turned = state[moment] @ state[basis]  # one step of the power iteration
            # No QR decomposition takes half precision.
            turned = turned.to(torch.promote_types(turned.dtype, torch.float32))
            state[basis] = torch.linalg.qr(turned).Q.to(gradient.dtype)
    return state.get("rows_basis"), state.get("columns_basis")


def _transposed(bases: Bases) -> Bases:
    rows, columns = bases
    return None if rows is None else rows.T, None if columns is None else columns.T


def _rotate(value: torch.Tensor, bases: Bases) -> torch.Tensor:
    rows, columns = bases
    value = value if rows is None else rows.T @ value
    return value if columns is None else value @ columns
