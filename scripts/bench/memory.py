#!/usr/bin/env python
"""Predicted against counted peak bytes of every stage, for small BERTs on the CPU.

``python scripts/bench/memory.py`` starts four ranks on this machine, which train a BERT with each schedule. The
prediction is the planner's, from a profile of the model's layers and the JSON, and knows nothing of the run. Counted is
every allocation and release of torch's CPU allocator since before the model was built; the peak is that of training.

With ``--time`` each case is trained in turns instead, and its seconds are printed beside the planned ones, which know
the profile and how fast this machine writes and reads the file that swaps use.
"""

import argparse
import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from allocations import count_allocations, watched
from common import (
    Say,
    add_sizes,
    bert_config,
    close_groups,
    ds_config,
    engine_for,
    parser_of,
    run,
    seconds_of,
    sizes,
    trainer_of,
)

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.engine.modules.host_memory import host_memory
from ds_vpipe.models.bert.example import example
from ds_vpipe.partition import uniform_partition
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import ModelProfile
from ds_vpipe.planning.plan import Plan
from ds_vpipe.planning.planner import predict
from ds_vpipe.planning.profiler import profile_layers
from ds_vpipe.tables import show_bytes


@dataclass(frozen=True)
class Case:
    """One training run."""

    name: str  # for the table
    micro_batches: int  # M
    vpipe: dict[str, Any] | None = field(default_factory=dict)  # the block; None for DeepSpeed's own engine
    optimizer: str = "AdamW"  # type in the JSON
    params: dict[str, Any] = field(default_factory=dict)  # its parameters besides the learning rate
    others: dict[str, Any] = field(default_factory=dict)  # of the JSON
    replicas: int = 1  # of a pipeline with as many times fewer stages


BSP = {"sync_mode": "bsp"}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}
ZERO = {**BF16, "zero_optimization": {"stage": 1, "reduce_bucket_size": 2_000_000}}  # as large as a stage, about
TORCH: dict[str, Any] = {"torch_adam": True}
CASES = [
    Case("asp", 1),
    Case("asp", 4),
    Case("asp, recompute 0.6", 4, {"recompute_ratio": 0.6}),
    Case("asp, recompute 1", 1, {"recompute_ratio": 1.0}),
    Case("asp, swap 0.6", 4, {"swap_ratio": 0.6}),
    Case("asp, swap 1", 1, {"swap_ratio": 1.0}),
    Case("asp, swap 0.5, recompute 0.4", 1, {"swap_ratio": 0.5, "recompute_ratio": 0.4}),
    Case("asp, one deeper", 2, {"stage_to_depth_map": [6, 4, 2, 0]}),
    Case("asp, vertical", 1, {"weight_sync": "vertical"}),
    Case("asp, none", 4, {"weight_sync": "none"}),
    Case("stock", 4, None),
    Case("asp, Lamb", 1, optimizer="Lamb"),
    Case("asp, torch AdamW", 1, params={"torch_adam": True}),
    Case("asp, SGD", 4, optimizer="SGD"),
    Case("1f1b", 4, BSP),
    Case("1f1b, recompute 0.6", 8, {**BSP, "recompute_ratio": 0.6}),
    Case("gpipe", 8, {**BSP, "schedule": "gpipe"}),
    Case("gpipe, swap 0.6", 8, {**BSP, "schedule": "gpipe", "swap_ratio": 0.6}),
    Case("interleaved", 8, {**BSP, "schedule": "interleaved", "virtual_stages": 2}),
    *(Case("asp, bf16", m, params=TORCH, others=BF16) for m in (1, 4)),
    *(Case("asp, bf16, ZeRO-1", m, params=TORCH, others=ZERO) for m in (1, 4)),
    Case("asp, ZeRO-1, DeepSpeed Adam", 4, others=ZERO),
    *(Case("asp, bf16, ZeRO-1 of two", m, params=TORCH, others=ZERO, replicas=2) for m in (1, 4)),
]
TIMED = ["asp", "asp, recompute 1", "asp, swap 1", "asp, swap 0.5, recompute 0.4"]


def sample(options: argparse.Namespace) -> dict[str, Any]:
    """Layers, inputs, loss function and labels."""
    return example(bert_config(options), options.batch, options.sequence, max_predictions=20)


