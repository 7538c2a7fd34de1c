"""The end of the interpreter, and the backend's threads that may still hold tensors then.

A thread of gloo lets go of a collective's tensors a moment after the rank that waited for it goes on. If it is the last
to hold them it needs Python's lock for that, and a thread that asks for the lock of an interpreter which is going down
ends the process by an abort: "terminate called without an active exception", in place of an exit status of 0. A script
that ends right after a checkpoint, whose last act is a collective, is where this happens.
"""

from __future__ import annotations

import atexit
import time

_GRACE_S = 0.1  # far more than they need: they only wait for the lock


def outlive_backend_threads() -> None:
    """Have the interpreter wait a moment for these threads when it ends; more than one call is as good as one."""
    atexit.unregister(_let_go)
    atexit.register(_let_go)


def _let_go() -> None:
    time.sleep(_GRACE_S)  # without the lock
