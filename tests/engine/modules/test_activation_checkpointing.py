"""DeepSpeed's activation checkpointing in a pipeline whose weights change while micro-batches are in flight."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import cases
import pytest
import torch
import toy
from test_features import SGD, STAGES, assert_same, build, train
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from worlds import Worlds

pytestmark = pytest.mark.mp


class Checkpointed(toy.Scale):
    """A layer that checkpoints itself, with DeepSpeed's reentrant function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import deepspeed

        return deepspeed.checkpointing.checkpoint(super().forward, x)


def note(calls: list[type], layer: nn.Module, inputs: Any) -> None:
    calls.append(type(layer))


def checkpointed() -> dict[str, dict[str, Any]]:
    import deepspeed
    from deepspeed.pipe import LayerSpec, PipelineModule

    block = {"partition_activations": True, "cpu_checkpointing": True, "synchronize_checkpoint_boundary": True}
    ds_config = cases.config(1, SGD, {}, activation_checkpointing=block)
    reports = {}
    for name in ("plain", "interval", "later", "configured", "own"):
        specs = toy.layer_specs(dropout=0.2)
        if name == "own":
            specs = [LayerSpec(Checkpointed, *s.module_args) if s.typename is toy.Scale else s for s in specs]
        torch.manual_seed(1234)
        interval = 2 if name in ("interval", "configured") else 0
        net = PipelineModule(
            specs, num_stages=STAGES, loss_fn=nn.CrossEntropyLoss(), activation_checkpoint_interval=interval
        )
        if name in ("configured", "own"):  # DeepSpeed reads the block where a script asks it to
            deepspeed.checkpointing.configure(None, deepspeed_config=ds_config)
        torch.manual_seed(1234)
        calls: list[type] = []
        hook = register_module_forward_pre_hook(partial(note, calls))
        engine = build(ds_config, net)
        if name == "later":
            net.set_checkpoint_interval(2)
        reports[name] = {**train(engine, toy.data(), 8), "calls": calls.count(toy.Scale)}
        hook.remove()
        deepspeed.checkpointing.configure(None, partition_activations=False, checkpoint_in_cpu=False, synchronize=False)
    return reports


def test_activation_checkpointing_keeps_versions_and_dropout(worlds: Worlds) -> None:
    ranks = worlds.run(STAGES, checkpointed)
    plain = [rank["plain"] for rank in ranks]
    for name in ("interval", "later", "configured", "own"):
        assert_same([rank[name] for rank in ranks], plain)
    for rank in ranks:
        for name in ("interval", "later"):  # layers run once more in backward passes
            assert rank[name]["calls"] > 1.5 * rank["plain"]["calls"] > 0, name


class Draws(nn.Linear):
    """A layer whose output depends on a draw that torch does not know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.random()


def drawn(mode: str, use_reentrant: bool) -> list[dict[str, Any]]:
    from deepspeed.pipe import LayerSpec, PipelineModule

    reports = []
    ds_config = cases.config(2, SGD, {"sync_mode": mode}, pipeline={"use_reentrant": use_reentrant})
    for interval in (0, 1):
        torch.manual_seed(1234)
        specs = [*toy.layer_specs()[:-1], LayerSpec(Draws, toy.HIDDEN, toy.HIDDEN), toy.layer_specs()[-1]]
        net = PipelineModule(
            specs, num_stages=STAGES, loss_fn=nn.CrossEntropyLoss(), activation_checkpoint_interval=interval
        )
        random.seed(5)
        reports.append(train(build(ds_config, net), toy.data(), 2))
    return reports


@pytest.mark.parametrize("mode", ["asp", "bsp"])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_layer_draws_the_same_twice(worlds: Worlds, mode: str, use_reentrant: bool) -> None:
    """From Python's generator, which DeepSpeed does not put back."""
    ranks = worlds.run(STAGES, drawn, mode, use_reentrant)
    assert_same([checkpointed for _, checkpointed in ranks], [plain for plain, _ in ranks])


def cast(mode: str, precision: dict[str, Any]) -> list[dict[str, Any]]:
    from deepspeed.pipe import LayerSpec, PipelineModule

    reports = []
    for own, interval in ((False, 0), (False, 2), (True, 0)):
        torch.manual_seed(1234)
        specs = toy.layer_specs()
        if own:
            specs = [LayerSpec(Checkpointed, *s.module_args) if s.typename is toy.Scale else s for s in specs]
        net = PipelineModule(
            specs, num_stages=STAGES, loss_fn=nn.CrossEntropyLoss(), activation_checkpoint_interval=interval
        )
        reports.append(train(build(cases.config(2, SGD, {"sync_mode": mode}, **precision), net), toy.data(), 3))
    return reports


@pytest.mark.parametrize("mode", ["asp", "bsp"])
def test_checkpointed_layers_cast_the_same_twice(worlds: Worlds, mode: str) -> None:
    """DeepSpeed runs them again without autocast: in fp32, or in an error where types then differ."""
    ranks = worlds.run(STAGES, cast, mode, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}})
    uncast = worlds.run(STAGES, cast, mode, {})
    for plain, interval, own in ranks:
        assert_same([interval, own], [plain, plain])
    assert ranks[0][0]["losses"] != uncast[0][0]["losses"]
