#!/usr/bin/env python
"""A pipeline that balances itself: pace before and after, from a bad split and with a stage that slows down.

``python scripts/bench/balance.py`` starts K ranks on this machine and trains layers that sleep, so that two cores can
stand for any number of devices:

* worst: training starts from ``[n-3, 1, 1, 1]``;
* slower: training starts from an even split, and some updates later stage 1 takes twice as long for every layer;
* jitter: every pass takes another time, log-normal with this sigma. Fixed default depths against those that follow
  (``"stage_to_depth_map": "auto"``), in turns;
* plain: nothing sleeps; a GPT-2 of Hugging Face's library with a large vocabulary is trained by a looping script on two
  stages, from its default split. Arms take turns.

Each is trained without ``"replan"``, with it in both ways of moving, and from the best split for the end. Prints
for each the seconds per micro-batch at the end (median), beside the best, and the lines of the decisions.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import Any

import torch
from common import (
    Curve,
    Emulated,
    Say,
    Sleep,
    close_groups,
    draw,
    ds_config,
    engine_for,
    markdown,
    micro_batch,
    parser_of,
    run,
    slowest,
)
from deepspeed.pipe import LayerSpec

import ds_vpipe

SLOW_STAGE, SLOWER = 1, 2.0
SEQUENCE, PLAIN_BATCH = 32, 4
ARMS = {
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


def best_split(layers: int, slowness: list[float]) -> list[int]:
    """Layers per stage with which the slowest stage takes the least time, by trying all."""

    def order(counts: list[int]) -> tuple[float, float]:
        seconds = [count * factor for count, factor in zip(counts, slowness, strict=True)]
        return max(seconds), sum(one**2 for one in seconds)

    cuts = combinations(range(1, layers), len(slowness) - 1)
    return min(([stop - start for start, stop in pairwise((0, *inner, layers))] for inner in cuts), key=order)


def ended(engine: Any) -> list[str]:
    """Lines of the decisions of an engine, which is destroyed."""
    lines = [] if engine.balance is None else [decision.line() for decision in engine.balance.decisions]
    engine.destroy()
    return lines


def train(case: str, arm: str, rank: int, options: argparse.Namespace) -> tuple[list[float], list[str], list[int]]:
    """Seconds per micro-batch of every update, lines of the decisions, and the split at the end."""
    stages, layers = options.stages, options.layers
    slowness = [SLOWER if case == "slower" and stage == SLOW_STAGE else 1.0 for stage in range(stages)]
    partition = [layers - stages + 1] + [1] * (stages - 1) if case == "worst" else best_split(layers, [1.0] * stages)
    if arm == "best":
        partition = best_split(layers, slowness)
    block: dict[str, Any] = {"partition": partition}
    if arm in ("live", "drain"):
        block["replan"] = {"every": options.every, "moves": arm}
    device = Device()
    specs = [LayerSpec(Throttled, options.layer_ms, device) for _ in range(layers)]
    engine = engine_for(specs, stages, ds_config(options.micro_batches, block))
    batch = micro_batch("emulated")
    data = iter(lambda: batch, None)
    seconds = []
    for update in range(options.updates):
        if update == options.slower_at or arm == "best":
            device.slowness = slowness[rank]
        begin = time.perf_counter()
        engine.train_batch(data)
        seconds.append((time.perf_counter() - begin) / options.micro_batches)
    split, lines = list(engine.pipeline.partition), ended(engine)
    del engine
    close_groups()
    return seconds, lines, split


def train_jittery(sigma: float, follows: bool, rank: int, options: argparse.Namespace) -> tuple[float, list[str]]:
    """Mean seconds per micro-batch of the second half of all updates, and lines of the decisions."""
    block: dict[str, Any] = {"partition": "uniform"}
    if follows:
        replan = {"every": options.every, "max_staleness": options.max_staleness}
        block |= {"stage_to_depth_map": "auto", "replan": replan}
    specs = [LayerSpec(Jittery, options.stage_ms, sigma, rank) for _ in range(options.stages)]
    engine = engine_for(specs, options.stages, ds_config(options.micro_batches, block))
    batch = micro_batch("emulated")
    data = iter(lambda: batch, None)
    for _ in range(options.updates // 2):
        engine.train_batch(data)
    begin = time.perf_counter()
    for _ in range(options.updates // 2):
        engine.train_batch(data)
    seconds = slowest((time.perf_counter() - begin) / (options.updates // 2) / options.micro_batches)
    lines = [] if engine.balance is None else [decision.line() for decision in engine.balance.depth_decisions]
    lines.append(f"depths at the end {list(engine.pipeline.depths)}")
    engine.destroy()
    del engine
    close_groups()
    return seconds, lines


def work_jittery(rank: int, say: Say, options: argparse.Namespace) -> None:
    """One rank of the pipelines whose passes vary."""
    rows = []
    for sigma in options.jitter:
        paces: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(options.repetitions):
            for follows, found in paces.items():
                seconds, lines = train_jittery(sigma, follows, rank, options)
                found.append(seconds)
                for line in lines if follows else ():
                    say(f"jitter {sigma}: {line}")
        ratios = sorted(fixed / other for fixed, other in zip(paces[False], paces[True], strict=True))
        middle = (f"{1e3 * statistics.median(found):.1f}" for found in paces.values())
        spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
        rows.append((sigma, *middle, lines[-1].rpartition("end ")[2], f"{statistics.median(ratios):.2f}", spread))
    head = ["sigma", "default depths, ms", "depths that follow, ms", "the last ones", "times as fast", "from, to"]
    say(markdown(head, rows))


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
    for _ in range(options.updates):
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


def work(rank: int, say: Say, options: argparse.Namespace) -> None:
    """One rank."""
    rows, panels = [], {}
    for case in options.cases:
        first = slice(2, options.every)
        if case == "slower":
            first = slice(options.slower_at, options.slower_at + options.every)
        runs = {arm: train(case, arm, rank, options) for arm in ARMS}
        paces = {arm: statistics.median(seconds[-options.every :]) for arm, (seconds, _, _) in runs.items()}
        for arm, (seconds, lines, split) in runs.items():
            at_first, longest = statistics.median(seconds[first]), max(seconds[2 * options.stages :])
            shown = f"{1e3 * at_first:.1f}", f"{1e3 * longest:.0f}", f"{1e3 * paces[arm]:.1f}"
            rows.append((case, arm, split, *shown, f"{paces['best'] / paces[arm]:.0%}"))
            for line in lines:
                say(f"{case}: {arm}: {line}")
        panels[case] = [
            Curve(ARMS[arm], list(enumerate(1e3 * one for one in seconds)), arm == "live", arm == "best")
            for arm, (seconds, *_) in runs.items()
        ]
    head = ["case", "arm", "layers at the end", "ms at first", "longest, ms", "ms at the end", "of the best"]
    say(markdown(head, rows))
    if rank == 0 and options.plot:
        draw(options.plot, panels, "update", "ms per micro-batch")


parser = parser_of(__doc__)
parser.add_argument("--stages", type=int, default=4)
parser.add_argument("--layers", type=int, default=16)
parser.add_argument("--layer-ms", type=float, default=6.0, help="per layer and micro-batch")
parser.add_argument("--micro-batches", type=int, default=2)
parser.add_argument("--every", type=int, default=20, help="updates between two looks")
parser.add_argument("--updates", type=int, default=200)
parser.add_argument("--slower-at", type=int, default=40, help="update at which a stage slows down")
parser.add_argument("--plot", help="picture of the seconds of every update")
parser.add_argument("--cases", nargs="+", choices=("worst", "slower"), default=["worst", "slower"])
parser.add_argument("--plain", action="store_true", help="the plain model, and nothing else")
parser.add_argument("--jitter", type=float, nargs="+", help="sigmas of pipelines whose passes vary, nothing else")
parser.add_argument("--stage-ms", type=float, default=24.0, help="per stage and micro-batch, of these")
parser.add_argument("--max-staleness", type=int, default=3, help="of these")
parser.add_argument("--vocabulary", type=int, default=16384, help="of the plain model")
parser.add_argument("--repetitions", type=int, default=5, help="of these and the plain model")
parse = parser.parse_args

if __name__ == "__main__":
    options = parse()
    if options.jitter:
        run(work_jittery, options.stages, options)
    else:
        run(work_plain if options.plain else work, 2 if options.plain else options.stages, options)
