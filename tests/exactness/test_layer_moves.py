"""Layers that move between stages while training goes on: the same training, bit for bit."""

from __future__ import annotations

import itertools
import random
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import toy
from deepspeed.pipe import LayerSpec
from test_exactness import OPTIMIZERS
from worlds import Worlds

pytestmark = pytest.mark.mp

ADAMW = OPTIMIZERS["AdamW"][0]
SCHEDULE = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 0.01}}}
LAYERS = len(toy.LAYERS)
UPDATES = 8


def split_at(generator: random.Random, stages: int) -> list[int]:
    cuts = [0, *sorted(generator.sample(range(1, LAYERS), stages - 1)), LAYERS]
    return [stop - start for start, stop in pairwise(cuts)]


def everything(engine: Any) -> dict[str, Any]:
    """Weights, optimizer states and rates of this stage, by parameter; and counters."""
    from ds_vpipe.engine.checkpoint.parameter_states import read_states

    engine.quiesce()  # copies of tied weights are as new as their owner's
    found: dict[str, Any] = dict(cases.parameters(engine))
    for name, state in read_states(engine, engine.stage.consensus.of_replicas).items():
        if name.startswith("tied_modules") and engine.stage.ties.weights_in:
            continue  # never used: what it does to a copy is overwritten
        found |= {f"{name}|{key}": torch.as_tensor(value).clone() for key, value in state.state.items()}
        found[f"{name}|lr"] = torch.tensor(state.options["lr"])
        if state.master is not None:
            found[f"{name}|master"] = state.master.clone()
    found["counters"] = torch.tensor([engine.global_steps, engine.global_samples, engine.skipped_steps])
    return found


def trained_with(
    ds_config: dict[str, Any], stages: int, splits: dict[int, list[int]], moves: bool = True, **module: Any
) -> dict[str, Any]:
    """Train with these splits from these updates on, or with a quiesce in the place of each; what came of it."""
    engine = cases.engine(ds_config, stages, **module)
    iterator = toy.data(replica=engine.grid.data_parallel_id)
    losses = []
    for update in range(UPDATES):
        if update in splits and moves:
            engine.repartition(splits[update])
        elif update in splits:
            engine.quiesce()
        losses.append(float(engine.train_batch(iterator)))
    result = {"losses": losses, "everything": everything(engine), "parts": list(engine.module.parts)}
    engine.destroy()
    return result


def with_and_without(
    ds_configs: list[dict[str, Any]], stages: int, splits: dict[int, list[int]], **module: Any
) -> list[dict[str, Any]]:
    reports = []
    for ds_config in ds_configs:
        for moves in (True, False):
            reports.append(trained_with(ds_config, stages, splits, moves, **module))
            cases.close_groups()
    return reports


def everywhere(reports: Any) -> dict[str, torch.Tensor]:
    """What all stages hold."""
    return {name: value for report in reports for name, value in report["everything"].items()}


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("stages", [2, 4])
def test_bsp_and_vertical_do_not_depend_on_moves(worlds: Worlds, stages: int) -> None:
    generator = random.Random(stages)
    splits = {update: split_at(generator, stages) for update in (1, 2, 4, 5, 7)}
    blocks = [{"sync_mode": "bsp"}, {"weight_sync": "vertical"}]
    ds_configs = [cases.config(size, ADAMW, block, **SCHEDULE) for block in blocks for size in (1, 2)]
    by_run = list(zip(*worlds.run(stages, with_and_without, ds_configs, stages, splits), strict=True))
    for moved, stayed in zip(by_run[::2], by_run[1::2], strict=True):
        assert moved[0]["parts"] != stayed[0]["parts"]
        assert moved[0]["losses"] == stayed[0]["losses"]
        assert_same(everywhere(moved), everywhere(stayed))


def test_the_same_split_is_no_move(worlds: Worlds) -> None:
    """What stages know of each other's norms goes on."""
    block = {"gradient_clipping_scope": "delayed_global", "partition": [4, 6]}
    ds_configs = [cases.config(1, ADAMW, block, **CLIPPED)]
    for moved, stayed in worlds.run(2, with_and_without, ds_configs, 2, {3: [4, 6], 5: [4, 6]}):
        assert moved["losses"] == stayed["losses"]
        assert_same(moved["everything"], stayed["everything"])


