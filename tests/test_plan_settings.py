"""What a DeepSpeed JSON means for planning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_vpipe.config import VPipeConfig
from ds_vpipe.planning.optimizer_bytes import optimizer_bytes
from ds_vpipe.planning.pace import Link
from ds_vpipe.planning.plan_settings import PlanSettings, configured_settings
from ds_vpipe.planning.planner import plan
from ds_vpipe.profiles.layer_profile import LayerProfile, ModelProfile

CONFIGS = Path(__file__).parent.parent / "ds_configs"


def settings_of(config: dict[str, Any], num_stages: int, micro_batches: int, **options: Any) -> PlanSettings:
    return configured_settings(VPipeConfig.parse(config["vpipe"]), config, num_stages, micro_batches, **options)


def test_asynchronous() -> None:
    config = {
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "vpipe": {"stage_to_depth_map": "auto", "weight_sync": "vertical", "link_bandwidth": 2e9, "profile": "p.json"},
    }
    assert settings_of(config, 4, 8, replicas=2, device_bytes=100, host_transfers=True) == PlanSettings(
        num_stages=4,
        micro_batches=8,
        schedule="asp",
        budget=100,
        depths="auto",
        weight_sync="vertical",
        optimizer=optimizer_bytes("adamw", None, "bfloat16", zero_stage=1, replicas=2),
        link=Link(bytes_per_s=2e9),
        host_transfers=True,
    )


def test_synchronous() -> None:
    for schedule in ("1f1b", "gpipe"):
        found = settings_of({"vpipe": {"sync_mode": "bsp", "schedule": schedule}}, 2, 3)
        assert found.schedule == schedule
        assert [there.versions for there in found.residencies()] == [1, 1]
    parts = settings_of({"vpipe": {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 3}}, 2, 4)
    assert (parts.schedule, parts.parts) == ("interleaved", 6)


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_config_can_be_planned(path: Path) -> None:
    config = json.loads(path.read_text())
    counts = config["vpipe"].get("partition")
    counts = counts if isinstance(counts, list) else None
    ratio = config["vpipe"].get("recompute_ratio", 0)
    ratios = None if counts is None else ratio if isinstance(ratio, list) else [ratio] * len(counts)
    stages = 4 if counts is None else len(counts)
    size = 16 if counts is None else sum(counts)
    layers = (LayerProfile("x", 1, 2, 4, 8, 2),) * size
    pipeline = settings_of(config, stages, config["gradient_accumulation_steps"])
    found = plan(ModelProfile(layers, 2, 1, "test", "float32", "analytic"), pipeline, counts, ratios)
    assert counts is None or found.partition == tuple(counts)
    assert (
        ratios is None
        or counts is None
        or [int(r * n) for r, n in zip(ratios, counts, strict=True)] == [stage.recomputed for stage in found.stages]
    )


def test_parts_share_the_budget_of_their_rank() -> None:
    settings = PlanSettings(2, 4, "interleaved", budget=(30, 60), virtual_stages=3)
    assert settings.part_budgets() == [10, 20, 10, 20, 10, 20]


def test_mitigations_of_staleness_hold_weights_where_gradients_are_late() -> None:
    config = {"vpipe": {"staleness": {"error_feedback": True, "nadam": True}}}
    versions = [there.versions for there in settings_of(config, 3, 2).residencies()]
    assert versions == [3, 3, 1], "two versions and the last change; none on the last stage"
