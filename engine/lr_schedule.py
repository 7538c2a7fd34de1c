"""A learning-rate policy at work on one stage's optimizer."""

from __future__ import annotations

from typing import Any

import torch

from ds_vpipe.errors import VPipeError
from ds_vpipe.lr_policies import LRPolicy


class LRSchedule:
    """Sets the learning rate of every parameter group before each update, for DeepSpeed to call.

    Every stage has one of its own, which counts the updates of that stage; the number is all that a checkpoint
    needs to hold.

    Args:
        optimizer: whose parameter groups hold the learning rates that the policy scales.
        policy: what it scales them with.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, policy: LRPolicy) -> None:
        self.optimizer = optimizer
        self._policy = policy
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._updates = 0
        self._set()

    def step(self) -> None:
        """Note that an update is done, and set the learning rates of the next one."""
        self._updates += 1
        self._set()

    def get_last_lr(self) -> list[float]:
        """The learning rates of the next update, one per parameter group."""
        factor = self._policy.factor(self._updates + 1)
        return [base * factor for base in self._base]

    def get_lr(self) -> list[float]:
        """As :meth:`get_last_lr`."""
        return self.get_last_lr()

    def state_dict(self) -> dict[str, Any]:
        """The number of the last update, counted from 0, under the name that DeepSpeed's own schedules give it.

        So a checkpoint goes on with another type of schedule, in both directions.
        """
        return {"last_batch_iteration": self._updates - 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after so many updates.

        Raises:
            VPipeError: it is the state of a schedule that does not say how many.
        """
        last = state.get("last_batch_iteration")
        if not isinstance(last, int):
            raise VPipeError(
                f"lr scheduler in the checkpoint: got a state with {', '.join(map(str, state)) or 'nothing'}; allowed: "
                "last_batch_iteration, as DeepSpeed's schedules have it; load with load_lr_scheduler_states=False"
            )
        self._updates = last + 1
        self._set()

    def _set(self) -> None:
        # Optimizers replace their list of groups when they load a checkpoint: always ask for it anew.
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            group["lr"] = rate
