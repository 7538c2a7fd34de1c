"""A learning-rate policy at work on one stage's optimizer."""

from __future__ import annotations

from typing import Any

import torch

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
        """How many updates are done."""
        return {"updates": self._updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after so many updates.

        A checkpoint of another type of schedule counts as well: DeepSpeed's own hold the number of the last update.
        """
        self._updates = state["updates"] if "updates" in state else state["last_batch_iteration"] + 1
        self._set()

    def _set(self) -> None:
        # Optimizers replace their list of groups when they load a checkpoint: always ask for it anew.
        for group, rate in zip(self.optimizer.param_groups, self.get_last_lr(), strict=True):
            group["lr"] = rate
