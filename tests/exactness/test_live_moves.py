"""Layers that move between stages while the engine trains: every micro-batch against the replay, to the last bit.

With ``DS_VPIPE_LONG_MOVES=1`` chains have 20 moves.
"""

from __future__ import annotations

import os
import random
import re
import signal
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import cases
import pytest
import reference
import torch
import toy
from torch import nn
from worlds import CaseFailed, Worlds

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.moves import Move, earliest_cut_over, moved
from ds_vpipe.schedules.pipeline import Pipeline

pytestmark = pytest.mark.mp

LAYERS = 10
# Long runs with gradients that are late need a lower rate.
MOVES, RATE = (20, 0.02) if os.environ.get("DS_VPIPE_LONG_MOVES") else (4, 0.1)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"type": "SGD", "params": {"lr": RATE, "momentum": 0.9}},
    "AdamW": {"type": "AdamW", "params": {"lr": 3e-3, "weight_decay": 0.1, "torch_adam": True}},
}


def rate(update: int) -> float:
    """A schedule in which every update is different: late ones have to use their own."""
    return RATE / (1 + 0.1 * update)


class ScheduledSGD(torch.optim.SGD):
    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, lr=RATE, momentum=0.9)
        self.updates = 0

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] = rate(self.updates)
        self.updates += 1
        return super().step(closure)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def plan(pipeline: Pipeline, seed: int) -> list[tuple[int, Move]]:
    """Moves at random micro-batches, one after the other, each with the update after which it is given."""
    draw, partition = random.Random(seed), uniform_partition(LAYERS, pipeline.num_stages)
    given: list[tuple[int, Move]] = []
    update = 0
    while len(given) < MOVES:
        pairs = [(s, s + d) for s in range(pipeline.num_stages) for d in (-1, 1) if partition[s] > 1]
        source, target = draw.choice([pair for pair in pairs if 0 <= pair[1] < pipeline.num_stages])
        layer = sum(partition[:source]) + (partition[source] - 1 if target > source else 0)
        later = draw.randrange(3) * pipeline.micro_batches
        move = Move(layer, source, target, earliest_cut_over(pipeline, source, target, update) + later)
        given.append((update, move))
        partition = moved(partition, move)
        update = move.settled_batch(pipeline) + draw.randrange(2)
    found = [move for _, move in given]
    if MOVES >= 20:
        assert {move.down for move in found} == {True, False}
        assert any((a.layer, a.source) == (b.layer, b.target) for a, b in pairwise(found)), "there and back"
    return given


def batches_of(pipeline: Pipeline, given: list[tuple[int, Move]]) -> int:
    """Batches until all moves are done, and two more."""
    return given[-1][1].settled_batch(pipeline) + 2


def train_moving(
    ds_config: dict[str, Any],
    stages: int,
    batches: int,
    given: list[tuple[int, Move]],
    *,
    stops: tuple[int, ...] = (),
    evaluate: bool = False,
    scheduled: bool = True,
    filled: bool = False,
) -> dict[str, Any]:
    torch.manual_seed(1234)
    trained = cases.engine(ds_config, stages)
    if filled:
        trained.optimizer.param_groups[0]["lr"] = torch.zeros((), dtype=torch.float64)
    iterator = toy.data(stops[0] if stops else None)
    losses, evaluations, update = [], [], 0
    moves = dict(given)
    while update < batches:
        if update in moves:
            trained.move_layer(moves.pop(update))
        for group in trained.optimizer.param_groups if scheduled else ():
            if filled:
                group["lr"].fill_(rate(update))  # as torch's schedulers do with a tensor
            else:
                group["lr"] = rate(update)
        if evaluate:
            held_out = iter([toy.micro_batch(10_000 + update)]) if trained.stage_id in (0, stages - 1) else None
            evaluations.append(float(trained.eval_batch(held_out, num_micro_batches=1)))
        try:
            losses.append(float(trained.train_batch(iterator)))
            update += 1
        except StopIteration:
            iterator = toy.data(start=trained.consumed_micro_batches)
    report = {
        "parameters": cases.parameters(trained),
        "losses": losses,
        "evaluations": evaluations,
        "bounds": list(trained.module.parts),
        "whole": trained.full_state_dict(),
    }
    trained.destroy()
    return report


