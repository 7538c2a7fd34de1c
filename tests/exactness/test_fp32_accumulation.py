"""Gradients of bf16 weights that are added in fp32, with ZeRO-1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import toy
from test_exactness import OPTIMIZERS, difference
from worlds import CaseFailed, Worlds

pytestmark = pytest.mark.mp

ZERO = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
WIDE = {**ZERO, "data_types": {"grad_accum_dtype": "fp32"}}
ADAMW = OPTIMIZERS["AdamW"][0]
DEEP = {"partition": "uniform", "stage_to_depth_map": [3, 0]}
BATCHES = 6


def resumed(ds_config: dict[str, Any], folder: str) -> list[Any]:
    """Going on after a save, and going on from it."""
    found = []
    for resumes in (False, True):
        torch.manual_seed(7)
        engine = cases.engine(ds_config, 2, dropout=0.2)
        if resumes:
            engine.load_checkpoint(folder)
        else:
            iterator = toy.data()
            for _ in range(3):
                engine.train_batch(iterator)
            engine.save_checkpoint(folder)
        iterator = toy.data(start=engine.consumed_micro_batches) if resumes else iterator
        losses = [float(engine.train_batch(iterator)) for _ in range(3)]
        found.append((losses, cases.parameters(engine)))
        engine.destroy()
        cases.close_groups()
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


def test_ties_are_refused_in_asp(worlds: Worlds) -> None:
    ds_config = cases.config(1, ADAMW, {"partition": "uniform"}, **WIDE)
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, cases.train, ds_config, 2, 1, specs=toy.words_tied_specs, loss_fn=toy.mean_over_positions)
    for error in failed.value.errors.values():
        assert 'data_types.grad_accum_dtype: got "fp32" for a model with weights tied across stages' in error
        assert "\n" not in error
