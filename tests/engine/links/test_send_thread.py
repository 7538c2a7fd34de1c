"""Tasks of a send thread are done in order, by another thread, and its end is clean."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from ds_vpipe.engine.links.send_thread import Immediate, SendThread


def test_tasks_are_done_in_order_in_another_thread() -> None:
    sending, done = SendThread(), []
    for number in range(200):
        sending.submit(lambda number=number: done.append((number, threading.get_ident())))
    sending.settle()
    assert [number for number, _ in done] == list(range(200))
    assert {thread for _, thread in done}.isdisjoint({threading.get_ident()})
    sending.stop()


def test_who_submits_does_not_wait() -> None:
    sending, gate = SendThread(), threading.Event()
    sending.submit(gate.wait)
    sending.submit(lambda: None)
    gate.set()
    sending.settle()
    sending.stop()


def test_settling_waits() -> None:
    sending, done = SendThread(), []
    sending.submit(lambda: (time.sleep(0.05), done.append(1)))
    sending.settle()
    assert done == [1]
    sending.stop()


def test_settling_has_a_limit() -> None:
    """A device may hang, and with it the task that waits for its copy."""
    sending, gate, done = SendThread(), threading.Event(), list[int]()
    sending.submit(gate.wait)  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        sending.settle(0.1)
    gate.set()
    sending.submit(lambda: done.append(1))
    sending.settle(30)
    assert done == [1]
    sending.stop()


def test_after_its_end_tasks_are_done_at_once() -> None:
    sending, done = SendThread(), []
    sending.submit(lambda: done.append(1))
    sending.stop()
    assert done == [1]
    sending.stop()
    sending.submit(lambda: done.append(threading.get_ident()))
    sending.settle()
    assert done == [1, threading.get_ident()]


def test_the_end_does_not_wait_for_a_task_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one for a device that hangs: the process has said so, and ends."""
    monkeypatch.setattr("ds_vpipe.engine.links.send_thread._EXIT_GRACE_S", 0.1)
    sending, gate = SendThread(), threading.Event()
    sending.submit(gate.wait)  # type: ignore[arg-type]
    begin = time.monotonic()
    sending.stop()
    assert time.monotonic() - begin < 30
    gate.set()


def test_an_error_is_raised_and_tasks_after_it_run() -> None:
    sending, done = SendThread(), []
    sending.submit(lambda: done[0])
    with pytest.raises(IndexError):
        sending.settle()
    sending.submit(lambda: done.append(1))
    sending.settle()
    assert done == [1]
    sending.stop()


def test_the_thread_ends_with_its_last_reference() -> None:
    sending = SendThread()
    worker = sending._thread
    assert worker.is_alive()
    del sending
    gc.collect()
    worker.join(10)
    assert not worker.is_alive()


def test_a_task_is_forgotten_once_it_is_done() -> None:
    class Held:
        pass

    sending, held = SendThread(), Held()
    there = weakref.ref(held)
    sending.submit(lambda held=held: None)
    sending.settle()
    del held
    assert there() is None
    sending.stop()


def test_immediate() -> None:
    runner, done = Immediate(), []
    runner.submit(lambda: done.append(threading.get_ident()))
    runner.settle()
    assert done == [threading.get_ident()]


def test_only_the_first_of_several_errors_is_raised() -> None:
    """The others follow from it, and would be raised where a stage sends its neighbours the first."""
    sending, gate = SendThread(), threading.Event()

    def fail(text: str) -> None:
        gate.wait()
        raise ValueError(text)

    sending.submit(lambda: fail("first"))
    sending.submit(lambda: fail("second"))
    gate.set()
    with pytest.raises(ValueError, match="first"):
        sending.settle()
    sending.settle()
    sending.stop()


def test_a_stored_error_does_not_keep_a_task_from_being_done() -> None:
    sending, done = SendThread(), []

    def fail() -> None:
        raise ValueError("copy")

    sending.submit(fail)
    while not sending._errors:
        time.sleep(0.001)
    sending.submit(lambda: done.append(1))
    with pytest.raises(ValueError, match="copy"):
        sending.settle()
    assert done == [1]
    sending.check()
    sending.stop()
