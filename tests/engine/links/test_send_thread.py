"""Tasks of a courier are done in order, by another thread, and its end is clean."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest
import torch

from ds_vpipe.engine.links.send_thread import Immediate, SendThread


def test_tasks_are_done_in_order_in_another_thread() -> None:
    courier, done = SendThread(), []
    for number in range(200):
        courier.submit(lambda number=number: done.append((number, threading.get_ident())))
    courier.settle()
    assert [number for number, _ in done] == list(range(200))
    assert {thread for _, thread in done}.isdisjoint({threading.get_ident()})
    courier.stop()


def test_who_submits_does_not_wait() -> None:
    courier, gate = SendThread(), threading.Event()
    courier.submit(gate.wait)
    courier.submit(lambda: None)
    gate.set()
    courier.settle()
    courier.stop()


def test_settling_waits() -> None:
    courier, done = SendThread(), []
    courier.submit(lambda: (time.sleep(0.05), done.append(1)))
    courier.settle()
    assert done == [1]
    courier.stop()


def test_after_its_end_tasks_are_done_at_once() -> None:
    courier, done = SendThread(), []
    courier.submit(lambda: done.append(1))
    courier.stop()
    assert done == [1]
    courier.stop()
    courier.submit(lambda: done.append(threading.get_ident()))
    courier.settle()
    assert done == [1, threading.get_ident()]


def test_an_error_is_told_and_nobody_waits_for_ever() -> None:
    courier, done = SendThread(), []
    courier.submit(lambda: done[0])
    with pytest.raises(IndexError):
        courier.settle()
    courier.submit(lambda: done.append(1))
    courier.settle()
    assert done == [1]
    courier.stop()


def test_the_thread_ends_with_the_courier() -> None:
    before = threading.active_count()
    courier = SendThread()
    assert threading.active_count() == before + 1
    thread = courier._thread
    del courier
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_a_task_is_forgotten_once_it_is_done() -> None:
    class Held:
        pass

    courier, held = SendThread(), Held()
    there = weakref.ref(held)
    courier.submit(lambda held=held: None)
    courier.settle()
    del held
    assert there() is None
    courier.stop()


def test_immediate() -> None:
    runner, done = Immediate(), []
    runner.submit(lambda: done.append(threading.get_ident()))
    runner.settle()
    assert done == [threading.get_ident()]


def test_only_the_first_of_several_errors_is_told() -> None:
    """The others follow from it, and would be raised where a stage tells its neighbours of the first."""
    courier, gate = SendThread(), threading.Event()

    def fail(text: str) -> None:
        gate.wait()
        raise ValueError(text)

    courier.submit(lambda: fail("first"))
    courier.submit(lambda: fail("second"))
    gate.set()
    with pytest.raises(ValueError, match="first"):
        courier.settle()
    courier.settle()
    courier.stop()


def test_a_stored_error_does_not_keep_a_task_from_being_done() -> None:
    courier, done = SendThread(), []

    def fail() -> None:
        raise ValueError("copy")

    courier.submit(fail)
    while not courier._errors:
        time.sleep(0.001)
    courier.submit(lambda: done.append(1))
    with pytest.raises(ValueError, match="copy"):
        courier.settle()
    assert done == [1]
    courier.check()
    courier.stop()


def test_the_thread_takes_its_device_first(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: taken.append((device, threading.get_ident())))
    courier, device = SendThread(torch.device("cuda", 1)), torch.device("cuda", 1)
    courier.submit(lambda: taken.append(threading.get_ident()))
    courier.settle()
    assert taken == [(device, taken[1]), taken[1]]
    assert taken[1] != threading.get_ident()
    courier.stop()
