"""The first failure of any rank, published through the store.

A failing stage sends its reason to its neighbours on their links. Other replicas have no link to it: they wait in a
reduction with a rank that will not come, for as long as the process that has failed is alive. So a thread of every rank
polls a key and, once a rank has failed, breaks off the groups in which this one may wait.

Only that thread uses the store, so that a question about failures takes a moment at most, also if its host is gone.
"""

from __future__ import annotations

import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

_INTERVAL_S = 0.5
_PATIENCE_S = 2.0  # for the store, and for other ranks to have seen a failure
_BYTES = 2048
_TAG = 2**31 - 1  # of no message
_STORE_IS_GONE = "the store of the default process group is gone, with the rank that had it"
_FAILURE, _SEEN = "failure", "ranks that have seen it"

Look = Callable[[float | None], str | None]
"""Asked regularly, with the time of a failure if there is one; returns the line of a wait that takes too long."""


@dataclass
class _Shared:
    """State of the thread. With a reference to the engine this would never be freed."""

    store: Any
    limit_s: float
    groups: list[Any] = field(default_factory=list)
    looks: list[weakref.WeakMethod[Look]] = field(default_factory=list)
    mine: str | None = None
    by_lost: bool = False
    overdue: str | None = None
    reason: str | None = None
    failed_at: float | None = None
    rounds: int = 0
    seen_by: int = 0
    ended: bool = False
    gone: bool = False  # the store, with the rank that had it
    unanswered: int = -1  # round in which a wait for the store has come to its end
    changed: threading.Condition = field(default_factory=threading.Condition)
    asked: threading.Event = field(default_factory=threading.Event)


def own_connection(store: Any, limit_s: float) -> Any:
    """Another connection to a store, for another thread: an operation waits for the one before it.

    Args:
        store: as torch has it, with operations of this thread alone.
        limit_s: how long a store that may be gone is asked for, in seconds.

    Raises:
        RuntimeError: nothing has answered.
    """
    if not hasattr(store, "clone"):
        return store
    usual = store.timeout  # torch tries for all of it, 10 minutes, once the store has gone
    store.set_timeout(timedelta(seconds=limit_s))
    try:
        return store.clone()
    finally:
        store.set_timeout(usual)


class FailureWatch:
    """Key of one engine, and the thread that polls it.

    Args:
        store: of this engine alone.
        ranks: number of ranks that poll the key.
        limit_s: how long a rank may wait after the store has gone, in seconds.

    Raises:
        RuntimeError: the store is gone.

    Attributes:
        state: its ``reason`` is that of the first failure that has been seen here; every action looks at it.
    """

    def __init__(self, store: Any, ranks: int, limit_s: float) -> None:
        self._ranks = ranks
        self.state = _Shared(own_connection(store, limit_s), limit_s)
        self._thread = threading.Thread(target=_watch, args=(self.state,), name="ds_vpipe-failures", daemon=True)
        self._thread.start()
        self.stop: Callable[[], object] = weakref.finalize(self, _end, self.state, self._thread)

    @property
    def failing(self) -> bool:
        """Whether a failure is known, of this rank or another."""
        return self.state.reason is not None or self.state.mine is not None

    def regularly(self, look: Look) -> None:
        """Let the thread call a method with every look at the key, as long as its object lives."""
        self.state.looks.append(weakref.WeakMethod(look))

    def breaks(self, group: Any) -> None:
        """Break off ``group`` once another rank has failed."""
        self.state.groups.append(group)
        if self.state.reason is not None and self.state.mine is None:  # the thread does that once
            break_off(group)

    def reason(self) -> str | None:
        """Reason of the first failure, looked up now; None if no rank has failed or the store does not answer."""
        shared = self.state
        after = shared.rounds + 2  # one may have begun before the call
        self._wait_until(lambda: shared.rounds >= after or shared.reason is not None)
        return shared.reason

    def publish(self, reason: str, by_lost: bool = False) -> None:
        """Publish a failure of this rank, unless another was first; does not wait.

        Args:
            reason: one line.
            by_lost: its cause is a rank that is gone, which will not see it.
        """
        self.state.mine, self.state.by_lost = reason, by_lost
        self.state.asked.set()

    def wait_until_seen(self) -> None:
        """Wait a moment until all ranks have seen a failure: the store may end with this process."""
        self._wait_until(lambda: self.state.seen_by >= self._ranks)

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        shared, deadline = self.state, time.monotonic() + _PATIENCE_S
        with shared.changed:
            begin = shared.rounds
            while not (is_so() or shared.ended or shared.gone or shared.unanswered == shared.rounds):
                if time.monotonic() > deadline:
                    shared.unanswered = begin  # the round, if it is still that one
                    return
                shared.asked.set()
                shared.changed.wait(0.05)


