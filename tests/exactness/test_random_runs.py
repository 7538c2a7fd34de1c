"""Runs drawn at random: a configuration, and calls between its updates. Equal to the replay, or refused in one line.

The suite has some of them. ``DS_VPIPE_RANDOM_RUNS=5000`` is the long form, which prints how many were trained, refused
and would have shown a wrong version (``pytest -s``); ``DS_VPIPE_RANDOM_FIRST`` is the number of its first run.
"""

from __future__ import annotations

import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Any

import cases
import loops
import pytest
import reference
import torch
import toy
from test_exactness import LAYERS, difference
from test_matrix import by_layer
from torch import nn
from worlds import Worlds

from ds_vpipe.errors import CallOrderError, VPipeConfigError
from ds_vpipe.schedules.moves import Move, earliest_cut_over, moved
from ds_vpipe.schedules.pipeline import Pipeline

pytestmark = pytest.mark.mp

RUNS = int(os.environ.get("DS_VPIPE_RANDOM_RUNS", "24"))
FIRST = int(os.environ.get("DS_VPIPE_RANDOM_FIRST", "0"))
AT_ONCE = 12
"""Runs in one world."""


def some(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """A stage of the replay that has nothing but the copy of a tied weight owns no parameters."""
    return parameters or [nn.Parameter(torch.zeros(1))]


# Bias of attention's keys has no gradient but rounding, which Adam would blow up without so large an eps.
ADAM = {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-4}
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer]]] = {
    "SGD": ({"type": "SGD", "params": {"lr": 0.1}}, lambda p: torch.optim.SGD(some(p), lr=0.1)),
    "momentum": (
        {"type": "SGD", "params": {"lr": 0.03, "momentum": 0.9, "weight_decay": 0.1}},
        lambda p: torch.optim.SGD(some(p), lr=0.03, momentum=0.9, weight_decay=0.1),
    ),
    "AdamW": ({"type": "AdamW", "params": {**ADAM, "torch_adam": True}}, lambda p: torch.optim.AdamW(some(p), **ADAM)),
}
PRECISIONS: dict[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "fp32": ({}, {}, 1e-5),
    "bf16": ({"bf16": {"enabled": True}}, {"dtype": torch.bfloat16}, 2e-2),
    "fp16": (
        {"fp16": {"enabled": True, "initial_scale_power": 18, "loss_scale_window": 2, "hysteresis": 1}},
        {"dtype": torch.float16},
        1e-2,
    ),
}
"""More of the JSON, options of the replay, largest difference."""
CLIP = 0.3


@dataclass(frozen=True)
class Run:
    """What is trained, and what happens between its updates.

    Attributes:
        depths: of all stages.
        ends: lengths of the data of one iterator after the other, from the first micro-batch of the run.
        calls: by the number of updates before them: a name and its argument.
        loop: whether a script loops over forward, backward and step.
    """

    number: int
    stages: int
    replicas: int
    micro_batches: int
    counts: tuple[int, ...]
    depths: tuple[int, ...]
    block: dict[str, Any]
    more: dict[str, Any]
    optimizer: str
    precision: str
    tied: bool
    updates: int
    ends: tuple[int, ...]
    calls: dict[int, tuple[str, Any]] = field(default_factory=dict)
    loop: bool = False

    def ds_config(self) -> dict[str, Any]:
        block = {"partition": list(self.counts), **self.block}
        return cases.config(
            self.micro_batches, OPTIMIZERS[self.optimizer][0], block, **self.more, **PRECISIONS[self.precision][0]
        )

    def engine(self, ds_config: dict[str, Any]) -> Any:
        if self.loop:
            return loops.engine(ds_config, self.stages)
        if self.tied:
            return cases.engine(ds_config, self.stages, toy.mean_over_positions, specs=toy.words_tied_specs)
        return cases.engine(ds_config, self.stages, toy.float_cross_entropy)


def composition(draw: random.Random, parts: int) -> tuple[int, ...]:
    """Layers of every stage, at least one each."""
    cuts = sorted(draw.sample(range(1, LAYERS), parts - 1))
    return tuple(stop - start for start, stop in pairwise([0, *cuts, LAYERS]))


