"""Mitigations of staleness around a stage's base optimizer, whatever that is and whatever is around it.

With w the weights, u_t what the base optimizer has changed in its update t, and tau the stage's delay in updates:

nadam
    The base optimizer's step is :class:`ds_vpipe.staleness.nadam.NAdamStep`'s.
error_feedback
    w += u_t + scale (u_t - u_{t-1}). The update is extrapolated over the one that it is late by, as
    delay-compensated SGD (Zheng et al., ICML 2017) does with a model of the gradient's change, here the last change.
    The first update, which has none before it, is as it is. Over a run on a linear loss the additions telescope.
weight_prediction
    Forward and backward passes see w + scale tau v, the update goes to w. v is the last update, or with
    ``smoothing`` a moving average. With momentum SGD this is SpecTrain (Chen, Yang and Cheng, 2018), and with Adam
    XPipe (Guan et al., 2019), both of which predict by the optimizer's own last direction; but every pass sees what its
    micro-batch's forward pass saw, as stashing promises.
lr_rescheduling
    The learning rate of update t is multiplied with tau ** -(1 - min(t / T, 1)), technique 1 of PipeMare
    (Yang et al., MLSys 2021).

Where the pipeline drains at the beginning of training (:mod:`ds_vpipe.staleness.beginning`), which is up to whoever
orders passes, tau is at most what the filling gives that an update or a version belongs to, error feedback adds nothing
to the first update of a filling, whose gradient is in time, and t counts from the end of the synchronous updates.

What they need from one update to the next is kept in the base optimizer's state, per parameter, so that it is saved,
resharded and loaded with everything else there, and master weights are treated like any others.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from ds_vpipe.staleness.beginning import ALWAYS_FULL, Beginning
from ds_vpipe.staleness.nadam import NAdamStep
from ds_vpipe.staleness.settings import Staleness

LAST_UPDATE = "vpipe_last_update"
"""Key of a parameter's state: what weight prediction extrapolates, in the parameter's shape."""

PREVIOUS_CHANGE = "vpipe_previous_change"
"""Key of a parameter's state: u_{t-1} of error feedback, in the parameter's shape."""


class StalenessMitigation:
    """Takes part in every ``optimizer.step()``.

    Args:
        optimizer: the base optimizer; its ``step`` is replaced on this instance.
        settings: what to do.
        delay: updates that this stage's gradients are late by, tau. With 0 the step is the optimizer's own.
        beginning: when the pipeline drains; default: not at all.

    Attributes:
        delay, beginning: as given; may change between updates.
        updates: updates done; whoever counts them sets it before a step.

    Raises:
        VPipeConfigError: NAdam's direction for an optimizer that has no moments.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, settings: Staleness, delay: int, beginning: Beginning = ALWAYS_FULL
    ) -> None:
        self.delay = delay
        self.beginning = beginning
        self.updates = 0
        self._optimizer = optimizer
        self._settings = settings
        self._nadam = None if settings.nadam is None else NAdamStep(optimizer, settings.nadam)
        base = optimizer.step

        @functools.wraps(base)
        def step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            return self._step(base, *args, **kwargs)

        # A method, as learning-rate schedulers of torch expect it.
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    @property
    def predicts(self) -> bool:
        """Whether passes see other weights than updates go to."""
        return self._settings.weight_prediction is not None

    @torch.no_grad()
    def predict(self, parameters: Sequence[torch.Tensor], into: Sequence[torch.Tensor], version: int) -> None:
        """Write the weights that passes are to use into tensors of the same shapes.

        Args:
            parameters: the base optimizer's, or others, which are only copied.
            into: gets the prediction; none of it shares memory with ``parameters``.
            version: updates that ``parameters`` have had.
        """
        if not parameters:
            return
        torch._foreach_copy_(list(into), list(parameters))
        prediction = self._settings.weight_prediction
        distance = 0.0 if prediction is None else prediction.scale * self._late(version)
        known = [self._optimizer.state.get(p, {}).get(LAST_UPDATE) for p in parameters]
        pairs = [(target, update) for target, update in zip(into, known, strict=True) if update is not None]
        if pairs and distance:
            targets, updates = zip(*pairs, strict=True)
            torch._foreach_add_(list(targets), list(updates), alpha=distance)

    def _late(self, updates: int) -> int:
        """By how many updates gradients at the version after so many updates are late at most."""
        return self.beginning.delay(updates, self.delay)

    def _step(self, base: Any, *args: Any, **kwargs: Any) -> Any:
        if self.delay == 0:
            return base(*args, **kwargs)
        remembers = self._settings.error_feedback is not None or self.predicts
        parameters = [p for group in self._optimizer.param_groups for p in group["params"] if p.grad is not None]
        before = [p.detach().clone() for p in parameters] if remembers else []
        with self._rescheduled():
            result = base(*args, **kwargs) if self._nadam is None else self._nadam()
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # else schedulers of torch warn
        if parameters and remembers:
            self._remember(parameters, before)
        return result

    @torch.no_grad()
    def _remember(self, parameters: list[torch.Tensor], before: list[torch.Tensor]) -> None:
        """Keep what this update changed, and add what error feedback adds.

        Args:
            parameters: those that were updated.
            before: their values before it; used up.
        """
        feedback, prediction = self._settings.error_feedback, self._settings.weight_prediction
        changes = list(torch._foreach_sub(parameters, before))
        del before
        for parameter, change in zip(parameters, changes, strict=True):
            state = self._optimizer.state[parameter]
            if feedback is not None:
                previous = state.get(PREVIOUS_CHANGE)
                if previous is not None and self.updates > self.beginning.filling(self.updates)[0]:
                    parameter.add_(change - previous, alpha=feedback.scale)
                state[PREVIOUS_CHANGE] = change
            elif prediction is not None:
                average = state.get(LAST_UPDATE)
                state[LAST_UPDATE] = change if average is None else torch.lerp(change, average, prediction.smoothing)

    @contextmanager
    def _rescheduled(self) -> Iterator[None]:
        """The learning rates of this update."""
        rescheduling = self._settings.lr_rescheduling
        if rescheduling is None:
            yield
            return
        groups = self._optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group, rate in zip(groups, rates, strict=True):
            done = max(0, self.updates - self._settings.synchronous_updates)
            group["lr"] = rate * rescheduling.factor(done, self._late(self.updates))
        try:
            yield
        finally:
            for group, rate in zip(groups, rates, strict=True):
                group["lr"] = rate