def trained_layers_away() -> int:
    """Updates of two stages of which one has no trained layer after a move."""
    import deepspeed

    import ds_vpipe

    layers = [torch.nn.Linear(4, 4).requires_grad_(at > 1) for at in range(6)]
    module = deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=torch.nn.functional.mse_loss)
    block = {"partition": [3, 3], "sync_mode": "bsp"}
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    ds_config = cases.config(1, OPTIMIZERS["SGD"][0], block)
    engine = ds_vpipe.initialize(model=module, config=ds_config, model_parameters=trained)[0]
    data = itertools.repeat((torch.ones(2, 4), torch.zeros(2, 4)))
    engine.train_batch(data)
    engine.repartition([2, 4])
    engine.train_batch(data)
    updates = int(engine.global_steps)
    engine.destroy()
    return updates


def test_a_stage_may_have_nothing_to_train_after_a_move(worlds: Worlds) -> None:
    assert worlds.run(2, trained_layers_away) == [2, 2]


def uncompiled(*args: Any, **module: Any) -> list[dict[str, Any]]:
    """:func:`with_and_without` without torch's compiler, which takes the processor half a minute for Muon's update."""
    with torch.compiler.set_stance("force_eager"):
        return with_and_without(*args, **module)


def test_layers_stay_those_of_muon(worlds: Worlds) -> None:
    """DeepSpeed's Muon asks each weight whether it is one of a matrix; ZeRO-1 asks it in every update."""
    splits = {2: [7, 3], 4: [3, 7], 6: [4, 6]}
    muon = {"type": "Muon", "params": {"lr": 0.01}}
    more = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
    block = {"sync_mode": "bsp", "partition": [5, 5]}
    ds_configs = [cases.config(2, muon, block, **more)]
    moved, stayed = zip(*worlds.run(2, uncompiled, ds_configs, 2, splits, loss_fn=toy.float_cross_entropy), strict=True)
    assert moved[0]["losses"] == stayed[0]["losses"]
    weights = [{n: v for n, v in everywhere(found).items() if "|" not in n} for found in (moved, stayed)]
    assert_same(*weights)


def moved_and_resumed(
    ds_config: dict[str, Any], stages: int, splits: dict[int, list[int]], folder: str, **module: Any
) -> list[dict[str, Any]]:
    """Train with moves, and by one engine for each split, which loads what the one before has saved."""
    ratios = ds_config["vpipe"].get("recompute_ratio", 0)
    moved = trained_with(ds_config, stages, splits, **module)
    cases.close_groups()
    losses, split, starts = [], None, [0, *splits, UPDATES]
    for start, stop in pairwise(starts):
        split = splits.get(start, split)
        block = {**ds_config["vpipe"], "recompute_ratio": ratios, **({} if split is None else {"partition": split})}
        engine = cases.engine({**ds_config, "vpipe": block}, stages, **module)
        if start:
            engine.load_checkpoint(folder, tag=str(start))
        iterator = toy.data(start=engine.consumed_micro_batches, replica=engine.grid.data_parallel_id)
        losses += [float(engine.train_batch(iterator)) for _ in range(start, stop)]
        engine.save_checkpoint(folder, tag=str(stop))
        resumed = {"losses": losses, "everything": everything(engine), "parts": list(engine.module.parts)}
        cases.end(engine)
    return [moved, resumed]


CLIPPED = {"gradient_clipping": 0.1}
STALE = {"staleness": {"nadam": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 3, "hysteresis": 1}}
ZERO = {"zero_optimization": {"stage": 1}}
BF16 = {"bf16": {"enabled": True}}
FLOAT_LOSS = {"loss_fn": toy.float_cross_entropy}
UNSTASHED = {"weight_sync": "none", "stage_to_depth_map": [4, 2, 0], "recompute_ratio": 0.5}
SOAP = {"type": "SOAP", "params": {"lr": 3e-3, "eps": 1e-4, "precondition_frequency": 3}}


FROZEN = {0, 1, 2, 3, 5}


def frozen_meanwhile(ds_configs: list[dict[str, Any]], loss_fn: Any) -> list[dict[str, Any]]:
    """Freeze some layers, move layers so that the first stage has no others, and train all again; or do not move."""
    reports = []
    for ds_config in ds_configs:
        for moves in (True, False):
            engine = cases.engine(ds_config, 2, loss_fn=loss_fn)
            iterator = toy.data()
            for trains in (True, False, True):
                for index, layer in enumerate(engine.module.forward_funcs, engine.module._local_start):
                    layer.requires_grad_(trains or index not in FROZEN)
                float(engine.train_batch(iterator))
                if moves and not trains:
                    engine.repartition([4, 6])
                    for index, layer in enumerate(engine.module.forward_funcs, engine.module._local_start):
                        assert all(parameter.requires_grad == (index not in FROZEN) for parameter in layer.parameters())
            reports.append({"everything": everything(engine), "parts": list(engine.module.parts)})
            cases.end(engine)
    return reports


