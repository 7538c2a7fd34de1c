"""Mitigations of staleness around a stage's base optimizer, whatever wraps that optimizer.

With w the weights, u_t the change that the base optimizer makes in update t, and tau the stage's delay in updates:

nadam
    The base optimizer's step is :class:`ds_vpipe.staleness.nadam.NAdamStep`'s.
error_feedback
    w += u_t + scale (u_t - u_{t-1}). The update is extrapolated over the one that it is late by, as
    delay-compensated SGD (Zheng et al., ICML 2017) does with a model of the gradient's change, here the last change.
    The first update, which has none before it, is as it is. Over a run on a linear loss the additions telescope.
lr_rescheduling
    The learning rate of update t is multiplied with tau ** -(1 - min(t / T, 1)), technique 1 of PipeMare
    (Yang et al., MLSys 2021).

During the delay warm-up (:mod:`ds_vpipe.staleness.delay_warmup`), whose drains the schedule makes, tau is at most the
delay of the update's drain interval, error feedback adds nothing to the first update of an interval, whose gradient is
in time, and t counts from the end of the synchronous updates.

State that lasts from one update to the next is kept in the base optimizer's state, per parameter, so that it is saved,
resharded and loaded with everything else there, and master weights are treated like any others.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from ds_vpipe.checkpoints.optimizer_states import PREVIOUS_CHANGE
from ds_vpipe.config.staleness import Staleness
from ds_vpipe.staleness.delay_warmup import NO_WARMUP, DelayWarmup
from ds_vpipe.staleness.nadam import NAdamStep

_MITIGATION = "_ds_vpipe_mitigation"  # attribute of an optimizer


def end_mitigation(optimizer: torch.optim.Optimizer | None) -> None:
    """Let the steps of an optimizer be its own again, for whoever goes on with it."""
    mitigation = vars(optimizer).get(_MITIGATION) if optimizer is not None else None
    if mitigation is not None:
        mitigation.ended = True  # schedulers may have wrapped the step since


class StalenessMitigation:
    """Mitigation that takes part in every ``optimizer.step()``, until :func:`end_mitigation` or another one.

    Args:
        optimizer: the base optimizer; its ``step`` is replaced on this instance.
        settings: the mitigations.
        delay: updates that this stage's gradients are late by, tau. With 0 the step is the optimizer's own.
        warmup: drain intervals; default: the pipeline is not drained.

    Attributes:
        delay, warmup: as given; may change between updates.
        updates: updates done; to be set before a step.
        ended: steps are the optimizer's own.

    Raises:
        VPipeConfigError: NAdam's direction for an optimizer that has no moments.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: Staleness, delay: int, warmup: DelayWarmup = NO_WARMUP
    ) -> None:
        self.delay = delay
        self.warmup = warmup
        self.updates = 0
        self.ended = False
        self._optimizer = optimizer
        self._settings = settings
        self._nadam = None if settings.nadam is None else NAdamStep(optimizer, settings.nadam)
        # With the hooks that a script has registered on steps, as torch's own step runs them.
        self._nadam_step = torch.optim.Optimizer.profile_hook_step(lambda optimizer: self._nadam and self._nadam())
        end_mitigation(optimizer)
        setattr(optimizer, _MITIGATION, self)
        base = optimizer.step

        @functools.wraps(base)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(base, *args, **kwargs)

        # A method, as learning-rate schedulers of torch expect it.
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def _step(self, base: Any, *args: Any, **kwargs: Any) -> Any:
        if self.ended:
            return base(*args, **kwargs)
        if self.delay == 0:
            if self._settings.error_feedback is not None:
                for state in self._optimizer.state.values():  # of a layer that comes from a stage with a delay
                    state.pop(PREVIOUS_CHANGE, None)
            return base(*args, **kwargs)
        feedback = self._settings.error_feedback
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        before = [p.detach().clone() for p in parameters] if feedback is not None else []
        with self._rescheduled():
            result = base(*args, **kwargs) if self._nadam is None else self._nadam_step(self._optimizer)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers of torch warn
        if feedback is not None and parameters:
            self._extrapolate(parameters, before, feedback.scale)
        return result

    @torch.no_grad()
    def _extrapolate(self, parameters: list[torch.Tensor], before: list[torch.Tensor], scale: float) -> None:
        """Error feedback on top of the base update, which began at the values ``before``."""
        changes = list(torch._foreach_sub(parameters, before))
        late = self.updates > self.warmup.drain_interval(self.updates)[0]
        for parameter, change in zip(parameters, changes, strict=True):
            state = self._optimizer.state[parameter]
            previous = state.get(PREVIOUS_CHANGE)
            if previous is not None and late:
                parameter.add_(torch.where(previous.isnan(), 0, change - previous), alpha=scale)
            state[PREVIOUS_CHANGE] = change

    @contextmanager
    def _rescheduled(self) -> Iterator[None]:
        """The learning rates of this update."""
        rescheduling = self._settings.lr_rescheduling
        if rescheduling is None:
            yield
            return
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        delay = self.warmup.delay(self.updates, self.delay)
        for group, rate in zip(groups, rates, strict=True):
            done = max(0, self.updates - self._settings.synchronous_updates)
            group["lr"] = rate * rescheduling.factor(done, delay)
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
