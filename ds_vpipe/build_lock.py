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

from ds_vpipe.errors import VPipeConfigError

LIMIT_S = 900.0  # the slowest file of DeepSpeed's operators takes some minutes
_EXIT_STATUS = 2


def extension_folder() -> Path:
    """Where torch builds extensions: ``TORCH_EXTENSIONS_DIR``, else ``torch_extensions`` in the user's cache."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "torch_extensions"


def ages(folder: Path) -> dict[Path, float]:
    """The locks below ``folder`` and for how many seconds nothing has changed beside them.

    A build that goes on has a lock, too, but writes a file now and then, however long it takes.
    """
    found = {}
    for lock in (*folder.glob("*/lock"), *folder.glob("*/*/lock")):
        try:
            found[lock] = time.time() - max(path.stat().st_mtime for path in lock.parent.iterdir())
        except (OSError, ValueError):  # the build has ended
            continue
    return found


def refuse_old_locks(limit_s: float = LIMIT_S) -> None:
    """Refuse to start where there is a lock and no build has written anything for so long.

    Raises:
        VPipeConfigError: there is one; the line names it.
    """
    for lock, age_s in sorted(ages(extension_folder()).items()):
        if age_s > limit_s:
            raise VPipeConfigError(_line(lock, age_s))


@contextmanager
def limited_builds(limit_s: float = LIMIT_S) -> Iterator[None]:
    """Inside, a wait for somebody else's build ends: the process, with one line, once a lock is refused.

    torch's wait cannot be interrupted from within the process, so that there is no other end.

    Raises:
        VPipeConfigError: as :func:`refuse_old_locks`.
    """
    refuse_old_locks(limit_s)
    done = threading.Event()

    def watch() -> None:
        while not done.wait(min(5.0, limit_s / 4)):
            try:
                refuse_old_locks(limit_s)
            except VPipeConfigError as error:
                print(f"[rank {os.environ.get('RANK', '0')}] ds_vpipe: {error}", file=sys.stderr, flush=True)
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
