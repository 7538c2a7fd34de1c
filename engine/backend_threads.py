"""Threads of gloo that still hold tensors at the end of the interpreter.

Such a thread frees a collective's tensors a moment after the rank that waited for it goes on, and needs Python's lock
for that. A thread that asks for the lock of an interpreter which is going down ends the process by an abort: "terminate
called without an active exception", in place of an exit status of 0. This happens to scripts that end right after a
checkpoint, whose last act is a collective.
"""

import atexit
import threading
import time
from contextlib import suppress
from pathlib import Path

_GRACE_S = 0.1  # far more than they need on an idle machine: they only wait for the lock
_LIMIT_S = 2.0  # where they have to wait for a processor too


def outlive_backend_threads() -> None:
    """Have the interpreter wait a moment for these threads when it ends; idempotent."""
    atexit.unregister(_release_lock)
    atexit.register(_release_lock)


def _release_lock() -> None:
    deadline = time.monotonic() + _LIMIT_S
    time.sleep(_GRACE_S)
    while _others_run() and time.monotonic() < deadline:
        time.sleep(0.01)


def _others_run() -> bool:
    """Whether another thread of this process has a processor or waits for one, as far as Linux says."""
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError):  # it has just ended
            runs = (task / "stat").read_text().rpartition(")")[2].split()[0] == "R"
            if runs and int(task.name) != threading.get_native_id():
                return True
    return False
