"""Learning rates that a looping script sets, kept for their updates.

A script that has no scheduler in the engine writes into ``optimizer.param_groups`` or steps a scheduler of its own
where a batch ends for it. The stage's update of that batch comes up to W_s rounds later, when the script has gone
on. So what the groups hold where a batch is handed in goes with the batch.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only

from ds_vpipe.errors import CallOrderError

_SCHEDULED = ("lr", "momentum", "betas", "weight_decay", "eps", "alpha", "dampening", "rho")


class ScriptRates:
    """Options of parameter groups, queued by batch until its update."""

    def __init__(self) -> None:
        self._waiting: deque[list[dict[str, Any]]] = deque()

    def queue(self, groups: list[dict[str, Any]]) -> None:
        """A batch ends for the script."""
        self._waiting.append(_options(groups))

    @contextmanager
    def of_next_update(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """Context in which ``groups`` have the options of the oldest queued batch."""
        if not self._waiting:
            yield
            return
        taken = self._waiting.popleft()
        if len(groups) < len(taken):
            raise CallOrderError(
                f"engine.optimizer: got {len(groups)} parameter groups while a batch with {len(taken)} is in flight, "
                f"allowed is to add some; call engine.drain() before groups are removed"
            )
        groups = groups[: len(taken)]  # what the script has added since has no gradients of that batch
        given, values = [dict(group) for group in groups], _options(groups)
        _set(groups, taken)
        try:
            yield
        finally:
            # What the update has written itself, as hooks and optimizers do, holds where the script has not since.
            found = _options(groups)
            for later in (*self._waiting, values):
                for options, due, now in zip(later, taken, found, strict=False):
                    options.update({key: now[key] for key in due if now[key] != due[key] and options[key] == due[key]})
            for group, before in zip(groups, given, strict=True):
                group.update({key: before[key] for key in _SCHEDULED if key in before})
            _set(groups, values)

    def forget(self) -> None:
        """The batches handed in so far have no update any more."""
        self._waiting.clear()


def _options(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the groups hold now: schedulers write into rates that are tensors."""
    return [
        {key: tree_map_only(Tensor, Tensor.clone, group[key]) for key in _SCHEDULED if key in group} for group in groups
    ]


def _set(groups: list[dict[str, Any]], options: list[dict[str, Any]]) -> None:
    """Give the groups these values. Tensors stay the ones that the script and the optimizer know."""
    for group, found in zip(groups, options, strict=True):
        group.update({key: _written(group.get(key), value) for key, value in found.items()})


def _written(there: Any, value: Any) -> Any:
    if isinstance(there, Tensor) and isinstance(value, Tensor):
        return there.copy_(value)
    if isinstance(there, tuple) and isinstance(value, tuple):
        return tuple(map(_written, there, value))
    return value
