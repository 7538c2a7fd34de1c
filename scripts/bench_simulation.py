#!/usr/bin/env python
"""Simulated against measured throughput of every schedule, on emulated device time.

``python scripts/bench_simulation.py`` starts four ranks on this machine, whose layers sleep for their forward and
backward passes, 1 : 2. Before each measurement every rank measures its own passes and updates alone; the simulator
gets those and the transfer seconds given, and nothing of the measured run. Prints micro-batches/s of both and how far
the simulation is off.
"""

from __future__ import annotations

import argparse
import os
import platform
import socket
import statistics
import time
from typing import Any

from bench_schedule import BATCH, WIDTH, build, endless, join, tell

CASES = [
    ("asp", 1, 1),
    ("asp", 8, 1),
    ("1f1b", 1, 1),
    ("1f1b", 8, 1),
    ("gpipe", 8, 1),
    ("interleaved", 8, 2),
]


def engine_for(schedule: str, stages: int, micro_batches: int, virtual_stages: int, stage_ms: float) -> Any:
    """An engine with one emulated layer per part."""
    import torch
    from deepspeed.pipe import PipelineModule

    import ds_vpipe

    torch.manual_seed(0)
    parts = stages * virtual_stages
    layers = build("emulated", parts, stage_ms / virtual_stages)
    module = PipelineModule(layers, num_stages=stages, loss_fn=torch.nn.functional.mse_loss, partition_method="uniform")
    block: dict[str, Any] = {} if schedule == "asp" else {"sync_mode": "bsp", "schedule": schedule}
    if virtual_stages > 1:
        block["virtual_stages"] = virtual_stages
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "vpipe": block,
    }
    return ds_vpipe.initialize(model=module, config=config)[0]


def own_costs(engine: Any) -> list[tuple[float, float]]:
    """Forward and backward seconds of each of this rank's parts, alone, median of 15."""
    import torch

    value = torch.randn(BATCH, WIDTH).requires_grad_()
    results = []
    for chunk in range(engine.pipeline.virtual_stages):
        if engine.pipeline.virtual_stages > 1:
            engine.module.chunk = chunk
        times = []
        for _ in range(15):
            start = time.perf_counter()
            output = engine.module(value)
            middle = time.perf_counter()
            torch.autograd.backward(output, torch.ones_like(output))
            times.append((middle - start, time.perf_counter() - middle))
        results.append((statistics.median(f for f, _ in times), statistics.median(b for _, b in times)))
    engine.module.zero_grad()
    return results


def measure(schedule: str, micro_batches: int, virtual_stages: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    import torch.distributed as dist

    from ds_vpipe.schedules.programs import Workload
    from ds_vpipe.simulation.simulator import StageCost, simulate

    engine = engine_for(schedule, options.stages, micro_batches, virtual_stages, options.stage_ms)
    costs: list[Any] = [None] * options.stages
    dist.all_gather_object(costs, own_costs(engine))
    iterator = endless("emulated")
    batches = max(3, options.micro_batches // micro_batches)
    for _ in range(max(2, 2 * options.stages // micro_batches)):
        engine.train_batch(iterator)
    rates = []
    for _ in range(options.repetitions):
        dist.barrier()
        start = time.perf_counter()
        for _ in range(batches):
            engine.train_batch(iterator)
        rates.append(batches * micro_batches / (time.perf_counter() - start))
    pipeline = engine.pipeline
    transfer = options.transfer_ms / 1000
    parts = [costs[pipeline.rank_of(part)][part // options.stages] for part in range(pipeline.num_parts)]
    stage_costs = [
        StageCost(forward, backward, send_activation_s=transfer, send_gradient_s=transfer)
        for forward, backward in parts
    ]
    simulation = simulate(pipeline, stage_costs, Workload(pipeline.depths[0] // micro_batches + 12))
    measured = statistics.median(rates)
    return {
        "schedule": schedule,
        "stages": options.stages,
        "micro_batches": micro_batches,
        "virtual_stages": virtual_stages,
        "measured": measured,
        "simulated": simulation.throughput,
        "error": simulation.throughput / measured - 1,
        "spread": [min(rates), max(rates)],
    }


def work(rank: int, options: argparse.Namespace, port: int) -> None:
    """What each rank does; rank 0 prints."""
    printed = join(rank, options.stages, port)
    for schedule, micro_batches, virtual_stages in CASES:
        row = measure(schedule, micro_batches, virtual_stages, options)
        if rank == 0:
            text = (
                f"{schedule:11} K={options.stages} M={micro_batches} v={virtual_stages} | "
                f"simulated {row['simulated']:6.2f} measured {row['measured']:6.2f} micro-batches/s | "
                f"off by {100 * row['error']:+.1f} %"
            )
            tell(row, text, printed, options.json)


def main() -> None:
    """Parse the command line and run every case in one world of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, default=4, help="K")
    parser.add_argument("--stage-ms", type=float, default=48.0, help="emulated compute per stage and micro-batch")
    parser.add_argument("--transfer-ms", type=float, default=0.5, help="what the simulator takes a transfer to take")
    parser.add_argument("--micro-batches", type=int, default=64, help="per repetition")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--json", help="append one JSON line per row to this file")
    options = parser.parse_args()

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import deepspeed
    import torch
    import torch.multiprocessing as mp

    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, gloo",
        flush=True,
    )
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    mp.spawn(work, args=(options, port), nprocs=options.stages)


if __name__ == "__main__":
    main()
