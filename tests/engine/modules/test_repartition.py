"""Layers move between stages with their weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import toy
from torch import nn
from worlds import Worlds

pytestmark = pytest.mark.mp

WIDTH = 4
MOVES = [(2, (2, 6)), (2, (7, 1)), (4, (1, 1, 4, 2)), (4, (4, 1, 2, 1)), (4, (1, 1, 1, 5))]


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


class Counting(nn.Module):
    """Has a buffer besides parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("offset", torch.zeros(WIDTH, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + self.offset.to(x.dtype)


def layers() -> list[Any]:
    """Specifications, modules, functions, and a tie that both parts of the moves leave on one stage."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    return [
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        double,
        TiedLayerSpec("tied", nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec("tied", nn.Linear, WIDTH, WIDTH),
        nn.Linear(WIDTH, WIDTH, bias=False),
        double,
        LayerSpec(Counting),
        LayerSpec(nn.Linear, WIDTH, 3),
    ]


def pipeline(stages: int, method: Any = "uniform", kind: str = "PipelineModule", specs: Any = None) -> Any:
    """A module whose weights are all different and not those that the specifications make."""
    import deepspeed

    import ds_vpipe

    cls = ds_vpipe.VPipeModule if kind == "VPipeModule" else deepspeed.pipe.PipelineModule
    module = cls(layers() if specs is None else specs, num_stages=stages, partition_method=method)
    with torch.no_grad():
        for number, (name, tensor) in enumerate(sorted(module.state_dict().items())):
            generator = torch.Generator().manual_seed(1000 * module.stage_id + number)
            if tensor.is_floating_point():
                tensor.copy_(torch.rand(tensor.shape, generator=generator))
            assert name
    return module


def gather(value: Any) -> list[Any]:
    import torch.distributed as dist

    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def states(module: Any) -> dict[int, dict[str, torch.Tensor]]:
    """The state of every layer of the model, by number."""
    start = module.parts[module.stage_id]
    own = {
        start + position: {name: tensor.clone() for name, tensor in layer.state_dict().items()}
        for position, layer in enumerate(module.forward_funcs)
        if isinstance(layer, nn.Module)
    }
    for index in range(start, module.parts[module.stage_id + 1]):
        if hasattr(module._layer_specs[index], "key"):
            own[index] = {n: t.clone() for n, t in module.tied_modules["tied"].state_dict().items()}
    return {index: state for part in gather(own) for index, state in part.items()}


def outputs(module: Any, value: torch.Tensor) -> torch.Tensor:
    """Evaluate the model, stage after stage."""
    module.eval()
    for stage in range(module.num_stages):
        with torch.no_grad():
            mine = module(value) if stage == module.stage_id else None
        value = next(part for part in gather(mine) if part is not None)
    return value


def move(stages: int, counts: Sequence[int], method: Any = "uniform") -> None:
    from ds_vpipe.engine.modules.partitioned import repartition

    module = pipeline(stages, method)
    value = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    before, wanted = states(module), outputs(module, value)
    assert repartition(module, counts)
    edges = [sum(counts[:stage]) for stage in range(stages + 1)]
    assert list(module.parts) == edges
    assert len(module.forward_funcs) == counts[module.stage_id]
    after = states(module)
    assert sorted(after) == sorted(before) == [0, 2, 3, 4, 6, 7]
    for index, state in before.items():
        assert state.keys() == after[index].keys()
        for name, tensor in state.items():
            assert after[index][name].dtype == tensor.dtype
            assert torch.equal(after[index][name], tensor), f"layer {index}: {name}"
    assert torch.equal(outputs(module, value), wanted)
    own = {id(p) for layer in module.forward_funcs if isinstance(layer, nn.Module) for p in layer.parameters()}
    own |= {id(p) for tied in module.tied_modules.values() for p in tied.parameters()}
    assert {id(p) for p in module.parameters()} == own, "parameters of layers that have gone"
    assert repartition(module, counts) is False


@pytest.mark.parametrize(("stages", "counts"), MOVES)
def test_weights_go_with_their_layers(worlds: Worlds, stages: int, counts: tuple[int, ...]) -> None:
    worlds.run(stages, move, stages, counts)


def test_tied_layers_part_and_stay_equal(worlds: Worlds) -> None:
    worlds.run(2, move, 2, (3, 5))


def move_twice(counts: Sequence[int], again: Sequence[int]) -> None:
    from ds_vpipe.engine.modules.partitioned import repartition

    module = pipeline(2)
    before = states(module)
    repartition(module, counts)
    repartition(module, again)
    after = states(module)
    assert all(torch.equal(after[i][n], t) for i, state in before.items() for n, t in state.items())


def test_there_and_back(worlds: Worlds) -> None:
    worlds.run(2, move_twice, (7, 1), (4, 4))


def built_with_a_list(counts: list[int]) -> list[int]:
    module = pipeline(2, counts, "VPipeModule")
    assert len(module.forward_funcs) == counts[module.stage_id]
    return list(module.parts)


def test_vpipe_module_takes_a_list(worlds: Worlds) -> None:
    assert worlds.run(2, built_with_a_list, [3, 5]) == [[0, 3, 8]] * 2
    assert worlds.run(2, pipeline_parts, "parameters") == [[0, 3, 8]] * 2


def pipeline_parts(method: str) -> list[int]:
    return list(pipeline(2, method, "VPipeModule").parts)


@pytest.mark.parametrize(
    ("counts", "words"),
    [([3, 4], ["sum to 7", "8"]), ([2, 2, 4], ["3 counts"]), ([8, 0], [">= 1"]), ("best", ['"best"'])],
)
def test_wrong_lists_are_refused_on_every_rank(worlds: Worlds, counts: Any, words: list[str]) -> None:
    for outcome in worlds.outcomes(2, built_with_a_list, counts):
        assert outcome.text.startswith("VPipeConfigError: vpipe.partition: got ")
        assert "\n" not in outcome.text
        assert [word for word in words if word not in outcome.text] == []


# Through initialize()

SGD = {"type": "SGD", "params": {"lr": 0.1}}


def initialized(counts: list[int], given: str, **block: Any) -> list[Any]:
    """What becomes of arguments that name parameters of the old split; the module is built with 5, 5."""
    import deepspeed

    import ds_vpipe

    module = deepspeed.pipe.PipelineModule(
        toy.layer_specs(), num_stages=2, partition_method="uniform", loss_fn=nn.CrossEntropyLoss()
    )
    parameters = [p for p in module.parameters() if p.requires_grad]
    ds_config = cases.config(1, {} if given.startswith("optimizer") else SGD, {"partition": counts, **block})
    if given.startswith("optimizer"):
        del ds_config["optimizer"]
    choices: dict[str, dict[str, Any]] = {
        "nothing": {},
        "list": {"model_parameters": parameters},
        "iterator": {"model_parameters": iter(parameters)},
        "some": {"model_parameters": parameters[1:]},
        "groups": {"model_parameters": [{"params": parameters, "lr": 0.3}]},
        "optimizer": {"optimizer": torch.optim.SGD(parameters, lr=0.1)},
        "optimizer function": {"optimizer": lambda trained: torch.optim.SGD(trained, lr=0.1)},
    }
    arguments = choices[given]
    if given == "optimizer function":
        arguments["model_parameters"] = parameters
    engine = ds_vpipe.initialize(model=module, config=ds_config, **arguments)[0]
    trained = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for p in engine.module.parameters()}
    losses = [float(engine.train_batch(toy.data())) for _ in range(2)]
    return [list(engine.module.parts), losses]


@pytest.mark.parametrize("given", ["nothing", "list", "iterator", "optimizer function"])
def test_parameters_are_those_of_the_new_split(worlds: Worlds, given: str) -> None:
    first, second = worlds.run(2, initialized, [3, 7], given)
    assert first == second
    assert first[0] == [0, 3, 10]


@pytest.mark.parametrize("given", ["groups", "optimizer"])
def test_any_parameters_will_do_where_no_layer_moves(worlds: Worlds, given: str) -> None:
    assert worlds.run(2, initialized, [5, 5], given)[0][0] == [0, 5, 10]


@pytest.mark.parametrize(
    ("given", "words"),
    [("optimizer", "the optimizer given"), ("some", "model_parameters"), ("groups", "model_parameters")],
)
def test_parameters_of_the_old_split_are_refused(worlds: Worlds, given: str, words: str) -> None:
    for outcome in worlds.outcomes(2, initialized, [3, 7], given):
        assert outcome.text.startswith("VPipeConfigError: vpipe.partition: got [3, 7], ")
        assert f"moves layers between stages, but {words}" in outcome.text
        assert "\n" not in outcome.text


def test_virtual_stages_are_named_in_refusals(worlds: Worlds) -> None:
    block = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}
    for outcome in worlds.outcomes(2, initialized, [3, 2, 3, 2], "optimizer", **block):
        assert outcome.text.startswith("VPipeConfigError: vpipe.virtual_stages: got 2, so [3, 2, 3, 2], which moves")
        assert "leave virtual_stages out, name the optimizer in the DeepSpeed JSON, or pass a function" in outcome.text


def with_another_schedule() -> list[str]:
    from deepspeed.runtime.pipe import schedule

    class ZeroBubble(schedule.TrainSchedule):
        pass

    with (
        mock.patch.object(schedule, "TrainSchedule", ZeroBubble),
        mock.patch("ds_vpipe.engine.build.logger.warning") as said,
    ):
        initialized([5, 5], "nothing")
    return [call.args[0] for call in said.call_args_list]


def test_a_replaced_schedule_is_said_to_be_ignored(worlds: Worlds) -> None:
    first, second = worlds.run(2, with_another_schedule)
    (line,) = first
    assert "TrainSchedule was replaced by " in line
    assert "ZeroBubble, which is not used" in line
    assert second == []


@pytest.mark.parametrize("counts", [[3, 6], [10]])
def test_wrong_partition_in_the_json(worlds: Worlds, counts: list[int]) -> None:
    for outcome in worlds.outcomes(2, initialized, counts, "nothing"):
        assert outcome.text.startswith(f"VPipeConfigError: vpipe.partition: got {counts}")
        assert "\n" not in outcome.text


# Layers that were changed after they had been built


def move_changed(how: str) -> list[bool]:
    """Change layer 1, which then moves from the first stage to the second; returns its requires_grad there."""
    from deepspeed.pipe import LayerSpec

    from ds_vpipe.engine.modules.partitioned import repartition

    module = pipeline(2, specs=[LayerSpec(nn.Linear, WIDTH, WIDTH) for _ in range(4)])
    if module.stage_id == 0:
        layer = module.forward_funcs[1]
        if how == "frozen":
            layer.requires_grad_(False)
        elif how == "dtype":
            layer.bfloat16()
        else:
            layer.register_parameter("adapter", nn.Parameter(torch.ones(WIDTH)))
    repartition(module, (1, 3))
    return [p.requires_grad for p in module.forward_funcs[0].parameters()]


def test_a_frozen_layer_stays_frozen(worlds: Worlds) -> None:
    assert worlds.run(2, move_changed, "frozen") == [[True, True], [False, False]]


@pytest.mark.parametrize("how", ["dtype", "more"])
def test_a_layer_that_cannot_be_built_again_is_refused(worlds: Worlds, how: str) -> None:
    for outcome in worlds.outcomes(2, move_changed, how):
        assert outcome.text.startswith("VPipeConfigError: "), outcome.text
        assert "layer 1" in outcome.text
        assert "\n" not in outcome.text
