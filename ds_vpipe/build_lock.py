"""Locks of extension builds: the one wait at a start that torch gives neither a name nor a limit.

DeepSpeed compiles some operators at their first use. torch lets one process build, and the others wait for as long as a
file ``lock`` is there. A process that is killed meanwhile leaves the file, and from then on every start waits for ever
and says nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.utils.file_baton import FileBaton

LIMIT_S = 900.0  # the slowest file of DeepSpeed's operators takes some minutes
_EXIT_STATUS = 2


def idle_s(lock: Path) -> float | None:
    """For how many seconds nothing has changed beside a lock; None if the build has ended.

    A build that goes on writes a file now and then, however long it takes.
    """
    try:
        return time.time() - max(path.stat().st_mtime for path in lock.parent.iterdir())
    except (OSError, ValueError):
        return None


def awaited_lock(thread: int) -> Path | None:
    """The lock that a thread waits for in torch, by the thread's number; None if it does something else."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_code is FileBaton.wait.__code__:
            return Path(frame.f_locals["self"].lock_file_path)
        frame = frame.f_back
    return None


@contextmanager
def limited_builds(limit_s: float = LIMIT_S) -> Iterator[None]:
    """Inside, a wait of this thread for somebody else's build ends: the process, with one line on standard error.

    torch's wait cannot be interrupted from within the process, so that there is no other end. Locks that nobody waits
    for do not matter.

    Args:
        limit_s: how long nothing may have changed beside the lock that is waited for.
    """
    thread, done = threading.get_ident(), threading.Event()

    def watch() -> None:
        while not done.wait(min(5.0, limit_s / 4)):
            lock = awaited_lock(thread)
            idle = None if lock is None else idle_s(lock)
            if lock is not None and idle is not None and idle > limit_s:
                rank = os.environ.get("RANK", "0")
                print(f"[rank {rank}] ds_vpipe: {_line(lock, idle)}", file=sys.stderr, flush=True)
                os._exit(_EXIT_STATUS)

    watcher = threading.Thread(target=watch, name="ds_vpipe-build-lock", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _line(lock: Path, age_s: float) -> str:
    return (
        f"extension build: got a lock {lock} beside which nothing has changed for {age_s / 60:.1f} minutes, as a "
        "killed process leaves it; allowed is one of a build that goes on, since others wait for it without end; "
        "delete the file and start again"
    )