def depth_map(draw: random.Random, stages: int) -> tuple[int, ...]:
    return (*sorted((draw.choice([0, 1, 2, 3, 5, 7]) for _ in range(stages - 1)), reverse=True), 0)


def drawn(number: int) -> Run:
    """The run of this number."""
    draw = random.Random(number)
    stages, size = draw.choice([1, 2, 2, 3, 3, 4]), draw.choice([1, 1, 2, 3, 4])
    replicas = 2 if stages <= 2 and draw.random() < 0.25 else 1
    counts, updates = composition(draw, stages), draw.randrange(4, 11)
    asynchronous = draw.random() < 0.9
    depths = depth_map(draw, stages) if asynchronous else (0,) * stages
    ratios = [draw.choice([0, 0.3, 0.5, 1]) for _ in counts] if draw.random() < 0.5 else [0] * stages
    block: dict[str, Any] = {"recompute_ratio": ratios, "link": draw.choice(["auto", "auto", "host"])}
    if asynchronous:
        block |= {"stage_to_depth_map": list(depths), "weight_sync": draw.choice(["stash"] * 5 + ["vertical", "none"])}
    else:
        block |= {"sync_mode": "bsp"}
    if draw.random() < 0.2:
        block["swap_ratio"] = [draw.choice([0, 0.5, 1]) for _ in counts]
    more: dict[str, Any] = {
        "zero_optimization": {"stage": int(draw.random() < 0.2)},
        "zero_allow_untested_optimizer": True,
    }
    if more["zero_optimization"]["stage"] and number % 2:
        more["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    optimizer, precision = draw.choice([*OPTIMIZERS, "SGD"]), draw.choice(["fp32"] * 4 + ["bf16", "fp16"])
    if not asynchronous and precision == "fp16":
        precision = "bf16"  # an overflow of one stage has all of them skip the update, which the replay does not know
    if asynchronous and draw.random() < 0.25:
        more["gradient_clipping"] = CLIP
        block["gradient_clipping_scope"] = draw.choice(["stage", "delayed_global"])
    if asynchronous and draw.random() < 0.25:
        block["staleness"] = draw.choice(
            [
                {"synchronous_updates": 3},
                {"delay_warmup_updates": 4},
                {"synchronous_updates": 2, "delay_warmup_updates": 4},
                {"synchronous_updates": 2, "nadam": True},
                {"nadam": True},
            ]
        )
    tied, total = draw.random() < 0.2, size * updates
    ends = sorted(draw.sample(range(size, total), draw.choice([0, 0, 1, 2]))) if total > size + 2 else []
    ends = [end for before, end in pairwise([0, *ends]) if end - before > 2 * size]
    loop = not tied and draw.random() < 0.3  # whose script is never without data
    ends = [] if loop else ends
    run = Run(
        number, stages, replicas, size, counts, depths, block, more, optimizer, precision, tied, updates,
        (*ends, 10**6), loop=loop,
    )  # fmt: skip
    return replace(run, calls=calls_of(draw, run))


def calls_of(draw: random.Random, run: Run) -> dict[int, tuple[str, Any]]:
    """Calls between updates, where no data have just ended."""
    calls: dict[int, tuple[str, Any]] = {}
    names = ["quiesce", "evaluate", "resume", "resume", "whole"]
    asynchronous, stale = run.block.get("sync_mode") != "bsp", {"staleness", "gradient_clipping_scope"} & {*run.block}
    plain = not run.tied and run.precision == "fp32" and not stale and run.block.get("weight_sync") != "none"
    if plain:
        names += ["repartition", "move", "move", "move"]
    changes = asynchronous and "staleness" not in run.block
    if changes:
        names.append("set_depths")
    ended = {end // run.micro_batches for end in run.ends}
    for update in range(1, run.updates):
        name = draw.choice(names)
        if draw.random() > 0.35 or update in ended:
            continue
        argument: Any = None
        if name == "repartition":
            argument = composition(draw, run.stages)
        elif name == "set_depths":
            argument = depth_map(draw, run.stages)
        elif name == "move":
            argument = draw.randrange(100)
        elif name == "evaluate":
            argument = draw.randrange(1, 4)
        elif name == "resume":  # with another split and other depths
            counts = composition(draw, run.stages) if plain and draw.random() < 0.5 else None
            argument = counts, depth_map(draw, run.stages) if changes and draw.random() < 0.5 else None
        calls[update] = name, argument
    return calls


def train(run: Run, folder: str) -> dict[str, Any]:
    """Train one run and report; or the line that refuses it."""
    torch.manual_seed(1234)
    try:
        engine = run.engine(run.ds_config())
    except VPipeConfigError as error:
        return {"refused": str(error)}
    replica, losses, done, refused = engine.grid.data_parallel_id, [], [], []
    ends = iter(run.ends)
    stop = next(ends)
    iterator = toy.data(stop, replica=replica)
    while engine.global_steps < run.updates:
        update = engine.global_steps
        name, argument = run.calls.get(update, ("", None))
        if name and (not done or done[-1][0] != update) and update not in (u for u, *_ in refused):
            if name in ("resume", "set_depths", "repartition"):  # which give up a move that has not begun
                done = [one for one in done if not unbegun(engine, one)]
            try:
                if name == "resume":
                    engine.save_checkpoint(f"{folder}/{run.number}")
                    engine.destroy()
                    engine = run.engine(resuming(run, done, *argument))
                    engine.load_checkpoint(f"{folder}/{run.number}")
                    iterator = toy.data(stop, start=engine.consumed_micro_batches, replica=replica)
                done.append((update, name, call(engine, name, argument, run.loop)))
            except (VPipeConfigError, CallOrderError) as error:
                refused.append((update, str(error)))
        if run.loop:
            loops.rounds(engine, engine.global_steps * run.micro_batches, run.micro_batches)
            continue
        try:
            losses.append(float(engine.train_batch(iterator)))
        except StopIteration:
            stop = next(ends)
            iterator = toy.data(stop, start=engine.consumed_micro_batches, replica=replica)
    if run.loop:
        engine.drain()
    elif any(name == "move" for _, name, _ in done):  # a layer that is on its way has an update to come
        engine.quiesce()
    report = {
        "stage": engine.stage_id,
        "parameters": loops.parameters(engine) if run.loop else cases.parameters(engine),
        "losses": losses,
        "done": done,
        "refused mid-run": refused,
    }
    engine.destroy()
    return report


def unbegun(engine: Any, call: tuple[int, str, Any]) -> bool:
    """Whether a call is a move that begins later."""
    _, name, result = call
    if name != "move" or result is None:
        return False
    return not Move(*result).has_begun(engine.pipeline, engine.global_steps * engine.micro_batches)


def resuming(
    run: Run, done: list[tuple[int, str, Any]], counts: tuple[int, ...] | None, depths: tuple[int, ...] | None
) -> dict[str, Any]:
    """The JSON of a resumed run: with this split and these depths, or those that there are by then."""
    split, latest = state(run, done)
    ds_config = run.ds_config()
    ds_config["vpipe"]["partition"] = list(counts or split)
    if run.block.get("sync_mode") != "bsp":
        ds_config["vpipe"]["stage_to_depth_map"] = list(depths or latest)
    return ds_config


def state(run: Run, done: list[tuple[int, str, Any]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Layers and depths of all stages after these calls."""
    split, depths = run.counts, run.depths
    for _, name, result in done:
        if name == "set_depths":
            depths = result
        elif name == "repartition":
            split = result
        elif name == "resume":
            split, depths = result[0] or split, result[1] or depths
        elif name == "move" and result is not None:
            split = moved(split, Move(*result))
    return split, depths


def call(engine: Any, name: str, argument: Any, loop: bool) -> Any:
    """Make one call between two updates; returns what the replay has to know of it."""
    if name == "quiesce":
        engine.quiesce()
    elif name == "evaluate" and loop:
        engine.eval()
        for number in range(argument):
            engine(*toy.micro_batch(10_000 + number))
        engine.train()
    elif name == "evaluate":
        ends = engine.stage.is_first or engine.stage.is_last
        engine.eval_batch(toy.data(start=10_000) if ends else None, num_micro_batches=argument)
    elif name == "whole":
        engine.full_state_dict()
    elif name in ("repartition", "set_depths"):
        getattr(engine, name)(argument)
        return argument
    elif name == "move":
        return move(engine, random.Random(argument))
    return argument


def move(engine: Any, draw: random.Random) -> tuple[int, int, int, int] | None:
    """Give a move of a layer to a neighbour, if any is possible; returns it as the replay has it."""
    pipeline, partition = engine.pipeline, engine.pipeline.partition
    pairs = [(s, s + d) for s in range(pipeline.num_stages) for d in (-1, 1) if partition[s] > 1]
    pairs = [pair for pair in pairs if 0 <= pair[1] < pipeline.num_stages]
    if not pairs:
        return None
    source, target = draw.choice(pairs)
    layer = sum(partition[:source]) + (partition[source] - 1 if target > source else 0)
    first = earliest_cut_over(pipeline, source, target, engine.global_steps)
    engine.move_layer(Move(layer, source, target, first))
    return layer, source, target, first


def train_all(runs: list[Run], folder: str) -> list[dict[str, Any]]:
    reports = []
    for run in runs:
        reports.append(train(run, folder))
        cases.close_groups()
    return reports


def replayed(run: Run, done: list[tuple[int, str, Any]], newest: bool = False) -> reference.Replay:
    """The run by the replay, with the calls that were made."""
    size, block = run.micro_batches, run.block
    refills, left_over, moves, changes = {0}, dict[int, int](), list[Any](), list[Any]()
    if block.get("sync_mode") == "bsp":  # whose pipeline is empty before every batch
        refills |= {update * size for update in range(run.updates + 1)}
    if run.loop:  # which ends with a drain
        refills.add(run.updates * size)
    for end in run.ends[:-1]:
        refills.add(end // size * size)
        left_over[end // size * size] = end % size
    for number, (update, name, result) in enumerate(done):
        first = update * size
        (old, depths), (new, latest) = state(run, done[:number]), state(run, done[: number + 1])
        if run.loop and name != "move":  # all micro-batches that the script has handed in are trained before
            refills.add(first)
            left_over[first] = 0
        elif name in ("quiesce", "resume", "set_depths", "repartition", "whole"):
            refills.add(first)
            left_over[first] = min(depths[0], min(end for end in run.ends if end >= first) - first)
        if latest != depths:
            changes.append((first, latest))
        if name == "move" and result is not None:
            moves.append((result, Pipeline("asp", run.stages, size, depths)))
        else:
            both = zip(places(old), places(new), strict=True)
            moves += [((layer, a, b, first), None) for layer, (a, b) in enumerate(both) if a != b]
    moves = [(*move[:3], cut_over(move, pipeline, refills)) for move, pipeline in moves]
    staleness = block.get("staleness")
    tied: dict[str, Any] = {"layers": toy.built_tied_layers(), "ties": toy.TIES[:1]} if run.tied else {}
    replay = reference.Replay(
        run.counts, run.depths, size, OPTIMIZERS[run.optimizer][1],
        vertical=block.get("weight_sync") == "vertical",
        stash=block.get("weight_sync") != "none" or newest,
        recomputed=recomputed_layers(run),
        newest=newest,
        replicas=run.replicas,
        zero=run.more["zero_optimization"]["stage"] == 1,
        clip=run.more.get("gradient_clipping", 0.0),
        scope=block.get("gradient_clipping_scope", "stage"),
        refills=sorted(refills),
        moves=moves,
        depth_changes=changes,
        staleness=staleness or {},
        scaler=reference.Scaler(2.0**18, window=2) if run.precision == "fp16" else None,
        criterion=toy.mean_over_positions if run.tied else toy.float_cross_entropy,
        **tied,
        **PRECISIONS[run.precision][1],
    )  # fmt: skip
    # Nothing is in flight where the run begins with late gradients step by step and is empty by itself.
    replay.left_over |= {first: left for first, left in left_over.items() if first // size not in replay.drained}
    return replay.run(run.updates)


def recomputed_layers(run: Run) -> list[int]:
    """Recomputed layers of every stage. A whole model has a piece more at its front, and one behind its layers."""
    found = []
    for stage, (ratio, layers) in enumerate(zip(run.block["recompute_ratio"], run.counts, strict=True)):
        front, tail = run.loop and stage == 0, run.loop and stage == run.stages - 1
        pieces = int(ratio * (layers + front + tail))
        found.append(min(layers, max(0, pieces - tail)))
    return found


def cut_over(move: tuple[int, int, int, int], pipeline: Pipeline | None, drains: set[int]) -> int:
    """The first micro-batch after a move: where the pipeline drains, one that has begun is complete."""
    if pipeline is None:
        return move[3]
    return min([move[3], *(drain for drain in drains if drain and Move(*move).has_begun(pipeline, drain))])


def places(split: tuple[int, ...]) -> list[int]:
    return [stage for stage, count in enumerate(split) for _ in range(count)]


def tolerance(run: Run) -> float:
    """Zero where every sum is done in the same order as in the replay."""
    off = PRECISIONS[run.precision][2]
    exact = run.optimizer != "AdamW" and run.replicas == 1 and not run.tied
    if run.precision == "fp32" and exact and not {"staleness", "gradient_clipping_scope"} & {*run.block}:
        return 0.0
    return 1e-4 if run.precision == "fp32" and run.optimizer == "AdamW" else off


def without_rounding(run: Run, parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters without the bias of attention's keys where Adam steps by gradients that are rounding alone."""
    if run.optimizer != "AdamW" or run.precision == "fp32":
        return parameters
    queries_and_values = {
        name: torch.cat([value.chunk(3)[0], value.chunk(3)[2]])
        for name, value in parameters.items()
        if name.endswith("in_proj_bias")
    }
    return {**parameters, **queries_and_values}


def check(run: Run, reports: list[dict[str, Any]], seen: Counter[str]) -> None:
    """Ranks of a stage are neighbours."""
    lines = {report.get("refused") for report in reports}
    if lines != {None}:
        (line,) = lines  # the same one on every rank
        assert line is not None
        assert "\n" not in line, line
        seen["refused"] += 1
        return
    assert all(report["done"] == reports[0]["done"] for report in reports), run
    assert all(report["refused mid-run"] == reports[0]["refused mid-run"] for report in reports), run
    assert all("\n" not in line for _, line in reports[0]["refused mid-run"])
    done = reports[0]["done"]
    seen.update(f"call of {name}" for _, name, _ in done)
    seen.update("call refused" for _ in reports[0]["refused mid-run"])
    wanted = replayed(run, done)
    for replica in range(run.replicas):
        pipeline = reports[replica :: run.replicas]
        found = by_layer(pipeline) if run.tied else cases.merged(pipeline)
        if run.tied and run.stages == 1:
            found |= {name.replace("0.", "9.", 1): value for name, value in found.items() if name.startswith("0.")}
        off = difference(without_rounding(run, found), without_rounding(run, wanted.parameters()))
        assert off <= tolerance(run), f"parameters off by {off:.1e} after {done}: {run}"
        for report in pipeline:
            assert run.loop or report["losses"] == pytest.approx(wanted.losses, rel=max(1e-5, tolerance(run))), run
    seen["trained"] += 1
    if max(run.depths) and difference(
        replayed(run, done, newest=True).parameters(), wanted.parameters()
    ) > 2 * tolerance(run):
        seen["a wrong version would have been seen"] += 1


def test_equal_to_the_replay_or_refused(worlds: Worlds) -> None:
    seen: Counter[str] = Counter()
    runs = [drawn(number) for number in range(FIRST, FIRST + RUNS)]
    by_ranks: dict[int, list[Run]] = {}
    for run in runs:
        by_ranks.setdefault(run.stages * run.replicas, []).append(run)
    for ranks, runs in by_ranks.items():
        rest = iter(runs)
        while together := list(islice(rest, AT_ONCE)):
            with tempfile.TemporaryDirectory() as folder:
                reports = worlds.run(ranks, train_all, together, folder)
            for position, run in enumerate(together):
                check(run, [of_rank[position] for of_rank in reports], seen)
    print(f"\n{RUNS} runs from {FIRST}:", ", ".join(f"{count} {what}" for what, count in sorted(seen.items())))
    assert seen["trained"] > RUNS / 2
    assert seen["a wrong version would have been seen"] > seen["trained"] / 3
