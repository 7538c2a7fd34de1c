"""A lock that a killed build has left is named, and nobody waits for it longer than the limit."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_vpipe.build_lock import ages, limited_builds, refuse_old_locks
from ds_vpipe.diagnosis.probe import observe
from ds_vpipe.errors import VPipeConfigError


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


def test_without_locks_there_is_nothing_to_say(lock: Path) -> None:
    refuse_old_locks()
    with limited_builds():
        pass


def test_a_build_that_goes_on_is_waited_for(lock: Path) -> None:
    leave(lock, 60)
    assert ages(lock.parents[1])[lock] == pytest.approx(60, abs=5)
    with limited_builds():
        pass


def test_a_long_build_that_goes_on_writing_is_no_old_lock(lock: Path) -> None:
    leave(lock, 5000)
    leave(lock.with_name("fused_adam.o"), 300)
    refuse_old_locks()
    (found,) = [age_s for path, age_s in observe([])["build_locks"] if path == str(lock)]
    assert ages(lock.parents[1])[lock] == pytest.approx(found, abs=5) == pytest.approx(300, abs=10)


def test_an_old_lock_is_named(lock: Path) -> None:
    leave(lock, 1200)
    with pytest.raises(VPipeConfigError, match=rf"got a lock {lock} beside .* for 20\.\d minutes.* delete the file"):
        refuse_old_locks()
    with pytest.raises(VPipeConfigError, match="delete the file"), limited_builds():
        pytest.fail("must not begin")


def test_torchs_own_folder_is_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import cpp_extension

    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = Path(cpp_extension._get_build_directory("fused_adam", verbose=False))
    leave(folder / "lock", 1200)
    with pytest.raises(VPipeConfigError, match="fused_adam/lock"):
        refuse_old_locks()


def test_a_wait_without_end_ends(lock: Path) -> None:
    """The process that waits in torch's own way ends by itself, with the line on standard error."""
    script = (
        "import sys\n"
        "from torch.utils.file_baton import FileBaton\n"
        "from ds_vpipe.build_lock import limited_builds\n"
        "open(sys.argv[1], 'w').close()\n"
        "with limited_builds(limit_s=2.0):\n"
        "    FileBaton(sys.argv[1]).wait()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(lock)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"got a lock {lock}" in ended.stderr
