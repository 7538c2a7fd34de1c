"""Batch sizes of a JSON that contradict each other are refused in one line; others are left to DeepSpeed."""

from __future__ import annotations

from typing import Any

import pytest

from ds_vpipe.config.deepspeed_json import DeepSpeedJson
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
        DeepSpeedJson(ds_config).refuse_batch_sizes(8, 4)
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
    DeepSpeedJson(ds_config).refuse_batch_sizes(8, 4)


def test_a_total_for_all_ranks_is_corrected() -> None:
    given = {TOTAL: 64, MICRO: 4, STEPS: 2, "vpipe": {}}
    found, line = DeepSpeedJson(given).corrected(8, 4)
    assert found.content == {**given, TOTAL: 16}
    assert line.startswith(f"{TOTAL}: got 64 for 8 replicas, but 8 ranks in 4 stages are 2; an update is of 16 samples")
    assert line.endswith(f"for 64 write {STEPS} 8")
    found.refuse_batch_sizes(8, 4)


@pytest.mark.parametrize("total", [16, 32, 63, "auto", None])
def test_other_totals_are_not_touched(total: Any) -> None:
    given = {TOTAL: total, MICRO: 4, STEPS: 2}
    assert DeepSpeedJson(given).corrected(8, 4) == (DeepSpeedJson(given), "")
    assert DeepSpeedJson({MICRO: 4, TOTAL: 64}).corrected(8, 4)[1] == ""
    assert DeepSpeedJson({TOTAL: 64, MICRO: 4, STEPS: 2}).corrected(8, 1)[1] == ""
