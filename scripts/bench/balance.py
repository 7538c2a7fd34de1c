#!/usr/bin/env python
"""A pipeline that balances itself: pace before and after, from a bad split and with a stage that slows down.

``python scripts/bench/balance.py`` starts K ranks on this machine and trains layers that sleep, so that two cores can
stand for any number of devices:

* worst: training starts from ``[n-3, 1, 1, 1]``;
* slower: training starts from an even split, and from update 200 on stage 1 takes twice as long for every layer;
* frozen: likewise, and from update 100 on the first half of the layers is frozen, which takes a third of the time then;
* jitter: every pass takes another time, log-normal with this sigma. Fixed default depths against those that follow
  (``"stage_to_depth_map": "auto"``);
* plain: nothing sleeps; a GPT-2 of Hugging Face's library with a large vocabulary is trained by a looping script on two
  stages, from its default split.

The first three are trained by DeepSpeed's engine from an even split, without ``"replan"``, with it in both ways of
moving, and from the best split for the end. Arms that sleep are trained at once, each by K processes of its own: what
else the machine does meets them alike. With fewer at once they leave each other more of the cores, which shows what a
decision costs. Plain models take turns. Prints medians: milliseconds per micro-batch at first
and in the last updates, the longest update, and the lines of the decisions. Rows go to a file, if one is named, and
table and picture are of all that are in it.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from typing import Any

import torch
from common import (
    Curve,
    Emulated,
    Row,
    Say,
    Sleep,
    add_row,
    close_groups,
    draw,
    ds_config,
    engine_for,
    machine,
    markdown,
    micro_batch,
    parser_of,
    read_rows,
    run,
    seconds_of,
    slowest,
    start,
    trainer_of,
)
from deepspeed.pipe import LayerSpec

import ds_vpipe

CASES = ("worst", "slower", "frozen")
SLOW_STAGE, SLOWER, SLOWER_AT = 1, 2.0, 200
SEQUENCE, PLAIN_BATCH = 32, 4
ARMS = {
    "stock": "DeepSpeed, even split",
    "stays": "without replan",
    "drain": '"moves": "drain"',
    "live": '"moves": "live"',
    "best": "from the best split",
}


@dataclass
class Device:
    """Emulated device of a rank. ``slowness`` multiplies the time of every layer on it."""

    slowness: float = 1.0


class Throttled(Emulated):
    """Layer that takes the time of the device that it is on."""

    def __init__(self, milliseconds: float, device: Device) -> None:
        super().__init__(milliseconds)
        self._alone, self._device = self._part, device

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        self._part = self._alone * self._device.slowness
        return super().forward(value)


class Jittery(Emulated):
    """Layer whose every pass takes another time."""

    def __init__(self, milliseconds: float, sigma: float, rank: int) -> None:
        super().__init__(milliseconds)
        self._random, self._sigma = random.Random(rank), sigma

    def _varied(self) -> float:
        return self._part * self._random.lognormvariate(-(self._sigma**2) / 2, self._sigma)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        backward_s = self._varied()
        return Sleep.apply(value * Sleep.apply(self.scale, 0.0, backward_s), self._varied(), backward_s)


def best_split(layers: list[float], slowness: list[float]) -> list[int]:
    """Layers per stage with which the slowest stage takes the least time, by trying all."""

    def order(edges: tuple[int, ...]) -> tuple[float, float]:
        stages = zip(pairwise(edges), slowness, strict=True)
        seconds = [sum(layers[start:stop]) * factor for (start, stop), factor in stages]
        return max(seconds), sum(one**2 for one in seconds)

    cuts = combinations(range(1, len(layers)), len(slowness) - 1)
    edges = min(((0, *inner, len(layers)) for inner in cuts), key=order)
    return [stop - start for start, stop in pairwise(edges)]


def ended(engine: Any) -> list[str]:
    """Lines of the decisions of an engine, which is destroyed."""
    balance = getattr(engine, "balance", None)
    lines = [] if balance is None else [decision.line() for decision in balance.decisions]
    engine.destroy()
    return lines


def train(case: str, arm: str, rank: int, options: argparse.Namespace) -> tuple[Row, list[str]]:
    """Milliseconds per micro-batch of every update and the split at the end, and lines of the decisions."""
    stages, layers = options.stages, options.layers
    slowness = [SLOWER if case == "slower" and stage == SLOW_STAGE else 1.0 for stage in range(stages)]
    frozen, changes = layers // 2 if case == "frozen" else 0, changes_at(case, options)
    partition = [layers - stages + 1] + [1] * (stages - 1)
    if arm == "best":
        partition = best_split([1 / 3] * frozen + [1.0] * (layers - frozen), slowness)
    elif case != "worst":
        partition = best_split([1.0] * layers, [1.0] * stages)
    block: dict[str, Any] | None = None if arm == "stock" else {"partition": partition}
    if block is not None and arm in ("live", "drain"):
        block["replan"] = {"every": options.every, "moves": arm}
    device = Device()
    specs = [LayerSpec(Throttled, options.layer_ms, device) for _ in range(layers)]
    engine = engine_for(specs, stages, ds_config(options.micro_batches, block))
    train_batch, milliseconds = trainer_of(engine, micro_batch("emulated")), []
    for update in range(options.updates or (changes + 80 if changes else 200)):
        if update == (0 if arm == "best" else changes):
            device.slowness = slowness[rank]
            for number, layer in enumerate(engine.module.forward_funcs, engine.module._local_start):
                layer.requires_grad_(number >= frozen)
        begin = time.perf_counter()
        train_batch()
        milliseconds.append(round(1e3 * (time.perf_counter() - begin) / options.micro_batches, 2))
    split = [stop - start for start, stop in pairwise(engine.module.parts)]
    lines = ended(engine)
    del engine, train_batch
    close_groups()
    return {"case": case, "arm": arm, "layers": split, "ms": milliseconds}, lines


def changes_at(case: str, options: argparse.Namespace) -> int:
    """Update at which something changes, 0 for the start."""
    return {"slower": SLOWER_AT, "frozen": options.frozen_at}.get(case, 0)


def train_jittery(sigma: float, follows: bool, rank: int, options: argparse.Namespace) -> tuple[Row, list[str]]:
    """Mean milliseconds per micro-batch of the second half of all updates, and lines of the decisions."""
    block: dict[str, Any] = {"partition": "uniform"}
    if follows:
        replan = {"every": options.every, "max_staleness": 3}
        block |= {"stage_to_depth_map": "auto", "replan": replan}
    specs = [LayerSpec(Jittery, options.stage_ms, sigma, rank) for _ in range(options.stages)]
    engine = engine_for(specs, options.stages, ds_config(options.micro_batches, block))
    half = (options.updates or 140) // 2
    seconds = seconds_of(trainer_of(engine, micro_batch("emulated")), half, half) / half / options.micro_batches
    lines = [] if engine.balance is None else [decision.line() for decision in engine.balance.depth_decisions]
    row = {"sigma": sigma, "follows": follows, "depths": list(engine.pipeline.depths), "ms": round(1e3 * seconds, 2)}
    engine.destroy()
    del engine
    close_groups()
    return row, lines


def show_jittery(options: argparse.Namespace, rows: list[Row]) -> None:
    """Print the table of all pipelines whose passes vary, and draw them."""
    shown, points = [], []
    for sigma in sorted({row["sigma"] for row in rows}):
        fixed, follow = ([r for r in rows if (r["sigma"], r["follows"]) == (sigma, one)] for one in (False, True))
        ratios = sorted(one["ms"] / other["ms"] for one, other in zip(fixed, follow, strict=True))
        paces = [statistics.median(row["ms"] for row in found) for found in (fixed, follow)]
        depths = ", ".join(sorted({str(row["depths"]) for row in follow}))
        shown.append((sigma, *(f"{pace:.1f}" for pace in paces), depths, *spread(ratios, ".2f")))
        points.append([(100 * sigma, pace) for pace in paces])
    head = ["sigma", "default depths, ms", "depths that follow, ms", "the last ones", "times as fast", "from, to"]
    print(markdown(head, shown))
    if options.plot:
        fixed, follow = zip(*points, strict=True)
        curves = [Curve("default depths", fixed), Curve("depths that follow", follow, bold=True)]
        draw(options.plot, {"": curves}, "sigma of a pass's time, %", "ms per micro-batch")


def spread(values: Iterable[float], form: str) -> tuple[str, str]:
    """Median of values, and the least and the most of them."""
    found = sorted(values)
    return f"{statistics.median(found):{form}}", f"{found[0]:{form}} to {found[-1]:{form}}"


def train_plain(arm: str, options: argparse.Namespace) -> tuple[list[float], list[str], list[list[int]]]:
    """Seconds per micro-batch of every update, lines of the decisions, and the splits at the start and at the end."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=options.vocabulary, n_embd=128, n_layer=options.layers, n_head=4, n_positions=SEQUENCE
    )
    block = {"replan": {"every": options.every if arm == "drain" else 0}}
    json = ds_config(options.micro_batches, block, PLAIN_BATCH, "AdamW", torch_adam=True)
    engine = ds_vpipe.initialize(model=GPT2LMHeadModel(config), config={**json, "pipeline": {"stages": 2}})[0]
    tokens = torch.randint(options.vocabulary, (PLAIN_BATCH, SEQUENCE))
    splits, seconds = [list(engine.pipeline.partition)], []
    for _ in range(options.updates or 80):
        begin = time.perf_counter()
        for _ in range(options.micro_batches):
            engine.backward(engine(input_ids=tokens, labels=tokens))
            engine.step()
        seconds.append((time.perf_counter() - begin) / options.micro_batches)
    splits.append(list(engine.pipeline.partition))
    lines = ended(engine)
    del engine
    close_groups()
    return seconds, lines, splits


