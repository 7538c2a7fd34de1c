"""Builds of operators: a lock that nobody holds is taken over, one that is held is named, no wait is without end."""

from __future__ import annotations

import fcntl
import inspect
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from ds_vpipe import extension_builds as builds
from ds_vpipe.doctor import probe
from ds_vpipe.errors import VPipeError
from ds_vpipe.extension_builds import BuildLock, environment_folder

HOLDS = "import runpy, sys; runpy.run_path(sys.argv[1])['FileBaton'](sys.argv[2]).try_acquire(); input()"
HOLDS_BY_KERNEL = "import filelock, sys; lock = filelock.FileLock(sys.argv[2]); lock.acquire(); input()"
BY_KERNEL = not hasattr(cpp_extension, "FileBaton")


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the lock of an extension's build is; a wait for it is looked at and named more often."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(builds, "LOOK_S", 0.05)
    monkeypatch.setattr(builds, "NAMED_AFTER_S", 0.5)
    monkeypatch.setattr(builds, "NAMED_EVERY_S", 0.1)
    path = tmp_path / "fused_adam" / "lock"
    path.parent.mkdir()
    return path


def leave(lock: Path, age_s: float) -> None:
    lock.touch()
    os.utime(lock, (time.time() - age_s,) * 2)


def locked_by_a_process(lock: Path, holds: str = HOLDS) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", holds, inspect.getfile(FileBaton), str(lock)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    while not lock.exists():
        assert holder.poll() is None
        time.sleep(0.01)
    return holder


def lines_of_a_wait(lock: Path, capfd: pytest.CaptureFixture[str], limit_s: float = 9000.0) -> str:
    """What is said while another thread waits, until the lock is removed, which is after the second line."""
    answers: list[bool] = []
    waiting = threading.Thread(target=lambda: answers.append(BuildLock(str(lock), limit_s).try_acquire()))
    waiting.start()
    lines = ""
    while lines.count("\n") < 2:
        lines += capfd.readouterr().err
        assert waiting.is_alive()
    lock.unlink()
    waiting.join(60)
    assert answers == [False]
    return lines


def test_a_lock_that_a_killed_process_has_left_is_taken_over(lock: Path, capfd: pytest.CaptureFixture[str]) -> None:
    holder = locked_by_a_process(lock)
    holder.kill()
    holder.wait()
    mine = BuildLock(str(lock))
    assert mine.try_acquire()
    line = capfd.readouterr().err
    assert line.startswith(f"[rank 0] ds_vpipe: extension build: the lock {lock}, 0.0 minutes old"), line
    assert line.endswith("taken over\n"), line
    with probe.Claim(lock) as claim:
        assert claim.state == probe.HELD, "by us, as others see it"
    mine.release()
    assert not list(lock.parent.iterdir())


