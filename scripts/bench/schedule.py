#!/usr/bin/env python
"""Throughput of pipelines, DeepSpeed's, torch's and ours, with interleaved repetitions.

``python scripts/bench/schedule.py`` starts K ranks on this machine and trains two equal layers per stage with

* bare: processes and sockets that do asp's passes and updates in its order without an engine, weights of passes in
  flight or ``torch.distributed``: what the machine itself costs;
* stock: DeepSpeed's ``PipelineEngine``; dualpipev: its ``DualPipeVEngine``; data-parallel: its engine with the whole
  model on every rank, for the same micro-batches per update;
* torch-1f1b, torch-interleaved, torch-zbv: ``torch.distributed.pipelining``, two parts per rank but for the first;
* bsp, gpipe, interleaved: our synchronous schedules; asp: the asynchronous one; asp-deeper: deep enough to hide
  transfers; asp-host: asp over gloo, as between hosts, where the others use shared memory.

Kinds of work: emulated, layers that sleep, so that two cores can stand for any number of devices and only schedule,
communication and bookkeeping are measured; adapters, LoRA on frozen layers that sleep, whose backward passes are as
long as the forward passes; and real, matrix products with one thread per rank. ``--links`` adds emulated transfer
times to the emulated work, in units of a stage's compute per micro-batch.

Prints for each arm micro-batches/s (median over repetitions), efficiency (the slowest stage's own compute, measured
alone on all ranks at once, over measured time per micro-batch) and the ratio to stock.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bare import bare_trainer
from common import (
    ACTIVATION_BYTES,
    REAL_BATCH,
    Curve,
    Row,
    Say,
    add_row,
    build,
    close_groups,
    draw,
    ds_config,
    engine_for,
    machine,
    markdown,
    micro_batch,
    parser_of,
    read_rows,
    seconds_of,
    slowest,
    start,
    trainer_of,
)
from slow_links import EmulatedLinks
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from ds_vpipe.planning.pace import hiding_depths

SETTLING = 2  # batches before a measurement, in which buffers and connections are made
VIRTUAL = 2  # parts per rank, of schedules that have several
LATENCY = 0.05  # of a message between two processes, in units of a stage's compute
Train = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """Work of one comparison."""

    work: str  # "emulated" layers, or "adapters" on such, or "real" ones, two per stage
    stages: int  # K
    micro_batches: int  # M
    stage_ms: float  # emulated compute per stage and micro-batch
    link: float = 0.0  # seconds that an activation is on its way, in units of ``stage_ms``

    def layers(self) -> list[Any]:
        """Specs of the model's layers."""
        return build(self.work, VIRTUAL * self.stages, self.stage_ms / VIRTUAL)

    def __str__(self) -> str:
        link = f" link {self.link:.0%}" if self.link else ""
        return f"{self.work:8} K={self.stages} M={self.micro_batches:<2}{link}"


def deeper(case: Case) -> list[int]:
    """The smallest depths that hide transfers, as the planner finds them. A message that takes no time takes some."""
    round_trip = 2 * (case.link + LATENCY)
    return list(hiding_depths([1.0] * case.stages, [round_trip] * (case.stages - 1)))


OURS: dict[str, Callable[[Case], dict[str, Any] | None]] = {
    "stock": lambda case: None,
    "bsp": lambda case: {"sync_mode": "bsp"},
    "gpipe": lambda case: {"sync_mode": "bsp", "schedule": "gpipe"},
    "interleaved": lambda case: {"sync_mode": "bsp", "schedule": "interleaved", "virtual_stages": VIRTUAL},
    "asp": lambda case: {},
    "asp-deeper": lambda case: {"stage_to_depth_map": deeper(case)},
    "asp-host": lambda case: {"link": "host"},
}
TORCHS: dict[str, tuple[Any, Callable[[int, int], list[int]]]] = {  # schedule, and the parts of a rank of so many
    "torch-1f1b": (pipelining.Schedule1F1B, lambda rank, ranks: [rank]),
    "torch-interleaved": (pipelining.ScheduleInterleaved1F1B, lambda rank, ranks: [rank, ranks + rank]),
    "torch-zbv": (ScheduleZBVZeroBubble, lambda rank, ranks: [rank, 2 * ranks - 1 - rank]),
}
ARMS = ("bare", "stock", "data-parallel", "dualpipev", *TORCHS, *list(OURS)[1:])


