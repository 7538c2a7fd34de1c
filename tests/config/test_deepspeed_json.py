"""The reader of a DeepSpeed JSON says what DeepSpeed's own parsed config says."""

from __future__ import annotations

from typing import Any

import pytest
from deepspeed import comm
from deepspeed.runtime.config import DeepSpeedConfig

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import MICRO, STEPS, TOTAL, DeepSpeedJson
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.planning.devices import Devices

ON, OFF = {"enabled": True}, {"enabled": False}
REPLICAS = 3
JSONS: list[dict[str, Any]] = [
    {STEPS: 4, MICRO: 2},
    {TOTAL: 24, MICRO: 2},
    {TOTAL: 24, STEPS: 2},
    {TOTAL: 24, MICRO: 2, STEPS: 4},
    {TOTAL: 24},
    *(
        {MICRO: 2, **settings}
        for settings in (
            {},
            {"bf16": ON},
            {"bf16": {"enabled": "true"}},
            {"bf16": OFF, "bfloat16": ON},
            {"bfloat16": ON},
            {"bf16": {}, "fp16": {"enabled": 1}},
            {"fp16": {"enabled": "false"}},
            {"float16": ON},
            {"zero_optimization": True},
            {"zero_optimization": False},
            {"zero_optimization": {}},
            {"zero_optimization": {"stage": 1, "reduce_bucket_size": 1e6}},
            {"zero_optimization": {"stage": 1, "reduce_bucket_size": "1000"}},
            {"zero_optimization": {"stage": "1"}},
            {"zero_optimization": {"stage": 1.0}},
            {"zero_optimization": {"stage": 2}},
            {"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}},
            {"optimizer": {"type": "SGD"}},
            {"optimizer": {}},
        )
    ),
]


@pytest.mark.parametrize("content", JSONS, ids=str)
def test_as_deepspeed(content: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "get_rank", lambda: 0)
    monkeypatch.setattr(comm, "get_world_size", lambda: REPLICAS)
    theirs, ours = DeepSpeedConfig({**content}), DeepSpeedJson(content)
    dtype = "float16" if theirs.float16_config.enabled else "bfloat16" if theirs.bfloat16_config.enabled else "float32"
    assert ours.dtype == dtype
    assert ours.zero_stage == theirs.zero_optimization_stage
    assert ours.reduce_bucket == theirs.zero_config.reduce_bucket_size
    assert (ours.optimizer or "").lower() == (theirs.optimizer_name or "").lower()
    assert ours.optimizer_params == (theirs.optimizer_params or {})
    assert ours.micro_batches(REPLICAS) == theirs.gradient_accumulation_steps


def test_micro_batches_that_nothing_says() -> None:
    wrong: list[dict[str, Any]] = [{}, {STEPS: 0}, {STEPS: True}, {STEPS: "auto", TOTAL: 8, MICRO: 2}]
    for content in wrong:
        with pytest.raises(
            VPipeConfigError, match=r"^gradient_accumulation_steps: got (null|0|true|\"auto\"); allowed"
        ):
            DeepSpeedJson(content).micro_batches(REPLICAS)


def test_the_planner_reads_what_deepspeed_reads() -> None:
    """Three copies of the reader disagreed about a bare boolean, numbers as words and the old name of bf16."""

    def held(**content: Any) -> Any:
        return Devices.of(VPipeConfig.parse({}), DeepSpeedJson(content), replicas=2).optimizer.held

    assert (
        held(zero_optimization=True) == held(zero_optimization={"stage": "1"}) == held(zero_optimization={"stage": 1})
    )
    assert held(bf16=OFF, bfloat16=ON) == held(fp16={"enabled": "false"}) == held()