def _watch(shared: _Shared) -> None:
    lost, gone, broken = None, False, False
    while not shared.ended:
        try:
            if not gone:
                _look(shared)
                lost = None
        except RuntimeError as error:  # the store ends with the process that has it, ordinary at the end of a run
            gone = isinstance(error, dist.DistNetworkError)  # torch does not connect anew, and prints a stack each time
            lost = lost or time.monotonic()
        if lost is not None and time.monotonic() > lost + shared.limit_s:
            shared.reason = shared.reason or shared.overdue or _STORE_IS_GONE
        if shared.failed_at is None and (shared.reason or shared.mine) is not None:
            shared.failed_at = time.monotonic()
        for found in shared.looks:
            look = found()
            with suppress(RuntimeError):  # of a device that has failed; the stage's own thread says so
                line = None if look is None else look(shared.failed_at)
                shared.overdue = shared.overdue or line
            del look
        if shared.reason is not None and not broken:
            broken = True
            for group in shared.groups if shared.mine is None else ():
                break_off(group)
        with shared.changed:
            shared.rounds, shared.gone = shared.rounds + 1, gone
            shared.changed.notify_all()
        shared.asked.wait(_INTERVAL_S)
        shared.asked.clear()


def _look(shared: _Shared) -> None:
    store = shared.store
    if shared.reason is None:
        told = shared.mine or shared.overdue
        if told is not None:
            told = told.encode()[:_BYTES].decode(errors="ignore")
            if store.compare_set(_FAILURE, "", told).decode() == told and shared.by_lost:
                store.add(_SEEN, 1)  # in its place
        if not store.check([_FAILURE]):
            return
        shared.reason = store.get(_FAILURE).decode()
        store.add(_SEEN, 1)
    if shared.mine is not None:
        shared.seen_by = store.add(_SEEN, 0)


def _end(shared: _Shared, thread: threading.Thread) -> None:
    shared.ended = True
    shared.asked.set()
    if thread is not threading.current_thread():
        thread.join(_PATIENCE_S)


def break_off(group: Any) -> None:
    """Break off all waits in ``group`` with an error. It is a process group, a backend or a socket; of no use then."""
    if isinstance(group, socket.socket):
        with suppress(OSError):
            group.shutdown(socket.SHUT_RDWR)
        return
    if group is None or group.size() == 1:
        return
    if isinstance(group, dist.ProcessGroup):
        for device in group._device_types:
            break_off(group._get_backend(device))
    elif isinstance(group, ProcessGroupGloo):
        # Gloo closes all connections of a group whose limit has passed for any wait.
        gloo: Any = group
        for context in range(len(gloo.options._devices)):
            with suppress(RuntimeError):
                data, other = torch.empty(1, dtype=torch.uint8, device="cpu"), (gloo.rank() + 1) % gloo.size()
                gloo.recv([data], other, _TAG - context).wait(timedelta(milliseconds=1))
    else:
        with suppress(RuntimeError):
            group.abort()
