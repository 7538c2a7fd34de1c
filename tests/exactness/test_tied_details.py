"""Tied layers beside evaluation, clipping in bsp, and everything that tells of a run."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import cases
import pytest
import reference
import torch
import toy
from test_exactness import LAYERS, OPTIMIZERS, difference, sgd
from test_reporting import observe, profile_of
from test_ties import by_layer
from worlds import Worlds

pytestmark = pytest.mark.mp

SGD = OPTIMIZERS["SGD"][0]
TIED: dict[str, Any] = {"loss_fn": toy.mean_over_positions, "specs": toy.tied_specs}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}}
ZERO = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}


def evaluated(micro_batches: int) -> dict[str, Any]:
    """Losses of the same data in flight, at rest, and after the data have ended; and a twin that never evaluates."""
    ds_config = cases.config(micro_batches, SGD, {"partition": "uniform"})
    report: dict[str, Any] = {"losses": []}
    for name in ("evaluates", "does not"):
        engine = cases.engine(ds_config, 4, **TIED)
        iterator = toy.data(7 * micro_batches)
        for number in range(7):
            engine.train_batch(iterator)
            if number in (0, 3, 4, 6):
                if name == "evaluates":
                    report["losses"].append(float(engine.eval_batch(toy.data(94, start=90), num_micro_batches=4)))
                if number in (3, 6):
                    engine.quiesce()
                    if name == "evaluates":
                        report["losses"].append(float(engine.eval_batch(toy.data(94, start=90), num_micro_batches=4)))
        report[name] = cases.parameters(engine)
        cases.end(engine)
    return report


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_evaluation_uses_the_owners_newest(worlds: Worlds, micro_batches: int) -> None:
    for report in worlds.run(4, evaluated, micro_batches):
        assert difference(report["evaluates"], report["does not"]) == 0
        first, flying, resting, between, ended, rested = report["losses"]
        assert flying == resting
        assert ended == rested
        assert len({first, flying, between, ended}) == 4


BSP = {
    "fp32": ({}, torch.float32, 1e-5),
    "fp32, ZeRO-1": (ZERO, torch.float32, 1e-5),
    "bf16": ({"bf16": {"enabled": True}}, torch.bfloat16, 1e-2),
    "bf16, ZeRO-1": ({"bf16": {"enabled": True}, **ZERO}, torch.bfloat16, 1e-2),
    "fp16": (FP16, torch.float16, 2e-3),
    "fp16, ZeRO-1": ({**FP16, **ZERO}, torch.float16, 2e-3),
}


WITHIN = tuple(((5, name), (8, name)) for name in ("linear.weight", "linear.bias", "scale"))  # tied within a stage
SPLITS: dict[int, tuple[tuple[int, ...], Any, tuple[Any, ...]]] = {
    2: ((3, 7), toy.tied_specs, toy.TIES[:3] + WITHIN),
    3: ((4, 3, 3), toy.words_tied_specs, toy.TIES[:1]),
}


def train_bsp(stages: int) -> list[dict[str, Any]]:
    counts, specs, _ = SPLITS[stages]
    block = {"sync_mode": "bsp", "partition": list(counts)}
    ds_configs = [cases.config(2, SGD, block, gradient_clipping=0.3, **extra) for extra, _, _ in BSP.values()]
    return cases.train_each(ds_configs, stages, 6, loss_fn=toy.mean_over_positions, specs=specs)


@pytest.mark.parametrize("stages", SPLITS)
def test_bsp_clips_by_the_norm_of_the_whole_model(worlds: Worlds, stages: int) -> None:
    """Of two stages the second has a layer with tied and other weights; of three that between has nothing tied."""
    ranks, (counts, _, ties) = worlds.run(stages, train_bsp, stages), SPLITS[stages]
    for position, (name, (_, dtype, tolerance)) in enumerate(BSP.items()):
        scaler = reference.Scaler(2.0**18, window=2) if dtype == torch.float16 else None
        wanted = reference.Replay(
            (LAYERS,), (0,), 2, sgd,
            clip=0.3, dtype=dtype, scaler=scaler, layers=toy.built_tied_layers(), ties=ties,
            criterion=toy.mean_over_positions,
        ).run(6)  # fmt: skip
        reports = [rank[position] for rank in ranks]
        got = {n: p for report in reports for n, p in by_layer(report, counts, report["parameters"]).items()}
        off = difference(got, wanted.parameters())
        assert off <= tolerance, f"{name}: {off:.1e}"


def told(folder: str) -> dict[str, Any]:
    """A run with ties, overflows and delayed norms, silent and with everything that tells something."""
    block = {"gradient_clipping_scope": "delayed_global"}
    extra = {**FP16, "gradient_clipping": 0.3}
    reports = {}
    for name, more in (("silent", {}), ("telling", profile_of(Path(folder)))):
        reports[name] = observe(cases.config(2, SGD, block, **{**extra, **more}), 3, **TIED)
    with redirect_stdout(io.StringIO()):
        engine = cases.engine(cases.config(2, SGD, block, **extra), 3, **TIED)
        iterator = toy.data()
        counts = []
        for _ in range(8):
            engine.train_batch(iterator)
            links, ties, senders = engine.stage.links, engine.stage.ties, engine.stage.senders
            received = [*ties.weights_in, *ties.gradients_in]
            received += [link.activations for link in links.before]
            received += [link.gradients for link in links.after]
            counts.append((sum(s.bytes_sent for s in senders), sum(r.bytes_received for r in received)))
        reports["per batch"] = tuple(now - before for now, before in zip(counts[-1], counts[-2], strict=True))
        reports["statistics"] = engine.statistics()
        reports["norm"] = float(engine.get_global_grad_norm())
        cases.end(engine)
    return reports


def test_everything_tells_of_tied_weights(worlds: Worlds, tmp_path: Path) -> None:
    ranks = worlds.run(3, told, str(tmp_path))
    for report in ranks:
        assert difference(report["telling"]["parameters"], report["silent"]["parameters"]) == 0
        assert report["telling"]["communication"]["summary"].keys() >= {"isend", "recv"}
    for report, record in zip(ranks, ranks[0]["statistics"], strict=True):
        assert (record.bytes_sent, record.bytes_received) == report["per batch"]
    assert "loss_scale" in " ".join(name for name, *_ in ranks[0]["telling"]["written"])
    assert all(report["norm"] > 0 for report in ranks)
