"""What a DeepSpeed JSON means for planning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.planning.devices import Devices, optimizer_bytes
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile
from ds_vpipe.planning.pace import LinkCost
from ds_vpipe.planning.planner import plan
from ds_vpipe.schedules.pipeline import Pipeline

CONFIGS = Path(__file__).parents[2] / "ds_configs"


def read(config: dict[str, Any], num_stages: int, micro_batches: int, **options: Any) -> tuple[Pipeline, Devices]:
    block = VPipeConfig.parse(config["vpipe"])
    return block.pipeline(num_stages, micro_batches), Devices.of(block, DeepSpeedJson(config), **options)


def test_asynchronous() -> None:
    config = {
        "optimizer": {"type": "AdamW"},
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 1},
        "vpipe": {"stage_to_depth_map": "auto", "weight_sync": "vertical", "link_bandwidth": 2e9, "profile": "p.json"},
    }
    pipeline, devices = read(config, 4, 8, replicas=2, device_bytes=100, host_transfers=True)
    assert pipeline == Pipeline("asp", 4, 8, weight_sync="vertical", recompute_ratio=(0.0,) * 4, swap_ratio=(0.0,) * 4)
    assert devices == Devices(
        budget=100,
        optimizer=optimizer_bytes(DeepSpeedJson(config), replicas=2),
        link=LinkCost(bytes_per_s=2e9),
        host_transfers=True,
    )


@pytest.mark.parametrize(
    ("link", "on_host", "packed"), [("nccl", False, 6), ("ipc", False, 6), ("nccl", True, 8), ("auto", False, 0)]
)
def test_where_messages_are_packed(link: str, on_host: bool, packed: int) -> None:
    pipeline, devices = read({"vpipe": {"link": link}}, 2, 1, host_transfers=on_host)
    buffers = [load.input_buffers + load.output_buffers for load in devices.loads(pipeline)]
    assert sum(buffers) == packed, buffers


def test_synchronous() -> None:
    for schedule in ("1f1b", "gpipe"):
        pipeline, devices = read({"vpipe": {"sync_mode": "bsp", "schedule": schedule}}, 2, 3)
        assert pipeline.schedule == schedule
        assert [load.versions for load in devices.loads(pipeline)] == [1, 1]
    pipeline, _ = read({"vpipe": {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 3}}, 2, 4)
    assert (pipeline.schedule, pipeline.num_parts) == ("interleaved", 6)


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
    pipeline, devices = read(config, stages, config["gradient_accumulation_steps"])
    found = plan(ModelProfile(layers, 2, 1, "test", "float32", "analytic"), pipeline, devices)
    assert counts is None or found.pipeline.partition == tuple(counts)
    assert (
        ratios is None
        or counts is None
        or [int(r * n) for r, n in zip(ratios, counts, strict=True)] == [stage.recomputed for stage in found.stages]
    )
