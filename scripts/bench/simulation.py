#!/usr/bin/env python
"""Simulated against measured throughput of every schedule, on emulated device time.

``python scripts/bench/simulation.py`` starts four ranks on this machine, whose layers sleep for their forward and
backward passes, 1 : 2. A short run of 1F1B, or of interleaved 1F1B with another number of micro-batches, is recorded;
the simulator takes the costs from there (:mod:`ds_vpipe.simulation.costs`) and says how fast the other
schedules are, which then run and are measured without a recorder. Prints micro-batches/s of both and how far the
simulation is off.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from common import build, ds_config, engine_for, join, machine, micro_batch, parser_of, start, trainer_of

from ds_vpipe.schedules.program import Workload
from ds_vpipe.simulation.costs import StageCost, recorded_costs
from ds_vpipe.simulation.simulator import simulate
from ds_vpipe.timelines.merge import merge, read_recordings

CASES = [
    ("asp", 1, 1),
    ("asp", 2, 1),
    ("asp", 8, 1),
    ("1f1b", 1, 1),
    ("1f1b", 8, 1),
    ("gpipe", 8, 1),
    ("interleaved", 8, 2),
]
RECORDED = {1: ("1f1b", 4), 2: ("interleaved", 4)}  # schedule and M of the recording, by virtual stages
RECORDED_BATCHES = 6


def engine_of(
    schedule: str, micro_batches: int, virtual_stages: int, options: argparse.Namespace, folder: str | None = None
) -> Any:
    """An engine with one emulated layer per virtual stage, recorded into ``folder`` if there is one."""
    block: dict[str, Any] = {} if schedule == "asp" else {"sync_mode": "bsp", "schedule": schedule}
    if virtual_stages > 1:
        block["virtual_stages"] = virtual_stages
    if folder is not None:
        block["timeline"] = {"enabled": True, "path": folder}
    layers = build("emulated", options.stages * virtual_stages, options.stage_ms / virtual_stages)
    return engine_for(layers, options.stages, ds_config(micro_batches, block))


def calibrate(virtual_stages: int, folder: str, options: argparse.Namespace) -> tuple[StageCost, ...]:
    """Costs of every virtual stage, from a short run that is recorded into ``folder``."""
    schedule, micro_batches = RECORDED[virtual_stages]
    engine = engine_of(schedule, micro_batches, virtual_stages, options, folder)
    train = trainer_of(engine, micro_batch("emulated"))
    for _ in range(RECORDED_BATCHES):
        train()
    engine.save_timeline()
    dist.barrier()
    costs = recorded_costs(merge(read_recordings(folder)), engine.pipeline.num_parts)
    engine.destroy()
    dist.barrier()
    return costs


def measure(engine: Any, micro_batches: int, options: argparse.Namespace) -> float:
    """Micro-batches/s of an engine, median over repetitions."""
    train = trainer_of(engine, micro_batch("emulated"))
    # A pipeline that all ranks have stopped in needs some batches to find its rhythm again.
    settling = -(-4 * options.stages // micro_batches)
    batches = -(-options.micro_batches // micro_batches)
    rates = []
    for _ in range(options.repetitions):
        dist.barrier()
        for _ in range(settling):
            train()
        begin = time.perf_counter()
        for _ in range(batches):
            train()
        rates.append(batches * micro_batches / (time.perf_counter() - begin))
    return statistics.median(rates)


def work(rank: int, stages: int, port: int, folder: str, options: argparse.Namespace) -> None:
    """One rank; rank 0 prints."""
    printed = join(rank, stages, port)
    costs = {virtual: calibrate(virtual, f"{folder}/{virtual}", options) for virtual in RECORDED}
    for schedule, micro_batches, virtual_stages in CASES:
        engine = engine_of(schedule, micro_batches, virtual_stages, options)
        workload = Workload(engine.pipeline.depths[0] // micro_batches + 12)
        simulated = simulate(engine.pipeline, costs[virtual_stages], workload).throughput
        measured = measure(engine, micro_batches, options)
        if rank == 0:
            print(
                f"{schedule:11} K={stages} M={micro_batches} v={virtual_stages} | simulated {simulated:6.2f} "
                f"measured {measured:6.2f} micro-batches/s | off by {100 * (simulated / measured - 1):+.1f} %",
                file=printed,
                flush=True,
            )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--stages", type=int, default=4, help="K")
    parser.add_argument("--stage-ms", type=float, default=48.0, help="emulated compute per stage and micro-batch")
    parser.add_argument("--micro-batches", type=int, default=64, help="per repetition")
    parser.add_argument("--repetitions", type=int, default=3)
    return parser.parse_args(words)


def main() -> None:
    """Run every case in one world of ranks."""
    options = parse()
    print(f"{machine()}, gloo", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        start(work, options.stages, folder, options)


if __name__ == "__main__":
    main()
