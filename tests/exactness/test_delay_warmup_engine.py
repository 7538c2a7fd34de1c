"""Delay warm-up in the engine: first synchronous updates, then drains that become rarer."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import cases
import loops
import pytest
import reference
import test_loop_engine
import test_ties
import torch
import toy
from test_exactness import LAYERS, OPTIMIZERS, difference
from test_resume import resume_everywhere
from worlds import Worlds

from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.one_f_one_b import default_depths

pytestmark = pytest.mark.mp

STAGES, BATCHES, ON_TIME = 3, 10, 4
COUNTS = uniform_partition(LAYERS, STAGES)
GROWING = {"synchronous_updates": 1, "delay_warmup_updates": 5}
WARMUPS = [{"synchronous_updates": ON_TIME}, GROWING, {"delay_warmup_updates": 7}]
SGD, ADAMW = OPTIMIZERS["SGD"][0], OPTIMIZERS["AdamW"][0]


def with_staleness(staleness: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"partition": "uniform", "staleness": staleness, **more}


def block(updates: int, **more: Any) -> dict[str, Any]:
    return with_staleness({"synchronous_updates": updates}, **more)


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_as_long_as_it_lasts_it_is_synchronous_training(worlds: Worlds, micro_batches: int) -> None:
    """Bit for bit, with an optimizer that has moments, however deep the pipeline is."""
    blocks: list[dict[str, Any]] = [
        {"partition": "uniform", "sync_mode": "bsp"},
        block(BATCHES),
        block(BATCHES, stage_to_depth_map=[4, 2, 0], weight_sync="vertical"),
        block(ON_TIME),
    ]
    configs = [cases.config(micro_batches, ADAMW, each) for each in blocks]
    ranks = worlds.run(STAGES, cases.train_each, configs, STAGES, BATCHES)
    bsp, asp, deep, short = (cases.merged([rank[position] for rank in ranks]) for position in range(len(blocks)))
    assert difference(asp, bsp) == 0
    assert difference(deep, bsp) == 0
    assert difference(short, bsp) > 1e-4


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("staleness", WARMUPS)
def test_against_the_reference(worlds: Worlds, micro_batches: int, staleness: dict[str, int]) -> None:
    """Versions, and what stages know of each other's norms, go on from where the pipeline drained last."""
    rows: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {}),
        ({"weight_sync": "vertical"}, {"vertical": True}),
        ({"gradient_clipping_scope": "delayed_global"}, {"clip": 0.3, "scope": "delayed_global"}),
    ]
    configs = [
        cases.config(micro_batches, SGD, with_staleness(staleness, **more), gradient_clipping=options.get("clip", 0.0))
        for more, options in rows
    ]
    ranks = worlds.run(STAGES, cases.train_each, configs, STAGES, BATCHES)
    sgd, depths = OPTIMIZERS["SGD"][1], default_depths(STAGES)
    for position, (more, options) in enumerate(rows):
        reports = [rank[position] for rank in ranks]
        wanted, losses = reference.replay(COUNTS, depths, micro_batches, BATCHES, sgd, staleness=staleness, **options)
        assert difference(cases.merged(reports), wanted) <= 1e-6, more
        for report in reports:
            assert report["losses"] == pytest.approx(losses, rel=1e-5), more


@pytest.mark.parametrize("staleness", WARMUPS)
def test_tied_weights(worlds: Worlds, staleness: dict[str, int]) -> None:
    reports, counts = test_ties.run(worlds, 2, 1, BATCHES, {"staleness": staleness})
    wanted = test_ties.replayed(counts, default_depths(2), 1, staleness=staleness).run(BATCHES)
    for report in reports:
        assert report["losses"] == pytest.approx(wanted.losses, rel=1e-5)
    for version in range(staleness.get("synchronous_updates", 0) + 1):  # the pipeline is empty after each
        owner, copy = (test_ties.by_layer(report, counts, report["history"][version]) for report in reports)
        assert torch.equal(owner["0.embedding.weight"], copy["9.embedding.weight"]), version


def train_two_parts(ds_config: dict[str, Any]) -> dict[str, Any]:
    """The data end in the middle of a batch, and once more."""
    engine, losses = cases.engine(ds_config, STAGES), []
    for stop in (5, 16):
        iterator = toy.data(stop)
        with contextlib.suppress(StopIteration):
            while True:
                losses.append(float(engine.train_batch(iterator)))
    report = {"parameters": cases.parameters(engine), "losses": losses, "steps": engine.global_steps}
    report["warned"] = engine.stage.drains.warned
    engine.destroy()
    return report


