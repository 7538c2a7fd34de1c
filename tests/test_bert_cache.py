"""Cache entries appear complete or not at all."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.cache import CACHE_VARIABLE, cache_directory, cached


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


def must_not_build(path: Path) -> None:
    pytest.fail(f"{path} was built")


def write(path: Path) -> None:
    path.write_text("built")


def test_an_entry_is_built_once() -> None:
    entry = cached("entry", write, builder=True)
    assert entry == cache_directory() / "entry"
    assert entry.read_text() == "built"
    assert cached("entry", must_not_build, builder=True) == entry


def test_a_failed_build_leaves_nothing() -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        cached("entry", fail, builder=True)
    assert list(cache_directory().iterdir()) == []


def test_a_folder_built_twice_at_once_is_kept() -> None:
    def build_while_another_does(path: Path) -> None:
        path.mkdir()
        (path / "file").write_text("late")
        (cache_directory() / "entry").mkdir()
        (cache_directory() / "entry" / "file").write_text("early")

    assert (cached("entry", build_while_another_does, builder=True) / "file").read_text() == "early"
    assert [path.name for path in cache_directory().iterdir()] == ["entry"]


def test_others_wait_for_the_builder() -> None:
    def build_late() -> None:
        time.sleep(0.3)
        cached("entry", write, builder=True)

    thread = threading.Thread(target=build_late)
    thread.start()
    assert cached("entry", must_not_build, builder=False, wait_s=10).read_text() == "built"
    thread.join()


def test_waiting_ends_with_a_message() -> None:
    with pytest.raises(VPipeConfigError, match=r"waited 0 s for .*entry"):
        cached("entry", must_not_build, builder=False, wait_s=0.1)


def test_an_unusable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(VPipeConfigError, match=f"not writable.*{CACHE_VARIABLE}"):
        cached("entry", write, builder=True)
