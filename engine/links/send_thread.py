"""A thread that does what a stage's messages need while the stage computes.

Copying a message together, handing it to the backend and posting a receive take as long as a small layer, above all
when nothing of them is left in the processor's caches. The stage's own thread only says what to send; layers let go of
Python's lock while they compute, and the courier works then.

Nothing that a courier does waits for another rank, so that it always comes to an end.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

import torch

Task = Callable[[], None]


class Runner(Protocol):
    """Does tasks, in the order in which they are submitted."""

    def submit(self, task: Task) -> None:
        """Do ``task``, now or soon. It deals with its own errors."""

    def settle(self) -> None:
        """Wait until everything submitted is done."""

    def check(self) -> None:
        """Raise what a task has raised, if any has; so does :meth:`settle`."""


class Immediate:
    """Does every task at once."""

    def submit(self, task: Task) -> None:
        """Do ``task`` now."""
        task()

    def settle(self) -> None:
        """Nothing is left to do."""

    def check(self) -> None:
        """Tasks have raised where they were submitted."""


class SendThread:
    """Does tasks in a thread of its own, which ends with the last reference to the courier or with :meth:`stop`.

    Args:
        device: what tasks use; a thread begins with the first one of its kind.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._errors: list[BaseException] = []
        arguments = (self._tasks, self._errors, device)
        self._thread = threading.Thread(target=_work, args=arguments, name="ds_vpipe-courier", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._tasks, self._thread)  # at the latest when the interpreter ends

    def submit(self, task: Task) -> None:
        """Let the thread do ``task``; after :meth:`stop` it is done at once."""
        if self._end.alive:
            self._tasks.put(task)
        else:
            task()

    def settle(self) -> None:
        """Wait until everything submitted is done.

        Raises:
            BaseException: what a task has raised.
        """
        if self._end.alive:
            done = threading.Lock()
            done.acquire()
            self._tasks.put(done.release)
            done.acquire()
        self.check()

    def stop(self) -> None:
        """Finish what was submitted and end the thread."""
        self._end()

    def check(self) -> None:
        """Raise what a task has raised, without waiting."""
        if self._errors:
            first = self._errors[0]
            self._errors.clear()  # what follows from the first one must not hide it from the neighbours
            raise first


def _end(tasks: queue.SimpleQueue[Task | None], thread: threading.Thread) -> None:
    # A thread that is in the midst of torch when the interpreter goes down takes the process with it.
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join()


def _work(tasks: queue.SimpleQueue[Task | None], errors: list[BaseException], device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    while (task := tasks.get()) is not None:
        try:
            task()
        except BaseException as error:  # else whoever settles would wait for ever
            errors.append(error)
        del task  # and what it holds, while the next one is waited for
