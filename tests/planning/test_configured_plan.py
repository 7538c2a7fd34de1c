"""What the JSON leaves to the planner: the plan it gets, what is refused, and an engine that runs by it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cases
import pytest
import toy
from worlds import Worlds

from ds_vpipe.__main__ import main
from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile
from ds_vpipe.planning.planner import configured_partition, configured_plan, read_profile

MB = 10**6
ALL = {"partition": "profile", "recompute_ratio": "auto", "stage_to_depth_map": "auto", "link_bandwidth": 1e18}


def profile_file(folder: Path, seconds: list[float]) -> str:
    """Layers of 1 MB of weights that keep 4 MB and hand on 0.1 MB."""
    layers = tuple(LayerProfile(f"L{i}", s, 2 * s, MB, 4 * MB, MB // 10) for i, s in enumerate(seconds))
    path = folder / "profile.json"
    ModelProfile(layers, MB // 10, toy.MICRO_BATCH, "cpu", "float32", "measured").save(path)
    return str(path)


def settle(
    folder: Path, block: dict[str, Any], seconds: list[float], stages: int = 2, batch: int = 1, **options: Any
) -> Any:
    block = {"profile": profile_file(folder, seconds), **block}
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    ds_config = {"gradient_accumulation_steps": batch, "optimizer": sgd, "vpipe": block}
    return planned(block, ds_config, [len(seconds) // stages] * stages, **options)


def planned(block: dict[str, Any], ds_config: dict[str, Any], own: list[int], **options: Any) -> Any:
    """The block with numbers, and the plan, as the engine prepares them."""
    config, json = VPipeConfig.parse(block), DeepSpeedJson(ds_config)
    profile = read_profile(config.profile, json, sum(own))
    pipeline = config.pipeline(len(own), json.micro_batches(1))
    plan = configured_plan(config, pipeline, Devices.of(config, json, **options), profile, own)
    return config.settled(plan.pipeline), plan


def test_an_unbalanced_model_is_balanced(tmp_path: Path) -> None:
    config, plan = settle(tmp_path, ALL, [5e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3])
    assert config.partition == (1, 5)
    assert config.recompute_ratio == (0.0, 0.0)
    assert config.stage_to_depth_map == (1, 0)
    assert plan.pace_s == pytest.approx(15e-3)
    assert not config.leaves_to_planner
    assert plan.pipeline == config.pipeline(2, 1)


def test_a_budget_brings_recomputation_where_it_is_needed(tmp_path: Path) -> None:
    block = {"recompute_ratio": "auto", "memory_budget": 24 * MB}
    config, plan = settle(tmp_path, block, [1e-3] * 6)
    assert config.partition == (3, 3), "the module's own split is kept"
    first, last = config.recompute_ratio
    assert first > last == 0.0
    assert all(memory.total <= 24 * MB for memory in plan.rank_memory())
    config, _ = settle(tmp_path, {"recompute_ratio": "auto"}, [1e-3] * 6, device_bytes=24 * MB)
    assert config.recompute_ratio == (first, last)
    with pytest.raises(VPipeConfigError, match="MB") as error:
        settle(tmp_path, {**block, "memory_budget": 4 * MB}, [1e-3] * 6)
    assert "\n" not in str(error.value)
    assert "recompute_ratio" not in str(error.value), "it is the planner's already"
    with pytest.raises(
        VPipeConfigError, match=r'nothing fits.*; leave recomputation to the planner \("recompute_ratio"'
    ):
        settle(tmp_path, {"partition": "profile", "memory_budget": 20 * MB}, [1e-3] * 6)


def test_whichever_of_swap_and_recomputation_costs_less(tmp_path: Path) -> None:
    block = {"recompute_ratio": "auto", "swap_ratio": "auto", "stage_to_depth_map": [3, 0], "memory_budget": 44 * MB}
    swapping, plan = settle(tmp_path, {**block, "host_bandwidth": 1e12}, [1e-3] * 6)
    assert swapping.recompute_ratio == (0.0, 0.0)
    assert swapping.swap_ratio[0] > swapping.swap_ratio[1] == 0.0
    assert not swapping.leaves_to_planner
    assert plan.pipeline == swapping.pipeline(2, 1)
    recomputing, _ = settle(tmp_path, {**block, "host_bandwidth": 1e6}, [1e-3] * 6)
    assert recomputing.recompute_ratio[0] > 0
    assert recomputing.swap_ratio == (0.0, 0.0)
    with pytest.raises(VPipeConfigError, match="host_bandwidth: got null; swap_ratio is 'auto', which weighs its time"):
        settle(tmp_path, block, [1e-3] * 6)


def test_interleaved_parts_get_the_split_of_the_plan(tmp_path: Path) -> None:
    block = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2, "partition": "profile"}
    config, plan = settle(tmp_path, {**block, "recompute_ratio": [0.5, 0]}, [5e-3, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3])
    assert plan.pipeline.virtual_stages == 2
    assert config.partition is not None
    assert len(config.partition) == 4
    assert config.partition[0] == 1, "the slowest layer is a part of its own"
    assert config.recompute_ratio == (0.5, 0.0, 0.5, 0.0)
    assert config.pipeline(2, 1) == plan.pipeline
    left = {**block, "recompute_ratio": "auto", "memory_budget": 60 * MB}
    config, plan = settle(tmp_path, left, [1e-3] * 8, batch=4)
    assert len(set(config.recompute_ratio)) > 1, "parts in flight for longer recompute more"
    assert all(memory.total <= 60 * MB for memory in plan.rank_memory())
    assert config.pipeline(2, 4) == plan.pipeline


def test_depths_hide_the_transfers_of_the_links_that_the_json_names(tmp_path: Path) -> None:
    block = {"stage_to_depth_map": "auto", "link_bandwidth": 1e18}
    assert settle(tmp_path, block, [1e-3] * 6)[0].stage_to_depth_map == (1, 0)
    config, plan = settle(tmp_path, {**block, "link_bandwidth": 1e8}, [1e-3] * 6)  # 1 ms for the 0.1 MB between stages
    assert config.stage_to_depth_map == (2, 0)
    assert plan.pace_s == pytest.approx(9e-3)
    with pytest.raises(VPipeConfigError, match="link_bandwidth: got null; stage_to_depth_map is 'auto'"):
        settle(tmp_path, {"stage_to_depth_map": "auto"}, [1e-3] * 6)


def test_a_profile_in_another_type_is_refused(tmp_path: Path) -> None:
    block = {"partition": "profile", "profile": profile_file(tmp_path, [1e-3] * 4)}
    ds_config = {"gradient_accumulation_steps": 1, "bf16": {"enabled": True}, "vpipe": block}
    with pytest.raises(VPipeConfigError, match="it is of float32 and the JSON trains in bfloat16"):
        planned(block, ds_config, [2, 2])


def test_a_profile_of_other_micro_batches_is_refused(tmp_path: Path) -> None:
    block = {"partition": "profile", "profile": profile_file(tmp_path, [1e-3] * 4)}
    ds_config = {"train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": 1, "vpipe": block}
    with pytest.raises(VPipeConfigError, match="it is of micro-batches of 2; allowed: a profile of micro-batches of 3"):
        planned(block, ds_config, [2, 2])


def test_a_profile_of_another_model_is_refused(tmp_path: Path) -> None:
    block = {**ALL, "profile": profile_file(tmp_path, [1e-3] * 6)}
    with pytest.raises(VPipeConfigError, match=r"^profile: got .*it has 6 layers but the model has 8"):
        planned(block, {"vpipe": block}, [4, 4])


@pytest.mark.parametrize(("key", "word"), list(ALL.items())[:3])
def test_a_profile_is_needed(key: str, word: str) -> None:
    with pytest.raises(VPipeConfigError, match=rf"vpipe.profile: got null; {key} is .*python -m ds_vpipe profile"):
        VPipeConfig.parse({key: word})


def train(ds_config: dict[str, Any]) -> dict[str, Any]:
    engine = cases.engine(ds_config, 2)
    iterator = toy.data()
    losses = [float(engine.train_batch(iterator)) for _ in range(4)]
    settled = engine.vpipe_config.partition, engine.vpipe_config.recompute_ratio, engine.vpipe_config.stage_to_depth_map
    plan = None if engine.plan is None else engine.plan.to_json()
    report = {"losses": losses, "pipeline": engine.pipeline, "settled": settled, "plan": plan}
    engine.destroy()
    return report


@pytest.mark.mp
def test_an_engine_runs_by_the_plan(worlds: Worlds, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same training as with the plan's numbers in the JSON; the command prints the same plan."""
    profile = profile_file(tmp_path, [5e-3] + [1e-3] * 9)
    sgd = {"type": "SGD", "params": {"lr": 0.1}}
    ds_config = cases.config(1, sgd, {**ALL, "profile": profile})
    reports = worlds.run(2, train, ds_config)
    pipeline = reports[0]["pipeline"]
    assert pipeline.partition == (3, 7)
    assert reports[0]["settled"] == (pipeline.partition, pipeline.recompute_ratio, pipeline.depths)
    (tmp_path / "ds_config.json").write_text(json.dumps(ds_config), encoding="utf-8")
    assert main(["plan", str(tmp_path / "ds_config.json"), "--stages", "2", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    for report in reports:
        assert json.loads(json.dumps(report["plan"])) == {key: printed[key] for key in report["plan"]}
    numbers = {"partition": list(pipeline.partition), "stage_to_depth_map": list(pipeline.depths)}
    for report in worlds.run(2, train, cases.config(1, sgd, numbers)):
        assert report["losses"] == reports[0]["losses"]
        assert report["plan"] is None


def test_parameters_are_counted_as_the_engine_counts_them(tmp_path: Path) -> None:
    """Those that are trained: a plan for adapters on a frozen model is of the split that trains."""
    sizes = [(9, 9), (3, 1), (3, 1), (3, 1), (9, 9)]  # all, and frozen ones
    layers = tuple(
        LayerProfile(f"L{i}", 1e-3, 2e-3, p * MB, MB, MB, frozen_bytes=f * MB) for i, (p, f) in enumerate(sizes)
    )
    pipeline = VPipeConfig.parse({}).pipeline(3, 1)
    profile = ModelProfile(layers, MB, 4, "cpu", "float32", "measured")
    assert configured_partition(VPipeConfig.parse({"partition": "parameters"}), pipeline, profile) == (2, 1, 2)


def test_parts_without_a_partition_are_even(tmp_path: Path) -> None:
    """In engine and commands alike: no module was built with as many parts."""
    block = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}
    config, plan = settle(tmp_path, {**block, "recompute_ratio": "auto"}, [1e-3] * 6)
    assert config.partition == plan.pipeline.partition == (2, 2, 1, 1)
    layers = tuple(LayerProfile(f"L{i}", 1e-3, 2e-3, size * MB, MB, MB) for i, size in enumerate([9, 1, 1, 1, 1, 1]))
    config = VPipeConfig.parse(block)
    profile = ModelProfile(layers, MB, 4, "cpu", "float32", "measured")
    assert configured_partition(config, config.pipeline(2, 1), profile) == (2, 2, 1, 1)
