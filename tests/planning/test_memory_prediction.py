"""Bytes that the planner predicts against those that training engines allocate: scripts/bench/memory.py, small."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

import pytest
from memory import BF16, BSP, TORCH, Case, counted, predicted, profile_of
from worlds import Worlds

STAGES, LIMIT = 2, 0.1
SMALL = Namespace(stages=STAGES, hidden=128, layers=4, vocabulary=1024, batch=4, sequence=64)


def zero(bucket: int) -> dict[str, Any]:
    return {**BF16, "zero_optimization": {"stage": 1, "reduce_bucket_size": bucket}}


# Parts without which the first stage's prediction would be wrong.
CASES = [
    (Case("asp", 1), ["versions", "activations", "optimizer"]),
    (Case("swap", 1, {"swap_ratio": 0.8, "stage_to_depth_map": [4, 0]}), ["versions", "activations", "optimizer"]),
    (Case("recompute", 4, {**BSP, "recompute_ratio": 0.6}), ["gradients", "recompute", "activations", "optimizer"]),
    (Case("bf16", 4, {"recompute_ratio": 1.0}, params=TORCH, others=BF16), ["optimizer"]),
    (Case("large bucket", 4, params=TORCH, others=zero(4_000_000)), ["optimizer"]),
    (Case("small bucket", 1, {"recompute_ratio": 1.0}, params=TORCH, others=zero(150_000)), ["optimizer"]),
    (Case("two replicas", 4, params=TORCH, others=zero(4_000_000), replicas=2), ["optimizer"]),
]


@pytest.mark.mp
@pytest.mark.parametrize(("case", "parts"), CASES, ids=lambda value: getattr(value, "name", None))
def test_within_a_tenth(worlds: Worlds, case: Case, parts: list[str]) -> None:
    ranks = STAGES * case.replicas
    options = Namespace(**{**vars(SMALL), "stages": ranks})
    peaks = worlds.run(ranks, counted, case, options)[:: case.replicas]
    memories = predicted(profile_of(case, SMALL), case, options).rank_memory()
    for memory, peak in zip(memories, peaks, strict=True):
        assert abs(memory.total / peak - 1) <= LIMIT, (memory, peak)
    for part in parts:
        without = memories[0].total - getattr(memories[0], part)
        assert abs(without / peaks[0] - 1) > LIMIT, part