def keeps_full(arm: str) -> bool:
    """Whether an arm fills the pipeline once and not in every batch."""
    return arm in ("bare", "data-parallel") or arm.startswith("asp")


def refusal(arm: str, case: Case) -> str | None:
    """Why an arm cannot do a case, or None."""
    stages, micro_batches = case.stages, case.micro_batches
    if arm == "bare" and (case.link or case.work != "emulated"):
        return "does emulated work without links"  # whose messages a socket holds, so that no send waits
    if arm == "data-parallel" and case.work != "real":
        return "does real work"  # other layers have next to no weights to reduce
    if arm == "data-parallel" and micro_batches % stages:
        return "needs M divisible by K"
    if arm in ("dualpipev", "torch-zbv") and micro_batches < 2 * stages:
        return "needs M >= 2K"
    if arm == "torch-1f1b" and micro_batches < stages:
        return "needs M >= K"
    if arm in ("interleaved", "torch-interleaved") and micro_batches % stages:
        return "needs M divisible by K"
    return None


def trainer(arm: str, case: Case) -> tuple[Any, Train]:
    """The engine of an arm, None for torch's, and a function that trains a batch."""
    if arm == "bare":
        return None, bare_trainer(*plain_stage(case), micro_batch(case.work), case.micro_batches)
    if arm in TORCHS:
        return None, torch_trainer(arm, case)
    module_class = "DualPipeVModule" if arm == "dualpipev" else "PipelineModule"
    vpipe = OURS[arm](case) if arm in OURS else None
    stages, micro_batches = case.stages, case.micro_batches
    if arm == "data-parallel":
        stages, micro_batches = 1, micro_batches // stages
    if vpipe is not None and case.link:
        vpipe = {**vpipe, "link": "host"}  # shared memory would not be slow
    samples = REAL_BATCH if case.work == "real" else 1
    config = ds_config(micro_batches, vpipe, samples)
    engine = engine_for(case.layers(), stages, config, module_class=module_class)
    return engine, trainer_of(engine, micro_batch(case.work))


def plain_stage(case: Case) -> tuple[torch.nn.Module, Callable[[], None]]:
    """A stage's layers without an engine, and an update of them."""
    torch.manual_seed(0)
    first = VIRTUAL * dist.get_rank()
    module = torch.nn.Sequential(*[spec.build() for spec in case.layers()[first : first + VIRTUAL]])
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return module, update


def torch_trainer(arm: str, case: Case) -> Train:
    """A schedule of ``torch.distributed.pipelining`` with SGD after every batch."""
    torch.manual_seed(0)
    (schedule, parts_of), specs = TORCHS[arm], case.layers()
    mine = parts_of(dist.get_rank(), case.stages)
    parts = len(mine) * case.stages
    size = len(specs) // parts
    modules, stages = [], []
    for part in mine:
        modules.append(torch.nn.Sequential(*[spec.build() for spec in specs[part * size : (part + 1) * size]]))
        stages.append(pipelining.PipelineStage(modules[-1], part, parts, torch.device("cpu")))
    runs = schedule(stages if len(mine) > 1 else stages[0], case.micro_batches, torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=1e-4)
    inputs, labels = (torch.cat([value] * case.micro_batches) for value in micro_batch(case.work))
    arguments = (inputs,) if 0 in mine else ()
    target = {"target": labels, "losses": []} if parts - 1 in mine else {}

    def train() -> None:
        runs.step(*arguments, **target)
        optimizer.step()
        optimizer.zero_grad()

    return train


