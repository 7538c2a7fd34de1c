"""A time limit on which all ranks agree.

Clocks differ, and a rank that stops one batch before its neighbours leaves them waiting. So ranks vote: at every
`interval`-th step each one starts an all-reduce of "my time is up", and reads the result `interval` steps later, when
it has long arrived. No rank ever waits for another one, and all of them stop after the same step.
"""

import time

import torch
from torch import distributed


class Deadline:
    """Ends training at the same step on every rank, at most ``2 * interval`` steps after the time is up.

    Build it on all ranks together: it opens a process group of its own, over gloo, so that votes neither wait for a
    device nor mix with other traffic.

    Args:
        seconds: time limit, from now; None for no limit (then no group is opened and no vote is held).
        interval: steps between two votes.
    """

    def __init__(self, seconds: float | None, interval: int = 10) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self._interval = interval
        self._group = None if seconds is None else distributed.new_group(backend="gloo")
        self._vote = torch.zeros(1)
        self._pending: distributed.Work | None = None

    def passed(self, step: int) -> bool:
        """Whether to stop after this step; call it on every rank after every step, numbered from 1."""
        if self._end is None or step % self._interval:
            return False
        if self._collect():
            return True
        self._vote = torch.tensor([float(time.monotonic() >= self._end)])
        self._pending = distributed.all_reduce(
            self._vote, op=distributed.ReduceOp.MAX, group=self._group, async_op=True
        )
        return False

    def close(self) -> None:
        """Complete the vote under way, if any; call it on every rank after the last step."""
        self._collect()

    def _collect(self) -> bool:
        if self._pending is None:
            return False
        self._pending.wait()
        self._pending = None
        return bool(self._vote.item())