def work_plain(rank: int, say: Say, options: argparse.Namespace) -> None:
    """One rank of the plain model."""
    rows, ratios = [], []
    for repetition in range(options.repetitions):
        paces = {}
        for arm in ("stays", "drain"):
            seconds, lines, splits = train_plain(arm, options)
            paces[arm] = slowest(statistics.median(seconds[-options.every :]))
            rows.append((repetition, arm, *splits, f"{1e3 * paces[arm]:.1f}"))
            for line in lines:
                say(f"plain: {arm}: {line}")
        ratios.append(paces["stays"] / paces["drain"])
    head = ["repetition", "arm", "pieces at first", "pieces at the end", "ms at the end"]
    found = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    say(f"{markdown(head, rows)}plain: {statistics.median(ratios):.2f} times as fast ({found})")


def work(rank: int, say: Say, case: Any, arm: Any, options: argparse.Namespace) -> None:
    """One rank of an arm, with ``--jitter`` of a pipeline whose passes vary."""
    row, lines = (train_jittery if options.jitter else train)(case, arm, rank, options)
    add_row(row, options.json if rank == 0 else None)
    for line in lines:
        say(f"jitter {case}: {line}" if options.jitter else f"{case}: {arm}: {line}")


def train_all(options: argparse.Namespace) -> None:
    """Train the arms of every case, some at once, a case after the other."""
    for _, case in product(range(options.repetitions), options.jitter or options.cases):
        # DeepSpeed's engine fails where all layers of a stage are frozen.
        able = [arm for arm in options.arms if (case, arm) != ("frozen", "stock")]
        arms = (False, True) if options.jitter else able
        with ThreadPoolExecutor(options.at_once or len(arms)) as pool:
            list(pool.map(lambda arm, case=case: start(work, options.stages, case, arm, options), arms))


