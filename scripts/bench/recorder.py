#!/usr/bin/env python
"""Price of a timeline: the same training with and without one, interleaved repetitions.

``python scripts/bench/recorder.py`` trains one stage with one small layer, so that the engine's own work is nearly all
there is, and prints medians in microseconds. A micro-batch is five actions (LOAD, F, B, REDUCE, STEP).
"""

import argparse
import statistics
import tempfile

import torch
from common import Say, ds_config, engine_for, parser_of, run, seconds_of, trainer_of

ACTIONS = 5
WIDTH, BATCH = 64, 4


def work(rank: int, say: Say, folder: str, options: argparse.Namespace) -> None:
    """The only rank."""
    batch = torch.randn(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)
    engines = []
    for record in (False, True):
        block = {"timeline": {"enabled": record, "path": folder}}
        engines.append(engine_for([torch.nn.Linear(WIDTH, WIDTH)], 1, ds_config(1, block, BATCH)))
    seconds: list[list[float]] = [[], []]
    for repetition in range(options.repetitions + 1):
        for engine, found in zip(engines, seconds, strict=True):
            each = seconds_of(trainer_of(engine, batch), options.micro_batches, 0) / options.micro_batches
            found += [each] * (repetition > 0)  # the first one warms up
    for engine in engines:
        engine.destroy()
    off, on = (1e6 * statistics.median(found) for found in seconds)
    say(f"without {off:.1f}, with {on:.1f} us per micro-batch: {(on - off) / ACTIONS:.2f} us per action")


parser = parser_of(__doc__)
parser.add_argument("--micro-batches", type=int, default=500, help="per repetition")
parser.add_argument("--repetitions", type=int, default=15)
parse = parser.parse_args

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run(work, 1, folder, parse())
