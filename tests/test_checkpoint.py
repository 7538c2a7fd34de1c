"""Checkpoints hold one consistent version, in DeepSpeed's own format."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import toy
from test_exactness import OPTIMIZERS, difference
from worlds import Worlds

pytestmark = pytest.mark.mp


def save_and_load(directory: str, extra: dict[str, Any], load_block: dict[str, Any] | None) -> dict[str, Any]:
    """Train, save while micro-batches are in flight, load into another engine, and go on with that."""
    ds_config = cases.config(2, OPTIMIZERS["AdamW"][0], {"partition": "uniform"}, **extra)
    trained = cases.engine(ds_config, 2)
    iterator = toy.data()
    for _ in range(5):
        trained.train_batch(iterator)
    trained.save_checkpoint(directory)
    saved = cases.parameters(trained)
    other = cases.engine(cases.config(2, OPTIMIZERS["AdamW"][0], load_block, **extra), 2)
    other.load_checkpoint(directory)
    loaded, steps = cases.parameters(other), other.global_steps
    iterator = toy.data(start=10)
    for _ in range(3):
        other.train_batch(iterator)
    return {
        "saved": saved,
        "loaded": loaded,
        "steps": steps,
        "moved": difference(cases.parameters(other), loaded),
    }


@pytest.mark.parametrize("load_block", [None, {"partition": "uniform"}], ids=["stock", "ours"])
@pytest.mark.parametrize(
    "extra", [{}, {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}], ids=["fp32", "bf16-zero1"]
)
def test_saved_in_flight_loads_everywhere(
    worlds: Worlds, tmp_path: Any, extra: dict[str, Any], load_block: dict[str, Any] | None
) -> None:
    for report in worlds.run(2, save_and_load, str(tmp_path), extra, load_block):
        assert difference(report["loaded"], report["saved"]) == 0
        assert report["steps"] == 5
        assert 1e-4 < report["moved"] < 1
