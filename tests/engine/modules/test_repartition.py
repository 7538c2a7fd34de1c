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


class Line(nn.Linear):
    """A tied layer of another class than the first one, which DeepSpeed takes for both where they are together."""


def layers() -> list[Any]:
    """Specifications, modules, functions, and a tie that both parts of the moves leave on one stage."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    return [
        LayerSpec(nn.Linear, WIDTH, WIDTH),
        double,
        TiedLayerSpec("tied", nn.Linear, WIDTH, WIDTH),
        TiedLayerSpec("tied", Line, WIDTH, WIDTH),
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


def initialized(built: list[int], given: str, block: dict[str, Any]) -> tuple[Any, ...]:
    """What becomes of arguments that name parameters of the split that the module was ``built`` with."""
    import ds_vpipe
    from ds_vpipe.engine.checkpoint.parameter_states import stage_layout
    from ds_vpipe.engine.execution.movable_layers import unfit_layers

    whole = toy.built_layers()
    module = ds_vpipe.VPipeModule(
        whole if "whole" in given else toy.layer_specs(),
        num_stages=2,
        partition_method=built,
        loss_fn=nn.CrossEntropyLoss(),
    )
    named = module if "whole" not in given else nn.ModuleList(whole)
    names, parameters = zip(*named.named_parameters(), strict=True)
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in parameters if p.dim() < 2], "lr": 0.2},
    ]
    moved = [p for n, p in module.named_parameters() if n.split(".")[0] in ("3", "4", "9")]
    choices: dict[str, dict[str, Any]] = {
        "nothing": {},
        "list": {"model_parameters": list(parameters)},
        "whole": {"model_parameters": list(parameters)},
        "groups of the whole": {"model_parameters": groups},
        "optimizer of the whole": {"optimizer": lambda: torch.optim.SGD(groups, lr=0.1)},
        "names of the whole": {"optimizer": lambda: torch.optim.SGD(named.named_parameters(), lr=0.1)},
        "iterator": {"model_parameters": iter(parameters)},
        "some": {"model_parameters": [p for n, p in zip(names, parameters, strict=True) if "bias" not in n]},
        "groups": {"model_parameters": groups},
        "optimizer": {"optimizer": lambda: torch.optim.SGD(groups, lr=0.1)},
        "of names": {"optimizer": lambda: torch.optim.SGD(module.named_parameters(), lr=0.1)},
        "of a function": {"optimizer": lambda: lambda trained: torch.optim.SGD(trained, lr=0.1)},
        "used": {"optimizer": lambda: torch.optim.SGD(groups, lr=0.1, momentum=0.9)},
        "uneven": {"optimizer": lambda: torch.optim.SGD(groups if module.stage_id else parameters, lr=0.1)},
        "idle": {"optimizer": lambda: torch.optim.SGD(moved, lr=0.1)},
    }
    arguments = choices[given]
    ds_config = cases.config(1, SGD, block)
    if "optimizer" in arguments:
        del ds_config["optimizer"]
        arguments["optimizer"] = arguments["optimizer"]()
    if given == "used":
        groups[0]["params"][0].grad = torch.zeros_like(groups[0]["params"][0])
        arguments["optimizer"].step()
    engine = ds_vpipe.initialize(model=module, config=ds_config, **arguments)[0]
    for group in engine.optimizer.param_groups:
        assert len(group.get("param_names", group["params"])) == len(group["params"])
    stage_layout(engine)  # raises where a checkpoint would have no name for a parameter
    if "virtual_stages" not in block:
        assert unfit_layers(engine.module, engine.stage.built) == {}  # layers that have come here may move on
    iterator = toy.data()
    losses = [float(engine.train_batch(iterator)) for _ in range(4)]
    found = list(engine.module.parts), losses, cases.parameters(engine)
    cases.end(engine)
    return found


def built_both_ways(given: str) -> list[tuple[Any, ...]]:
    return [initialized(built, given, {"partition": [3, 7]}) for built in ([3, 7], [5, 5])]


@pytest.mark.parametrize(
    "given",
    [
        *("nothing", "list", "iterator", "some", "groups", "optimizer", "of names", "of a function"),
        *("whole", "groups of the whole", "optimizer of the whole", "names of the whole"),
    ],
)
def test_parameters_follow_their_layers(worlds: Worlds, given: str) -> None:
    """Training is that of a module that was built with the split, whatever trains it."""
    for wanted, found in worlds.run(2, built_both_ways, given):
        assert found[:2] == wanted[:2]
        assert found[0] == [0, 3, 10]
        assert all(torch.equal(value, wanted[2][name]) for name, value in found[2].items())


def in_the_log() -> list[float]:
    from deepspeed.comm import comm as ds_comm

    with mock.patch.multiple(ds_comm.comms_logger, enabled=True, prof_all=True):  # as comm.configure() has it
        losses: list[float] = initialized([5, 5], "nothing", {"partition": [3, 7]})[1]
    ds_comm.comms_logger.reset_data()
    return losses


def test_layers_move_where_communication_is_logged_already(worlds: Worlds) -> None:
    """DeepSpeed's log ends the process, with exit status 0, at an operation that it does not know."""
    logged, others = worlds.run(2, in_the_log), worlds.run(2, initialized, [5, 5], "nothing", {"partition": [3, 7]})
    assert logged == [losses for _, losses, _ in others]