def train_all(
    runs: list[tuple[dict[str, Any], list[tuple[int, Move]], dict[str, Any]]], stages: int, batches: int
) -> Any:
    reports = []
    for ds_config, given, options in runs:
        reports.append(train_moving(ds_config, stages, batches, given, **options))
        cases.close_groups()
    return reports


def config(micro_batches: int, optimizer: str, **block: Any) -> dict[str, Any]:
    return cases.config(micro_batches, OPTIMIZERS[optimizer], {"partition": "uniform", **block})


def expected(
    pipeline: Pipeline, batches: int, given: list[tuple[int, Move]], optimizer: str, **options: Any
) -> reference.Replay:
    moves = [(m.layer, m.source, m.target, m.micro_batch) for _, m in given]
    return reference.Replay(
        uniform_partition(LAYERS, pipeline.num_stages),
        pipeline.depths,
        pipeline.micro_batches,
        ScheduledSGD if optimizer == "SGD" else adamw,  # type: ignore[arg-type]
        vertical=pipeline.vertical,
        moves=moves,
        **options,
    ).run(batches)


def evaluated(run: reference.Replay, update: int) -> float:
    """Loss of the model after ``update`` updates of every layer."""
    value, labels = toy.micro_batch(10_000 + update)
    for layer, weights in zip(run.layers, run.history[update], strict=True):
        value = torch.func.functional_call(layer, weights, (value,))
    return float(run.criterion(value, labels))


def difference(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert got.keys() == wanted.keys()
    return max(float((got[name] - wanted[name]).abs().max()) for name in wanted)


def final_bounds(stages: int, given: list[tuple[int, Move]]) -> list[int]:
    partition = uniform_partition(LAYERS, stages)
    for _, move in given:
        partition = moved(partition, move)
    return [sum(partition[:stage]) for stage in range(stages + 1)]


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("stages", [2, 4])
def test_moves_with_stashing_against_the_replay(worlds: Worlds, stages: int, micro_batches: int) -> None:
    runs, wanted, pipelines = [], [], []
    for seed, factor in ((0, 1), (1, 2), (2, 2)):
        depths = tuple(factor * (stages - 1 - stage) for stage in range(stages))
        pipelines.append(Pipeline("asp", stages, micro_batches, depths))
        block = config(micro_batches, "SGD", stage_to_depth_map=list(depths))
        given = plan(pipelines[-1], 10 * stages + seed)
        runs.append((block, given, {"evaluate": seed == 2, "filled": seed == 1}))
    batches = max(batches_of(pipeline, given) for pipeline, (_, given, _) in zip(pipelines, runs, strict=True))
    for pipeline, (_, given, _) in zip(pipelines, runs, strict=True):
        wanted.append(expected(pipeline, batches, given, "SGD"))
    ranks = worlds.run(stages, train_all, runs, stages, batches)
    for number, run in enumerate(wanted):
        reports = [rank[number] for rank in ranks]
        given = runs[number][1]
        found = cases.merged(reports)
        assert difference(found, run.parameters()) == 0, given
        update, move = given[0]
        early = replace(move, micro_batch=move.micro_batch - micro_batches)
        other = expected(pipelines[number], batches, [(update, early), *given[1:]], "SGD")
        assert difference(found, other.parameters()) > 0, "a hand-over one update early would be seen"
        assert reports[-1]["losses"] == pytest.approx(run.losses, rel=1e-6)
        if runs[number][2]["evaluate"]:  # in the middle of moves, too
            means = [evaluated(run, update) for update in range(batches)]
            assert reports[-1]["evaluations"] == pytest.approx(means, rel=1e-6)
        for report in reports:
            assert report["bounds"] == final_bounds(stages, given)
            assert difference(report["whole"], found) == 0


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 1)])
def test_moves_with_adamw(worlds: Worlds, stages: int, micro_batches: int) -> None:
    pipeline = Pipeline("asp", stages, micro_batches)
    given, options = plan(pipeline, 5), {"scheduled": False}
    batches = batches_of(pipeline, given)
    ranks = worlds.run(stages, train_all, [(config(micro_batches, "AdamW"), given, options)], stages, batches)
    found = cases.merged([rank[0] for rank in ranks])
    off = difference(found, expected(pipeline, batches, given, "AdamW").parameters())
    assert off <= 1e-5
    early = [(update, replace(move, micro_batch=move.micro_batch - micro_batches)) for update, move in given]
    seen = difference(found, expected(pipeline, batches, early, "AdamW").parameters())
    assert seen > 1e-4
    print(f"AdamW, K={stages} M={micro_batches}, {len(given)} moves: off by {off:.1e}, each early by {seen:.1e}")


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 1)])
def test_with_one_version_everywhere_moves_change_nothing(worlds: Worlds, stages: int, micro_batches: int) -> None:
    runs, most = [], 0
    for seed, block in enumerate(({"weight_sync": "vertical"}, {"sync_mode": "bsp"}, {"sync_mode": "bsp"})):
        schedule = ("asp", "1f1b", "gpipe")[seed]
        extra = {"schedule": schedule} if seed else {}
        pipeline = Pipeline(schedule, stages, micro_batches, weight_sync="stash" if seed else "vertical")  # type: ignore[arg-type]
        ds_config, given = config(micro_batches, "SGD", **block, **extra), plan(pipeline, seed)
        most = max(most, batches_of(pipeline, given))
        runs += [(ds_config, moves, {"evaluate": True}) for moves in ([], given)]
    ranks = worlds.run(stages, train_all, runs, stages, most)
    for number in range(0, len(runs), 2):
        plain, moving = ([rank[at] for rank in ranks] for at in (number, number + 1))
        assert difference(cases.merged(moving), cases.merged(plain)) == 0, runs[number + 1][1]
        assert [report["losses"] for report in moving] == [report["losses"] for report in plain]
        assert [report["evaluations"] for report in moving] == [report["evaluations"] for report in plain]
        assert moving[0]["bounds"] == final_bounds(stages, runs[number + 1][1])