def test_torch_builds_with_such_a_lock(lock: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """torch imports, without a build, what it has waited for: whoever takes the lock over must build."""
    leave(lock, 3600)
    built = []
    with builds.extension_builds(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpp_extension, "_write_ninja_file_and_build_library", lambda **_: built.append(lock.exists()))
        patch.setattr(cpp_extension, "_import_module_from_library", lambda *_: "the module")
        (lock.parent / "source.cpp").touch()
        assert cpp_extension.load(
            "fused_adam_test", [str(lock.parent / "source.cpp")], build_directory=str(lock.parent)
        )
    assert built == [True]
    assert BY_KERNEL or ("60.0 minutes old" in capfd.readouterr().err and not lock.exists())
    assert BY_KERNEL or cpp_extension.FileBaton is FileBaton


def test_a_lock_of_the_kernels_is_waited_for_and_named(lock: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """torch's since 2.14."""
    holder = locked_by_a_process(lock, HOLDS_BY_KERNEL)
    while not probe.locked(lock):
        time.sleep(0.01)
    threading.Timer(3.0, holder.kill).start()
    with builds.KernelLock(str(lock)):
        assert holder.poll(), "it has ended before"
    lines = capfd.readouterr().err
    assert f"for the lock {lock}, 0.0 minutes old, {probe.LOCKED}; nothing to do" in lines
    assert not probe.locked(lock), "the file is left, and nobody has it"


def test_a_wait_for_the_kernels_lock_ends(lock: Path) -> None:
    leave(lock.with_name("fused_adam.o"), 1200)
    os.utime(lock.parent, (time.time() - 5000,) * 2)
    mine, holder = builds.KernelLock(str(lock)), builds.KernelLock(str(lock), thread_local=False)
    lock.touch()
    os.utime(lock, (time.time() - 1200,) * 2)
    holder.acquire()
    mine.limit_s = 900.0
    threading.Timer(1.0, holder.release).start()
    with mine:  # a build has just begun, whatever is left of others
        pass
    holder.acquire()
    os.utime(lock, (time.time() - 1200,) * 2)
    with pytest.raises(VPipeError) as raised:
        mine.acquire()
    holder.release()
    assert f"got a lock {lock}, {probe.LOCKED}, beside which nothing has changed for 20.0 minutes" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "other", "ours"), [("FileBaton", "FileLock", BuildLock), ("FileLock", "FileBaton", builds.KernelLock)]
)
def test_torch_builds_with_our_lock(
    name: str, other: str, ours: type, lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to torch 2.13 and since 2.14."""
    monkeypatch.delattr(cpp_extension, other, raising=False)
    monkeypatch.setattr(cpp_extension, name, object, raising=False)
    with builds.extension_builds():
        assert getattr(cpp_extension, name) is ours
    assert getattr(cpp_extension, name) is object


def test_a_living_process_is_waited_for_and_named(lock: Path, capfd: pytest.CaptureFixture[str]) -> None:
    holder = locked_by_a_process(lock)
    lines = lines_of_a_wait(lock, capfd)
    assert f"for the lock {lock}, 0.0 minutes old, {probe.HELD}; nothing to do" in lines
    holder.kill()
    holder.wait()


def test_a_file_system_of_other_hosts(
    lock: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Another host may hold the lock: it is never taken, and named with the remedy until the limit."""
    monkeypatch.setattr(probe, "_file_system", lambda path: "nfs4")
    leave(lock, 1200)
    with pytest.raises(VPipeError, match=r"nothing has changed for 20\.0 minutes.*delete the file, and start again"):
        BuildLock(str(lock), limit_s=900.0).try_acquire()
    unknown = "of which this host cannot know who has it open (a file system of type nfs4)"
    assert f"{unknown}; if no build is going on, delete the file" in lines_of_a_wait(lock, capfd)


def test_one_of_many_takes_a_lock_over(lock: Path) -> None:
    """Threads here are as good as processes: each has the file open for itself."""
    leave(lock, 3600)
    at_once: list[int] = []
    inside: list[int] = []

    def build(number: int) -> None:
        mine = BuildLock(str(lock), limit_s=9000.0)
        if mine.try_acquire():
            inside.append(number)
            at_once.append(len(inside))
            time.sleep(0.3)
            inside.remove(number)
            mine.release()

    threads = [threading.Thread(target=build, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert set(at_once) == {1}
    assert not list(lock.parent.iterdir())


def test_only_the_second_look_counts(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An owner closes a lock just before it removes it, and would fail to if it were gone."""
    leave(lock, 3600)
    looks: list[Path] = []

    def look(path: Path) -> probe.Claim:
        looks.append(path)
        if len(looks) == 2:
            lock.unlink()  # its owner goes on
        return probe.Claim(path)

    monkeypatch.setattr(builds, "Claim", look)
    assert not BuildLock(str(lock)).try_acquire()
    assert len(looks) == 2


@pytest.mark.parametrize("by_kernel", [False, True])
def test_a_ninja_that_outlives_its_python(by_kernel: bool, lock: Path) -> None:
    leave(lock, 3600)
    ninja = lock.parent / "ninja"
    ninja.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(ninja), "60"], cwd=lock.parent)
    threading.Timer(0.5, process.kill).start()
    mine: Any = builds.KernelLock(str(lock)) if by_kernel else BuildLock(str(lock))
    assert mine.acquire() if by_kernel else mine.try_acquire()
    assert process.poll(), "it has ended before"
    mine.release()


def test_a_wait_without_end_ends(lock: Path) -> None:
    leave(lock, 0)
    leave(lock.with_name("fused_adam.o"), 1200)
    os.utime(lock, (time.time() - 5000,) * 2)
    with lock.open(), pytest.raises(VPipeError) as raised:  # held, so that it is not taken over
        BuildLock(str(lock), limit_s=900).try_acquire()
    assert f"got a lock {lock}, {probe.HELD}, beside which nothing has changed for 20.0 minutes" in str(raised.value)


def test_a_lock_taken_after_the_build(lock: Path) -> None:
    """torch waits for it once more before it imports; if that process has ended, nothing is to be done."""
    leave(lock, 3600)
    BuildLock(str(lock)).wait()
    assert not lock.exists()


def test_what_doctor_says_of_a_lock(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave(lock, 5000)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.14.1+cpu")
    assert not [found for found in probe.observe([])["build_locks"] if found[0] == str(lock)], "nobody has it"
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert [found[2] for found in probe.observe([])["build_locks"] if found[0] == str(lock)] == [probe.LOCKED]
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0+cpu")
    leave(lock.with_name("fused_adam.o"), 300)
    (found,) = [found[1:] for found in probe.observe([])["build_locks"] if found[0] == str(lock)]
    assert probe.idle_s(lock) == pytest.approx(found[0], abs=5) == pytest.approx(300, abs=10)
    assert found[1] == probe.UNUSED
    lock.with_name("fused_adam.o").unlink()
    lock.unlink()
    assert probe.idle_s(lock) is None


def test_a_folder_per_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "/mine")
    with builds.extension_builds():
        assert os.environ["TORCH_EXTENSIONS_DIR"] == "/mine"
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    folders = [environment_folder()]
    (tmp_path / "link").symlink_to(sys.prefix)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "link"))
    folders.append(environment_folder())
    monkeypatch.setattr(sys, "prefix", "/another/environment")
    folders.append(environment_folder())
    monkeypatch.setattr("torch.__version__", "9.9.9")
    folders.append(environment_folder())
    monkeypatch.setattr("deepspeed.__version__", "9.9.9")
    folders.append(environment_folder())
    assert len(set(folders)) == 5
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.13.0")  # in which a lock is a file
    with builds.extension_builds():
        built = Path(cpp_extension._get_build_directory("fused_adam", verbose=False))
    assert built == Path(folders[4]) / "fused_adam"
    assert built.is_relative_to(tmp_path / "torch_extensions")
    (built / "lock").touch()
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    assert [path for path, *_ in probe.observe([])["build_locks"]] == [str(built / "lock")], "doctor looks there too"