def trained_by_a_function() -> None:
    import deepspeed

    import ds_vpipe

    factor = nn.Parameter(torch.ones(1))
    layers = [*toy.layer_specs(), lambda x: x * factor]
    module = deepspeed.pipe.PipelineModule(
        layers, num_stages=2, partition_method="uniform", loss_fn=nn.CrossEntropyLoss()
    )
    parameters = [*module.parameters(), factor]
    engine = ds_vpipe.initialize(model=module, config=cases.config(1, SGD, {}), model_parameters=parameters)[0]
    iterator = toy.data()
    for _ in range(2):  # the last stage has sent its gradients before it makes an update
        engine.train_batch(iterator)


def test_a_parameter_of_a_function_is_refused_with_its_first_gradient(worlds: Worlds) -> None:
    """And not when it is saved, after hours: no checkpoint has a name for it."""
    line = (
        'got "a parameter of shape [1] that has a gradient and is in no layer of this stage"; allowed: parameters of '
    )
    for outcome in worlds.outcomes(2, trained_by_a_function):
        assert line in outcome.text


def in_virtual_stages() -> list[Any]:
    block = {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}
    return [initialized([5, 5], given, block)[1] for given in ("nothing", "of names")]


def test_parameters_follow_into_virtual_stages(worlds: Worlds) -> None:
    for by_json, by_script in worlds.run(2, in_virtual_stages):
        assert by_json == by_script


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("used", "the optimizer given to initialize() has made updates, or is an Adagrad"),
        ("uneven", "stages have different numbers of parameter groups, allowed is one"),
        ("idle", "leaves a stage nothing to train, allowed with an optimizer given to initialize() is something"),
    ],
)
def test_optimizers_that_cannot_follow_are_refused(worlds: Worlds, given: str, words: str) -> None:
    for outcome in worlds.outcomes(2, initialized, [5, 5], given, {"partition": [3, 7]}):
        start = "VPipeConfigError: vpipe.partition: got [3, 7], which moves layers between stages, but "
        assert outcome.text.startswith(start + words)
        assert "\n" not in outcome.text


def with_another_schedule() -> list[str]:
    from deepspeed.runtime.pipe import schedule

    class ZeroBubble(schedule.TrainSchedule):
        pass

    with (
        mock.patch.object(schedule, "TrainSchedule", ZeroBubble),
        mock.patch("ds_vpipe.engine.build.logger.warning") as said,
    ):
        initialized([5, 5], "nothing", {})
    return [call.args[0] for call in said.call_args_list]


