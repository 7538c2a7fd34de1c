"""Batch sizes of a JSON that contradict each other are refused in one line; others are left to DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest

from ds_vpipe.batch_sizes import refuse_batch_sizes
from ds_vpipe.errors import VPipeConfigError

TOTAL, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@pytest.mark.parametrize(
    ("ds_config", "allowed"),
    [
        (
            {TOTAL: 64, MICRO: 4, STEPS: 2},
            f"16, which is {MICRO} 4 x {STEPS} 2 x 2 replicas; write 16, or remove the key",
        ),
        ({TOTAL: 20, MICRO: 4}, f"a multiple of 8, which is {MICRO} 4 x 2 replicas; change it, or {MICRO}"),
        ({TOTAL: 9, STEPS: 3}, f"a multiple of 6, which is {STEPS} 3 x 2 replicas; change it, or {STEPS}"),
    ],
)
def test_contradictions(ds_config: dict[str, Any], allowed: str) -> None:
    with pytest.raises(VPipeConfigError) as caught:
        refuse_batch_sizes(ds_config, 8, 4)
    line = f"{TOTAL}: got {ds_config[TOTAL]}; 8 ranks in 4 stages are 2 replicas; allowed: {allowed}"
    assert str(caught.value) == line


@pytest.mark.parametrize(
    "ds_config",
    [
        {TOTAL: 16, MICRO: 4, STEPS: 2},
        {TOTAL: 16, MICRO: 4},
        {TOTAL: 18, STEPS: 3},
        {TOTAL: 7},
        {MICRO: 4, STEPS: 3},
        {TOTAL: "auto", MICRO: 4, STEPS: 2},
        {TOTAL: 16, MICRO: 0},
        {},
    ],
)
def test_nothing_to_say(ds_config: dict[str, Any]) -> None:
    refuse_batch_sizes(ds_config, 8, 4)
