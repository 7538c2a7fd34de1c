"""Peer updates: overflows and gradient norms of other stages, with a fixed delay and without waiting.

Every stage keeps a table with a row per stage. Rows of earlier stages come with activations, which
precede the update; rows of later stages come in a message of their own after those stages' update of
the same batch, which they finish first. So at update ``t`` the table holds
update ``t - d`` of an earlier stage, with ``d`` of :func:`ds_vpipe.schedules.one_f_one_b.peer_delay`, and update
``t`` of a later one. Which message a row comes with depends on the schedule and never on time.
"""

from typing import Any

import torch

_OVERFLOWS, _SQUARED_NORM = range(2)


class PeerUpdates:
    """Table of updates skipped for an overflow, and squared norm of the latest gradient, by stage."""

    def __init__(self, num_stages: int, stage: int) -> None:
        self._stage = stage  # which keeps the table
        self._table = torch.zeros(num_stages, 2, dtype=torch.float64, device="cpu")
        self._overflows_known = 0.0
        self.own_norm = 0.0  # unscaled gradient norm of the stage's current update

    @property
    def table(self) -> torch.Tensor:
        """Copy, ``[K, 2]``, fp64: a neighbour may still receive it while the next update changes the table."""
        return self._table.clone()

    def after_update(self, overflow: bool) -> bool:
        """Enter this stage's own update.

        Returns:
            Whether any stage is now known to have skipped more updates than after the update before.
        """
        row = self._table[self._stage]
        row[_OVERFLOWS] += overflow
        row[_SQUARED_NORM] = 0.0 if overflow else self.own_norm**2
        overflows = float(self._table[:, _OVERFLOWS].sum())
        new, self._overflows_known = overflows > self._overflows_known, overflows
        return new

    def from_earlier(self, table: torch.Tensor) -> None:
        """Take the rows of earlier stages from the previous stage's table."""
        self._table[: self._stage] = table[: self._stage]

    def from_later(self, table: torch.Tensor) -> None:
        """Take the rows of later stages from the next stage's table."""
        self._table[self._stage + 1 :] = table[self._stage + 1 :]

    def squared_norm_elsewhere(self) -> float:
        """Sum of the other stages' squared gradient norms; one not known yet counts as 0."""
        norms = self._table[:, _SQUARED_NORM]
        return float(norms[: self._stage].sum() + norms[self._stage + 1 :].sum())

    def state(self) -> dict[str, Any]:
        """Values for a checkpoint."""
        return {"table": self.table, "heard": self._overflows_known}

    def restore(self, state: dict[str, Any]) -> None:
        """The inverse of :meth:`state`."""
        self._table.copy_(state["table"])
        self._overflows_known = state["heard"]

    def forget(self) -> None:
        """Clear the table, as at the start of training."""
        self._table.zero_()
        self._overflows_known = 0.0
