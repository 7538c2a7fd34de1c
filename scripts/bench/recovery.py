#!/usr/bin/env python
"""Price of states kept in host memory: the same training with and without them, interleaved repetitions.

``python scripts/bench/recovery.py`` trains two stages of linear layers with AdamW, M = 4, with a state after every
update, after every tenth, and without; and prints medians of milliseconds per update.
"""

import argparse
import os
import statistics
from unittest import mock

import torch
from common import Say, ds_config, engine_for, markdown, parser_of, run, seconds_of, trainer_of

from ds_vpipe.kept_memory import KeptMemory, await_start, connection

STAGES, MICRO_BATCHES, BATCH = 2, 4, 64


def work(rank: int, say: Say, options: argparse.Namespace) -> None:
    """One rank."""
    batch = torch.randn(BATCH, options.width), torch.zeros(BATCH, options.width)
    layers = [torch.nn.Linear(options.width, options.width) for _ in range(STAGES * options.layers)]
    arms = []
    for every in (0, 10, 1):
        memory, environment = KeptMemory(), dict[str, str]()
        supervisor, its = connection()
        memory.start(supervisor, "0 0")
        await_start(its, environment)
        with mock.patch.dict(os.environ, environment):
            config = ds_config(MICRO_BATCHES, {"recovery": {"every": every}}, BATCH, "AdamW", torch_adam=True)
            engine = engine_for(layers, STAGES, config)
        train_batch = trainer_of(engine, batch)

        def train_and_take(train_batch=train_batch, memory=memory, supervisor=supervisor) -> None:
            train_batch()
            memory.receive(supervisor)  # as the supervisor does

        arms.append((every, engine, train_and_take, []))
    for repetition in range(options.repetitions + 1):
        for _, _, train, found in arms:
            seconds = seconds_of(train, options.updates, 0) / options.updates
            found += [1e3 * seconds] * (repetition > 0)  # the first one warms up
    without = arms[0][-1]
    rows = []
    for every, _, _, found in arms:
        ratios = [one / other for one, other in zip(found, without, strict=True)]
        rows.append((every or "none", f"{statistics.median(found):.1f}", f"{statistics.median(ratios):.2f}"))
    parameters = sum(p.numel() for p in layers[0].parameters()) * options.layers / 1e6
    say(f"{parameters:.1f} million parameters per stage\n{markdown(['a state every', 'ms per update', 'ratio'], rows)}")
    for _, engine, _, _ in arms:
        engine.destroy()


parser = parser_of(__doc__)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--layers", type=int, default=4, help="per stage")
parser.add_argument("--updates", type=int, default=20, help="per repetition")
parser.add_argument("--repetitions", type=int, default=7)
parse = parser.parse_args

if __name__ == "__main__":
    run(work, STAGES, parse())