def test_what_is_frozen_for_a_while_goes_on_after_a_move(worlds: Worlds) -> None:
    block = {"sync_mode": "bsp", "partition": [6, 4]}
    ds_configs = [cases.config(1, ADAMW, block, **extra) for extra in ({}, ZERO, BF16)]
    by_run = list(zip(*worlds.run(2, frozen_meanwhile, ds_configs, toy.float_cross_entropy), strict=True))
    for moved, stayed in zip(by_run[::2], by_run[1::2], strict=True):
        assert moved[0]["parts"] != stayed[0]["parts"]
        assert_same(everywhere(moved), everywhere(stayed))


def sent(ds_config: dict[str, Any]) -> tuple[int, int]:
    """Bytes that stage 0 sends for its last two layers, of eight, and those of all its parameters."""
    engine = cases.engine(ds_config, 2, loss_fn=toy.float_cross_entropy)
    engine.train_batch(toy.data())
    copy, counts = engine.stage.consensus.bytes_of_stage, []

    def counted(tensor: torch.Tensor, *args: Any) -> None:
        counts.append(tensor.nbytes)
        copy(tensor, *args)

    engine.stage.consensus.bytes_of_stage = counted
    whole = sum(parameter.nbytes for parameter in engine.module.parameters())
    engine.repartition([6, 4])
    cases.end(engine)
    return sum(counts), whole


def test_a_layer_is_sent_without_the_flat_buffers_that_it_is_in(worlds: Worlds) -> None:
    sizes = [worlds.run(2, sent, cases.config(1, ADAMW, {"partition": [8, 2]}, **extra))[0] for extra in ({}, ZERO)]
    assert sizes[0][0] < 3 * sizes[0][1]  # two of eight layers, each with two states of its weights, and their names
    assert sizes[1][0] < 1.5 * sizes[0][0]  # master weights are more, but not all others'


@pytest.mark.parametrize(
    ("stages", "world", "micro_batches", "block", "extra", "module"),
    [
        (2, 2, 1, {}, {}, {}),
        (4, 4, 1, {"recompute_ratio": 0.5}, SCHEDULE, {}),
        (4, 4, 2, {"gradient_clipping_scope": "delayed_global", **STALE}, CLIPPED, {}),
        (2, 4, 2, {}, CLIPPED, {}),
        (3, 3, 1, {}, CLIPPED, {"specs": toy.words_tied_specs, "loss_fn": toy.mean_over_positions}),
        (3, 3, 2, {"sync_mode": "bsp"}, CLIPPED, {"specs": toy.words_tied_specs, "loss_fn": toy.mean_over_positions}),
        (2, 2, 1, {}, {**BF16, **ZERO}, {"specs": toy.words_tied_specs, "loss_fn": toy.mean_over_positions}),
        (2, 2, 1, {}, FP16, {"specs": toy.words_tied_specs, "loss_fn": toy.mean_over_positions}),
        (3, 3, 2, UNSTASHED, {}, {"specs": toy.built_layers}),
        (2, 4, 1, {}, {**ZERO, **CLIPPED}, {}),
        (2, 4, 2, {}, {**BF16, **ZERO, **CLIPPED, **SCHEDULE}, FLOAT_LOSS),
        (3, 3, 1, {}, BF16, FLOAT_LOSS),
        (3, 3, 1, {}, {**FP16, **CLIPPED, **SCHEDULE}, FLOAT_LOSS),
        (2, 4, 1, {}, {**FP16, **ZERO}, FLOAT_LOSS),
        (3, 3, 1, {}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, FLOAT_LOSS),
        (3, 3, 1, {}, {"optimizer": SOAP}, {}),
    ],
    ids=[
        "plain",
        "recompute",
        "norms-and-staleness",
        "replicas",
        "tied",
        "bsp-tied",
        "tied-bf16-zero",
        "tied-fp16",
        "built-layers",
        "zero",
        "bf16-zero",
        "bf16",
        "fp16",
        "fp16-zero",
        "autocast",
        "SOAP",
    ],
)
def test_a_move_is_a_save_and_a_resume(
    worlds: Worlds,
    tmp_path: Path,
    stages: int,
    world: int,
    micro_batches: int,
    block: dict[str, Any],
    extra: dict[str, Any],
    module: dict[str, Any],
) -> None:
    generator = random.Random(stages + micro_batches)
    splits = {update: split_at(generator, stages) for update in (2, 3, 6)}
    ds_config = {**cases.config(micro_batches, ADAMW, block), **extra}
    reports = worlds.run(world, moved_and_resumed, ds_config, stages, splits, str(tmp_path), **module)
    for moved, resumed in reports:
        assert moved["parts"] == resumed["parts"]
        assert moved["losses"] == resumed["losses"]
        assert_same(moved["everything"], resumed["everything"])


