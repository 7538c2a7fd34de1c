"""What ranks agree on before they build an engine."""

from __future__ import annotations

import contextlib
import io
import time
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import toy
from torch import nn
from worlds import Worlds

from ds_vpipe.config.block import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.engine import build
from ds_vpipe.errors import PipelinePeerError, VPipeConfigError


@pytest.mark.parametrize(
    ("name", "mine", "other", "budget"), [("cuda", 80, 40, 36), ("cuda", 40, 80, 36), ("cpu", 9, 9, None)]
)
def test_all_ranks_plan_for_the_smallest_card(
    monkeypatch: pytest.MonkeyPatch, name: str, mine: int, other: int, budget: int | None
) -> None:
    accelerator = SimpleNamespace(device_name=lambda: name, total_memory=lambda: mine)
    monkeypatch.setattr(build, "get_accelerator", lambda: accelerator)
    everyone = SimpleNamespace(minimum=lambda value, what: min(value, int(0.9 * other)))
    consensus = SimpleNamespace(everyone=everyone)
    found = build._devices(VPipeConfig(), DeepSpeedJson({}), 1, consensus)  # type: ignore[arg-type]
    assert (found.budget, found.host_transfers) == (budget, name == "cpu")


class Turns(nn.Module):
    """Multiplies by numbers of a type, such as complex ones."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(toy.CLASSES, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.turn).abs()


def with_parameters_in(dtype: torch.dtype, runs: list[tuple[int, dict[str, Any]]]) -> list[str]:
    """Lines of engines with parameters of a type on the last of so many stages."""
    from deepspeed.pipe import LayerSpec

    lines = []
    for stages, extra in runs:
        ds_config = cases.config(1, {"type": "AdamW", "params": {"lr": 0.1}}, {"partition": "uniform"}) | extra
        try:
            engine = cases.engine(ds_config, stages, specs=lambda: [*toy.layer_specs(), LayerSpec(Turns, dtype)])
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


def with_an_interval(blocks: list[dict[str, Any]]) -> list[str]:
    """Lines of engines of a module that recomputes by an interval of its own."""
    import deepspeed

    import ds_vpipe

    lines = []
    for block in blocks:
        net = deepspeed.pipe.PipelineModule(
            toy.layer_specs(), num_stages=1, loss_fn=nn.CrossEntropyLoss(), activation_checkpoint_interval=1
        )
        ds_config = cases.config(1, {"type": "SGD", "params": {"lr": 0.1}}, block)
        with pytest.raises(VPipeConfigError) as refused:
            ds_vpipe.initialize(model=net, config=ds_config)
        lines.append(str(refused.value))
        cases.close_groups()
    return lines


def test_an_interval_of_the_modules_own_is_refused_next_to_what_it_overrides(worlds: Worlds) -> None:
    planned = {"partition": "profile", "profile": "layers.json"}
    blocks: list[dict[str, Any]] = [{"recompute_ratio": 0.5}, {"swap_ratio": [0.5]}, planned]
    (lines,) = worlds.run(1, with_an_interval, blocks)
    for line, key in zip(
        lines, ("vpipe.recompute_ratio", "vpipe.swap_ratio", "what vpipe leaves to the planner"), strict=True
    ):
        assert line == (
            f"PipelineModule(activation_checkpoint_interval): got 1, allowed next to {key} is 0; leave it out and use "
            f"vpipe.recompute_ratio"
        )


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
    for lines in worlds.run(2, with_parameters_in, torch.complex64, [*runs, (2, {})]):
        assert lines.pop() == ""
        for line, start in zip(lines, starts, strict=True):
            assert line.startswith(start), line
            assert line.endswith("let layers have real parameters and use torch.view_as_complex()")


@pytest.mark.mp
def test_parameters_in_float64_are_refused_where_deepspeed_would_make_others_of_them(worlds: Worlds) -> None:
    zero = {"zero_optimization": {"stage": 1}}
    starts = ["zero_optimization.stage: got 1; allowed: 0 for a model", "replicas: got 2; allowed: 1 for a model"]
    for lines in worlds.run(2, with_parameters_in, torch.float64, [(2, zero), (1, {}), (2, {})]):
        assert lines.pop() == ""
        for line, start in zip(lines, starts, strict=True):
            assert line.startswith(start), line
            assert line.endswith("let layers have parameters in float32 and cast them")


def with_nothing_to_train(plain: bool) -> list[str]:
    """Lines of engines of two stages that are given no parameters, frozen ones, and those of one stage."""
    import deepspeed
    import loops

    import ds_vpipe

    lines = []
    for given in ("none", "frozen", "one stage's"):
        if plain:
            model: Any = loops.Whole()
        else:
            model = deepspeed.pipe.PipelineModule(
                toy.layer_specs(), num_stages=2, loss_fn=nn.CrossEntropyLoss(), partition_method="uniform"
            )
        for parameter in model.parameters() if given == "frozen" else ():
            parameter.requires_grad_(False)
        mine = list(model.parameters())
        if given == "one stage's":
            mine = mine[:1] if plain or torch.distributed.get_rank() == 0 else []
        ds_config = cases.config(1, {"type": "SGD", "params": {"lr": 0.1}}, {}, pipeline={"stages": 2})
        try:
            parameters = [] if given == "none" else mine
            engine = ds_vpipe.initialize(model=model, config=ds_config, model_parameters=parameters)[0]
            if plain:
                engine.backward(engine(*toy.micro_batch(0)))
            else:
                engine.eval_batch(toy.data())
                engine.train_batch(toy.data())
            engine.destroy()
            lines.append("")
        except VPipeConfigError as error:
            lines.append(str(error))
        cases.close_groups()
    return lines


@pytest.mark.mp
@pytest.mark.parametrize("plain", [False, True])
def test_a_model_of_which_nothing_is_trained_is_refused(worlds: Worlds, plain: bool) -> None:
    for none, frozen, one_stages in worlds.run(2, with_nothing_to_train, plain):
        assert none == frozen
        assert none.startswith("optimizer: got no parameter that is trained, on any stage; allowed is one at least")
        assert one_stages == ""


def failing_engine(error: Exception, other: Exception) -> str:
    """The line of an engine that DeepSpeed cannot make on the last rank, beside one whose collective breaks."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    failed = torch.distributed.get_rank() == 1

    def fail(*_: Any, **__: Any) -> None:
        if not failed:
            time.sleep(1)
        raise error if failed else other

    with mock.patch.object(PipelineEngine, "__init__", fail), pytest.raises(Exception) as found:  # noqa: PT011
        cases.engine(cases.config(1, {"type": "SGD", "params": {"lr": 0.1}}, {}), 2)
    return f"{found.type.__name__}: {found.value}"


