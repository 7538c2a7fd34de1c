"""Bytes that the planner predicts against those that training engines allocate: scripts/bench/memory.py, small."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
from memory import BSP, Case, counted, predicted, sample
from worlds import Worlds

STAGES, LIMIT = 2, 0.1
SMALL = Namespace(stages=STAGES, hidden=128, layers=4, vocabulary=1024, batch=4, sequence=64)


def profile() -> Any:
    from ds_vpipe.planning.profiler import profile_layers

    return profile_layers(**sample(SMALL), micro_batches=1, warm_up=0)


# Parts without which the first stage's prediction would be wrong.
CASES = [
    (Case("asp", 1), ["versions", "activations", "optimizer"]),
    (Case("swap", 1, {"swap_ratio": 0.8, "stage_to_depth_map": [4, 0]}), ["versions", "activations", "optimizer"]),
    (Case("recompute", 4, {**BSP, "recompute_ratio": 0.6}), ["gradients", "recompute", "activations", "optimizer"]),
]


@pytest.mark.mp
@pytest.mark.parametrize(("case", "parts"), CASES, ids=lambda value: getattr(value, "name", None))
def test_within_a_tenth(worlds: Worlds, case: Case, parts: list[str]) -> None:
    memories, peaks = predicted(profile(), case, SMALL).rank_memory(), worlds.run(STAGES, counted, case, SMALL)
    for memory, peak in zip(memories, peaks, strict=True):
        assert abs(memory.total / peak - 1) <= LIMIT, (memory, peak)
    for part in parts:
        without = memories[0].total - getattr(memories[0], part)
        assert abs(without / peaks[0] - 1) > LIMIT, part
