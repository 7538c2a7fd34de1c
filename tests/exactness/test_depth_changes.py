"""Other depths while training runs: the engine against the replay, with all that depends on delays."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import loops
import pytest
import reference
import test_exactness
import test_staleness_engine
import torch
import toy
from test_exactness import LAYERS, difference
from test_matrix import by_layer
from worlds import CaseFailed, Worlds

from ds_vpipe.errors import CallOrderError, VPipeConfigError
from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.one_f_one_b import default_depths

pytestmark = pytest.mark.mp

UPDATES, CLIP = 16, 0.3
CHANGES = {3: {3: [4, 1, 0], 5: [1, 1, 0], 9: [5, 3, 0], 10: [2, 1, 0]}, 4: {2: [6, 4, 2, 0], 7: [3, 3, 1, 0]}}
OPTIMIZERS = {**test_exactness.OPTIMIZERS, "late AdamW": test_staleness_engine.OPTIMIZERS["AdamW"]}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}}
NORMS = {"gradient_clipping_scope": "delayed_global"}
TIED: dict[str, Any] = {"layers": toy.built_tied_layers, "ties": toy.TIES[:1], "criterion": toy.mean_over_positions}
STALE: dict[str, Any] = {"nadam": True}
# Optimizer, block, rest of the JSON, options of the replay, largest difference.
RUNS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], float]] = {
    "stash": ("SGD", {}, {}, {}, 0),
    "vertical, recomputed": ("SGD", {"weight_sync": "vertical", "recompute_ratio": 0.5}, {}, {"vertical": True}, 0),
    "no stash": ("SGD", {"weight_sync": "none"}, {}, {"stash": False}, 0),
    "gloo": ("SGD", {"link": "host"}, {}, {}, 0),
    "AdamW": ("AdamW", {}, {}, {}, 1e-5),
    "staleness": ("late AdamW", {"staleness": STALE}, {}, {"staleness": STALE}, 1e-4),
    "norms": ("SGD", NORMS, {"gradient_clipping": CLIP}, {"clip": CLIP, "scope": "delayed_global"}, 1e-5),
    "tied": ("SGD", {}, {}, TIED, 1e-5),
    "fp16": ("SGD", {}, FP16, {"dtype": torch.float16, "criterion": toy.float_cross_entropy}, 2e-3),
}


def trained_with(ds_config: dict[str, Any], stages: int, changes: dict[int, list[int]], **module: Any) -> Any:
    """Train with other depths from these updates on."""
    engine = cases.engine(ds_config, stages, **module)
    iterator, losses, alive = toy.data(), [], []
    for update in range(UPDATES):
        if update in changes:
            engine.set_depths(changes[update])
        losses.append(float(engine.train_batch(iterator)))
        alive.append(engine.stashing_optimizer.num_versions)
    report = {"stage": engine.stage_id, "parameters": cases.parameters(engine), "losses": losses, "alive": alive}
    engine.destroy()
    return report


def each(runs: list[tuple[Any, ...]]) -> list[Any]:
    reports = []
    for ds_config, stages, changes, module in runs:
        reports.append(trained_with(ds_config, stages, changes, **module))
        cases.close_groups()
    return reports


def replayed(stages: int, micro_batches: int, name: str, changes: dict[int, list[int]]) -> reference.Replay:
    optimizer, _, _, options, _ = RUNS[name]
    options = {**options, "depth_changes": [(at * micro_batches, depths) for at, depths in changes.items()]}
    if name == "tied":
        options["layers"] = options["layers"]()
    if name == "fp16":
        options["scaler"] = reference.Scaler(2.0**18, window=2)
    counts, depths = uniform_partition(LAYERS, stages), default_depths(stages)
    return reference.Replay(counts, depths, micro_batches, OPTIMIZERS[optimizer][1], **options).run(UPDATES)


@pytest.mark.parametrize(("stages", "micro_batches"), [(3, 2), (4, 1)])
def test_equal_to_the_replay(worlds: Worlds, stages: int, micro_batches: int) -> None:
    runs = []
    for name, (optimizer, block, extra, options, _) in RUNS.items():
        ds_config = cases.config(micro_batches, OPTIMIZERS[optimizer][0], {"partition": "uniform", **block}, **extra)
        module: dict[str, Any] = {"loss_fn": options["criterion"]} if "criterion" in options else {}
        module |= {"specs": toy.words_tied_specs} if name == "tied" else {}
        runs.append((ds_config, stages, CHANGES[stages], module))
    ranks = worlds.run(stages, each, runs)
    for position, (name, (*_, tolerance)) in enumerate(RUNS.items()):
        reports = [rank[position] for rank in ranks]
        wanted = replayed(stages, micro_batches, name, CHANGES[stages])
        found = by_layer(reports) if name == "tied" else cases.merged(reports)
        off = difference(found, wanted.parameters())
        assert off <= tolerance, f"{name}: off by {off:.1e}"
        for report in reports:
            assert report["losses"] == pytest.approx(wanted.losses, rel=max(1e-5, tolerance)), name
        other = replayed(stages, micro_batches, name, {})
        assert difference(found, other.parameters()) > max(1e-3, 2 * tolerance), f"{name}: depths change nothing"


def refused(ds_config: dict[str, Any], stages: int, given: list[Any]) -> tuple[str, Any]:
    """The line of depths that are refused, of this rank's, and what comes of training beside them."""
    engine = cases.engine(ds_config, stages)
    iterator = toy.data()
    for _ in range(3):
        engine.train_batch(iterator)
        with pytest.raises(VPipeConfigError) as error:
            engine.set_depths(given[engine.global_rank])
    parameters = cases.parameters(engine)
    engine.destroy()
    return str(error.value), parameters