def skipped(ds_config: dict[str, Any]) -> tuple[int, int]:
    """Updates that this stage has skipped, before and after a move between two others."""
    engine, iterator = cases.engine(ds_config, 3, loss_fn=toy.float_cross_entropy), toy.data()
    for _ in range(3):
        engine.train_batch(iterator)
    before = engine.skipped_steps
    engine.repartition([3, 4, 3])
    found = before, engine.skipped_steps
    cases.end(engine)
    return found


def test_each_stage_keeps_its_count_of_skipped_updates(worlds: Worlds) -> None:
    """The others may not have met an overflow."""
    ds_config = cases.config(1, ADAMW, {"partition": [4, 3, 3]}, **FP16)
    first, _, last = worlds.run(3, skipped, ds_config)
    assert first == (1, 1)
    assert last == (2, 2)


def moved_with_other_options(ds_config: dict[str, Any], name: str, value: Any) -> str:
    """The line of a move between optimizers that differ in an option, after which training goes on."""
    from ds_vpipe.errors import VPipeConfigError

    engine = cases.engine(ds_config, 2)
    if engine.stage_id == 0:
        engine.optimizer.param_groups[0][name] = value
    iterator = toy.data()
    engine.train_batch(iterator)
    with pytest.raises(VPipeConfigError) as error:
        engine.repartition([4, 6])
    engine.train_batch(iterator)
    engine.destroy()
    return str(error.value)


@pytest.mark.parametrize(("name", "value"), [("amsgrad", True), ("lr", 0.5), ("weight_decay", 0.5)])
def test_optimizers_that_differ_in_an_option_are_refused(worlds: Worlds, name: str, value: Any) -> None:
    """A layer's state would not be what its new stage's optimizer looks for, or its learning rate another."""
    ds_config = cases.config(1, ADAMW, {"partition": "uniform"})
    for line in worlds.run(2, moved_with_other_options, ds_config, name, value):
        assert line.startswith(f"repartition(): layers cannot move: the optimizers of the stages differ in {name}; ")


class Quantized(torch.nn.Parameter):
    """As libraries of quantized weights have them."""


def quantize(engine: Any) -> None:
    next(engine.module.parameters()).__class__ = Quantized


def another_group(engine: Any) -> None:
    if engine.stage_id == 0:
        group = engine.optimizer.param_groups[0]
        engine.optimizer.param_groups.append({**group, "params": [group["params"].pop()]})


def compiled(engine: Any) -> None:
    engine._is_compiled = True


def built_twice() -> list[Any]:
    specs = toy.layer_specs()
    specs[2] = specs[3] = toy.Scale(130)
    return specs


def sharing() -> list[Any]:
    shared = toy.Scale(130)
    specs = toy.layer_specs()
    specs[2:4] = [LayerSpec(torch.nn.Sequential, shared), LayerSpec(torch.nn.Sequential, shared)]
    return specs


