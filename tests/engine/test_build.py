"""What ranks agree on before they build an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import cases
import pytest
import torch
import toy
from torch import nn
from worlds import Worlds

from ds_vpipe.config.block import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.engine import build
from ds_vpipe.errors import VPipeConfigError


@pytest.mark.parametrize(
    ("name", "mine", "other", "budget"), [("cuda", 80, 40, 36), ("cuda", 40, 80, 36), ("cpu", 9, 9, None)]
)
def test_all_ranks_plan_for_the_smallest_card(
    monkeypatch: pytest.MonkeyPatch, name: str, mine: int, other: int, budget: int | None
) -> None:
    accelerator = SimpleNamespace(device_name=lambda: name, total_memory=lambda: mine)
    monkeypatch.setattr(build, "get_accelerator", lambda: accelerator)
    consensus = SimpleNamespace(lowest=lambda value, what: min(value, int(0.9 * other)))
    found = build._devices(VPipeConfig(), DeepSpeedJson({}), 1, consensus)  # type: ignore[arg-type]
    assert (found.budget, found.host_transfers) == (budget, name == "cpu")


class Turns(nn.Module):
    """Multiplies by complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(toy.CLASSES, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.turn).abs()


def with_complex_parameters(runs: list[tuple[int, dict[str, Any]]]) -> list[str]:
    """Lines of engines with complex parameters on the last of so many stages."""
    from deepspeed.pipe import LayerSpec

    lines = []
    for stages, extra in runs:
        ds_config = cases.config(1, {"type": "AdamW", "params": {"lr": 0.1}}, {"partition": "uniform"}) | extra
        try:
            engine = cases.engine(ds_config, stages, specs=lambda: [*toy.layer_specs(), LayerSpec(Turns)])
            engine.destroy()
            lines.append("")
        except VPipeConfigError as error:
            lines.append(str(error))
        cases.close_groups()
    return lines


def next_to_the_script(runs: list[dict[str, Any]]) -> list[str]:
    """Types of the optimizers of engines that are given AdamW; the JSON has what is refused."""
    import deepspeed
    import loops

    import ds_vpipe

    def adamw(module: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(module.parameters(), lr=0.1)

    found = []
    for extra in runs:
        ds_config = cases.config(1, {}, {"partition": "uniform"}) | extra
        net = deepspeed.pipe.PipelineModule(
            toy.layer_specs(), num_stages=2, loss_fn=nn.CrossEntropyLoss(), partition_method="uniform"
        )
        by_pipeline = ds_vpipe.initialize(model=net, config=ds_config, optimizer=adamw(net))[0]
        for engine in (by_pipeline, loops.engine(ds_config, 2, optimizer=adamw)):
            found.append(type(engine.basic_optimizer).__name__)
            engine.destroy()
            cases.close_groups()
    return found


@pytest.mark.mp
def test_the_jsons_optimizer_counts_only_where_it_is_used(worlds: Worlds) -> None:
    runs: list[dict[str, Any]] = [
        {"optimizer": {"type": "SOAP", "params": {"lr": 0.1}}, "zero_optimization": {"stage": 1}},
        {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}},
    ]
    assert worlds.run(2, next_to_the_script, runs) == [["AdamW"] * 4] * 2


@pytest.mark.mp
def test_complex_parameters_are_refused_where_their_real_parts_alone_would_be_trained(worlds: Worlds) -> None:
    runs = [
        (2, {"zero_optimization": {"stage": 1}}),
        (2, {"bf16": {"enabled": True}}),
        (2, {"fp16": {"enabled": True}}),
        (1, {}),
        (2, {"optimizer": {"type": "SOAP", "params": {"lr": 0.1}}}),
    ]
    starts = [
        "zero_optimization.stage: got 1; allowed: 0 for a model",
        'DeepSpeed JSON: got "training in bfloat16"; allowed: training in float32 for a model',
        'DeepSpeed JSON: got "training in float16"; allowed: training in float32 for a model',
        "replicas: got 2; allowed: 1 for a model",
        'optimizer.type: got "SOAP"; allowed: AdamW for a model',
    ]
    for lines in worlds.run(2, with_complex_parameters, [*runs, (2, {})]):
        assert lines.pop() == ""
        for line, start in zip(lines, starts, strict=True):
            assert line.startswith(start), line
            assert line.endswith("let layers have real parameters and use torch.view_as_complex()")
