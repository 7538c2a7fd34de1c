"""Builds of DeepSpeed's operators: a folder per environment, and waits with a limit.

torch lets one process build while the others wait, without limit or message. Up to torch 2.13 they wait as long as a
file ``lock`` exists, which a process that is killed meanwhile leaves for every later start; since then the kernel holds
the lock. And all virtual environments share torch's folder: each would build anew what another one has built with other
versions.
"""

import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from filelock import FileLock, Timeout
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from ds_vpipe.doctor.probe import BUILD_LIMIT_S, HELD, LOCKED, UNUSED, Claim, idle_s, locked
from ds_vpipe.errors import VPipeError, say

POLL_S = 0.1
LOOK_S = 2.0  # its owner closes a lock just before it removes it: only the second look at a closed one counts
NAMED_AFTER_S = 15.0
NAMED_EVERY_S = 60.0
BUILDING = "whose owner has ended, but not its ninja, which still builds"


@contextmanager
def extension_builds() -> Iterator[None]:
    """Builds in this environment's folder, or the one that the user names, whose locks are ours."""
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", environment_folder())
    name, lock = ("FileBaton", BuildLock) if hasattr(cpp_extension, "FileBaton") else ("FileLock", KernelLock)
    with patch.object(cpp_extension, name, lock):
        yield


def environment_folder() -> str:
    """Folder of this environment beneath torch's own: builds depend on both versions.

    And on its path as it is: ninja's files name it, and are built anew under that of a link to the same environment.
    """
    version = f"{sys.version_info.major}{sys.version_info.minor}"
    prefix = hashlib.sha256(os.path.abspath(sys.prefix).encode()).hexdigest()[:8]
    name = f"ds_vpipe_py{version}_torch{torch.__version__}_deepspeed{deepspeed.__version__}_{prefix}"
    return os.path.join(cpp_extension.get_default_build_root(), name)


class Wait:
    """Wait for another process's build, for as long as files next to its lock change within ``limit_s``."""

    def __init__(self, lock: Path, limit_s: float) -> None:
        self._lock, self._limit_s = lock, limit_s
        self._start = time.monotonic()
        self._named = self._start - NAMED_EVERY_S + NAMED_AFTER_S

    def go_on(self, state: str) -> None:
        """Say now and then what is waited for; ``state`` says who has the lock.

        Raises:
            VPipeError: nothing has changed for longer than the limit.
        """
        now = time.monotonic()
        idle, lock = idle_s(self._lock) or 0.0, f"lock {self._lock}, "
        if state != UNUSED and idle > self._limit_s and now - self._start >= NAMED_AFTER_S:
            raise VPipeError(
                f"extension build: got a {lock}{state}, beside which nothing has changed for {idle / 60:.1f} minutes; "
                f"allowed is one of a build that goes on; end the process or delete the file, and start again"
            )
        if now - self._named >= NAMED_EVERY_S:
            self._named, busy = now, state in (HELD, LOCKED, BUILDING)
            remedy = "nothing to do" if busy else "if no build is going on, delete the file"
            waited = f"waiting for {now - self._start:.0f} s for the {lock}{_age(self._lock)} old"
            say(f"extension build: {waited}, {state}; {remedy}")


class KernelLock(FileLock):
    """torch's lock of a build since 2.14, which the kernel takes from an owner that ends."""

    limit_s = BUILD_LIMIT_S

    def acquire(self, *args: Any, **kwargs: Any) -> Any:
        """Take the lock. Its present owner is waited for and named, and so is a ninja that has outlived one."""
        lock, take = Path(self.lock_file), super().acquire
        wait = Wait(lock, self.limit_s)
        while True:
            with suppress(Timeout):
                if not locked(lock):  # filelock 3 writes to the file at every look, and it would never be idle
                    acquired = take(timeout=0)
                    break
            wait.go_on(LOCKED)
            time.sleep(POLL_S)
        os.utime(lock)  # this build begins now, however old the file is
        while ninja_runs(lock.parent):
            wait.go_on(BUILDING)
            time.sleep(LOOK_S)
        return acquired


class BuildLock(FileBaton):
    """torch's lock of a build up to 2.13, taken over from an owner that has ended."""

    fd: Any  # torch says None, and puts a number there

    def __init__(self, lock_file_path: str, limit_s: float = BUILD_LIMIT_S) -> None:
        super().__init__(lock_file_path)
        self._lock = Path(lock_file_path)
        self._limit_s = limit_s

    def try_acquire(self) -> bool:
        """True if this process is to build. False once another one has."""
        return bool(super().try_acquire()) or self._await()

    def wait(self) -> None:
        """Wait for a process that took the lock after the build had ended."""
        if self._await():
            self.release()

    def _await(self) -> bool:
        """Wait until the lock is gone. True if it is this process's own instead."""
        wait, looked, state = Wait(self._lock, self._limit_s), time.monotonic() - LOOK_S, HELD
        while self._lock.exists():
            now = time.monotonic()
            if now - looked >= LOOK_S:
                looked, before = now, state
                with Claim(self._lock) as claim:
                    state = claim.state
                    if state == UNUSED and ninja_runs(self._lock.parent):
                        state = BUILDING
                    if state == UNUSED == before:
                        self._take_over()
                        return True
                wait.go_on(state)
            time.sleep(self.wait_seconds)
        return False

    def _take_over(self) -> None:
        """Replace the lock that no process holds by one of our own. No process sees it missing."""
        left = f"the lock {self._lock}, {_age(self._lock)} old, is one that a process has left that ended"
        say(f"extension build: {left}; taken over")
        self.fd, path = tempfile.mkstemp(prefix="lock.", dir=self._lock.parent)
        os.rename(path, self._lock)


def ninja_runs(folder: Path) -> bool:
    """True while a ninja builds in a folder: it outlives a killed Python."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "comm").read_text() == "ninja\n" and (process / "cwd").samefile(folder):
                return True
    return False


def _age(lock: Path) -> str:
    with suppress(OSError):
        return f"{(time.time() - lock.stat().st_mtime) / 60:.1f} minutes"
    return "0 minutes"
