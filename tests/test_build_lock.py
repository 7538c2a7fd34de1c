"""A lock that a killed build has left is named by whoever waits for it, and nobody waits longer than the limit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.utils.file_baton import FileBaton

from ds_vpipe.build_lock import awaited_lock, idle_s, limited_builds
from ds_vpipe.diagnosis.probe import observe

WAITS = """
import os, sys, threading, time
from torch.utils.file_baton import FileBaton
from ds_vpipe.build_lock import limited_builds
lock, limit_s, ends_after_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
def build():
    for _ in range(int(ends_after_s / 0.1)):
        open(lock + ".o", "w").close()
        time.sleep(0.1)
    os.remove(lock)
if ends_after_s:
    threading.Thread(target=build, daemon=True).start()
with limited_builds(limit_s):
    FileBaton(lock).wait()
print("built")
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the lock of an extension's build is."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "fused_adam" / "lock"
    path.parent.mkdir()
    return path


def leave(lock: Path, age_s: float) -> None:
    lock.touch()
    os.utime(lock, (time.time() - age_s,) * 2)


def wait_for(lock: Path, limit_s: float, ends_after_s: float = 0.0) -> subprocess.CompletedProcess[str]:
    """A process that waits as torch does, while somebody builds for so long, or for ever."""
    command = [sys.executable, "-c", WAITS, str(lock), str(limit_s), str(ends_after_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=400)


def test_a_wait_without_end_ends(lock: Path) -> None:
    leave(lock, 1200)
    ended = wait_for(lock, limit_s=900)
    assert ended.returncode == 2
    assert f"got a lock {lock} beside which nothing has changed for 20." in ended.stderr
    assert "delete the file" in ended.stderr


def test_a_build_that_goes_on_writing_is_waited_for(lock: Path) -> None:
    leave(lock, 0)
    ended = wait_for(lock, limit_s=1.0, ends_after_s=3.0)
    assert (ended.returncode, ended.stdout) == (0, "built\n"), ended.stderr


def test_a_lock_that_nobody_waits_for_does_not_matter(lock: Path) -> None:
    leave(lock, 5000)
    with limited_builds(limit_s=0.02):
        time.sleep(0.2)


def test_the_lock_that_a_thread_waits_for(lock: Path) -> None:
    lock.touch()
    waiting = threading.Thread(target=FileBaton(str(lock)).wait)
    waiting.start()
    assert waiting.ident is not None
    while awaited_lock(waiting.ident) is None and waiting.is_alive():
        time.sleep(0.01)
    assert awaited_lock(waiting.ident) == lock
    assert awaited_lock(threading.get_ident()) is None
    lock.unlink()
    waiting.join()
    assert awaited_lock(waiting.ident) is None


def test_the_time_since_anything_changed_is_what_doctor_says(lock: Path) -> None:
    leave(lock, 5000)
    leave(lock.with_name("fused_adam.o"), 300)
    (found,) = [age_s for path, age_s in observe([])["build_locks"] if path == str(lock)]
    assert idle_s(lock) == pytest.approx(found, abs=5) == pytest.approx(300, abs=10)
    lock.with_name("fused_adam.o").unlink()
    lock.unlink()
    assert idle_s(lock) is None