@pytest.mark.parametrize("staleness", WARMUPS)
def test_data_that_end_meanwhile(worlds: Worlds, staleness: dict[str, int]) -> None:
    """Two batches of the first data, eight of the others; what is left over is no batch."""
    reports = worlds.run(STAGES, train_two_parts, cases.config(2, SGD, with_staleness(staleness)))
    order = [0, 1, 2, 3, *range(16)]
    wanted, losses = reference.replay(
        COUNTS, default_depths(STAGES), 2, 10, OPTIMIZERS["SGD"][1],
        order=order, refills=(0, 4), staleness=staleness,
    )  # fmt: skip
    assert difference(cases.merged(reports), wanted) <= 1e-6
    for report in reports:
        assert not report["warned"], "neither iterator has ended after one batch"
        assert report["steps"] == 10
        assert report["losses"] == pytest.approx(losses, rel=1e-5)


def train_and_save(ds_config: dict[str, Any], directory: str, at: int) -> dict[str, Any]:
    engine, iterator = cases.engine(ds_config, STAGES), toy.data()
    for batch in range(BATCHES):
        if batch == at:
            engine.save_checkpoint(directory)
        engine.train_batch(iterator)
    report = {"parameters": cases.parameters(engine)}
    engine.destroy()
    return report


def test_a_save_inside_a_drain_interval(worlds: Worlds, tmp_path: Path) -> None:
    """Intervals begin at 0, 1, 3, 5 and 8 as without it, and at 4 and 6."""
    for at in (4, 6):
        config = cases.config(1, SGD, with_staleness(GROWING))
        reports = worlds.run(STAGES, train_and_save, config, str(tmp_path / str(at)), at)
        wanted, _ = reference.replay(
            COUNTS, default_depths(STAGES), 1, BATCHES, OPTIMIZERS["SGD"][1], refills=(0, at), staleness=GROWING
        )
        assert difference(cases.merged(reports), wanted) <= 1e-6


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_resumed_bit_for_bit(worlds: Worlds, tmp_path: Path, micro_batches: int) -> None:
    """Before, at and after the end of the synchronous updates and of an interval."""
    methods = {"nadam": True}
    for number, first in enumerate(({"synchronous_updates": 3}, {"synchronous_updates": 1, "delay_warmup_updates": 3})):
        config = cases.config(micro_batches, ADAMW, with_staleness({**methods, **first}))
        folder = str(tmp_path / str(number))
        for wrong in worlds.run(STAGES, resume_everywhere, folder, config, STAGES, (2, 3, 4)):
            assert wrong == []


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_scripts_that_loop(worlds: Worlds, micro_batches: int) -> None:
    """Every stage has made the update when ``step()`` returns where the pipeline is drained."""
    rounds = BATCHES * micro_batches
    warmups = [{"synchronous_updates": BATCHES}, *WARMUPS]
    configs = [cases.config(micro_batches, SGD, with_staleness(staleness)) for staleness in warmups]
    ranks = worlds.run(STAGES, loops.train_each, configs, STAGES, rounds)
    for position, staleness in enumerate(warmups):
        run = loops.Replay(
            COUNTS, default_depths(STAGES), micro_batches, OPTIMIZERS["SGD"][1],
            staleness=staleness,
        )  # fmt: skip
        run.run(BATCHES)
        reports = [rank[position] for rank in ranks]
        assert difference(cases.merged(reports), run.parameters()) <= 1e-6
        assert [report["latest"] for report in reports] == [BATCHES] * STAGES
        assert reports[-1]["losses"] == pytest.approx(run.each, rel=1e-5)


def test_scripts_that_loop_resume(worlds: Worlds, tmp_path: Path) -> None:
    """Saved in the third of four synchronous batches, and after them; inside an interval of two batches."""
    for first, at in (({"synchronous_updates": 4}, 6), ({"synchronous_updates": 4}, 10), (GROWING, 6)):
        ds_config = cases.config(2, ADAMW, with_staleness({**first, "nadam": True}))
        folder = str(tmp_path / f"{len(first)} {at}")
        for report in worlds.run(STAGES, test_loop_engine.resume, folder, ds_config, at):
            for resumed in report["resumed"]:
                assert difference(resumed[0], report["went_on"][0]) == 0
                assert resumed[1:] == report["went_on"][1:]