REFUSED = [
    ({}, [[2, 3, 0]] * 3, "set_depths(): depth_map: got [2, 3, 0]; allowed: 3 whole numbers >= 0"),
    ({}, [5] * 3, "set_depths(): depth_map: got [5]; allowed: 3 whole numbers >= 0"),
    ({}, [[4, 0]] * 3, "set_depths(): depth_map: got [4, 0]; allowed: 3 whole numbers >= 0"),
    ({}, [[4, 1, 0], [4, 1, 0], [4, 2, 0]], "and others on another rank, allowed is one list"),
    ({"link": "shared"}, [[40, 2, 0]] * 3, "set_depths(): got [40, 2, 0] with links through shared memory"),
    ({"link": "ipc"}, [[40, 2, 0]] * 3, "set_depths(): got [40, 2, 0] with links through shared memory"),
    ({"staleness": {"synchronous_updates": 1}}, [[2, 0, 0]] * 3, "set_depths(): got [2, 0, 0] with vpipe.staleness"),
    (
        {"sync_mode": "bsp"},
        [[2, 1, 0]] * 3,
        'set_depths(): depth_map: got [2, 1, 0]; schedule "1f1b" has depths of its own',
    ),
]


@pytest.mark.parametrize(("block", "given", "line"), REFUSED)
def test_what_does_not_fit_is_refused_on_every_rank(
    worlds: Worlds, block: dict[str, Any], given: list[Any], line: str
) -> None:
    """In one line, before the pipeline is emptied."""
    ds_config = cases.config(2, OPTIMIZERS["SGD"][0], {"partition": "uniform", **block})
    reports = worlds.run(3, refused, ds_config, 3, given)
    assert all(line in text and "\n" not in text for text, _ in reports)
    undisturbed = worlds.run(3, cases.train, ds_config, 3, 3)
    assert difference(cases.merged([{"parameters": p} for _, p in reports]), cases.merged(undisturbed)) == 0


def over_everything(folder: str, ds_config: dict[str, Any], resumes: bool) -> dict[str, Any]:
    """Depths that change where data have ended, beside evaluations and saves; resumed half-way, or not."""
    engine = cases.engine(ds_config, 3)
    if resumes:
        engine.load_checkpoint(folder)
        engine.set_depths([4, 2, 0])
    losses = []
    for start, stop, depths in ((0, 7, [1, 1, 0]), (8, 15, [4, 2, 0]), (16, 24, None)):
        if resumes and stop < 24:
            continue
        iterator = toy.data(stop, start=start)
        with contextlib.suppress(StopIteration):
            while True:
                losses.append(float(engine.train_batch(iterator)))
                losses.append(float(engine.eval_batch(toy.data(94, start=90), num_micro_batches=4)))
        if depths:
            engine.set_depths(depths)
            engine.set_depths(depths)
        if stop == 15 and not resumes:
            engine.save_checkpoint(folder)
    report = {"parameters": cases.parameters(engine), "losses": losses, "steps": engine.global_steps}
    engine.destroy()
    return report


@pytest.mark.parametrize("link", ["auto", "host"])
def test_at_the_end_of_data_beside_evaluation_and_saves(worlds: Worlds, tmp_path: Path, link: str) -> None:
    ds_config = cases.config(2, OPTIMIZERS["SGD"][0], {"partition": "uniform", "link": link})
    through = worlds.run(3, over_everything, str(tmp_path), ds_config, False)
    resumed = worlds.run(3, over_everything, str(tmp_path), ds_config, True)
    order = [*range(6), *range(8, 14), *range(16, 24)]
    wanted = reference.Replay(
        uniform_partition(LAYERS, 3), (2, 1, 0), 2, test_exactness.sgd,
        order=order, depth_changes=[(6, (1, 1, 0)), (12, (4, 2, 0))],
    ).run(10)  # fmt: skip
    assert difference(cases.merged(through), wanted.parameters()) == 0
    assert difference(cases.merged(resumed), wanted.parameters()) == 0
    assert through[0]["losses"][0::2] == pytest.approx(wanted.losses, rel=1e-6)
    assert resumed[0]["losses"] == through[0]["losses"][-len(resumed[0]["losses"]) :]


def in_a_loop(ds_config: dict[str, Any]) -> dict[str, Any]:
    engine = loops.engine(ds_config, 3)
    loops.rounds(engine, 0, 6)
    engine.set_depths([4, 2, 0])
    loops.rounds(engine, 6, 9)
    with pytest.raises(CallOrderError, match=r"^set_depths\(\): called after 1 of a batch's 2 micro-batches"):
        engine.set_depths([2, 1, 0])
    loops.rounds(engine, 15, 1)
    engine.drain()
    return {"parameters": loops.parameters(engine)}


