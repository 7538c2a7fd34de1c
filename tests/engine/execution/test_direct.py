"""The engine in the place of DeepSpeed's, without ``ds_vpipe.initialize``, and activation checkpointing by interval."""

from __future__ import annotations

from typing import Any

import cases
import pytest
import torch
import toy
from torch import nn
from worlds import CaseFailed, Worlds

pytestmark = pytest.mark.mp

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}
BATCHES = 6
BLOCK = {"partition": [4, 6], "recompute_ratio": 0.5}


def run(trained: Any) -> dict[str, Any]:
    """Losses and final parameters, and the kind of engine."""
    iterator = toy.data()
    losses = [float(trained.train_batch(iterator)) for _ in range(BATCHES)]
    evaluation = float(trained.eval_batch(toy.data(start=70)))
    kind = type(trained).__name__, getattr(getattr(trained, "stage", None), "asynchronous", None)
    report = {"losses": [*losses, evaluation], "parameters": cases.parameters(trained), "kind": kind}
    cases.end(trained)
    return report


def in_its_place(ds_config: dict[str, Any], **module: Any) -> dict[str, Any]:
    """Train with an engine that ``deepspeed.initialize`` has built from our class."""
    import deepspeed

    import ds_vpipe

    net = deepspeed.pipe.PipelineModule(
        toy.layer_specs(0.2), num_stages=2, loss_fn=nn.CrossEntropyLoss(), partition_method="uniform", **module
    )
    stock, deepspeed.PipelineEngine = deepspeed.PipelineEngine, ds_vpipe.VPipeEngine
    try:
        torch.manual_seed(5)
        return run(deepspeed.initialize(model=net, config=ds_config, model_parameters=list(net.parameters()))[0])
    finally:
        deepspeed.PipelineEngine = stock


def initialized(ds_config: dict[str, Any]) -> dict[str, Any]:
    """Train with what ``ds_vpipe.initialize`` builds."""
    torch.manual_seed(5)
    return run(cases.engine(ds_config, 2, dropout=0.2))


def all_ways() -> dict[str, Any]:
    plain, block = cases.config(2, ADAMW, None), cases.config(2, ADAMW, BLOCK)
    return {
        "stock": initialized(plain),
        "no block": in_its_place(plain),
        "initialize": initialized(block),
        "block": in_its_place(block),
    }


def test_engine_in_the_place_of_deepspeeds(worlds: Worlds) -> None:
    for reports in worlds.run(2, all_ways):
        kinds = {way: report["kind"] for way, report in reports.items()}
        assert kinds["stock"] == ("PipelineEngine", None)
        assert kinds["no block"] == ("VPipeEngine", False)
        assert kinds["block"] == kinds["initialize"] == ("VPipeEngine", True)
        for ours, wanted in (("no block", "stock"), ("block", "initialize")):
            assert reports[ours]["losses"] == reports[wanted]["losses"], ours
            assert reports[ours]["parameters"].keys() == reports[wanted]["parameters"].keys(), ours
            for name, value in reports[wanted]["parameters"].items():
                assert torch.equal(reports[ours]["parameters"][name], value), f"{ours}: {name}"


def test_engine_in_the_place_of_deepspeeds_refuses_alike(worlds: Worlds) -> None:
    with pytest.raises(CaseFailed) as failure:
        worlds.run(2, in_its_place, cases.config(2, ADAMW, None, zero_optimization={"stage": 2}))
    for line in failure.value.errors.values():
        assert line.startswith("VPipeConfigError: zero_optimization.stage: got 2")


def checkpointed() -> list[dict[str, Any]]:
    """Synchronous and asynchronous, each without and with checkpointing by interval and its two functions."""
    reports = []
    for mode in ("bsp", "asp"):
        for pipeline in ({}, {"activation_checkpoint_interval": 2}):
            ds_config = cases.config(2, ADAMW, {"sync_mode": mode}, pipeline=pipeline)
            torch.manual_seed(5)
            reports.append(run(cases.engine(ds_config, 2, dropout=0.2)))
    return reports


def test_checkpointing_by_interval_loses_no_gradient_of_integers(worlds: Worlds) -> None:
    for bsp, bsp_checkpointed, asp, asp_checkpointed in worlds.run(2, checkpointed):
        for plain, other in ((bsp, bsp_checkpointed), (asp, asp_checkpointed)):
            assert plain["losses"] == other["losses"]
            assert all(torch.equal(other["parameters"][name], value) for name, value in plain["parameters"].items())
