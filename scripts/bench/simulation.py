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

import torch.distributed as dist
from common import Say, close_groups, ds_config, engine_for, micro_batch, parser_of, run, trainer_of
from schedule import OURS, VIRTUAL, Case, train_for

from ds_vpipe.config import VPipeConfig
from ds_vpipe.schedules.program import Workload
from ds_vpipe.simulation.costs import StageCost, recorded_costs
from ds_vpipe.simulation.simulator import simulate
from ds_vpipe.timelines.merge import merge, read_recordings

CASES = [("asp", 1), ("asp", 2), ("asp", 8), ("bsp", 1), ("bsp", 8), ("gpipe", 8), ("interleaved", 8)]
RECORDED = {1: "bsp", VIRTUAL: "interleaved"}  # by virtual stages
RECORDED_MICRO_BATCHES, RECORDED_BATCHES = 4, 6


def recorded(arm: str, folder: str, options: argparse.Namespace) -> tuple[StageCost, ...]:
    """Costs of every virtual stage, from a short run that is recorded into ``folder``."""
    case = Case("emulated", options.stages, RECORDED_MICRO_BATCHES, options.stage_ms)
    block = {**(OURS[arm](case) or {}), "timeline": {"enabled": True, "path": folder}}
    engine = engine_for(case.layers(), case.stages, ds_config(case.micro_batches, block))
    train = trainer_of(engine, micro_batch("emulated"))
    for _ in range(RECORDED_BATCHES):
        train()
    engine.save_timeline()
    dist.barrier()
    costs = recorded_costs(merge(read_recordings(folder)), engine.pipeline.num_parts)
    engine.destroy()
    del engine, train
    close_groups()
    return costs


def work(rank: int, say: Say, folder: str, options: argparse.Namespace) -> None:
    """One rank."""
    costs = {virtual: recorded(arm, f"{folder}/{virtual}", options) for virtual, arm in RECORDED.items()}
    for arm, micro_batches in CASES:
        case = Case("emulated", options.stages, micro_batches, options.stage_ms)
        pipeline = VPipeConfig.parse(OURS[arm](case)).pipeline(case.stages, micro_batches)
        workload = Workload(pipeline.depths[0] // micro_batches + 12)
        simulated = simulate(pipeline, costs[pipeline.virtual_stages], workload).throughput
        batches = -(-options.micro_batches // micro_batches)
        seconds = statistics.median(train_for(batches, arm, case, None) for _ in range(options.repetitions))
        measured = batches * micro_batches / seconds
        off = 100 * (simulated / measured - 1)
        say(
            f"{pipeline.schedule:11} K={case.stages} M={micro_batches} v={pipeline.virtual_stages} | simulated "
            f"{simulated:6.2f} measured {measured:6.2f} micro-batches/s | off by {off:+.1f} %"
        )


parser = parser_of(__doc__)
parser.add_argument("--stages", type=int, default=4, help="K")
parser.add_argument("--stage-ms", type=float, default=48.0, help="emulated compute per stage and micro-batch")
parser.add_argument("--micro-batches", type=int, default=64, help="per repetition")
parser.add_argument("--repetitions", type=int, default=3)
parse = parser.parse_args

if __name__ == "__main__":
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        run(work, options.stages, folder, options)