def test_scripts_that_loop_change_depths_where_a_batch_has_ended(worlds: Worlds) -> None:
    reports = worlds.run(3, in_a_loop, cases.config(2, OPTIMIZERS["SGD"][0], {}))
    replays = [
        reference.Replay((4, 3, 3), (2, 1, 0), 2, test_exactness.sgd, depth_changes=changes).run(8).parameters()
        for changes in ([(6, (4, 2, 0))], [])
    ]
    assert difference(cases.merged(reports), replays[0]) == 0
    assert difference(*replays) > 1e-3


@contextlib.contextmanager
def varied_passes() -> Iterator[None]:
    """Passes that are said to vary much."""
    chance = random.Random(int(os.environ["RANK"]))

    def varied(_: Any) -> list[tuple[float, float]]:
        return [(1e-6 * chance.lognormvariate(0, 0.5), 2e-6 * chance.lognormvariate(0, 0.5)) for _ in range(10)]

    with mock.patch("ds_vpipe.engine.observe.layer_costs.LayerCosts.passes", varied):
        yield


def auto(**block: Any) -> dict[str, Any]:
    """A JSON with depths that follow."""
    replan = {"every": 10, "max_staleness": 3}
    block = {"partition": "uniform", "stage_to_depth_map": "auto", "replan": replan, **block}
    return cases.config(2, OPTIMIZERS["SGD"][0], block)


def following(block: dict[str, Any], folder: str, updates: int, load: bool) -> dict[str, Any]:
    """Depths and decisions of every update."""
    with varied_passes():
        engine = cases.engine(auto(**block), 3)
        if load:
            engine.load_checkpoint(folder)
        iterator = toy.data(start=engine.consumed_micro_batches)
        depths = [engine.pipeline.depths]
        for _ in range(updates):
            engine.train_batch(iterator)
            depths.append(engine.pipeline.depths)
        parameters = cases.parameters(engine)
        if not load:
            engine.save_checkpoint(folder)
    report = {"parameters": parameters, "depths": depths, "decisions": engine.balance.depth_decisions}
    recorder = engine.observation._recorder
    report["events"] = [] if recorder is None else [text for _, text in recorder.recording().meta["events"]]
    cases.end(engine)
    return report


def followed(folder: str, updates: int) -> list[dict[str, Any]]:
    tight, drains = {"replan": {"every": 10}}, {"staleness": {"synchronous_updates": 11}}
    recorded = {"timeline": {"enabled": True, "path": f"{folder}/timeline"}}
    runs: list[tuple[dict[str, Any], int, bool]] = [({}, updates, False), (recorded, 12, True), (tight, 1, True)]
    runs.append((drains, 24, False))
    return [following(given, f"{folder}/saved", count, load) for given, count, load in runs]


def test_depths_that_follow_are_exact_and_resumed(worlds: Worlds, tmp_path: Path) -> None:
    updates = 16
    ranks = worlds.run(3, followed, str(tmp_path), updates)
    through, resumed, tight, drains = ([rank[number] for rank in ranks] for number in range(4))
    for reports in (through, resumed):
        assert all(report["depths"] == reports[0]["depths"] for report in reports)
        assert all(report["decisions"] == reports[0]["decisions"] for report in reports)
    depths = [*through[0]["depths"], *resumed[0]["depths"][1:]]
    assert depths[0] == (2, 1, 0)
    assert (2, 1, 0) < depths[updates] <= (6, 3, 0)
    assert resumed[0]["depths"][0] == depths[updates]
    assert tight[0]["depths"][0] == (2, 1, 0)  # those of the checkpoint are beyond its limit
    assert drains[0]["decisions"] == []
    assert any(f"depths {list(depths[updates])}" in text for text in resumed[0]["events"])
    changes = [(2 * at, now) for at, (before, now) in enumerate(pairwise(depths), 1) if now != before]
    wanted = reference.Replay(
        uniform_partition(LAYERS, 3), (2, 1, 0), 2, test_exactness.sgd,
        depth_changes=changes, refills=(0, 2 * updates),
    ).run(updates + 12)  # fmt: skip
    assert difference(cases.merged(through), wanted.parameters(updates)) == 0
    assert difference(cases.merged(resumed), wanted.parameters()) == 0


def fails_on_one_rank() -> None:
    with varied_passes():
        engine, iterator = cases.engine(auto(), 3), toy.data()
        if engine.stage_id == 1:
            engine.set_depths = {}.__getitem__
        for _ in range(20):
            engine.train_batch(iterator)


def test_a_change_of_depths_that_fails_on_one_rank_ends_all_with_its_reason(worlds: Worlds) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(3, fails_on_one_rank)
    lines = failed.value.errors
    assert lines[1].startswith(("KeyError", "TypeError"))
    assert all("stage 1 (rank 1) failed in" in lines[rank] for rank in (0, 2)), lines
