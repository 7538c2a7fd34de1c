"""Gradients of bf16 weights that are added in fp32, with ZeRO-1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import deepspeed
import pytest
import reference
import torch
import toy
from deepspeed.utils import safe_get_full_optimizer_state
from test_exactness import OPTIMIZERS, difference, sgd
from test_ties import by_layer, replayed
from worlds import Worlds

pytestmark = pytest.mark.mp

ZERO = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
WIDE = {**ZERO, "data_types": {"grad_accum_dtype": "fp32"}}
ADAMW, SGD = OPTIMIZERS["AdamW"][0], OPTIMIZERS["SGD"][0]
CLIP = 0.3
DEEP = {"partition": "uniform", "stage_to_depth_map": [3, 0]}
BATCHES = 6


def resumed(ds_config: dict[str, Any], folder: str, stages: int = 2, **module: Any) -> list[Any]:
    """Going on after a save, and going on from it."""
    found = []
    for resumes in (False, True):
        torch.manual_seed(7)
        engine = cases.engine(ds_config, stages, dropout=0.2, **module)
        if resumes:
            engine.load_checkpoint(folder)
        else:
            iterator = toy.data()
            for _ in range(3):
                engine.train_batch(iterator)
            engine.save_checkpoint(folder)
        iterator = toy.data(start=engine.consumed_micro_batches) if resumes else iterator
        losses = [float(engine.train_batch(iterator)) for _ in range(3)]
        copies = [parameter for parameter in engine.stage_parameters if getattr(parameter, "ds_pipe_replicated", False)]
        moments = [float(safe_get_full_optimizer_state(copy, "exp_avg").norm()) for copy in copies]
        found.append((losses, cases.parameters(engine), moments))
        cases.end(engine)
    return found


def trained(folder: str) -> dict[str, Any]:
    runs = {
        "stock": cases.config(4, ADAMW, None, **WIDE),
        "bsp": cases.config(4, ADAMW, {"sync_mode": "bsp"}, **WIDE),
        "asp": cases.config(1, ADAMW, DEEP, **WIDE),
        "asp in bf16": cases.config(1, ADAMW, DEEP, **ZERO),
    }
    found: dict[str, Any] = {}
    for name, ds_config in runs.items():
        report = cases.train(ds_config, 2, BATCHES)
        found[name] = report["losses"], report["parameters"], report["alive"]
        cases.close_groups()
    found["resumed"] = resumed(cases.config(2, ADAMW, DEEP, **WIDE, gradient_clipping=0.5), folder)
    return found


def test_stock_engine_stashing_and_resume(worlds: Worlds, tmp_path: Path) -> None:
    """In asp M is 1, where nothing is added, and gradients of old versions are those of the optimizer in bf16."""
    reports = worlds.run(2, trained, str(tmp_path))
    for report in reports:
        for one, other in (("stock", "bsp"), ("asp in bf16", "asp")):
            assert report[one][0] == report[other][0], other
            assert difference(report[one][1], report[other][1]) == 0, other
        after, again = report["resumed"]
        assert after[0] == again[0]
        assert difference(after[1], again[1]) == 0
    assert reports[0]["asp"][2][-1] == 4  # versions alive


REDUCED = {**WIDE, "communication_data_type": "fp32"}  # else the sums over replicas, and over one, are in bf16
TIED = {"specs": toy.tied_specs, "loss_fn": toy.mean_over_positions}


def without_learning(module: Any, x: torch.Tensor) -> torch.Tensor:
    """As the layer, with no gradient of the weight that is tied."""
    output = torch.nn.functional.linear(x, module.linear.weight.detach(), module.linear.bias)
    return x + torch.tanh(output * module.scale)


class Unlearning(toy.Scale):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return without_learning(self, x)


def specs_of_gradients_elsewhere() -> list[Any]:
    """Ties over two stages, one of whose weights has gradients at its copy alone."""
    specs = toy.words_tied_specs()
    for position, forward_fn in ((5, without_learning), (8, None)):
        specs[position] = deepspeed.pipe.TiedLayerSpec(
            "linear", toy.Scale, 150, forward_fn=forward_fn, tied_weight_attr=["linear.weight"]
        )
    return specs


def train_tied(folder: str) -> list[Any]:
    """With 4 stages and M = 1 and 4; with 2 stages of 2 replicas each, clipped; saved and resumed."""
    reports = []
    for micro_batches in (1, 4):
        ds_config = cases.config(micro_batches, ADAMW, {"partition": [3, 2, 3, 2]}, **REDUCED)
        reports.append(cases.train(ds_config, 4, BATCHES, **TIED))
        cases.close_groups()
    ds_config = cases.config(4, SGD, {"partition": [6, 4]}, **REDUCED, gradient_clipping=CLIP)
    module = {"specs": specs_of_gradients_elsewhere, "loss_fn": toy.mean_over_positions}
    reports.append(cases.train(ds_config, 2, BATCHES, **module))
    cases.close_groups()
    return [*reports, resumed(cases.config(2, ADAMW, {}, **REDUCED, gradient_clipping=0.5), folder, 4, **TIED)]


def off(ranks: list[dict[str, Any]], counts: tuple[int, ...], wanted: reference.Replay) -> list[float]:
    """By how much every rank's parameters differ from the replay's after the run."""
    parameters = wanted.run(BATCHES).parameters()
    named = [by_layer(report, counts, report["parameters"]) for report in ranks]
    return [difference(mine, {name: parameters[name] for name in mine}) for mine in named]


def test_ties_in_asp(worlds: Worlds, tmp_path: Path) -> None:
    """Gradients of copies travel and are added in fp32: the replay's bits, which those added in bf16 have not."""
    ranks = worlds.run(4, train_tied, str(tmp_path))
    counts = (3, 2, 3, 2)
    for run, micro_batches in enumerate((1, 4)):
        reports = [rank[run] for rank in ranks]
        wide, narrow = (
            replayed(counts, (3, 2, 1, 0), micro_batches, dtype=torch.bfloat16, adds_in=adds_in)
            for adds_in in (torch.float32, torch.bfloat16)
        )
        assert off(reports, counts, wide) == [0.0] * 4
        assert max(off(reports, counts, narrow)) > 1e-2
    layers = [*toy.built_tied_layers()[:5], Unlearning(150), *toy.built_tied_layers()[6:]]
    wanted = reference.Replay(
        (6, 4), (1, 0), 4, sgd, replicas=2, zero=True, clip=CLIP, dtype=torch.bfloat16, adds_in=torch.float32,
        layers=layers, ties=[toy.TIES[0], toy.TIES[3]], criterion=toy.mean_over_positions,
    )  # fmt: skip
    assert off([rank[2] for rank in ranks], (6, 4), wanted) == [0.0] * 4
    for after, again in (rank[3] for rank in ranks):
        assert after[0] == again[0]
        assert difference(after[1], again[1]) == 0
    moments = [moment for rank in ranks for moment in rank[3][0][2]]
    assert moments == [0.0] * 4, "copies are not updated where they are"
