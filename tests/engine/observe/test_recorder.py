"""Recordings of what every rank did: the program, in order, with versions and losses; training does not notice."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import pytest
import torch
import toy
from worlds import Worlds

from ds_vpipe.engine.observe.recorder import TimelineRecorder
from ds_vpipe.schedules.actions import Category
from ds_vpipe.schedules.one_f_one_b import version_used
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload, programs
from ds_vpipe.timelines.merge import merge, read_recordings

pytestmark = pytest.mark.mp

SGD = {"type": "SGD", "params": {"lr": 0.1}}
STAGES, MICRO_BATCHES, BATCHES = 3, 2, 5


def recorded(folder: str, block: dict[str, Any]) -> dict[str, Any]:
    reports = {}
    for name in ("plain", "recorded"):
        timeline = {"enabled": name == "recorded", "path": folder}
        ds_config = cases.config(MICRO_BATCHES, SGD, {**block, "timeline": timeline})
        engine = cases.engine(ds_config, STAGES, dropout=0.2)
        iterator = toy.data(BATCHES * MICRO_BATCHES)
        torch.manual_seed(7)
        losses = [float(engine.train_batch(iterator)) for _ in range(BATCHES)]
        reports[name] = {"losses": losses, "parameters": cases.parameters(engine)}
        if name == "plain":
            assert engine.save_timeline() is None
        cases.end(engine)
    return reports


@pytest.mark.parametrize(
    ("schedule", "sync"),
    [("asp", "stash"), ("asp", "none"), *((name, "") for name in ("1f1b", "gpipe", "interleaved"))],
)
def test_a_recording_is_the_program(worlds: Worlds, tmp_path: Path, schedule: str, sync: str) -> None:
    block: dict[str, Any] = {"weight_sync": sync} if sync else {"sync_mode": "bsp", "schedule": schedule}
    virtual_stages = 2 if schedule == "interleaved" else 1
    if virtual_stages > 1:
        block["virtual_stages"] = virtual_stages
    stale = tmp_path / f"replica00-rank{STAGES:03d}.json"
    stale.write_text("of an earlier run with more stages", encoding="utf-8")
    ranks = worlds.run(STAGES, recorded, str(tmp_path), block)
    for reports in ranks:
        assert reports["plain"]["losses"] == reports["recorded"]["losses"]
        for name, value in reports["plain"]["parameters"].items():
            assert torch.equal(value, reports["recorded"]["parameters"][name])
    assert not stale.exists()
    timeline = merge(read_recordings(tmp_path))
    assert timeline.source == "recording"
    assert [loss for _, loss in timeline.losses] == pytest.approx(ranks[0]["recorded"]["losses"])
    pipeline = Pipeline(schedule, STAGES, MICRO_BATCHES, virtual_stages=virtual_stages)  # type: ignore[arg-type]
    wanted = programs(pipeline, Workload(BATCHES))
    for rank in range(STAGES):
        mine = sorted((span for span in timeline.spans if span.rank == rank), key=lambda span: span.start)
        texts = [str(action) for action in wanted[rank]]
        found = [str(span.action) for span in mine]
        # The data end where one more micro-batch would be admitted: that is met, but no action of the program.
        assert [text for text in found if text in set(texts)] == texts
        assert len(found) - len(texts) <= 2
        assert all(before.end <= after.start + 1e-9 for before, after in pairwise(mine))
        for span in mine:
            if span.category in (Category.FORWARD, Category.BACKWARD) and schedule == "asp":
                newest = span.category is Category.BACKWARD and sync == "none"
                depth = 0 if newest else pipeline.depths[rank]
                assert span.version == version_used(span.action.index, depth, MICRO_BATCHES), span


def test_recordings_of_an_earlier_run_are_removed_and_nothing_else(tmp_path: Path) -> None:
    gone = ["replica00-rank002.json", "replica00-rank1000.json", "replica02-rank000.json", "replica100-rank001.json"]
    kept = ["replica00-rank001.json", "replica01-rank002.json", "replica00-rank-notes.json", "merged.json"]
    for name in (*gone, *kept, "replica00-rank000.json"):
        (tmp_path / name).write_text("of an earlier run", encoding="utf-8")

    def forget(stage: int) -> None:
        of: Any = SimpleNamespace(number=stage, is_first=stage == 0, pipeline=Pipeline("asp", 2, MICRO_BATCHES))
        recorder = TimelineRecorder(of, 0)
        recorder.forget_earlier(tmp_path, 2)
        recorder.forget_earlier(tmp_path / "nowhere", 2)

    forget(0)
    assert {path.name for path in tmp_path.iterdir()} == set(kept)
    forget(1)
    assert {path.name for path in tmp_path.iterdir()} == set(kept[1:])


class Unreadable:
    """Loss on a device that has failed."""

    def item(self) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_recording_does_without_losses_that_cannot_be_read() -> None:
    stage: Any = SimpleNamespace(number=0, pipeline=Pipeline("asp", 2, MICRO_BATCHES), device=torch.device("cpu"))
    recorder, unreadable = TimelineRecorder(stage, 0), Unreadable()
    recorder.note("an event")
    recorder.loss(0, torch.tensor(0.5))
    recorder.loss(1, unreadable)  # type: ignore[arg-type]
    for _ in range(2):
        found = recorder.recording()
        assert found.losses == ((0, 0.5),)
        assert [event for _, event in found.meta["events"]] == ["an event"]


def test_a_recording_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    recorder: Any = SimpleNamespace(_replica=0, _stage=SimpleNamespace(number=0))

    def write_some(path: Path) -> None:
        path.write_text("{", encoding="utf-8")
        raise OSError("no space left on device")

    recorder.recording = lambda: SimpleNamespace(save=write_some)
    with pytest.raises(OSError, match="no space"):
        TimelineRecorder.save(recorder, tmp_path)
    assert list(tmp_path.iterdir()) == []


class Fragile(toy.Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and x.requires_grad and self.calls > 3:
            raise ValueError("too fragile")
        self.calls += 1
        return super().forward(x)

    calls = 0


def fragile_specs() -> list[Any]:
    from deepspeed.pipe import LayerSpec

    specs = toy.layer_specs()
    specs[4] = LayerSpec(Fragile, 140)
    return specs


def fail(folder: str) -> str:
    engine = cases.engine(cases.config(1, SGD, {"timeline": {"enabled": True, "path": folder}}), 2, specs=fragile_specs)
    iterator = toy.data()
    for _ in range(10):
        try:
            engine.train_batch(iterator)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_a_failing_pass_is_told_as_it_is(worlds: Worlds, tmp_path: Path) -> None:
    texts = worlds.run(2, fail, str(tmp_path))
    assert all("too fragile" in text for text in texts), texts
    assert len(list(tmp_path.glob("*.json"))) == 2