@pytest.mark.parametrize("down", [True, False])
def test_the_data_end_anywhere_in_a_move(worlds: Worlds, down: bool) -> None:
    """A move that has begun is complete when the pipeline has drained; one that has not comes later as planned."""
    batches, stages = 16, 3
    pipeline = Pipeline("asp", stages, 2, (5, 3, 0))
    source, target = (0, 1) if down else (1, 0)
    partition = uniform_partition(LAYERS, stages)
    layer = partition[0] - 1 if down else partition[0]
    move = Move(layer, source, target, earliest_cut_over(pipeline, source, target, 3))
    runs, wanted = [], []
    for drained in range(6, move.micro_batch + 8, 2):
        end = drained + drained // 2 % 2  # every second one with a micro-batch left over
        cut_over = min(move.micro_batch, drained) if move.has_begun(pipeline, drained) else move.micro_batch
        done = Move(layer, source, target, cut_over)
        runs.append((config(2, "SGD", stage_to_depth_map=[5, 3, 0]), [(3, move)], {"stops": (end,)}))
        wanted.append(expected(pipeline, batches, [(3, done)], "SGD", refills=(0, drained)).parameters())
    ranks = worlds.run(stages, train_all, runs, stages, batches)
    for number, parameters in enumerate(wanted):
        assert difference(cases.merged([rank[number] for rank in ranks]), parameters) == 0, runs[number][2]


