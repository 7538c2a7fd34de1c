"""Adam's update with Nesterov momentum: the direction looks one step ahead of where a stale gradient points.

Dozat, Incorporating Nesterov Momentum into Adam (ICLR workshop 2016), in the form of ``torch.optim.NAdam`` with
decoupled weight decay. LAMB (You et al., ICLR 2020) gets the same mix before its trust ratio.

It reads and writes the state of the optimizer that it stands in for (``step``, ``exp_avg``, ``exp_avg_sq``), so that
checkpoints of one are checkpoints of the other. With fp16, bf16 and ZeRO-1 these are states of the master weights.
"""

import functools
from types import MethodType
from typing import Any

import torch

from ds_vpipe.checkpoints.optimizer_states import counted_together
from ds_vpipe.config.staleness import NAdam, Staleness, refuse_options, without_moments

_ADAM = {"lr", "betas", "eps", "weight_decay"}
_ADAM_FORMS = {"amsgrad", "bias_correction", "decoupled_weight_decay", "maximize"}
_IMPLEMENTATIONS = {"capturable", "differentiable", "foreach", "fused"}
_TRUST_RATIO = {"min_coeff", "max_coeff"}
_NOTHING = 1e-17  # less changes nothing in 1 - x
_NADAM = "_ds_vpipe_nadam"  # attribute of an optimizer


def momentum(beta: float, decay: float, step: int) -> float:
    """NAdam's momentum at an update; it grows towards ``beta``."""
    return float(beta * (1.0 - 0.5 * 0.96 ** (step * decay)))


def use_nadam(optimizer: torch.optim.Optimizer, settings: Staleness | None, delay: int) -> None:
    """Replace an optimizer's steps as the ``"staleness"`` object says, until :func:`end_nadam`.

    ``delay`` is the number of updates that the stage's gradients are late by: where it is 0 the steps stay the
    optimizer's own.

    Raises:
        VPipeConfigError: NAdam's direction for an optimizer that has no moments, whatever the delay.
    """
    end_nadam(optimizer)  # of an engine before, on an optimizer of the script's
    if settings is None or settings.nadam is None:
        return
    nadam = NAdamStep(optimizer, settings.nadam)
    if delay == 0:
        return
    setattr(optimizer, _NADAM, nadam)
    base = optimizer.step
    # With the hooks that a script has registered on steps, as torch's own step runs them.
    hooked = torch.optim.Optimizer.profile_hook_step(lambda _: nadam())

    @functools.wraps(base)
    def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if nadam.ended:
            return base(*args, **kwargs)
        hooked(optimizer)
        optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers of torch warn
        return None

    # A method, as learning-rate schedulers of torch expect it.
    optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]


def end_nadam(optimizer: torch.optim.Optimizer | None) -> None:
    """Let the steps of an optimizer be its own again, for whoever goes on with it."""
    nadam = vars(optimizer).get(_NADAM) if optimizer is not None else None
    if nadam is not None:
        nadam.ended = True  # schedulers may have wrapped the step since


class NAdamStep:
    """Updates the parameters of an Adam or LAMB optimizer in its place.

    Args:
        optimizer: Adam or LAMB of any library, recognised by its hyperparameters. Its betas are not
            used. Its weight decay is decoupled, also where its own would be an L2 penalty.
        settings: the betas used, and how the momentum grows.

    Raises:
        VPipeConfigError: another optimizer, or an option that has no NAdam form.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, settings: NAdam) -> None:
        self.ended = False  # whether steps are the optimizer's own
        self._optimizer = optimizer
        self._settings = settings
        self._product = (0, 1.0)  # of the momenta up to an update
        keys = set(optimizer.defaults)
        is_lamb = keys >= _TRUST_RATIO
        known = _ADAM | _ADAM_FORMS | _IMPLEMENTATIONS | ({"max_grad_norm", *_TRUST_RATIO} if is_lamb else set())
        if not keys >= _ADAM or not keys & {"amsgrad", "bias_correction"} or keys - known:
            raise without_moments(type(optimizer).__name__)
        for group in optimizer.param_groups:
            refuse_options(group)

    @torch.no_grad()
    def __call__(self) -> None:
        """One update of all parameters that have a gradient."""
        for group in self._optimizer.param_groups:
            if group.pop("step", None) is not None:  # else each is counted already
                states = [self._optimizer.state[p] for p in group["params"] if p in self._optimizer.state]
                for state, counted in zip(states, counted_together(states), strict=True):
                    state.update(counted)
            for step, parameters in self._by_step([p for p in group["params"] if p.grad is not None]).items():
                self._update(parameters, group, step)

    def _by_step(self, parameters: list[torch.Tensor]) -> dict[int, list[torch.Tensor]]:
        """Parameters by the number of the update that is theirs; those unfrozen later have had fewer."""
        found: dict[int, list[torch.Tensor]] = {}
        for parameter in parameters:
            state = self._optimizer.state[parameter]
            found.setdefault(int(state["step"] if "exp_avg" in state else 0) + 1, []).append(parameter)
        return found

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any], step: int) -> None:
        states = [self._state(parameter) for parameter in parameters]
        for state in states:
            state["step"] = torch.full_like(state["step"], step) if torch.is_tensor(state["step"]) else step
        beta1, beta2 = self._settings.betas
        gradients = _real([parameter.grad for parameter in parameters if parameter.grad is not None])
        means, squares = (_real([state[key] for state in states]) for key in ("exp_avg", "exp_avg_sq"))
        parameters = _real(parameters)
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        roots = torch._foreach_div(squares, 1 - beta2**step)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        product, ahead = self._momenta(step), self._momentum(step + 1)
        directions = torch._foreach_mul(gradients, (1 - self._momentum(step)) / (1 - product))
        torch._foreach_add_(directions, means, alpha=ahead / (1 - product * ahead))
        torch._foreach_div_(directions, roots)
        rate, decay = float(group["lr"]), group["weight_decay"]
        if "max_coeff" in group:
            if decay:
                torch._foreach_add_(directions, parameters, alpha=decay)
            for parameter, direction in zip(parameters, directions, strict=True):
                norm, length = parameter.norm(), direction.norm()
                ratio = (norm / length).clamp(group["min_coeff"], group["max_coeff"])
                direction.mul_(torch.where((norm > 0) & (length > 0), ratio, torch.ones_like(ratio)))
        elif decay:
            torch._foreach_mul_(parameters, 1 - rate * decay)
        torch._foreach_add_(parameters, directions, alpha=-rate)

    def _state(self, parameter: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.state[parameter]
        if "exp_avg" not in state:
            count = torch.zeros((), dtype=torch.float32, device="cpu")  # in bfloat16 it would stop at 256
            state["step"] = count if isinstance(self._optimizer, torch.optim.Adam) else 0
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state

    def _momentum(self, step: int) -> float:
        return momentum(self._settings.betas[0], self._settings.momentum_decay, step)

    def _momenta(self, step: int) -> float:
        """Product of the momenta of all updates up to ``step``, which alone decides it: no checkpoint needs it."""
        at, product = self._product if self._product[0] <= step else (0, 1.0)
        for number in range(at + 1, step + 1):
            if product < _NOTHING:
                break
            product *= self._momentum(number)
        self._product = (step, product)
        return product


def _real(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, complex ones as pairs of real numbers, as torch's own Adam takes them."""
    return [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
