"""Asynchronous point-to-point links between neighbouring stages.

Each direction between two stages has a process group of its own, so that the two never queue behind
each other and a wait that fails cannot poison the links to other stages. Sends never block: gloo hands
them to the receiver when it is ready. Receives are posted ``prefetch`` messages ahead, because a gloo
send is a rendezvous: it moves only once its receive is posted.

A posted receive must be at least as long as its message. Both ends therefore follow one rule: the
buffer for message ``n`` is as long as the longest of messages ``0 .. n - prefetch``, which are those
that the receiver has seen when it posts it. A longer message is announced in its place by a small one
and follows on its own; this happens only when messages grow.

Every wait has a limit and a name: a timeout, a lost peer and a peer's own failure all end it with a
:class:`~ds_vpipe.errors.PipelinePeerError`, which says who waited, for what, and from whom.

Here is what both ends have to know: who they are, which messages fit, what a failure means.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

from ds_vpipe.engine.links.message import HEADER_BYTES
from ds_vpipe.errors import VPipeError


class Channel(enum.IntEnum):
    """Links that share a process group are told apart by the tags of their messages, two a link."""

    TRAINING = 0
    EVALUATION = 2

    @property
    def own_tag(self) -> int:
        """Tag of messages that were announced; ordinary ones use the channel's value."""
        return self + 1


@dataclass(frozen=True, slots=True)
class Peer:
    """A stage and the rank that runs it."""

    stage: int
    rank: int

    def __str__(self) -> str:
        return f"stage {self.stage} (rank {self.rank})"


class Capacity:
    """Length of the receive buffer for each message, the same on both ends."""

    def __init__(self, prefetch: int) -> None:
        self._recent: deque[int] = deque()
        self._prefetch = prefetch
        self._longest = HEADER_BYTES

    def sender(self) -> int:
        """Buffer length that the receiver posts for the next message to be sent."""
        return self._longest

    def sent(self, size: int) -> None:
        self._recent.append(size)
        if len(self._recent) >= self._prefetch:
            self._longest = max(self._longest, self._recent.popleft())

    def received(self, size: int) -> int:
        """Buffer length for the receive that is posted after a message of ``size`` bytes."""
        self._longest = max(self._longest, size)
        return self._longest


def cause(error: RuntimeError, timeout_s: float | None) -> str:
    """One line for what the backend reported; ``timeout_s`` is the limit in seconds that the user may raise, if any."""
    text = " ".join(str(error).split())
    if "Timed out" in text or "timeout" in text.lower():
        if timeout_s is None:
            return "nothing came in time; see the other ranks' logs"
        return (
            f"nothing came within {timeout_s:g} s; see that rank's log, or raise vpipe.peer_timeout_s "
            f"if a step may take that long"
        )
    if "closed" in text or "reset" in text or "Broken pipe" in text:
        return "it is gone (connection closed); see that rank's log for the cause"
    return text


def is_of_collective(error: BaseException) -> bool:
    """True if a backend's collective has raised it, and no layer of a model."""
    words = ("gloo", "pair closure", "NCCL", "Operation timed out")
    return isinstance(error, RuntimeError) and not isinstance(error, VPipeError) and any(w in str(error) for w in words)