def stage_seconds(case: Case) -> float:
    """The slowest stage's own compute per micro-batch in seconds: its layers alone, forward and backward, median."""
    module = torch.nn.Sequential(*[spec.build() for spec in case.layers()[:VIRTUAL]])
    value = micro_batch(case.work)[0].requires_grad_()
    times = []
    dist.barrier()
    for _ in range(25):
        begin = time.perf_counter()
        output = module(value)
        torch.autograd.backward(output, torch.ones_like(output))
        times.append(time.perf_counter() - begin)
    return slowest(statistics.median(times))


def train_for(batches: int, arm: str, case: Case, links: EmulatedLinks | None) -> float:
    """Seconds that so many batches take on the slowest rank, once the pipeline has found its rhythm.

    The pipeline is made for it and taken apart afterwards: no other one's threads share the cores with it.
    """
    engine, train = trainer(arm, case)
    before = 0 if links is None else links.messages
    if links is not None:
        links.bytes_per_s = ACTIVATION_BYTES / (case.link * case.stage_ms / 1000)
    settling = SETTLING + (math.ceil(4 * case.stages / case.micro_batches) if keeps_full(arm) else 0)
    seconds = seconds_of(train, batches, settling)
    if links is not None:
        links.bytes_per_s = math.inf
        if links.messages == before:
            raise RuntimeError(f"{arm} sends nothing over emulated links, and would be measured without them")
    if engine is not None:
        engine.destroy()
    del engine, train
    close_groups()
    return seconds


def measure(case: Case, links: EmulatedLinks | None, options: argparse.Namespace) -> list[Row]:
    """The rows of a case, one per arm that can do it."""
    able = [arm for arm in options.arms if refusal(arm, case) is None]
    rates: dict[str, list[float]] = {arm: [] for arm in able}
    seconds = []
    for repetition in range(options.repetitions):
        seconds.append(stage_seconds(case))
        first = repetition % max(1, len(able))
        for arm in able[first:] + able[:first]:
            # About how many times a stage's compute a batch takes.
            slots = case.micro_batches
            slots += 0 if keeps_full(arm) else (case.stages - 1) * (1 + 2 * case.link)
            batches = max(2, math.ceil(options.seconds / (seconds[0] * slots)))
            rates[arm].append(batches * case.micro_batches / train_for(batches, arm, case, links))
    alone = statistics.median(seconds)
    return [
        {
            **asdict(case),
            "stage_ms": 1e3 * alone,
            "arm": arm,
            "rate": statistics.median(values),
            "efficiency": alone * statistics.median(values),
            "spread": [min(values), max(values)],
        }
        for arm, values in rates.items()
    ]


def work(rank: int, say: Say, shared: str, case: Case, options: argparse.Namespace) -> None:
    """One rank; rank 0 also writes the rows down."""
    rows = measure(case, EmulatedLinks(shared, rank) if case.link else None, options)
    stock = next((row["rate"] for row in rows if row["arm"] == "stock"), None)
    for row in rows:
        ratio = f" | {row['rate'] / stock:5.2f} x stock" if stock else ""
        say(
            f"{case} stage {row['stage_ms']:6.2f} ms | {row['arm']:17} {row['rate']:6.2f} micro-batches/s | "
            f"efficiency {row['efficiency']:.3f}{ratio} | {row['spread'][0]:.2f} .. {row['spread'][1]:.2f}"
        )
        add_row(row, options.json if rank == 0 else None)
    for arm in options.arms:
        why = refusal(arm, case)
        if why is not None:
            say(f"{case} | {arm:17} {why}")


