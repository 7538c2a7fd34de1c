"""What the thread that looks for failures of other ranks asks the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import timedelta

import pytest
import torch.distributed as dist

from ds_vpipe.engine.links import failure_watch
from ds_vpipe.engine.links.failure_watch import FailureWatch, own_connection


class Gone:
    """A store whose process has ended."""

    def __init__(self) -> None:
        self.asked = 0

    def check(self, _: Sequence[str]) -> bool:
        self.asked += 1
        raise dist.DistNetworkError("Failed to recv, got 0 bytes")


def test_store_that_is_gone_is_asked_once() -> None:
    """torch prints a stack of its own for every question, and rank 0 may end a while before others."""
    store = Gone()
    watch = FailureWatch(store, 2, limit_s=100)
    assert watch.reason() is None  # has looked
    with watch.state.changed:
        watch.state.changed.wait_for(lambda: watch.state.rounds >= 3, timeout=20)
    watch.stop()
    assert store.asked == 1


def test_no_connection_to_a_store_that_ends_in_between_is_waited_for_long() -> None:
    """torch tries for as long as its own timeout, which is 10 minutes, though the rank that had it has ended."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, timeout=timedelta(seconds=60))
    assert own_connection(store, 0.5).add("asked", 1) == 1
    del server
    begin = time.monotonic()
    with pytest.raises(dist.DistNetworkError):
        own_connection(dist.PrefixStore("engine 1", store), 0.5)
    assert time.monotonic() - begin < 30
    assert store.timeout == timedelta(seconds=60)


def test_nobody_waits_for_what_a_store_that_is_gone_will_not_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher ends this rank within a second of rank 0's end, and its line has to be out by then."""
    monkeypatch.setattr(failure_watch, "_PATIENCE_S", 60.0)
    watch, begin = FailureWatch(Gone(), 2, limit_s=100), time.monotonic()
    watch.publish("rank 1 has lost rank 0", by_lost=True)
    watch.wait_until_seen()
    assert watch.reason() is None
    watch.stop()
    assert time.monotonic() - begin < 30


def test_a_failure_that_others_do_not_see_is_waited_for_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time, since the store answers."""
    monkeypatch.setattr(failure_watch, "_PATIENCE_S", 0.3)
    watch, waits = FailureWatch(dist.HashStore(), 2, limit_s=100), list[float]()
    watch.publish("a failure of rank 0")

    def wait() -> None:
        for _ in range(2):
            begin = time.monotonic()
            watch.wait_until_seen()
            waits.append(time.monotonic() - begin)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(30)
    assert [seconds >= 0.3 for seconds in waits] == [True] * 2
    assert watch.reason() == "a failure of rank 0"
    watch.stop()


class Silent:
    """A store that does not answer, as where its process is stopped, until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def check(self, _: Sequence[str]) -> bool:
        self.released.wait(30)
        return False


def test_a_store_that_does_not_answer_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failure_watch, "_PATIENCE_S", 1.0)
    store = Silent()
    watch, begin = FailureWatch(store, 2, limit_s=100), time.monotonic()
    assert watch.reason() is None
    assert time.monotonic() - begin > 0.9
    monkeypatch.setattr(failure_watch, "_PATIENCE_S", 60.0)
    for _ in range(2):
        watch.wait_until_seen()
    assert time.monotonic() - begin < 25
    store.released.set()
    monkeypatch.setattr(failure_watch, "_PATIENCE_S", 10.0)
    with watch.state.changed:
        assert watch.state.changed.wait_for(lambda: watch.state.rounds >= 1, timeout=20)
    rounds = watch.state.rounds
    assert watch.reason() is None
    assert watch.state.rounds >= rounds + 2, "it answers again"
    watch.stop()


def test_store_that_has_been_gone_for_long_is_a_failure() -> None:
    watch = FailureWatch(Gone(), 2, limit_s=0)
    reason = watch.reason()
    watch.stop()
    assert reason is not None
    assert "store of the default process group is gone" in reason


def test_a_rank_that_is_gone_has_its_failure_seen_for_it() -> None:
    """Once, whoever of its neighbours finds it."""
    store = dist.HashStore()
    watches = [FailureWatch(store, 3, limit_s=100) for _ in range(2)]  # of ranks that are left
    for rank, watch in enumerate(watches):
        watch.publish(f"rank {rank} has lost rank 2", by_lost=True)
    deadline = time.monotonic() + 20
    while watches[0].state.seen_by < 3 and time.monotonic() < deadline:
        watches[0].wait_until_seen()
    assert len({watch.reason() for watch in watches}) == 1
    for watch in watches:
        watch.stop()
    assert watches[0].state.seen_by == 3