def test_a_replaced_schedule_is_said_to_be_ignored(worlds: Worlds) -> None:
    first, second = worlds.run(2, with_another_schedule)
    (line,) = first
    assert "TrainSchedule was replaced by " in line
    assert "ZeroBubble, which is not used" in line
    assert second == []


@pytest.mark.parametrize("counts", [[3, 6], [10]])
def test_wrong_partition_in_the_json(worlds: Worlds, counts: list[int]) -> None:
    for outcome in worlds.outcomes(2, initialized, [5, 5], "nothing", {"partition": counts}):
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
        elif how == "attribute":
            layer.factor = 3.0
        elif how == "another value":
            layer.in_features = 5
        elif how == "forward":
            layer.forward = torch.relu
        elif how == "hook":
            layer.register_forward_hook(lambda module, inputs, output: 3 * output)
        elif how == "gradient hook":
            layer.register_full_backward_hook(lambda module, before, after: None)
        elif how == "parameter hook":
            layer.weight.register_hook(lambda gradient: 2 * gradient)
        elif how == "notes":  # what does not change what a layer computes
            layer._note, layer.cache = 5, torch.ones(2)
            layer.eval()
        else:
            layer.register_parameter("adapter", nn.Parameter(torch.ones(WIDTH)))
    repartition(module, (1, 3))
    return [p.requires_grad for p in module.forward_funcs[0].parameters()]


def test_a_frozen_layer_stays_frozen(worlds: Worlds) -> None:
    assert worlds.run(2, move_changed, "frozen") == [[True, True], [False, False]]


class Offset(nn.Linear):
    """Layer with buffers that are in no state dict, one of them expanded."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("offset", torch.zeros(2), persistent=False)
        self.register_buffer("places", torch.arange(3).expand(2, -1), persistent=False)


def move_offsets() -> list[float]:
    from deepspeed.pipe import LayerSpec

    from ds_vpipe.engine.modules.partitioned import repartition

    module = pipeline(2, specs=[LayerSpec(Offset) for _ in range(4)])
    for number, layer in enumerate(module.forward_funcs, module._local_start):
        layer.offset.fill_(number)
        layer.places = torch.arange(number, number + 3).repeat(2, 1)
    repartition(module, (1, 3))
    return [layer.offset.sum().item() + layer.places.max().item() for layer in module.forward_funcs]


def test_buffers_that_are_not_persistent_move_too(worlds: Worlds) -> None:
    assert worlds.run(2, move_offsets) == [[2], [5, 8, 11]]


def move_all_changed() -> dict[str, Any]:
    """What becomes of each change."""
    from ds_vpipe.errors import VPipeConfigError

    found: dict[str, Any] = {}
    for how in (*CHANGES, "another value", "notes"):
        try:
            with mock.patch("ds_vpipe.engine.modules.partitioned.logger") as logger:
                found[how] = move_changed(how), [str(call.args[0]) for call in logger.warning.call_args_list]
        except VPipeConfigError as error:
            found[how] = str(error)
        cases.close_groups()
    return found


CHANGES = {
    "dtype": "weight",
    "more": "adapter",
    "attribute": "factor",
    "forward": "forward",
    "hook": "_forward_hooks",
    "gradient hook": "_backward_hooks",
    "parameter hook": "hooks of weight",
}


def test_a_layer_that_cannot_be_built_again_is_refused(worlds: Worlds) -> None:
    first, second = worlds.run(2, move_all_changed)
    for how, what in CHANGES.items():
        assert first[how] == second[how]
        assert f"layer 1 (Linear) was changed after it had been built ({what})" in first[how]
        assert "\n" not in first[how]
    assert first["notes"] == ([True, True], [])
    assert first["another value"][0] == [True, True]
    assert "layer 1 (Linear) has in_features" in first["another value"][1][0]
    assert second["another value"][1] == []