def table(rows: list[Row]) -> str:
    """Efficiency of every arm, and how many times as fast as stock the case's fastest other one is.

    Args:
        rows: of several of one arm in one case the last counts.
    """
    arms = [arm for arm in ARMS if any(row["arm"] == arm for row in rows)]
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = (row["work"] != "emulated", row["link"], row["stages"], row["micro_batches"])
        cases.setdefault(key, {})[row["arm"]] = row
    lines = []
    for (_, link, stages, micro_batches), found in sorted(cases.items()):
        kind = f"link {link:.0%}" if link else next(iter(found.values()))["work"]
        cells = [f"{found[arm]['efficiency']:.3f}" if arm in found else "" for arm in arms]
        fastest = max((row for arm, row in found.items() if arm != "bare"), key=lambda row: row["rate"])
        ratio = f"{fastest['arm']} {fastest['rate'] / found['stock']['rate']:.2f}" if "stock" in found else ""
        lines.append((kind, stages, micro_batches, f"{next(iter(found.values()))['stage_ms']:.1f}", *cells, ratio))
    return markdown(["work", "K", "M", "stage, ms", *arms, "fastest, x stock"], lines)


def panels(rows: list[Row]) -> dict[str, list[Curve]]:
    """Efficiency over M, a panel per number of stages and one per number of stages with slow links."""
    found: dict[str, dict[str, dict[int, float]]] = {}
    for row in sorted(rows, key=lambda row: (row["link"], row["stages"], row["micro_batches"])):
        if row["work"] == "emulated":
            title = f"K = {row['stages']}" + (f", transfers of {row['link']:.0%} of compute" if row["link"] else "")
            found.setdefault(title, {}).setdefault(row["arm"], {})[row["micro_batches"]] = row["efficiency"]
    return {
        title: [
            Curve(arm, [*arms.get(arm, {}).items()], bold=arm.startswith("asp"), dashed=arm == "bare")
            for arm in ARMS
            if arm in arms
        ]
        for title, arms in found.items()
    }


def cases_of(options: argparse.Namespace) -> Iterator[Case]:
    """Cases to measure."""
    for stages in options.stages:
        for micro_batches in options.micro_batches:
            yield Case(options.work, stages, micro_batches, options.stage_ms)
    for link in options.links:
        for micro_batches in options.link_micro_batches:
            yield Case("emulated", options.link_stages, micro_batches, options.stage_ms, link)
    for micro_batches in options.real_micro_batches:
        yield Case("real", 2, micro_batches, 0.0)


parser = parser_of(__doc__)
parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
parser.add_argument("--work", choices=("emulated", "adapters"), default="emulated", help="of the first cases")
parser.add_argument("--stages", type=int, nargs="*", default=[2, 4, 8], help="K of the first cases")
parser.add_argument("--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="M of those")
parser.add_argument("--stage-ms", type=float, default=24.0, help="emulated compute per stage and micro-batch")
parser.add_argument("--links", type=float, nargs="*", default=[0.1, 0.5, 1.0], help="transfer over compute")
parser.add_argument("--link-stages", type=int, default=4, help="K of the cases with links")
parser.add_argument("--link-micro-batches", type=int, nargs="+", default=[1, 8], help="M of those")
parser.add_argument("--real-micro-batches", type=int, nargs="*", default=[1, 8], help="M of real work, K = 2")
parser.add_argument("--seconds", type=float, default=2.5, help="of an arm in a repetition, about")
parser.add_argument("--repetitions", type=int, default=5)
parser.add_argument("--json", help="append one JSON line per row to this file")
parser.add_argument("--plot", help="draw the rows of --json to this file, PNG or SVG")
parser.add_argument("--table", help="write the rows of --json to this Markdown file, a row per case")
parse = parser.parse_args

if __name__ == "__main__":
    options = parse()
    if (options.plot or options.table) and not options.json:
        parser.error("--plot and --table show what is in --json: give it too")
    print(machine(), flush=True)
    for case in cases_of(options):
        with tempfile.TemporaryDirectory() as shared:
            start(work, case.stages, shared, case, options)
    if options.plot:
        draw(options.plot, panels(read_rows(options.json)), "M, micro-batches per batch", "efficiency", log=True)
    if options.table:
        Path(options.table).write_text(table(read_rows(options.json)), encoding="utf-8")
