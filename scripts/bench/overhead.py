#!/usr/bin/env python
"""Processor time of the engine itself, with many small parameter tensors.

``python scripts/bench/overhead.py`` trains two stages, each of layers of 16 small tensors, with M = 1: an update, and
on stage 0 a fork of all weights, for every micro-batch. Printed is processor time of the main thread per micro-batch:
of training; of the same layers' passes and the same optimizer's update alone; and the difference, which is what
instructions, messages, stashing and DeepSpeed's bookkeeping take. Processes that wait for each other may find caches
cold, which is no engine's: so the same passes and updates in two processes with a socket between them (``bare.py``) are
measured too. Processor time depends less than any other on what else the machine does; all are measured in turns all
the same. ``--profile`` lists the functions that take it on stage 0.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import io
import pstats
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from bare import bare_trainer
from common import Linears, Say, ds_config, engine_for, parser_of, run, trainer_of
from deepspeed.pipe import LayerSpec

WIDTH = 16
BATCH = 4
TURN = 20  # batches
TENSORS = 16  # of a layer, as in an encoder layer of BERT
RATE = 1e-7  # so that weights, and with them the sizes of gradients, stay as they are


class Layer(Linears):
    """Matrix products that keep the size of a gradient.

    By torch's initialization it would be smaller than any normal number after some hundred of them, in the engine's
    passes more often than in those alone, and processors and square roots take long for such numbers.
    """

    def __init__(self, count: int, width: int) -> None:
        super().__init__(count, width)
        for linear in self:
            torch.nn.init.orthogonal_(linear.weight)


def without_engine(engine: Any, options: argparse.Namespace) -> tuple[Callable[[], float], Callable[[], float]]:
    """Timers of a batch of the stage's layers without an engine, clipped by torch: alone, and bare.

    As many micro-batches are in flight as in the pipeline: what they hold is no longer in the processor's caches when
    their backward pass comes.
    """
    batch = value, labels = torch.randn(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)
    in_flight: deque[Any] = deque()

    def copied() -> tuple[torch.nn.Module, list[torch.nn.Parameter], Callable[[], None]]:
        module = torch.nn.Sequential(*[copy.deepcopy(layer) for layer in engine.module.forward_funcs])
        parameters = list(module.parameters())
        made = getattr(torch.optim, options.optimizer)(parameters, lr=RATE)

        def update() -> None:
            if options.clip > 0:
                torch.nn.utils.clip_grad_norm_(parameters, options.clip)
            made.step()
            made.zero_grad()

        return module, parameters, update

    module, weights, update = copied()

    def alone() -> None:
        for _ in range(options.micro_batches):
            output = module(value.detach().requires_grad_())
            in_flight.append(engine.module.loss_fn(output, labels) if engine.is_last_stage() else output)
            if len(in_flight) > engine.depth:
                oldest = in_flight.popleft()
                torch.autograd.backward(oldest, torch.ones_like(oldest))
        update()

    other, others, update_other = copied()
    bare = bare_trainer(other, update_other, batch, options.micro_batches)
    return partial(seconds, alone, weights), partial(seconds, bare, others)


def seconds(step: Callable[[], Any], weights: Iterable[torch.Tensor] = ()) -> float:
    """Processor time of this thread for one call, which updates ``weights`` while graphs of theirs are in flight."""
    with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(weights)):
        begin = time.thread_time()
        step()
        return time.thread_time() - begin


def work(rank: int, say: Say, options: argparse.Namespace) -> None:
    """One stage."""
    per_stage = max(1, options.tensors // TENSORS)
    params: dict[str, Any] = {"torch_adam": True} if options.optimizer.startswith("Adam") else {}
    config = ds_config(options.micro_batches, {}, BATCH, options.optimizer, lr=RATE, **params)
    layers = [LayerSpec(Layer, TENSORS // 2, WIDTH) for _ in range(2 * per_stage)]
    engine = engine_for(layers, 2, {**config, "gradient_clipping": options.clip})
    train = trainer_of(engine, (torch.randn(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)))
    alone, bare = without_engine(engine, options)
    times: dict[str, list[float]] = {"training": [], "alone": [], "bare": []}
    for _ in range(options.turns):  # since a machine is not equally fast all the time
        for what, measured in zip(times, (partial(seconds, train), alone, bare), strict=True):
            dist.barrier()
            times[what] += [measured() for _ in range(TURN)]
    medians = [statistics.median(found) / options.micro_batches for found in times.values()]
    found: list[Any] = [None, None]
    dist.all_gather_object(found, medians)
    for stage, (training, passes, piped) in enumerate(found):
        say(
            f"stage {stage}: {per_stage * TENSORS} tensors, {options.optimizer}, M={options.micro_batches}"
            f"{f', clipping at {options.clip:g}' if options.clip > 0 else ''}: "
            f"training {1e6 * training:.0f}, passes and update alone {1e6 * passes:.0f}, "
            f"engine {1e6 * (training - passes):.0f} us per micro-batch; "
            f"with a socket and no engine {1e6 * piped:.0f}, engine beyond that {1e6 * (training - piped):.0f} us"
        )
    if options.profile:
        with cProfile.Profile(time.thread_time) as profile:
            for _ in range(options.turns * TURN):
                train()
        listed = io.StringIO()
        pstats.Stats(profile, stream=listed).sort_stats("tottime").print_stats(options.profile)
        say(listed.getvalue())
    engine.destroy()
    dist.barrier()


parser = parser_of(__doc__)
parser.add_argument("--tensors", type=int, default=400, help="parameter tensors per stage")
parser.add_argument("--micro-batches", type=int, default=1, help="M")
parser.add_argument("--optimizer", default="SGD", choices=["SGD", "AdamW"])
parser.add_argument("--clip", type=float, default=0.0, help="gradient_clipping")
parser.add_argument("--turns", type=int, default=10, help=f"times that {TURN} batches are measured each way")
parser.add_argument("--profile", type=int, default=0, metavar="N", help="list the N functions that take most")
parse = parser.parse_args

if __name__ == "__main__":
    run(work, 2, parse())