def save_while_moving(
    ds_config: dict[str, Any], stages: int, batches: int, given: tuple[int, Move], at: int, folder: str
) -> dict[str, Any]:
    """Train with a checkpoint after ``at`` updates, and load it into an engine with the partition that it has."""
    torch.manual_seed(1234)
    trained = cases.engine(ds_config, stages)
    iterator = toy.data()
    for update in range(batches):
        if update == given[0]:
            trained.move_layer(given[1])
        for group in trained.optimizer.param_groups:
            group["lr"] = rate(update)
        if update == at:
            trained.save_checkpoint(folder, tag=f"at{at}")
            partition = [b - a for a, b in zip(trained.module.parts, trained.module.parts[1:], strict=False)]
        trained.train_batch(iterator)
    kept = cases.parameters(trained)
    cases.end(trained)
    ds_config = {**ds_config, "vpipe": {**ds_config["vpipe"], "partition": partition}}
    resumed = cases.engine(ds_config, stages)
    resumed.load_checkpoint(folder, tag=f"at{at}")
    iterator = toy.data(start=resumed.consumed_micro_batches)
    for update in range(at, batches):
        for group in resumed.optimizer.param_groups:
            group["lr"] = rate(update)
        resumed.train_batch(iterator)
    report = {"parameters": kept, "resumed": cases.parameters(resumed), "partition": partition}
    cases.end(resumed)
    return report


def save_each(ds_config: dict[str, Any], stages: int, batches: int, given: Any, folder: str) -> Any:
    return [save_while_moving(ds_config, stages, batches, move, at, folder) for move, at in given]


@pytest.mark.parametrize("sync", ["stash", "vertical"])
def test_a_checkpoint_in_a_move_has_the_new_split(worlds: Worlds, sync: str, tmp_path: Any) -> None:
    stages, batches = 3, 14
    pipeline = Pipeline("asp", stages, 2, (5, 3, 0), weight_sync=sync)  # type: ignore[arg-type]
    partition, given = uniform_partition(LAYERS, stages), []
    for source, target in ((0, 1), (1, 0)):
        layer = partition[0] - 1 if target else partition[0]
        move = Move(layer, source, target, earliest_cut_over(pipeline, source, target, 2))
        places = range(3, move.settled_batch(pipeline) + 2, 1 if sync == "stash" else 2)
        given += [((2, move), at) for at in places]
    ds_config = config(2, "SGD", stage_to_depth_map=[5, 3, 0], weight_sync=sync)
    ranks = worlds.run(stages, save_each, ds_config, stages, batches, given, str(tmp_path))
    for number, ((_, move), at) in enumerate(given):
        reports = [rank[number] for rank in ranks]
        begun = move.has_begun(pipeline, at * 2)
        assert tuple(reports[0]["partition"]) == (moved(partition, move) if begun else partition)
        merged = {name: value for report in reports for name, value in report["resumed"].items()}
        if begun:
            assert difference(cases.merged(reports), merged) == 0, (move, at)


def change_while_moving(call: str, wanted: Any) -> list[list[int]]:
    """Layers of the stages by each of those that know them, after a call in a move that has begun."""
    trained, iterator = cases.engine(config(1, "SGD"), 2), toy.data()
    trained.move_layer(Move(4, 0, 1, earliest_cut_over(trained.pipeline, 0, 1, 0)))
    for _ in range(2):
        trained.train_batch(iterator)
    assert trained.moves.move is not None
    getattr(trained, call)(wanted)
    assert not trained.stage.weights.moved, "scripts may now change the layer as all others"
    trained.train_batch(iterator)
    module = trained.module
    found = [list(trained.pipeline.partition), [stop - start for start, stop in pairwise(module.parts)]]
    here = len([layer for layer in module.forward_funcs if isinstance(layer, nn.Module)])
    cases.end(trained)
    return [*found, [here]]


def test_the_pipeline_is_changed_in_a_move_that_has_begun(worlds: Worlds) -> None:
    """The call empties the pipeline, which completes the move: what follows is about the new split."""
    for call, wanted, split in (
        ("set_depths", [2, 0], [4, 6]), ("repartition", [5, 5], [5, 5]), ("quiesce", "quiesce()", [4, 6]),
    ):  # fmt: skip
        for stage, report in enumerate(worlds.run(2, change_while_moving, call, wanted)):
            assert report == [split, split, [split[stage]]]


