"""Files in memory that outlive a rank, between a process and a child that it forks."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import BinaryIO

import pytest

from ds_vpipe import kept_memory
from ds_vpipe.kept_memory import KEPT, KeptFiles, KeptMemory, await_start, connection


def in_child(memory: KeptMemory, work: Callable[[KeptFiles], object]) -> int:
    """Exit status of a child that has ``memory``, and ends like one that is killed."""
    mine, its = connection()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            mine.close()
            memory.close()
            environment: dict[str, str] = {}
            assert await_start(its, environment) == ["1", "29500"]
            kept = KeptFiles.of(environment)
            status = 0 if kept is not None and work(kept) in (None, True) else 2
        finally:
            os._exit(status)
    its.close()
    memory.start(mine, "1 29500")
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    memory.receive(mine)
    mine.close()
    return status


def text(value: str) -> Callable[[BinaryIO], object]:
    return lambda file: file.write(value.encode())


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_files_outlive_children_and_leave_nothing() -> None:
    memory, before = KeptMemory(), opened()

    def first(kept: KeptFiles) -> None:
        for name in ("weights 1", "weights 2", "state 1 0", "state 1 0"):
            kept.keep(f"engine 1/{name}", text(name))
        kept.drop(lambda name: name.endswith("weights 1"))

    def half(kept: KeptFiles) -> None:
        def write(file: BinaryIO) -> None:
            file.write(b"half")
            os._exit(9)

        kept.keep("engine 1/state 1 0", text("anew"))
        kept.keep("engine 1/state 2 0", write)

    def finds(kept: KeptFiles) -> bool:
        names = {"engine 1/weights 2", "engine 1/state 1 0"}
        read = {name: kept.open(name).read() for name in names} if kept.found == names else {}
        kept.drop(lambda _: True)
        return read == {"engine 1/weights 2": b"weights 2", "engine 1/state 1 0": b"anew"} and not kept.found

    assert in_child(memory, first) == 0
    assert in_child(memory, half) == 9
    assert in_child(memory, finds) == 0
    assert in_child(memory, lambda kept: not kept.found) == 0
    assert opened() == before


def test_a_rank_without_a_supervisor_has_none() -> None:
    assert KeptFiles.of({}) is None
    assert KeptFiles.of({KEPT: ""}) is None
    assert KeptFiles.of({KEPT: f"{os.getppid()};99;state=98"}) is None  # as in a program that a rank has started


def test_systems_without_such_files_keep_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """But ranks start there."""
    monkeypatch.setattr(kept_memory, "_AVAILABLE", False)
    memory, environment = KeptMemory(), dict[str, str]()
    mine, its = connection()
    memory.start(mine, "0 29500")
    assert await_start(its, environment) == ["0", "29500"]
    assert memory.receive(mine) == set()
    assert KeptFiles.of(environment) is None


def test_a_supervisor_that_is_gone_is_no_hang() -> None:
    environment: dict[str, str] = {}
    mine, its = connection()
    KeptMemory().start(mine, "0 29500")
    await_start(its, environment)
    mine.close()
    kept = KeptFiles.of(environment)
    assert kept is not None
    with pytest.raises(OSError, match="Broken pipe"):
        kept.keep("state", text("state"))
    os.close(int(environment[KEPT].split(";")[1]))


def test_a_child_whose_supervisor_ends_does_not_start() -> None:
    mine, its = connection()
    mine.close()
    assert await_start(its, {}) == []