def show(options: argparse.Namespace, rows: list[Row]) -> None:
    """Print the table of all rows, and draw them."""
    shown, panels = [], {}
    for case in dict.fromkeys(row["case"] for row in rows):
        begin = changes_at(case, options) or 2 * options.stages
        runs = {arm: [row for row in rows if (row["case"], row["arm"]) == (case, arm)] for arm in ARMS}
        runs = {arm: found for arm, found in runs.items() if found}
        paces = {arm: [statistics.median(row["ms"][-options.every :]) for row in found] for arm, found in runs.items()}
        for arm, found in runs.items():
            at_first = statistics.median(statistics.median(row["ms"][begin : begin + options.every]) for row in found)
            longest = statistics.median(max(row["ms"][begin:]) for row in found)
            pairs = zip(paces.get("best", ()), paces[arm], strict=False)
            of_best = spread((best / one for best, one in pairs), ".0%") if "best" in paces else ("", "")
            layers = ", ".join(sorted({str(row["layers"]) for row in found}))
            measured = f"{at_first:.1f}", f"{longest:.0f}", f"{statistics.median(paces[arm]):.1f}"
            shown.append((case, arm, layers, *measured, *of_best))
        panels[case] = [
            Curve(ARMS[arm], list(enumerate(map(statistics.median, zip(*(row["ms"] for row in found), strict=True)))),
                  arm == "live", arm == "best")
            for arm, found in runs.items()
        ]  # fmt: skip
    head = [
        "case",
        "arm",
        "layers at the end",
        "ms at first",
        "longest, ms",
        "ms at the end",
        "of the best",
        "from, to",
    ]
    print(markdown(head, shown))
    if options.plot:
        draw(options.plot, panels, "update", "ms per micro-batch")


parser = parser_of(__doc__)
parser.add_argument("--stages", type=int, default=4)
parser.add_argument("--layers", type=int, default=16)
parser.add_argument("--layer-ms", type=float, default=24.0, help="per layer and micro-batch")
parser.add_argument("--micro-batches", type=int, default=2)
parser.add_argument("--every", type=int, default=20, help="updates between two looks")
parser.add_argument("--updates", type=int, help="of each run; default: 80 after a change, else 200")
parser.add_argument("--frozen-at", type=int, default=100, help="update at which layers are frozen")
parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
parser.add_argument("--at-once", type=int, help="arms of K processes that run at the same time; default: all")
parser.add_argument("--json", help="file of rows")
parser.add_argument("--plot", help="picture of the seconds of every update")
parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
parser.add_argument("--plain", action="store_true", help="the plain model, and nothing else")
parser.add_argument("--jitter", type=float, nargs="+", help="sigmas of pipelines whose passes vary, nothing else")
parser.add_argument("--stage-ms", type=float, default=48.0, help="per stage and micro-batch, of these")
parser.add_argument("--vocabulary", type=int, default=16384, help="of the plain model")
parser.add_argument("--repetitions", type=int, default=5, help="turns of all arms")
parse = parser.parse_args

if __name__ == "__main__":
    options = parse()
    if options.plain:
        run(work_plain, 2, options)
    else:
        print(machine(), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            options.json = options.json or f"{folder}/rows.jsonl"
            train_all(options)
            (show_jittery if options.jitter else show)(options, read_rows(options.json))
