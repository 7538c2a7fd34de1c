"""Statistics of stages: what a record says, how it gets to the first stage, where it is told."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import time
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import numpy as np
import pytest
import torch
import toy
from torch import nn
from worlds import Worlds

from ds_vpipe.engine.links.message import Message, Packer
from ds_vpipe.engine.observe.statistics import COLUMNS, StageStatistics, StatisticsMean, line
from ds_vpipe.schedules.one_f_one_b import default_depths, update_delay
from ds_vpipe.timelines.timeline import Timeline

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def record(stage: int = 0, batch: int = 0, **values: Any) -> StageStatistics:
    zeros = {field.name: 0 for field in dataclasses.fields(StageStatistics)}
    return StageStatistics(**{**zeros, "stage": stage, "batch": batch, **values})


def test_a_record_is_a_row_of_numbers_and_back() -> None:
    one = record(3, 7, forward_s=0.25, bytes_sent=2**40 + 1, staleness=2, peak_memory_bytes=3)
    row = dataclasses.astuple(one)
    assert len(row) == COLUMNS
    assert StageStatistics.from_row(row) == one
    assert isinstance(StageStatistics.from_row(row).bytes_sent, int)


def test_mean_adds_seconds_and_bytes_and_keeps_the_most_of_the_rest() -> None:
    mean = StatisticsMean()
    assert mean.take() == []
    first = [record(0, 4, forward_s=1.0, staleness=3), record(1, 4, bytes_sent=10, versions=2)]
    second = [record(0, 5, forward_s=3.0, staleness=1), record(1, 5, bytes_sent=30, versions=1)]
    for records in (first, second):
        mean.add(np.array([dataclasses.astuple(r) for r in records]))
    assert mean.take() == [
        record(0, 5, forward_s=2.0, staleness=3),
        record(1, 5, bytes_sent=20, versions=2),
    ]
    assert mean.take() == []


@pytest.mark.parametrize("batches", [1, 63, 64, 65, 1000])
def test_mean_over_any_number_of_batches(batches: int) -> None:
    mean = StatisticsMean()
    for _ in range(2):  # what was taken does not count again
        for batch in range(batches):
            mean.add(np.array([dataclasses.astuple(record(0, batch, forward_s=float(batch), staleness=batch % 7))]))
        most = max(batch % 7 for batch in range(batches))
        assert mean.take() == [record(0, batches - 1, forward_s=(batches - 1) / 2, staleness=most)]


def test_busy_is_the_share_that_was_not_waiting() -> None:
    assert record(forward_s=1.0, update_s=0.5, wait_gradients_s=0.25, wait_activations_s=0.25).busy == 0.75
    assert record().busy == 0.0


def test_the_line_has_a_column_for_every_stage() -> None:
    text = line([record(0, forward_s=0.5, wait_gradients_s=0.5, staleness=1), record(1, forward_s=1.0)])
    assert "\n" not in text
    parts = {part.split("  ")[0].strip(): part.split()[-2:] for part in text.split(" | ")}
    assert parts["busy %"] == ["50", "100"]
    assert parts["wait ms"] == ["500.0", "0.0"]
    assert parts["staleness"] == ["1", "0"]


class Slow(nn.Module):
    """A loss that takes a while, after some calls."""

    calls = 0

    def forward(self, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 18:
            time.sleep(0.05)
        return nn.functional.cross_entropy(outputs, labels)


def observe(ds_config: dict[str, Any], stages: int, batches: int, loss_fn: Any = None) -> dict[str, Any]:
    """Train, with an evaluation in between, and report every batch's statistics and what is printed."""
    torch.manual_seed(1234)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        trained = cases.engine(ds_config, stages, loss_fn=loss_fn)
        statistics = [trained.statistics()]
        iterator = toy.data(replica=trained.grid.data_parallel_id)
        for batch in range(batches):
            trained.train_batch(iterator)
            statistics.append(trained.statistics())
            if batch == batches // 2:
                trained.eval_batch(toy.data(start=500))
    report = {"statistics": statistics, "output": output.getvalue(), "parameters": cases.parameters(trained)}
    cases.end(trained)
    return report


@pytest.mark.mp
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_every_batch_has_a_record_of_every_stage_on_the_first(worlds: Worlds, micro_batches: int) -> None:
    stages, batches = 4, 8
    depths = default_depths(stages)
    ranks = worlds.run(stages, observe, cases.config(micro_batches, SGD, {}), stages, batches)
    seen = [rank["statistics"] for rank in ranks]
    for stage in range(stages):
        assert [len(records) for records in seen[stage]] == [0, *[stages if stage == 0 else 1] * batches]
    for batch in range(batches):
        records = seen[0][batch + 1]
        assert [r.stage for r in records] == list(range(stages))
        assert {r.batch for r in records} == {batch}
        assert records[1:] == [seen[stage][batch + 1][0] for stage in range(1, stages)]
    steady = seen[0][batches]
    assert [r.versions for r in steady] == [update_delay(depth, micro_batches) + 1 for depth in depths]
    assert [r.staleness for r in steady] == [update_delay(depth, micro_batches) for depth in depths]
    assert all(r.forward_s > 0 and r.backward_s > 0 and r.update_s > 0 and r.send_s > 0 for r in steady)
    assert all(r.peak_memory_bytes > 2**20 for r in steady)
    assert [r.load_s > 0 for r in steady] == [True, False, False, True]
    # An evaluation in between is not counted, and what one stage sends the next receives.
    outputs = torch.zeros(toy.MICRO_BATCH, toy.SEQUENCE, toy.HIDDEN)
    activation = Packer().pack(Message.ACTIVATION, 0, (outputs, None)).size  # and no norms of other stages
    for records in seen[0][4:]:
        assert records[0].bytes_sent == records[-1].bytes_received == micro_batches * activation
        assert sum(r.bytes_sent for r in records) == sum(r.bytes_received for r in records)
    assert seen[0][1][0].bytes_sent > micro_batches * activation, "those ahead of the first batch"


