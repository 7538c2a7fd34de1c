#!/usr/bin/env python
"""What a long run holds: memory, files and threads of every rank, and its speed, by thousands of updates.

``python scripts/bench/soak.py`` trains two stages with two replicas each, with a micro-batch of another length every
time, evaluation, checkpoints, of which the newest two stay, and an end of the data now and then, so that the pipeline
drains. After every ``--every`` updates it prints a row: micro-batches per second, and of each rank its resident memory,
open files, threads, and the processor time of its main thread per micro-batch, which depends less than the rate on what
else the machine does. The last lines are slopes per thousand updates by least squares, without the first fifth, in
which buffers and caches find their sizes.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch
import torch.distributed as dist
from common import Say, ds_config, engine_for, markdown, parser_of, run
from deepspeed.pipe import LayerSpec
from torch import nn

VOCABULARY, HIDDEN, SEQUENCES, LENGTHS, MICRO_BATCHES = 64, 32, 4, (3, 48), 2
STAGES, REPLICAS = 2, 2
COLUMNS = ["micro-batches/s", "MB", "files", "threads", "us", "/dev/shm"]


class Mix(nn.Module):
    """Linear layer with dropout and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return value + nn.functional.dropout(torch.tanh(self.linear(value)), 0.1, self.training)


def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def batches(begin: int, end: int, replica: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches whose lengths follow from their numbers, so that they are the same in every run."""
    for number in range(begin, end):
        generator = torch.Generator().manual_seed(2 * number + replica)
        length = random.Random(number).randint(*LENGTHS)
        tokens = torch.randint(VOCABULARY, (SEQUENCES, length), generator=generator)
        yield tokens, tokens.roll(1, 1)


def held() -> list[float]:
    """Resident memory of this process in MB, its open files and threads, and microseconds of this thread until now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return [pages * os.sysconf("SC_PAGE_SIZE") / 1e6, files, threads, 1e6 * time.thread_time()]


def work(rank: int, say: Say, options: argparse.Namespace, folder: str) -> None:
    """One rank."""
    layers = [LayerSpec(nn.Embedding, VOCABULARY, HIDDEN), *[LayerSpec(Mix) for _ in range(4)]]
    layers.append(LayerSpec(nn.Linear, HIDDEN, VOCABULARY))
    config = ds_config(MICRO_BATCHES, {}, SEQUENCES, "AdamW", torch_adam=True)
    engine = engine_for(layers, STAGES, {**config, "gradient_clipping": 1.0}, loss)
    replica, rows, begin, used = engine.grid.data_parallel_id, list[list[list[float]]](), time.perf_counter(), 0.0
    data: Any = iter(())
    while engine.global_steps < options.updates:
        try:
            engine.train_batch(data)
        except StopIteration:
            first = engine.consumed_micro_batches
            data = batches(first, first + options.epoch * MICRO_BATCHES, replica)
            continue
        update = engine.global_steps
        if update % options.evaluate == 0:
            engine.eval_batch(batches(10**9, 10**9 + MICRO_BATCHES, replica))
        if update % options.save == 0:
            engine.save_checkpoint(folder)
            if rank == 0:
                shutil.rmtree(Path(folder, f"global_step{update - 2 * options.save}"), ignore_errors=True)
        if update % options.every == 0:
            rate = options.every * MICRO_BATCHES * REPLICAS / (time.perf_counter() - begin)
            *mine, until_now = held()
            found: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(found, [*mine, (until_now - used) / options.every / MICRO_BATCHES])
            of_ranks = [list(column) for column in zip(*found, strict=True)]
            rows.append([[rate], *of_ranks, [len(os.listdir("/dev/shm"))]])
            cells = [", ".join(f"{value:.0f}" for value in column) for column in rows[-1]]
            lines = markdown(["updates", *COLUMNS], [[update, *cells]]).splitlines()
            say("\n".join(lines if len(rows) == 1 else lines[2:]))
            begin, used = time.perf_counter(), until_now
    settled = rows[len(rows) // 5 :]
    places = [options.every * number / 1000 for number in range(len(settled))]
    for name, columns in zip(COLUMNS, zip(*settled, strict=True), strict=True):
        of_ranks = [list(values) for values in zip(*columns, strict=True)]
        slopes = ", ".join(f"{linear_regression(places, values).slope:+.3f}" for values in of_ranks)
        mean = sum(map(sum, of_ranks)) / sum(map(len, of_ranks))
        say(f"slope of {name} per 1,000 updates: {slopes} (mean {mean:.0f})")
    engine.destroy()
    dist.barrier()


parser = parser_of(__doc__)
parser.add_argument("--updates", type=int, default=20_000)
parser.add_argument("--every", type=int, default=1000, help="updates between two rows")
parser.add_argument("--evaluate", type=int, default=50, help="updates between two evaluations")
parser.add_argument("--save", type=int, default=200, help="updates between two checkpoints")
parser.add_argument("--epoch", type=int, default=500, help="updates until the data ends")
parse = parser.parse_args

if __name__ == "__main__":
    options = parse()
    if options.updates < 2 * options.every:
        parser.error(f"--updates: got {options.updates}; a slope takes two rows; allowed: {2 * options.every} or more")
    with tempfile.TemporaryDirectory() as folder:
        about = f"; ranks {', '.join(map(str, range(STAGES * REPLICAS)))} from left to right"
        run(work, STAGES * REPLICAS, options, folder, about=about)