def wrong_splits() -> list[str]:
    """What refusals of repartition() say, after which training goes on."""
    trained, iterator, lines = cases.engine(config(1, "SGD"), 2), toy.data(), []
    for counts, ratios in (([5, 6], None), ([4, 6], [0, 2])):
        trained.train_batch(iterator)
        with pytest.raises(VPipeConfigError) as error:
            trained.repartition(counts, ratios)
        lines.append(str(error.value))
    trained.train_batch(iterator)
    assert trained.pipeline.partition == (5, 5)
    trained.destroy()
    return lines


def test_a_wrong_split_is_refused_before_anything_moves(worlds: Worlds) -> None:
    for lines in worlds.run(2, wrong_splits):
        assert "partition" in lines[0]
        assert "recompute_ratio" in lines[1]


def first(x: torch.Tensor) -> torch.Tensor:
    return x * 1.5


class Drawing(toy.Attend):
    """Layer that draws random numbers when it is built."""

    def __init__(self) -> None:
        super().__init__(150)
        torch.rand(1)


def specs_with_others() -> list[Any]:
    """The toy model with a layer that is a function and a built module between its stages."""
    from deepspeed.pipe import LayerSpec

    specs = toy.layer_specs()
    return [*specs[:4], first, toy.built_layers()[4], LayerSpec(Drawing), *specs[6:9], nn.Tanh(), specs[9]]


def train_others(ds_config: dict[str, Any], given: list[tuple[int, Move]], batches: int) -> dict[str, Any]:
    torch.manual_seed(1234)
    trained = cases.engine(ds_config, 2, specs=specs_with_others)
    moves, iterator = dict(given), toy.data()
    group = trained.optimizer.param_groups[0]
    group["param_names"] = [trained.param_names[parameter] for parameter in group["params"]]  # as torch does if it can
    random_state = torch.get_rng_state()  # which passes leave alone, and so do moves
    for update in range(batches):
        if update in moves:
            trained.move_layer(moves[update])
        trained.train_batch(iterator)
        names = {id(parameter): name for name, parameter in trained.module.named_parameters()}
        assert group["param_names"] == [names[id(parameter)] for parameter in group["params"]]
    assert torch.equal(torch.get_rng_state(), random_state)
    report = {"parameters": cases.parameters(trained), "layers": len(trained.module.forward_funcs)}
    trained.destroy()
    return report


def train_others_twice(ds_config: dict[str, Any], given: list[tuple[int, Move]], batches: int) -> Any:
    reports = [train_others(ds_config, [], batches)]
    cases.close_groups()
    return [*reports, train_others(ds_config, given, batches)]


def test_layers_of_all_kinds_move(worlds: Worlds) -> None:
    """A built module, a function, and back; with vertical sync nothing may change."""
    pipeline = Pipeline("asp", 2, 2, weight_sync="vertical")
    given, update = [], 0
    for layer, source, target in ((5, 0, 1), (4, 0, 1), (4, 1, 0), (5, 1, 0), (6, 1, 0)):
        move = Move(layer, source, target, earliest_cut_over(pipeline, source, target, update))
        given.append((update, move))
        update = move.settled_batch(pipeline)
    ds_config = config(2, "SGD", weight_sync="vertical", partition=[6, 6])
    ranks = worlds.run(2, train_others_twice, ds_config, given, update + 3)
    plain, moving = ([rank[at] for rank in ranks] for at in (0, 1))
    assert difference(cases.merged(moving), cases.merged(plain)) == 0
    assert [report["layers"] for report in moving] == [7, 5]


def refusals(runs: list[tuple[dict[str, Any], Move, dict[str, Any]]]) -> list[str]:
    """What each configuration says to a move after one update, and then to a training that goes on."""
    lines = []
    for ds_config, move, module in runs:
        other = {key: module.pop(key) for key in ("change", "everywhere", "given", "elsewhere") if key in module}
        trained = cases.engine(ds_config, 2, **module)
        iterator = toy.data()
        trained.train_batch(iterator)
        if "given" in other:
            trained.move_layer(other["given"])
        if "change" in other and trained.stage_id == 0:
            other["change"](trained)
        if "everywhere" in other:
            other["everywhere"](trained)
        try:
            trained.move_layer(other.get("elsewhere", move) if trained.stage_id else move)
            lines.append("")
        except VPipeConfigError as error:
            lines.append(str(error))
        trained.train_batch(iterator)
        cases.end(trained)
    return lines


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x


