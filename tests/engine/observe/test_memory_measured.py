"""What a stage's memory came to, beside what was planned."""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import psutil
import pytest
import torch
import toy
from test_configured_plan import ALL, profile_file
from worlds import Worlds

from ds_vpipe.engine.engine import _at_exit
from ds_vpipe.engine.observe import statistics as memory_report
from ds_vpipe.engine.observe.statistics import PeakMemory, memory_line
from ds_vpipe.planning.memory import StageMemory
from ds_vpipe.planning.plan import Plan, StagePlan
from ds_vpipe.schedules.pipeline import Pipeline

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
STAGES = tuple(
    StagePlan(i, i + 1, 0, 1.0, 2.0, 0.0, 0.0, StageMemory(weights=w)) for i, w in enumerate([10**6, 2 * 10**6])
)
PLAN = Plan(Pipeline("asp", 2, 1), STAGES, 1.0, 1.0)


class FakeMemory:
    """What the operating system and the GPU's allocator say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.resident, self.allocated = 5 * 10**6, 7 * 10**6
        monkeypatch.setattr(psutil.Process, "memory_info", lambda _: type("Info", (), {"rss": self.resident}))
        monkeypatch.setattr(memory_report, "_STATUS", folder / "status")
        monkeypatch.setattr(memory_report, "_FORGET", folder / "clear_refs")
        monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: self.allocated)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: setattr(self, "allocated", 10**6))
        self._status = folder / "status"
        self.highest(5000)

    def highest(self, kilobytes: int) -> None:
        self._status.write_text(f"VmPeak:\t 99999 kB\nVmHWM:\t {kilobytes} kB\nVmRSS:\t 1 kB\n")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeMemory:
    return FakeMemory(monkeypatch, tmp_path)


def test_on_a_gpu_it_is_the_allocators_peak(memory: FakeMemory) -> None:
    peak = PeakMemory(CUDA, [])
    assert peak.bytes() == 10**6, "what was before does not count"
    memory.allocated = 1_952_000
    line = memory_line(PLAN, PLAN.pipeline, 1, peak)
    assert line == "ds_vpipe: stage 1: planned 2 MB, measured peak 1.95 MB (-2.4 %)"


def test_on_the_cpu_it_is_resident_memory_above_the_start(memory: FakeMemory) -> None:
    weight = torch.zeros(1000)
    peak = PeakMemory(CPU, [weight, weight[:10], torch.zeros(500)])
    memory.highest(6000)
    assert peak.bytes() == 6000 * 1024 - 5 * 10**6 + 4000 + 2000  # a storage counts once
    assert memory_line(PLAN, PLAN.pipeline, 0, peak) == (
        "ds_vpipe: stage 0: planned 1 MB, peak of resident memory above the start 1.15 MB "
        "(150 kB more; libraries and the C allocator count too)"
    )


def test_an_earlier_higher_peak_hides_this_one(memory: FakeMemory) -> None:
    peak = PeakMemory(CPU, [])  # the system does not let the peak be forgotten
    memory.resident = 4 * 10**6
    assert peak.bytes() is None
    assert memory_line(PLAN, PLAN.pipeline, 0, peak).endswith(
        "planned 1 MB, peak of resident memory above the start not known, there was a higher one before"
    )


def test_a_plan_of_another_split_is_said_to_be_one(memory: FakeMemory) -> None:
    line = memory_line(PLAN, replace(PLAN.pipeline, micro_batches=2), 1, PeakMemory(CUDA, []))
    assert "planned 2 MB for an earlier split, depths or batch size, measured peak 1 MB" in line


def test_the_real_numbers() -> None:
    """In a process of its own, which has had no higher peak."""
    code = """
import torch
from ds_vpipe.engine.observe.statistics import PeakMemory
peak = PeakMemory(torch.device("cpu"), [])
values = torch.ones(50_000_000)
print(peak.bytes())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=400, check=True)
    assert 195e6 <= int(done.stdout.splitlines()[-1]) <= 250e6


class Writes(io.StringIO):
    """Keeps every piece that is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def train(ds_config: dict[str, Any], ends: str) -> list[str]:
    """What is printed, in the pieces in which it is written."""
    engine = cases.engine(ds_config, 2)
    iterator = toy.data()
    with contextlib.redirect_stdout(Writes()) as printed:
        for _ in range(3):
            engine.train_batch(iterator)
        if ends == "at exit":
            _at_exit(weakref.ref(engine))
        engine.destroy()
        engine.destroy()
    return list(filter(None, printed.pieces))


@pytest.mark.mp
@pytest.mark.parametrize("ends", ["destroyed", "at exit"])
def test_every_stage_says_it_once(worlds: Worlds, tmp_path: Any, ends: str) -> None:
    profile = profile_file(tmp_path, [1e-3] * 10)
    ds_config = cases.config(1, {"type": "SGD", "params": {"lr": 0.1}}, {**ALL, "profile": profile})
    for stage, pieces in enumerate(worlds.run(2, train, ds_config, ends)):
        (line,) = pieces  # text and newline at once, or those of several ranks would run together
        assert re.match(f"ds_vpipe: stage {stage}: planned [^,]* MB, peak.*\n$", line), line
    without = cases.config(1, {"type": "SGD", "params": {"lr": 0.1}}, {})
    assert worlds.run(2, train, without, ends) == [[], []]
