"""Runners of send and receive tasks: at once, or in a thread of their own while the stage computes.

Packing a message, giving it to the backend and posting a receive take as long as a small layer, above all when nothing
of them is left in the processor's caches. The stage's own thread only submits tasks; layers let go of Python's lock
while they compute, and the send thread works then. No task waits for another rank but where a socket is full, with a
limit, so that every one ends.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable

Task = Callable[[], None]

COPYING = "its send thread to finish what is to be sent"
"""Name of a wait for tasks."""
_EXIT_GRACE_S = 60.0


class Immediate:
    """Runner without a thread: tasks run, and raise, where they are submitted."""

    def submit(self, task: Task) -> None:
        """Run ``task`` now."""
        task()

    def settle(self, limit_s: float | None = None) -> None:
        """Nothing is left to run."""

    def check(self) -> None:
        """Nothing is left to raise."""


class SendThread:
    """Runner in a thread of its own.

    It ends with :meth:`stop` or its last reference.
    """

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._errors: list[BaseException] = []
        arguments = (self._tasks, self._errors)
        self._thread = threading.Thread(target=_work, args=arguments, name="ds_vpipe-send", daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._tasks, self._thread)  # at the latest when the interpreter ends

    def submit(self, task: Task) -> None:
        """Let the thread run ``task``; after :meth:`stop` it runs at once."""
        if self._end.alive:
            self._tasks.put(task)
        else:
            task()

    def settle(self, limit_s: float | None = None) -> None:
        """Wait until all tasks have run; raise the first error of one.

        Raises:
            TimeoutError: the limit has passed, as where a device hangs.
        """
        in_time = True
        if self._end.alive:
            done = threading.Lock()
            done.acquire()
            self._tasks.put(done.release)
            in_time = done.acquire(timeout=-1 if limit_s is None else limit_s)
        self.check()
        if not in_time:
            raise TimeoutError("Timed out")

    def stop(self) -> None:
        """Run all submitted tasks and end the thread."""
        self._end()

    def check(self) -> None:
        """Raise the first error of a task, without waiting."""
        if self._errors:
            first = self._errors[0]
            self._errors.clear()  # what follows from the first one must not hide it from the neighbours
            raise first


Runner = Immediate | SendThread


def _end(tasks: queue.SimpleQueue[Task | None], thread: threading.Thread) -> None:
    # A thread that is in the midst of torch when the interpreter goes down takes the process with it.
    tasks.put(None)
    if thread is not threading.current_thread():
        thread.join(_EXIT_GRACE_S)  # which waits for a device, and that may hang


def _work(tasks: queue.SimpleQueue[Task | None], errors: list[BaseException]) -> None:
    while (task := tasks.get()) is not None:
        try:
            task()
        except BaseException as error:  # else settle() would never return
            errors.append(error)
        del task  # and what it holds, while the next one is waited for