ZERO_1 = {"zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}
CANNOT_MOVE: dict[str, tuple[dict[str, Any], dict[str, Any], Any, Any]] = {
    # block, other keys, specifications, a change of the engine
    "the schedule is 'interleaved'": (
        {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": 2}, {}, None, None,
    ),
    "swap_ratio is not 0": ({"swap_ratio": 0.5}, {}, None, None),
    "DeepSpeed has replaced the optimizer": (
        {}, {**ZERO_1, "optimizer": {"type": "Adagrad", "params": {"lr": 0.01}}}, None, None,
    ),
    "the optimizer is offloaded": (
        {}, {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}},
             "zero_force_ds_cpu_optimizer": False, "bf16": {"enabled": True}}, None, None,
    ),
    "torch_autocast is enabled with ZeRO-1": (
        {}, {**ZERO_1, "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, None, None,
    ),
    "activation_checkpoint_interval is not 0": ({}, {"pipeline": {"activation_checkpoint_interval": 1}}, None, None),
    "the engine is compiled": ({}, {}, None, compiled),
    "is a Quantized, such as a quantized weight": ({}, {}, None, quantize),
    "the optimizer has [1, 2] parameter groups on different stages": ({}, {}, None, another_group),
    "layers 2 and 3 share a parameter": ({}, {}, built_twice, None),
    "layers of a stage share a parameter without being tied": ({}, {}, sharing, None),
}  # fmt: skip


def lines_of_refused_moves() -> dict[str, str]:
    from ds_vpipe.errors import VPipeConfigError

    lines = {}
    for name, (block, extra, specs, change) in CANNOT_MOVE.items():
        ds_config = {**cases.config(2, ADAMW, {"partition": "uniform", **block}), **extra}
        engine = cases.engine(ds_config, 2, specs=specs, loss_fn=toy.float_cross_entropy)
        if change is not None:
            change(engine)
        with pytest.raises(VPipeConfigError) as error:
            engine.repartition([4, 6])
        lines[name] = str(error.value)
        cases.end(engine)
    return lines


def test_layers_that_cannot_move_are_refused_on_every_rank(worlds: Worlds) -> None:
    for lines in worlds.run(2, lines_of_refused_moves):
        for name, line in lines.items():
            assert line.startswith("repartition(): layers cannot move: ")
            assert name in line
            assert "\n" not in line


def in_groups(
    ds_config: dict[str, Any], stages: int, way: str, save: str | None, load: str | None, moves: list[list[int]]
) -> dict[str, Any]:
    """Train with three groups, of which no stage has all; save or load after three updates, or move layers then."""
    import deepspeed

    import ds_vpipe

    net = deepspeed.pipe.PipelineModule(toy.layer_specs(), num_stages=stages, loss_fn=torch.nn.CrossEntropyLoss())
    rates = {"0": 1e-3, "9": 5e-2}
    found: dict[float, list[Any]] = {1e-3: [], 1e-2: [], 5e-2: []}
    for name, parameter in net.named_parameters():
        found[rates.get(name.partition(".")[0], 1e-2)].append(parameter)
    groups = [{"params": members, "lr": rate} for rate, members in found.items()]
    given: dict[str, Any] = {"model_parameters": groups}
    ds_config = dict(ds_config)
    if way != "JSON":
        del ds_config["optimizer"]
        given["optimizer"] = lambda found: torch.optim.AdamW(found)
        schedules = torch.optim.lr_scheduler
        given["lr_scheduler"] = lambda one: schedules.LambdaLR(one, lambda count: 1 / (1 + 0.1 * count))
    if way == "object":  # whose schedule goes on from the groups' rates
        given["lr_scheduler"] = lambda one: schedules.ExponentialLR(one, 0.8)
    if way == "object":
        given["optimizer"] = torch.optim.AdamW(groups)
        given["model_parameters"] = None
    engine = ds_vpipe.initialize(model=net, config=ds_config, **given)[0]
    if load is not None:
        engine.load_checkpoint(load)
    iterator = toy.data(start=engine.consumed_micro_batches)
    losses = [] if load is not None else [float(engine.train_batch(iterator)) for _ in range(3)]
    if save is not None:
        engine.save_checkpoint(save)
    for counts in moves:
        engine.repartition(counts)
    losses += [float(engine.train_batch(iterator)) for _ in range(3)]
    report = {"losses": losses[-3:], "parameters": cases.parameters(engine)}
    cases.end(engine)
    return report


@pytest.mark.parametrize("way", ["JSON", "callable", "object"])
@pytest.mark.parametrize("zero", [0, 1])
def test_groups_keep_their_rates_wherever_layers_go(worlds: Worlds, tmp_path: Path, way: str, zero: int) -> None:
    """DeepSpeed drops a group of which a stage has nothing; numbers of groups would stand for others elsewhere."""
    block = {"sync_mode": "bsp", "partition": [5, 5]}
    ds_config = cases.config(1, ADAMW, block, zero_optimization={"stage": zero}, zero_allow_untested_optimizer=True)
    folder = str(tmp_path)
    runs = [
        worlds.run(2, in_groups, ds_config, 2, way, folder, None, []),
        worlds.run(2, in_groups, ds_config, 2, way, None, None, [[9, 1], [2, 8]]),
    ]
    for counts in ([2, 8], [10], [3, 3, 4]):
        other = {**ds_config, "vpipe": {**ds_config["vpipe"], "partition": counts}}
        moves = [[8, 2], [4, 6]] if len(counts) == 2 else []
        runs.append(worlds.run(len(counts), in_groups, other, len(counts), way, None, folder, moves))
    wanted, *others = [(reports[0]["losses"], cases.merged(reports)) for reports in runs]
    for losses, parameters in others:
        assert losses == wanted[0]
        assert_same(parameters, wanted[1])


def moved_then_used(ds_config: dict[str, Any], folder: str) -> dict[str, Any]:
    """Move layers, evaluate, save and go on; and go on from what was saved, in an engine with the last split."""
    engine = cases.engine(ds_config, 2)
    iterator = toy.data()
    whole = []
    for split, ratios in (([5, 5], None), ([8, 2], [0.5, 1.0]), ([2, 8], None)):  # ratios change no result
        engine.train_batch(iterator)
        engine.repartition(split, ratios)
        whole.append(
            (float(engine.eval_batch(toy.data(2))), engine.full_state_dict(), float(engine.eval_batch(toy.data(2))))
        )
    engine.save_checkpoint(folder)
    losses = [float(engine.train_batch(iterator)) for _ in range(3)]
    went_on = everything(engine)
    engine.load_checkpoint(folder)
    again = toy.data(start=engine.consumed_micro_batches)
    in_place = [float(engine.train_batch(again)) for _ in range(3)]
    cases.end(engine)
    engine = cases.engine({**ds_config, "vpipe": {**ds_config["vpipe"], "partition": [2, 8]}}, 2)
    engine.load_checkpoint(folder)
    again = toy.data(start=engine.consumed_micro_batches)
    resumed = [float(engine.train_batch(again)) for _ in range(3)]
    same = everything(engine)
    engine.destroy()
    return {
        "whole": [(before == after, len(state)) for before, state, after in whole],
        "losses": (losses, in_place, resumed),
        "everything": (went_on, same),
    }


def test_evaluation_and_checkpoints_after_moves(worlds: Worlds, tmp_path: Path) -> None:
    ds_config = cases.config(2, ADAMW, {"partition": [1, 9]}, **SCHEDULE)
    for report in worlds.run(2, moved_then_used, ds_config, str(tmp_path)):
        assert {one[0] for one in report["whole"]} == {True}
        assert len({one[1] for one in report["whole"]}) == 1
        went_on, in_place, resumed = report["losses"]
        assert went_on == in_place == resumed
        assert_same(*report["everything"])


class Counted(toy.Scale):
    """A layer whose state has more than tensors, and which draws random numbers when it is built."""

    calls, word = 0, ""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        torch.rand(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


class Numbered(toy.Scale):
    """A layer that counts its passes in a plain attribute, has others that a script may set, and keeps a cache."""

    calls, word = 0, ""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.length = self.cache = None
        self.rank = torch.distributed.get_rank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.length != len(x):
            self.length, self.cache = len(x), torch.ones(())
        return super().forward(x) * self.cache


def counted_specs() -> list[Any]:
    specs = toy.layer_specs()
    specs[3:5] = LayerSpec(Numbered, 130), LayerSpec(Counted, 140)
    return specs


def calls_after_a_move() -> list[tuple[Any, ...]]:
    """Forward passes of layers 3 and 4 by now, and what the script has set, on the stage that has them.

    Last what layer 3 has found on that stage when it was built.
    """
    engine = cases.engine(cases.config(1, ADAMW, {"sync_mode": "bsp"}), 2, specs=counted_specs)
    iterator = toy.data()
    engine.train_batch(iterator)
    if engine.stage_id == 0:
        engine.module.forward_funcs[3].dropout = 0.25
        engine.module.forward_funcs[3].word = "set"
    random_state = torch.get_rng_state()
    with mock.patch("ds_vpipe.engine.modules.built_layers.logger.warning") as warning:
        engine.repartition([3, 7])
    lines = [call.args[0] for call in warning.mock_calls]
    assert len(lines) == engine.stage_id
    assert all("layer 3 (Numbered) has moved" in line and ".rank is 1, as it is built again" in line for line in lines)
    assert torch.equal(torch.get_rng_state(), random_state)
    engine.train_batch(iterator)
    layers = engine.module.forward_funcs
    found = [
        (found.calls, found.dropout, found.word, getattr(found, "rank", None))
        for found in layers
        if isinstance(found, (Numbered, Counted))
    ]
    engine.destroy()
    return found


def test_extra_state_and_settings_move(worlds: Worlds) -> None:
    assert worlds.run(2, calls_after_a_move) == [[], [(2, 0.25, "set", 1), (2, 0.0, "", None)]]