@pytest.mark.mp
def test_what_deepspeed_cannot_make_on_one_rank_is_told_on_the_others(worlds: Worlds) -> None:
    error = ModuleNotFoundError("No module named 'tensorboard'")
    lost = "[pair.cc:553] Connection closed by peer"
    first, last = worlds.run(2, failing_engine, error, RuntimeError(lost))
    assert last == f"ModuleNotFoundError: {error}"
    assert first == (
        "PipelinePeerError: stage 0 (rank 0) stopped while it made its engine: stage 1 (rank 1) failed while it made "
        f"its engine: {last}"
    )
    lost = "[unbound_buffer.cc:84] Timed out waiting 1000ms for recv operation, Gloo connectFullMesh: pair closure"
    assert worlds.run(2, failing_engine, error, RuntimeError(f"gloo: {lost}"))[0].startswith("PipelinePeerError: ")
    first, last = worlds.run(2, failing_engine, error, ValueError("of its own"))
    assert (first, last) == ("ValueError: of its own", f"ModuleNotFoundError: {error}")


class Unreadable(nn.Identity):
    """A layer that wants a file which one rank does not have."""

    def __init__(self) -> None:
        if torch.distributed.get_rank() == 1:
            raise FileNotFoundError(2, "No such file or directory", "vocabulary.txt")
        super().__init__()


def moving_to_the_last_stage() -> str:
    """The line of a rank whose block moves a layer to a stage that cannot make it."""
    import deepspeed

    import ds_vpipe

    layers = [nn.Linear(2, 2), deepspeed.pipe.LayerSpec(Unreadable), nn.Linear(2, 2), nn.Linear(2, 2)]
    module = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    ds_config = cases.config(1, {"type": "SGD", "params": {"lr": 0.1}}, {"partition": [1, 3], "peer_timeout_s": 50})
    with pytest.raises((PipelinePeerError, FileNotFoundError)) as found:
        ds_vpipe.initialize(model=module, config=ds_config)
    return f"{found.type.__name__}: {found.value}"


@pytest.mark.mp
def test_a_layer_that_one_stage_cannot_make_is_told_on_the_others(worlds: Worlds) -> None:
    begin = time.monotonic()
    first, last = worlds.run(2, moving_to_the_last_stage)
    assert last == "FileNotFoundError: [Errno 2] No such file or directory: 'vocabulary.txt'"
    assert first.startswith("PipelinePeerError: ")
    assert "stage 1 (rank 1) failed while it made its layers: FileNotFoundError: [Errno 2]" in first
    assert time.monotonic() - begin < 30


def starting(blocks: list[dict[str, Any]]) -> list[list[str]]:
    """What this rank prints at the start about the layers of stages."""
    found = []
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as said:
            cases.engine(cases.config(1, {"type": "AdamW", "params": {"lr": 0.1}}, block), 2).destroy()
        found.append([line for line in said.getvalue().splitlines() if "ds_vpipe: stages have" in line])
    return found


@pytest.mark.mp
def test_a_split_other_than_deepspeeds_is_said_to_hold(worlds: Worlds) -> None:
    """DeepSpeed prints the split that a module is built with."""
    line = "ds_vpipe: stages have the layers [4, 6], no longer [5, 5] as the module was built"
    first, second = worlds.run(2, starting, [{"partition": [4, 6]}, {"partition": [5, 5]}])
    assert first == [[line], []]
    assert second == [[], []]


def making_none(failed: bool) -> str:
    """The line of a rank that makes an engine beside one whose script ends after it has made the module."""
    import deepspeed

    import ds_vpipe
    from ds_vpipe.run import pipelines

    def module() -> Any:
        return deepspeed.pipe.PipelineModule(toy.layer_specs(), num_stages=2, loss_fn=nn.CrossEntropyLoss())

    if torch.distributed.get_rank() == 1:
        with suppress(KeyError), pipelines():
            module()
            if failed:
                raise KeyError("no data")
        return ""
    ds_config = cases.config(1, {"type": "SGD", "params": {"lr": 0.1}}, {"peer_timeout_s": 50})
    with pytest.raises(PipelinePeerError) as lost:
        ds_vpipe.initialize(model=module(), config=ds_config)
    return str(lost.value)


@pytest.mark.mp
@pytest.mark.parametrize(
    ("failed", "why"), [(True, "its script failed: KeyError: 'no data'"), (False, "its script has ended")]
)
def test_a_rank_that_makes_no_engine_is_not_waited_for(worlds: Worlds, failed: bool, why: str) -> None:
    begin = time.monotonic()
    line, _ = worlds.run(2, making_none, failed)
    assert line.startswith("stage 0 (rank 0) stopped waiting for all ranks to compare configurations: ")
    assert line.endswith(f": rank 1 makes no engine: {why}")
    assert time.monotonic() - begin < 30