@pytest.mark.mp
def test_who_waits_for_a_slow_stage_and_which_has_become_slow(worlds: Worlds, tmp_path: Path) -> None:
    block = {"timeline": {"enabled": True, "path": str(tmp_path / "timeline")}}
    extra = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}}
    ranks = worlds.run(2, observe, cases.config(1, SGD, block, **extra), 2, 33, loss_fn=Slow())
    first, last = ranks[0]["statistics"][-1]
    assert last.forward_s >= 0.05
    assert first.wait_gradients_s > 0.01
    assert first.wait_activations_s == last.wait_gradients_s == 0
    [[_, event]] = Timeline.load(tmp_path / "timeline" / "replica00-rank000.json").meta["events"]
    assert event.startswith("stage 1 is a straggler at update 33: its own passes take ")
    with (tmp_path / "run" / "Train_Pipeline_stage1_slower_by.csv").open() as file:
        [_, [samples, factor]] = list(csv.reader(file))
    assert int(samples) == 33 * toy.MICRO_BATCH  # in the first batch the pipeline is filled
    assert float(factor) > 2


def compared(blocks: list[dict[str, Any]]) -> list[list[int]]:
    """Batches of whose passes the time is compared, in a pipeline that is emptied before the fourth and after that."""
    found = []
    for block in blocks:
        trained, iterator, batches = cases.engine(cases.config(1, SGD, block), 2), toy.data(), list[int]()
        for batch in range(9):
            if batch == 3 or batch > 5:
                trained.quiesce()
            before = len(trained.observation._passes)
            trained.train_batch(iterator)
            batches += [batch] * (len(trained.observation._passes) - before)
        cases.end(trained)
        found.append(batches)
    return found


@pytest.mark.mp
def test_passes_that_run_again_make_no_straggler(worlds: Worlds) -> None:
    blocks = [{}, {"sync_mode": "bsp"}, {"staleness": {"synchronous_updates": 2}}]
    assert worlds.run(2, compared, blocks)[0] == [[1, 2, 4, 5], [*range(9)], [0, 1, 4, 5]]


@pytest.mark.mp
def test_replicas_tell_of_their_own_pipeline_and_rank_0_speaks(worlds: Worlds, tmp_path: Path) -> None:
    extra = {"steps_per_print": 2, "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}}
    ranks = worlds.run(4, observe, cases.config(2, SGD, {}, **extra), 2, 4)
    assert [len(rank["statistics"][-1]) for rank in ranks] == [2, 2, 1, 1]
    spoken = [[text for text in rank["output"].splitlines() if "busy %" in text] for rank in ranks]
    assert [len(lines) for lines in spoken] == [2, 0, 0, 0]
    assert spoken[0][1].startswith("steps: 4 stages 0-1: busy % ")
    with (tmp_path / "run" / "Train_Pipeline_stage1_versions.csv").open() as file:
        rows = list(csv.reader(file))
    samples = 2 * 2 * toy.MICRO_BATCH
    assert rows == [["step", "versions"], [str(2 * samples), "1"], [str(4 * samples), "1"]]
    with (tmp_path / "run" / "Train_Pipeline_stage0_wait_s.csv").open() as file:
        assert all(float(value) >= 0 for _, value in list(csv.reader(file))[1:])


class Late:
    """Copies and sends nothing before somebody waits for it, and lets a clock tick then."""

    def __init__(self) -> None:
        self.seconds, self._tasks = 0.0, list[Any]()

    def submit(self, task: Any) -> None:
        self._tasks.append(task)

    def settle(self) -> None:
        self.seconds += 1.0
        while self._tasks:
            self._tasks.pop(0)()

    def check(self) -> None:
        pass


def train_with_late_copies(batches: int) -> Any:
    from types import SimpleNamespace

    from ds_vpipe.engine.links import host_link
    from ds_vpipe.engine.observe import statistics

    late = Late()
    clock: Any = SimpleNamespace(perf_counter=lambda: late.seconds, monotonic=time.monotonic)
    trained = cases.engine(cases.config(1, SGD, {"link": "host"}), 2)
    with contextlib.ExitStack() as patched:
        for module in (host_link, statistics):
            patched.enter_context(mock.patch.object(module, "time", clock))
        for link in trained.stage.links.after:
            link.activations._runner = late
        iterator = toy.data()
        for _ in range(batches):
            trained.train_batch(iterator)
    late.settle()
    return trained.statistics()


@pytest.mark.mp
def test_waiting_for_copies_is_no_computing(worlds: Worlds) -> None:
    first, last = worlds.run(2, train_with_late_copies, 5)[0]
    assert first.forward_s == first.update_s == 0.0
    assert first.wait_copies_s == first.wait_s == 1.0
    assert last.wait_copies_s == 0.0
