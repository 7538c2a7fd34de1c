"""Imports that the collector of garbage leaves alone, and nothing else."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ds_vpipe.uncollected import uncollected

SCRIPT = """
import gc

class Cycle:
    pass

cycle = Cycle()
cycle.itself = cycle
import deepspeed, ds_vpipe
ds_vpipe.VPipeEngine
print(gc.isenabled(), gc.get_freeze_count() // 1000, any(found is cycle for found in gc.get_objects()))
"""


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    """Afterwards what a test has frozen is collected, and what was frozen before it is frozen again."""
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    gc.enable()


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("for_good", [False, True])
def test_garbage_stays_inside_and_afterwards_if_it_is_for_good(for_good: bool) -> None:
    with uncollected(for_good=for_good):
        assert not gc.isenabled()
        seen = weakref.ref(Cycle())
    assert gc.isenabled()
    gc.collect()
    assert (seen() is not None) == for_good


def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    with uncollected(for_good=False):
        pass
    assert not gc.isenabled()


def test_an_import_that_fails_freezes_nothing() -> None:
    with suppress(ImportError), uncollected(for_good=True):
        seen = weakref.ref(Cycle())
        raise ImportError
    assert gc.isenabled()
    gc.collect()
    assert seen() is None


def test_a_process_that_has_done_something_is_not_frozen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import deepspeed

    from ds_vpipe.run import main

    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(deepspeed, "initialize", deepspeed.initialize)
    (tmp_path / "script.py").write_text("")
    gc.disable()
    seen = weakref.ref(Cycle())
    assert main([str(tmp_path / "script.py")]) == 0
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize(("by", "frozen"), [((), False), (("-m", "ds_vpipe.run"), True)])
def test_what_a_script_has_made_is_collected(tmp_path: Path, by: tuple[str, ...], frozen: bool) -> None:
    """A script that imports the engine itself may have anything by then; ``ds_vpipe.run`` imports before it."""
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, *by, str(tmp_path / "script.py")]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    enabled, thousands, seen = done.stdout.split()[-3:]
    assert (enabled, seen) == ("True", "True"), done.stderr
    assert (int(thousands) > 100) == frozen


ENDS = """
import atexit, gc, sys
from types import ModuleType
from ds_vpipe.uncollected import keep_at_end, uncollected

atexit.register(lambda: print(gc.get_freeze_count() > 0))
with uncollected(for_good=True):
    pass
sys.modules[sys.argv[1]] = ModuleType(sys.argv[1])
if sys.argv[2] == "kept":
    atexit.register(keep_at_end)
"""


@pytest.mark.parametrize(
    ("module", "kept", "frozen"), [("triton", "", False), ("triton", "kept", True), ("another", "", True)]
)
def test_nothing_is_left_for_triton_to_list(module: str, kept: str, frozen: bool) -> None:
    """From 3.9 on it prints what is alive when a process ends, below the line that says why it ended.

    What would end a process in torch's abort is kept all the same.
    """
    command = [sys.executable, "-c", ENDS, module, kept]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout == f"{frozen}\n"
