#!/usr/bin/env python
"""Price of a timeline: the same training with and without one, interleaved repetitions.

``python scripts/bench/recorder.py`` trains one stage with one small layer, so that the engine's own work is nearly all
there is, and prints medians in microseconds. A micro-batch is five actions (LOAD, F, B, REDUCE, STEP).
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence

import torch
from common import ds_config, engine_for, join, machine, parser_of, trainer_of

ACTIONS = 5
WIDTH, BATCH = 64, 4


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--micro-batches", type=int, default=500, help="per repetition")
    parser.add_argument("--repetitions", type=int, default=15)
    return parser.parse_args(words)


def main() -> None:
    """Measure."""
    options = parse()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{machine()}, gloo", flush=True)
    printed = join(0, 1, port=0)  # any: nobody else joins
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        blocks = {record: {"timeline": {"enabled": record, "path": folder}} for record in seconds}
        batch = (torch.randn(BATCH, WIDTH), torch.zeros(BATCH, WIDTH))
        engines = {
            record: engine_for([torch.nn.Linear(WIDTH, WIDTH)], 1, ds_config(1, block, BATCH))
            for record, block in blocks.items()
        }
        trainers = {record: trainer_of(engine, batch) for record, engine in engines.items()}
        for repetition in range(options.repetitions + 1):
            for record, train in trainers.items():
                begin = time.perf_counter()
                for _ in range(options.micro_batches):
                    train()
                if repetition:  # the first one warms up
                    seconds[record].append((time.perf_counter() - begin) / options.micro_batches)
        for engine in engines.values():
            engine.destroy()
    off, on = (statistics.median(found) * 1e6 for found in seconds.values())
    per_action = (on - off) / ACTIONS
    print(f"without {off:.1f}, with {on:.1f} us per micro-batch: {per_action:.2f} us per action", file=printed)


if __name__ == "__main__":
    main()
