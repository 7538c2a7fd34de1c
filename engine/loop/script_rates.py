"""Learning rates that a looping script sets itself, kept for the updates that they were meant for.

A script that has no scheduler in the engine writes into ``optimizer.param_groups`` or steps a scheduler of its own
where a batch ends for it. The stage's update of that batch comes up to W_s rounds later, when the script has gone
on. So what the groups hold where a batch is handed in goes with the batch.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_SCHEDULED = ("lr", "momentum", "betas", "weight_decay")


class ScriptRates:
    """Options of parameter groups by batch, from where it is handed in to where it is updated with."""

    def __init__(self) -> None:
        self._waiting: deque[list[dict[str, Any]]] = deque()

    def hand_in(self, groups: list[dict[str, Any]]) -> None:
        """A batch ends for the script."""
        self._waiting.append(_options(groups))

    @contextmanager
    def of_next_update(self, groups: list[dict[str, Any]]) -> Iterator[None]:
        """Give ``groups`` what they were handed in with, in the order of batches, and back what the script has set."""
        if not self._waiting:
            yield
            return
        given = _options(groups)
        _set(groups, self._waiting.popleft())
        try:
            yield
        finally:
            _set(groups, given)

    def forget(self) -> None:
        """The batches handed in so far have no update any more."""
        self._waiting.clear()


def _options(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: group[key] for key in _SCHEDULED if key in group} for group in groups]


def _set(groups: list[dict[str, Any]], options: list[dict[str, Any]]) -> None:
    for group, found in zip(groups, options, strict=True):
        group.update(found)