class Remembering(nn.Module):
    def get_extra_state(self) -> int:
        return 0

    def set_extra_state(self, state: int) -> None:
        """Nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(3, toy.HIDDEN, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.words.weight[0]


def specs_with(layer: type[nn.Module]) -> list[Any]:
    from deepspeed.pipe import LayerSpec

    specs = toy.layer_specs()
    specs[4] = LayerSpec(layer)
    return specs


def spread(tokens: torch.Tensor) -> torch.Tensor:
    return tokens.float().unsqueeze(-1).expand(*tokens.shape, toy.HIDDEN)


def specs_with_one_that_trains() -> list[Any]:
    """The toy model, of whose first stage layer 4 alone has parameters."""
    return [spread, first, first, first, *toy.layer_specs()[4:]]


def add_a_parameter(trained: Any) -> None:
    trained.module.forward_funcs[4].added = nn.Parameter(torch.ones(1), requires_grad=False)


def change_a_number(trained: Any) -> None:
    trained.module.forward_funcs[4].dropout = 0.5


class OtherLinear(nn.Linear):
    pass


def change_a_class(trained: Any) -> None:
    trained.module.forward_funcs[4].linear.__class__ = OtherLinear


def add_a_hook(trained: Any) -> None:
    next(trained.module.forward_funcs[4].parameters()).register_hook(torch.clone)


def add_a_hook_to_the_optimizer(trained: Any) -> None:
    trained.optimizer.register_step_pre_hook(lambda *_: None)


def switch_nesterov(trained: Any) -> None:
    trained.optimizer.param_groups[0]["nesterov"] = True


def add_a_hook_after_updates(trained: Any) -> None:
    trained.optimizer.register_step_post_hook(lambda *_: None)


def add_a_hook_of_a_layer(trained: Any) -> None:
    trained.module.forward_funcs[4].register_forward_hook(lambda *_: None)


def add_a_hook_of_a_gradient(trained: Any) -> None:
    next(trained.module.forward_funcs[4].parameters()).register_post_accumulate_grad_hook(lambda _: None)


def add_a_hook_of_layer_5(trained: Any) -> None:
    if trained.stage_id == 1:
        trained.module.forward_funcs[0].register_forward_hook(lambda *_: None)


def make_two_groups(trained: Any) -> None:
    group = trained.optimizer.param_groups[0]
    trained.optimizer.param_groups.append({**group, "params": [group["params"].pop()]})


def step_otherwise(trained: Any) -> None:
    trained.optimizer.step = partial(torch.optim.SGD.step, trained.optimizer)


def test_what_cannot_move_is_refused_on_every_rank_in_one_line(worlds: Worlds) -> None:
    down = Move(4, 0, 1, 20)
    runs: list[tuple[dict[str, Any], Move, dict[str, Any]]] = [
        (config(1, "SGD"), Move(3, 0, 1, 20), {}),
        (config(1, "SGD"), Move(4, 0, 1, 1), {}),
        (config(1, "SGD"), down, {"specs": partial(specs_with, Counting)}),
        (config(1, "SGD", recompute_ratio=0.5), down, {}),
        (config(1, "SGD", swap_ratio=0.5), down, {}),
        ({**config(1, "SGD"), "gradient_clipping": 1.0}, down, {}),
        ({**config(1, "SGD"), "bf16": {"enabled": True}, "zero_optimization": {"stage": 1},
          "zero_allow_untested_optimizer": True}, down, {}),
        (config(1, "SGD", weight_sync="none"), down, {}),
        (config(1, "SGD", staleness={"synchronous_updates": 2}), down, {}),
        (config(1, "SGD", replan={"every": 100}), down, {}),
        (config(1, "SGD"), down, {"specs": partial(specs_with, Remembering)}),
        (config(1, "SGD"), down, {"change": add_a_parameter}),
        (config(1, "SGD"), down, {"change": change_a_number}),
        (config(1, "SGD"), down, {"change": change_a_class}),
        (config(1, "SGD"), down, {"change": add_a_hook}),
        (config(1, "SGD"), down, {"change": add_a_hook_to_the_optimizer}),
        (config(1, "SGD"), down, {"change": step_otherwise}),
        (config(1, "SGD"), down, {"change": switch_nesterov}),
        (config(1, "SGD"), down, {"specs": specs_with_one_that_trains}),
        (config(1, "SGD"), down, {"specs": partial(specs_with, Sparse)}),
        ({**config(1, "SGD"), "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}, down, {}),
        ({**config(1, "SGD"), "bf16": {"enabled": True}}, down, {}),
        ({**config(1, "SGD"), "torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, down, {}),
        (config(1, "SGD"), down, {"change": add_a_hook_after_updates}),
        (config(1, "SGD"), down, {"change": add_a_hook_of_a_layer}),
        (config(1, "SGD"), down, {"change": add_a_hook_of_a_gradient}),
        (config(1, "SGD"), down, {"everywhere": make_two_groups}),
        (config(1, "SGD"), down, {"specs": toy.words_tied_specs, "loss_fn": toy.mean_over_positions}),
        (config(1, "SGD"), Move(5, 1, 0, 20), {"everywhere": add_a_hook_of_layer_5}),
        (config(1, "SGD"), down, {"elsewhere": replace(down, micro_batch=21)}),
        (config(1, "SGD"), down, {"given": replace(down, micro_batch=21)}),
    ]  # fmt: skip
    words = [
        "layer 4, the last of two or more", "from 3 on, after 1 update", "buffers", "recomputed", "swap_ratio",
        "clipped", "flat buffers", "weight_sync", "staleness", "vpipe.replan.every", "extra state",
        "changed after", "layer 4 keeps a dropout that passes may change", "layer 4 was changed",
        "4.scale has hooks, which would stay behind",
        "hooks or a step()", "hooks or a step()",
        "the optimizers of the stages differ in nesterov", "stage 0 trains nothing but layer 4",
        "sparse gradients", "flat buffers", "flat buffers", "flat buffers", "hooks or a step()", "layer 4 has hooks",
        "layer 4 has parameters with hooks", "several groups", "has tied layers",
        "layer 5 has hooks", "the same move on all ranks", "one move at a time, after 22 updates",
    ]  # fmt: skip
    for lines in worlds.run(2, refusals, runs):
        for line, word in zip(lines, words, strict=True):
            assert word in line
            assert "\n" not in line


def changed_since_the_decision(down: Move) -> list[str]:
    """What the first stage says to a move that was found to be possible, and is not any more."""
    trained, lines = cases.engine(config(1, "SGD"), 2), []
    trained.train_batch(toy.data())
    for move, change in (
        (replace(down, layer=3), None), (down, add_a_hook_of_a_layer), (down, add_a_hook_to_the_optimizer),
    ):  # fmt: skip
        if trained.stage_id == 0:
            if change is not None:
                change(trained)
            with pytest.raises(VPipeConfigError) as error:
                trained.moves.begin(move)
            lines.append(str(error.value))
    cases.end(trained)
    return lines


def test_what_was_decided_and_cannot_be_done_is_refused(worlds: Worlds) -> None:
    lines, _ = worlds.run(2, changed_since_the_decision, Move(4, 0, 1, 20))
    assert "layer 4, the last of two or more" in lines[0]
    for line, reason in zip(lines[1:], ("layer 4 has hooks", "hooks or a step() of the script's"), strict=True):
        assert reason in line
        assert "layers as they were when it was decided" in line


def freeze_while_moving(move: Move, everywhere: bool) -> None:
    trained, iterator = cases.engine(config(1, "SGD"), 3), toy.data()
    for update in range(12):
        if update == 2:
            trained.move_layer(move)
        if update == 5:  # the layer is on both stages
            layers = [getattr(trained.module, str(move.layer), None)]
            for layer in layers if everywhere or trained.stage_id == move.source else []:
                if layer is not None:
                    layer.requires_grad_(False)
        trained.train_batch(iterator)
    cases.end(trained)


def test_freezing_a_layer_that_moves_on_one_stage_alone_ends_all_ranks_with_its_reason(worlds: Worlds) -> None:
    move = Move(4, 1, 0, 6)
    worlds.run(3, freeze_while_moving, move, True)
    with pytest.raises(CaseFailed) as failed:
        worlds.run(3, freeze_while_moving, move, False)
    line = "requires_grad: got parameters of layer 4 that were frozen or trained again on stage 1 alone while they"
    assert [line in error for error in failed.value.errors.values()] == [True] * 3


def die_in_a_move(move: Move, kind: str) -> None:
    trained = cases.engine(config(1, "SGD"), 3)

    class Killer:
        def before(self, action: Any) -> None:
            if action.kind.name == kind:
                os.kill(os.getpid(), signal.SIGKILL)

        def after(self, action: Any) -> None:
            """Nothing."""

    trained.executor.watchers.append(Killer())
    iterator = toy.data()
    for update in range(20):
        if update == 2:
            trained.move_layer(move)
        trained.train_batch(iterator)


@pytest.mark.parametrize(
    ("move", "kind", "victim"),
    [
        (Move(3, 0, 1, 6), "SEND_LAYER_DOWN", 0),
        (Move(3, 0, 1, 6), "RECV_LAYER_GRAD_DOWN", 1),
        (Move(4, 1, 0, 6), "SEND_LAYER_GRAD_UP", 1),
        (Move(4, 1, 0, 6), "RECV_LAYER_UP", 0),
    ],
)
def test_survivors_of_a_kill_in_a_move_say_whom_they_waited_for(
    doomed: Worlds, move: Move, kind: str, victim: int
) -> None:
    outcomes = doomed.outcomes(3, die_in_a_move, move, kind)
    assert outcomes[victim].text == "died"
    for rank in {0, 1, 2} - {victim}:
        assert not outcomes[rank].good
        assert outcomes[rank].seconds < 40
        text = outcomes[rank].text
        assert re.match(rf"PipelinePeerError: stage {rank} \(rank {rank}\) (waited for|stopped) ", text), text
        assert f"stage {victim} (rank {victim}): it is gone" in text
        assert "\n" not in text


def by_name(trained: Any) -> dict[str, torch.Tensor]:
    """Weights and momenta of this stage."""
    momenta = {
        f"momentum.{name}": trained.optimizer.state[parameter]["momentum_buffer"].clone()
        for name, parameter in trained.module.named_parameters()
    }
    return {**cases.parameters(trained), **momenta}


def save_for_stock(given: list[tuple[int, Move]], batches: int, folder: str) -> tuple[Any, Any]:
    torch.manual_seed(1234)
    trained, moves, iterator = cases.engine(config(2, "SGD"), 2), dict(given), toy.data()
    for update in range(batches):
        if update in moves:
            trained.move_layer(moves[update])
        trained.train_batch(iterator)
    trained.save_checkpoint(folder)
    saved = by_name(trained)
    cases.end(trained)
    stock = cases.engine(cases.config(2, OPTIMIZERS["SGD"], None), 2)
    stock.load_checkpoint(folder)
    return saved, by_name(stock)


def test_the_stock_engine_loads_a_checkpoint_after_moves(worlds: Worlds, tmp_path: Any) -> None:
    """There and back, so that both engines have the same split."""
    pipeline, given, update = Pipeline("asp", 2, 2), [], 0
    for source, target in ((1, 0), (0, 1)):
        move = Move(5, source, target, earliest_cut_over(pipeline, source, target, update))
        given.append((update, move))
        update = move.settled_batch(pipeline)
    for saved, loaded in worlds.run(2, save_for_stock, given, update + 2, str(tmp_path)):
        assert difference(loaded, saved) == 0
