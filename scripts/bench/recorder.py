#!/usr/bin/env python
"""Price of a timeline: the same training with and without one, interleaved repetitions.

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
from collections.abc import Sequence

from common import ds_config, engine_for, join, machine

ACTIONS = 5
WIDTH, BATCH = 64, 4


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--micro-batches", type=int, default=500, help="per repetition")
    parser.add_argument("--repetitions", type=int, default=15)
    return parser.parse_args(words)


def main() -> None:
    """Measure."""
    options = parse()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(f"{machine()}, gloo", flush=True)
    printed = join(0, 1, port=0)  # any: nobody else joins

    import torch

    batch = torch.randn(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)
    iterator = iter(lambda: batch, None)
    folder = tempfile.mkdtemp()
    engines = {}
    for record in (False, True):
        config = ds_config(1, {"timeline": {"enabled": record, "path": folder}}, BATCH)
        engines[record] = engine_for([torch.nn.Linear(WIDTH, WIDTH)], 1, config)
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
