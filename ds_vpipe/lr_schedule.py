"""Learning-rate schedule of :mod:`ds_vpipe.lr_policies` for DeepSpeed's engine.

Apart from the policies, which commands read without torch.
"""

from typing import Any

import torch
from deepspeed.runtime.lr_schedules import WarmupLR

from ds_vpipe.errors import VPipeError
from ds_vpipe.lr_policies import LRPolicy


class LRSchedule(WarmupLR):
    """Learning-rate schedule of one stage, which counts the updates of that stage.

    Counting, checkpoints and parameter groups are DeepSpeed's. torch's LambdaLR would also replace ``optimizer.step``
    and add a key to the parameter groups of checkpoints.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, policy: LRPolicy) -> None:
        self._policy = policy
        super().__init__(optimizer, warmup_max_lr=[float(group["lr"]) for group in optimizer.param_groups])

    def get_lr(self) -> list[float]:
        """Learning rates of the next update, one per parameter group."""
        factor = self._policy.factor(self.last_batch_iteration + 2)  # which is -1 before the first update
        return [base * factor for base in self.max_lrs]

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue after the updates that a state counts.

        Raises:
            VPipeError: the state of a schedule that does not count updates.
        """
        state = state or {}  # a checkpoint of a training without a schedule has None
        last = state.get("last_batch_iteration")
        if not isinstance(last, int):
            given = ", ".join(map(str, state)) or "nothing"
            raise VPipeError(
                f"lr scheduler in the checkpoint: got a state with {given}; allowed: last_batch_iteration, as "
                "DeepSpeed's schedules have it; load with load_lr_scheduler_states=False"
            )
        self.step(last)
