"""Functions that a micro-batch meets on its way from ``train_batch()`` to the update of the last stage: few enough.

``pytest -s`` prints the list.
"""

from __future__ import annotations

import inspect
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import cases
import pytest
import toy
from worlds import Worlds

ROOT = Path(__file__).parents[2]
FILES, LINES = 21, 1_527  # most that a batch goes through

Function = tuple[str, str, int]
"""File, qualified name, lines."""


def functions_of_a_batch(stages: int = 3) -> set[Function]:
    """Product functions that one batch of a full pipeline runs on this rank, in all threads."""
    engine = cases.engine(cases.config(2, {"type": "SGD", "params": {"lr": 0.1}}, {}), stages)
    iterator = toy.data()
    for _ in range(4):
        engine.train_batch(iterator)
    codes: set[CodeType] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            codes.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        engine.train_batch(iterator)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    engine.destroy()
    found = set()
    for code in codes:
        path = Path(code.co_filename).resolve()
        product = path.is_relative_to(ROOT / "engine") or path.is_relative_to(ROOT / "ds_vpipe")
        if product and code.co_name[0] != "<":
            found.add((str(path.relative_to(ROOT)), code.co_qualname, len(inspect.getsourcelines(code)[0])))
    return found


def on_all_ranks(worlds: Worlds) -> list[Function]:
    """The functions of all ranks together, file by file."""
    outermost = set().union(*worlds.run(3, functions_of_a_batch))
    return sorted(one for one in outermost if ".<locals>." not in one[1])


@pytest.mark.mp
def test_the_way_is_short(worlds: Worlds) -> None:
    found = on_all_ranks(worlds)
    names = {name for _, name, _ in found}
    assert {"VPipeEngine.train_batch", "Executor.forward", "Executor.step"} <= names
    files = {path for path, _, _ in found}
    lines = sum(length for _, _, length in found)
    for path in sorted(files):
        print(f"\n{path}:", ", ".join(f"{name} {length}" for file, name, length in found if file == path))
    classes = {name.partition(".")[0] for name in names if "." in name}
    print(f"{len(files)} files, {len(classes)} classes, {lines} lines of functions")
    assert len(files) <= FILES, sorted(files)
    assert lines <= LINES, (lines, found)
