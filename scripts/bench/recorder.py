#!/usr/bin/env python
"""What recording a timeline costs, per micro-batch: the same training with and without it, interleaved repetitions.

``python scripts/bench/recorder.py`` trains one stage with one small layer, so that the engine's own work is nearly all
there is, and prints medians in microseconds. A micro-batch is five actions (LOAD, F, B, REDUCE, STEP).
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from typing import Any

from common import join, machine

ACTIONS = 5
WIDTH, BATCH = 64, 4


def engine_for(record: bool, folder: str) -> Any:
    """One stage with one linear layer, whose recording goes to ``folder``."""
    import torch
    from deepspeed.pipe import PipelineModule

    import ds_vpipe

    torch.manual_seed(0)
    module = PipelineModule([torch.nn.Linear(WIDTH, WIDTH)], num_stages=1, loss_fn=torch.nn.functional.mse_loss)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "vpipe": {"timeline": {"enabled": record, "path": folder}},
    }
    return ds_vpipe.initialize(model=module, config=config)[0]


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, default=500, help="per repetition")
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{machine()}, gloo", flush=True)
    printed = join(0, 1, port=0)  # any: nobody else joins

    import torch

    batch = torch.randn(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)
    iterator = iter(lambda: batch, None)
    folder = tempfile.mkdtemp()
    engines = {record: engine_for(record, folder) for record in (False, True)}
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for repetition in range(options.repetitions + 1):
        for record, engine in engines.items():
            start = time.perf_counter()
            for _ in range(options.micro_batches):
                engine.train_batch(iterator)
            if repetition:  # the first one warms up
                seconds[record].append((time.perf_counter() - start) / options.micro_batches)
    off, on = (statistics.median(seconds[record]) * 1e6 for record in (False, True))
    per_action = (on - off) / ACTIONS
    print(f"without {off:.1f}, with {on:.1f} us per micro-batch: {per_action:.2f} us per action", file=printed)
    for engine in engines.values():
        engine.destroy()
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
