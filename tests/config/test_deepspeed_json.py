"""The reader of a DeepSpeed JSON says what DeepSpeed's own parsed config says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from deepspeed import comm
from deepspeed.runtime.config import DeepSpeedConfig

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import MICRO, STEPS, TOTAL, DeepSpeedJson, load_deepspeed_json
from ds_vpipe.config.unsupported import refuse_unsupported
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


ODD = [
    *(
        True,
        False,
        0,
        1,
        2,
        -1,
        10**30,
        1.0,
        0.0,
        0.5,
        float("nan"),
        float("inf"),
        None,
        [],
        {},
        [1],
        {"enabled": True},
    ),
    *("", "true", "T", "y", "Yes", "on", "1", "1.0", " 1", "+1", "1_0", "no", "off", "0", "f", "auto", "1" * 5000),
]
ZERO, FP16, BF16, AUTOCAST = "zero_optimization", "fp16", "bf16", "torch_autocast"
DATA, COMPILE, CHECKPOINT = "data_efficiency", "compile", "checkpoint"
READ: dict[str, tuple[Callable[[DeepSpeedJson], object], Callable[[Any], object]]] = {
    ZERO: (lambda ours: ours.zero_stage, lambda theirs: theirs.zero_optimization_stage),
    f"{ZERO}.stage": (lambda ours: ours.zero_stage, lambda theirs: theirs.zero_optimization_stage),
    f"{ZERO}.reduce_bucket_size": (
        lambda ours: ours.reduce_bucket,
        lambda theirs: theirs.zero_config.reduce_bucket_size,
    ),
    f"{ZERO}.cpu_offload": (
        lambda ours: ours.optimizer_offload is not None,
        lambda theirs: theirs.zero_config.offload_optimizer is not None,
    ),
    f"{ZERO}.compute_grad_norm": (
        lambda ours: ours.on(f"{ZERO}.compute_grad_norm", True),
        lambda theirs: theirs.zero_config.compute_grad_norm,
    ),
    f"{FP16}.enabled": (lambda ours: ours.dtype == "float16", lambda theirs: theirs.float16_config.enabled),
    f"{BF16}.enabled": (lambda ours: ours.dtype == "bfloat16", lambda theirs: theirs.bfloat16_config.enabled),
    f"{AUTOCAST}.enabled": (
        lambda ours: ours.is_set(f"{AUTOCAST}.enabled"),
        lambda theirs: bool(theirs.torch_autocast_enabled),
    ),
    f"{DATA}.enabled": (
        lambda ours: ours.is_set(f"{DATA}.enabled"),
        lambda theirs: bool(theirs.data_efficiency_enabled),
    ),
    f"{COMPILE}.deepcompile": (
        lambda ours: ours.on(f"{COMPILE}.deepcompile"),
        lambda theirs: theirs.compile_config.deepcompile,
    ),
    f"{CHECKPOINT}.use_node_local_storage": (
        lambda ours: ours.is_set(f"{CHECKPOINT}.use_node_local_storage"),
        lambda theirs: bool(theirs.use_node_local_storage),
    ),
    "managed_gradient_accumulation": (
        lambda ours: ours.is_set("managed_gradient_accumulation"),
        lambda theirs: bool(theirs.managed_gradient_accumulation),
    ),
    "tensor_parallel.autotp_size": (
        lambda ours: ours.whole("tensor_parallel.autotp_size"),
        lambda theirs: theirs.tensor_parallel_config.autotp_size,
    ),
    STEPS: (lambda ours: ours.micro_batches(1), lambda theirs: theirs.gradient_accumulation_steps),
}


@pytest.mark.parametrize("path", READ)
def test_what_deepspeed_accepts_is_read_alike(path: str) -> None:
    """Values of the wrong type: "y" has been fp16 for DeepSpeed and fp32 here."""
    ours, theirs = READ[path]
    for value in ODD:
        content: dict[str, Any] = {MICRO: 1}
        *parents, last = path.split(".")
        inner = content
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value
        try:
            wanted = theirs(DeepSpeedConfig(copy.deepcopy(content)))
        except Exception:
            wanted = None  # it refuses the value
        try:
            refuse_unsupported(DeepSpeedJson(content), VPipeConfig.parse({}), 2)
            found = ours(DeepSpeedJson(content))
        except VPipeConfigError:
            continue
        assert wanted is None or found == wanted, value


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


@pytest.mark.parametrize("content", ["", " \n"])
def test_an_empty_file_is_named(tmp_path: Path, content: str) -> None:
    """To Hjson, which DeepSpeed reads, it is an object without keys."""
    path = tmp_path / "ds.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(VPipeConfigError, match="it is not JSON: it is empty"):
        load_deepspeed_json(path)
