"""Threads of gloo that still hold tensors at the end of the interpreter.

Such a thread frees a collective's tensors a moment after the rank that waited for it goes on, and needs Python's lock
for that. A thread that asks for the lock of an interpreter which is going down ends the process by an abort: "terminate
called without an active exception", in place of an exit status of 0. This happens to scripts that end right after a
checkpoint, whose last act is a collective.
"""

import atexit
import time

_GRACE_S = 0.1  # far more than they need: they only wait for the lock


def outlive_backend_threads() -> None:
    """Have the interpreter wait a moment for these threads when it ends; idempotent."""
    atexit.unregister(_release_lock)
    atexit.register(_release_lock)


def _release_lock() -> None:
    time.sleep(_GRACE_S)