def config_of(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """The JSON of a case."""
    block = None if case.vpipe is None else {**case.vpipe, "link": "host"}  # shared memory is no allocation of torch's
    config = ds_config(case.micro_batches, block, options.batch, case.optimizer, **case.params)
    return {**config, "gradient_clipping": 1.0, **case.others}


def stages_of(case: Case, options: argparse.Namespace) -> int:
    """K of a case, on as many ranks as without replicas."""
    return int(options.stages) // case.replicas


def profile_of(case: Case, options: argparse.Namespace) -> ModelProfile:
    """Profile of the model's layers with weights as in the case's training."""
    dtype = getattr(torch, DeepSpeedJson(case.others).dtype)
    return profile_layers(**sample(options), micro_batches=1, warm_up=0, dtype=dtype)


def predicted(profile: Any, case: Case, options: argparse.Namespace) -> Plan:
    """The planner's numbers for layers split evenly."""
    block, json = VPipeConfig.parse(BSP if case.vpipe is None else case.vpipe), DeepSpeedJson(config_of(case, options))
    stages = stages_of(case, options)
    counts = uniform_partition(len(profile), stages * block.virtual_stages)
    pipeline = replace(block.pipeline(stages, case.micro_batches), partition=tuple(counts))
    return predict(profile, pipeline, Devices.of(block, json, replicas=case.replicas, host_transfers=True))


def held(reduce: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A reduction whose tensor is held until gloo has dropped it, whose releases are not counted."""
    found = reduce(*args, **kwargs)
    time.sleep(0.02)
    return found


def counted(case: Case, options: argparse.Namespace) -> int:
    """This rank's peak bytes while it trains."""
    made = sample(options)

    def run() -> None:
        engine = engine_for(made["layers"], stages_of(case, options), config_of(case, options), made["loss_fn"])
        train = trainer_of(engine, (made["inputs"], made["labels"]))
        with watched():
            for _ in range(max(3, 3 * options.stages // case.micro_batches)):
                train()
        engine.destroy()
        del engine, train
        gc.collect()  # nothing is in flight any more

    with patch.object(dist, "all_reduce", partial(held, dist.all_reduce)):
        return int(count_allocations(run).peak)


def file_bandwidth(size: int = 1 << 24, times: int = 8) -> float:
    """Bytes per second of one direction, between memory and the file of swaps."""
    memory, begin = host_memory(torch.device("cpu")), time.perf_counter()
    for _ in range(times):
        copy = memory.put(torch.zeros(size, dtype=torch.uint8).untyped_storage())
        memory.take(memory.fetch(copy))
        memory.free(copy)
    return 2 * size * times / (time.perf_counter() - begin)


def timed(case: Case, options: argparse.Namespace) -> tuple[float, int]:
    """Seconds per micro-batch of full pipelines, and bytes per micro-batch that this rank has swapped."""
    made = sample(options)
    engine = engine_for(made["layers"], options.stages, config_of(case, options), made["loss_fn"])
    train = trainer_of(engine, (made["inputs"], made["labels"]))
    batches, swap = -(-options.time // case.micro_batches), engine.stage.swap
    seconds_of(train, options.stages, 0)
    before = 0 if swap is None else swap.bytes_moved
    seconds = seconds_of(train, batches, 0)
    moved = 0 if swap is None else swap.bytes_moved - before
    engine.destroy()
    close_groups()
    return seconds / batches / case.micro_batches, moved // batches // case.micro_batches


def compare_times(say: Say, cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Train the cases in turns and print medians beside the plan."""
    profile = profile_layers(**sample(options), micro_batches=5, warm_up=2)
    bandwidth = file_bandwidth()
    rounds = [[timed(case, options) for case in cases] for _ in range(3)]
    for position, case in enumerate(cases):
        moved: list[Any] = [None] * options.stages
        dist.all_gather_object(moved, rounds[0][position][1])
        found = predicted(profile, replace(case, vpipe={**(case.vpipe or {}), "host_bandwidth": bandwidth}), options)
        planned = [stage.host_bytes // found.pipeline.in_flight(rank) for rank, stage in enumerate(found.stages)]
        seconds = median(times[position][0] for times in rounds)
        swapped = ", ".join(f"{show_bytes(a)} ({show_bytes(b)})" for a, b in zip(moved, planned, strict=True))
        text = f"{1e3 * seconds:6.1f} ms per micro-batch (planned {1e3 * found.pace_s:6.1f})"
        say(f"{case.name:28} M={case.micro_batches} | {text} | swapped {swapped}")
    say(f"file: {bandwidth / 1e9:.1f} GB/s")


def describe(case: Case, memories: Sequence[Any], peaks: Sequence[int], errors: Sequence[float]) -> str:
    """A row of the table."""
    totals = " ".join(f"{show_bytes(memory.total):>7}" for memory in memories)
    measured = " ".join(f"{show_bytes(peak):>7}" for peak in peaks)
    off = " ".join(f"{100 * error:+5.1f}" for error in errors)
    return f"{case.name:28} M={case.micro_batches} | predicted {totals} | measured {measured} | off by {off} %"


def work(rank: int, say: Say, options: argparse.Namespace) -> None:
    """One rank."""
    if options.time:
        compare_times(say, [case for case in CASES if case.name in (options.cases or TIMED)], options)
        return
    worst = 0.0
    for case in CASES:
        if options.cases and case.name not in options.cases:
            continue
        peaks: list[Any] = [None] * options.stages
        dist.all_gather_object(peaks, counted(case, options))
        peaks = [max(peaks[first : first + case.replicas]) for first in range(0, len(peaks), case.replicas)]
        memories = predicted(profile_of(case, options), case, options).rank_memory()
        errors = [memory.total / peak - 1 for memory, peak in zip(memories, peaks, strict=True)]
        worst = max(worst, *map(abs, errors))
        say(describe(case, memories, peaks, errors))
    say(f"largest difference: {100 * worst:.1f} %")


parser = parser_of(__doc__)
parser.add_argument("--stages", type=int, default=4, help="ranks, K of cases without replicas")
add_sizes(parser, hidden=256, layers=8, vocabulary=4096, batch=8, sequence=128)
parser.add_argument("--cases", nargs="*", help="names of cases; default: all")
parser.add_argument("--time", type=int, default=0, metavar="N", help="time N micro-batches of cases in turns")
parse = parser.parse_args

if __name__ == "__main__":
    options = parse()
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    run(work, options.stages, options, about=sizes(options))
