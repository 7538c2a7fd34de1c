"""``weight_sync: "none"``: late forward passes, and backward passes with the newest weights, against the replay."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import reference
import torch
import toy
from test_exactness import LAYERS, asp, depths_of, difference, sgd
from worlds import Worlds

from ds_vpipe.partition import uniform_partition

pytestmark = pytest.mark.mp

BATCHES = 12
HALF = {"bf16": {"enabled": True}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
CLIP = {"gradient_clipping": 0.2}
ROWS: dict[int, list[tuple[int, float, int, dict[str, Any]]]] = {
    4: [
        (1, 0, 1, {}),
        (1, 0.5, 1, {}),
        (1, 1, 1, {}),
        (1, 0, 2, {}),
        (2, 0, 1, {}),
        (2, 0.5, 2, {}),
        (4, 0, 1, {}),
        (8, 1, 2, {}),
        (1, 0, 1, HALF),
        (2, 0.5, 1, HALF),
        (1, 0.5, 1, AUTOCAST),
        (2, 0, 1, CLIP),
    ],
    2: [(1, 0, 1, {}), (1, 0.5, 2, {}), (3, 1, 2, {})],
}
"""By number of stages: M, recompute ratio, factor of the depths, more of the JSON."""


def wanted(
    stages: int, micro_batches: int, ratio: float, factor: int, extra: dict[str, Any]
) -> dict[str, torch.Tensor]:
    counts = uniform_partition(LAYERS, stages)
    options: dict[str, Any] = {"recomputed": [int(ratio * count) for count in counts]}
    options |= {"dtype": torch.bfloat16} if extra is HALF else {"autocast": extra is AUTOCAST}
    options |= {"clip": extra.get("gradient_clipping", 0.0), "criterion": toy.float_cross_entropy}
    depths = depths_of(stages, factor)
    return reference.replay(counts, depths, micro_batches, BATCHES, sgd, stash=False, **options)[0]


@pytest.mark.parametrize("stages", ROWS)
def test_against_the_replay(worlds: Worlds, stages: int) -> None:
    """Bit for bit in fp32, for every K, M, depth and recompute ratio, with one set of weights in memory."""
    rows = ROWS[stages]
    configs = [asp(stages, m, "SGD", ratio, "none", factor) | extra for m, ratio, factor, extra in rows]
    ranks = worlds.run(stages, cases.train_each, configs, stages, BATCHES, loss_fn=toy.float_cross_entropy)
    for position, row in enumerate(rows):
        reports = [rank[position] for rank in ranks]
        off = difference(cases.merged(reports), wanted(stages, *row))
        tolerance = 1e-2 if row[3] in (HALF, AUTOCAST) else 1e-6 if row[3] else 0
        assert off <= tolerance, f"{row}: parameters off by {off:.1e}"
        for report in reports:
            assert {*report["alive"], report["allocated"]} == {1}, row


def test_replay_would_notice() -> None:
    """Stashed weights, newest ones in forward passes too, and other layers that run again give other weights."""
    depths, counts = (3, 2, 1, 0), uniform_partition(LAYERS, 4)
    found = [wanted(4, 1, ratio, 1, {}) for ratio in (0, 0.5, 1)]
    for options in ({}, {"newest": True}):
        criterion = toy.float_cross_entropy
        found.append(reference.replay(counts, depths, 1, BATCHES, sgd, criterion=criterion, **options)[0])
    for number, one in enumerate(found):
        assert all(difference(one, other) > 1e-3 for other in found[:number])
