#!/usr/bin/env python
"""Stock DeepSpeed against ds_vpipe's asynchronous schedule, in one run and interleaved repetitions.

``python scripts/bench_schedule.py`` starts K ranks on this machine. Two kinds of work:

* emulated: layers whose forward and backward pass sleep, 1 : 2, so that two cores can stand for any number
  of devices and only schedule, communication and bookkeeping are measured;
* real: matrix products on the CPU, one thread per rank, as many stages as cores.

Each case prints micro-batches/s (median over repetitions) of both engines, their ratio, and the
efficiency of the asynchronous one: the slowest stage's own compute over measured time per micro-batch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WIDTH = 64
BATCH = 4


def build(kind: str, stages: int, stage_ms: float) -> list[Any]:
    """One layer per stage of ``stage_ms`` milliseconds forward and backward, the first a projection of the input."""
    import torch
    from deepspeed.pipe import LayerSpec
    from torch import nn

    class Pause(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor, seconds: float) -> torch.Tensor:
            ctx.seconds = seconds
            time.sleep(seconds / 3)
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            time.sleep(ctx.seconds * 2 / 3)
            return gradients[0], None

    class Emulated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return Pause.apply(self.linear(value), stage_ms / 1000)

    class Real(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)])

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.layers(value)

    return [LayerSpec(Emulated if kind == "emulated" else Real) for _ in range(stages)]


def endless(kind: str) -> Iterator[Any]:
    """The same micro-batch over and over."""
    import torch

    inputs = torch.randn(BATCH, WIDTH) if kind == "emulated" else torch.randn(256, 512)
    while True:
        yield inputs, torch.zeros_like(inputs)


def engine_for(kind: str, stages: int, micro_batches: int, stage_ms: float, vpipe: dict[str, Any] | None) -> Any:
    """A fresh engine: stock for ``vpipe`` None."""
    import torch
    from deepspeed.pipe import PipelineModule

    import ds_vpipe

    torch.manual_seed(0)
    module = PipelineModule(
        build(kind, stages, stage_ms),
        num_stages=stages,
        loss_fn=torch.nn.functional.mse_loss,
        partition_method="uniform",
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    if vpipe is not None:
        config["vpipe"] = vpipe
    return ds_vpipe.initialize(model=module, config=config)[0]


def stage_seconds(kind: str, engine: Any) -> float:
    """This stage's own compute per micro-batch in seconds: its layers alone, forward and backward, median of 15."""
    import torch

    value = next(endless(kind))[0].requires_grad_()
    times = []
    for _ in range(15):
        start = time.perf_counter()
        output = engine.module(value)
        torch.autograd.backward(output, torch.ones_like(output))
        times.append(time.perf_counter() - start)
    engine.module.zero_grad()
    return statistics.median(times)


def measure(kind: str, stages: int, micro_batches: int, options: argparse.Namespace) -> dict[str, Any]:
    """One row of the table."""
    import torch
    import torch.distributed as dist

    vpipe: dict[str, Any] = {"sync_mode": "asp"}
    if options.extra_depth:
        vpipe["stage_to_depth_map"] = [s + options.extra_depth if s else 0 for s in range(stages - 1, -1, -1)]
    arms = {
        "stock": engine_for(kind, stages, micro_batches, options.stage_ms, None),
        "asp": engine_for(kind, stages, micro_batches, options.stage_ms, vpipe),
    }
    alone = torch.tensor([stage_seconds(kind, arms["asp"])])
    dist.all_reduce(alone, op=dist.ReduceOp.MAX)
    iterators = {name: endless(kind) for name in arms}
    rates: dict[str, list[float]] = {name: [] for name in arms}
    batches = max(3, options.micro_batches // micro_batches)
    for name, engine in arms.items():
        for _ in range(max(2, 2 * stages // micro_batches)):
            engine.train_batch(iterators[name])
    for _ in range(options.repetitions):
        for name, engine in arms.items():
            dist.barrier()
            start = time.perf_counter()
            for _ in range(batches):
                engine.train_batch(iterators[name])
            # Stage 0 is the last to finish a batch, so its time is the pipeline's.
            rates[name].append(batches * micro_batches / (time.perf_counter() - start))
    median = {name: statistics.median(values) for name, values in rates.items()}
    return {
        "work": kind,
        "stages": stages,
        "micro_batches": micro_batches,
        "stage_ms": alone.item() * 1e3,
        "stock": median["stock"],
        "asp": median["asp"],
        "ratio": median["asp"] / median["stock"],
        "efficiency": alone.item() * median["asp"],
        "spread": {name: [min(values), max(values)] for name, values in rates.items()},
    }


def join(rank: int, stages: int, port: int) -> Any:
    """Become ``rank`` of a world of this machine's processes; returns the stream to print to."""
    world = str(stages)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=world, LOCAL_SIZE=world)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    import deepspeed
    import torch
    from deepspeed.utils import logger

    torch.set_num_threads(1)
    logger.setLevel("ERROR")
    printed, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115 - DeepSpeed prints its topology
    deepspeed.init_distributed(dist_backend="gloo")
    return printed


def machine() -> str:
    """What the numbers were measured with, for the first line of a table."""
    import deepspeed
    import torch

    return (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"torch {torch.__version__}, deepspeed {deepspeed.__version__}, gloo"
    )


def tell(row: dict[str, Any], text: str, printed: Any, path: str | None) -> None:
    """Print a row of the table, and append it to the file ``path``, if any."""
    print(text, file=printed, flush=True)
    if path:
        with Path(path).open("a") as file:
            file.write(json.dumps(row) + "\n")


def work(rank: int, options: argparse.Namespace, stages: int, port: int, cases: list[tuple[str, int]]) -> None:
    """What each rank does; rank 0 prints."""
    printed = join(rank, stages, port)
    for kind, micro_batches in cases:
        row = measure(kind, stages, micro_batches, options)
        if rank == 0:
            text = (
                f"{kind:9} K={stages} M={micro_batches:<2} stage {row['stage_ms']:6.2f} ms | stock {row['stock']:6.1f} "
                f"asp {row['asp']:6.1f} micro-batches/s | ratio {row['ratio']:5.2f} "
                f"| efficiency {row['efficiency']:.3f}"
            )
            tell(row, text, printed, options.json)


def main() -> None:
    """Parse the command line and run every case in its own world of ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="+", default=[4], help="K of the emulated cases")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 8], help="M, micro-batches per batch")
    parser.add_argument("--stage-ms", type=float, default=24.0, help="emulated compute per stage and micro-batch")
    parser.add_argument("--extra-depth", type=int, default=0, help="forwards beyond the default depth, per stage")
    parser.add_argument("--micro-batches", type=int, default=128, help="per repetition; few would count the start")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--no-real", action="store_true", help="leave out real compute (2 stages)")
    parser.add_argument("--json", help="append one JSON line per row to this file")
    options = parser.parse_args()

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch.multiprocessing as mp

    print(f"{machine()}; extra depth {options.extra_depth}", flush=True)
    worlds = [(stages, [("emulated", m) for m in options.batch_sizes]) for stages in options.stages]
    if not options.no_real:
        worlds.append((2, [("real", m) for m in options.batch_sizes]))
    for stages, cases in worlds:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = server.getsockname()[1]
        mp.spawn(work, args=(options, stages, port, cases), nprocs=stages)


if __name__ == "__main__":
    main()
