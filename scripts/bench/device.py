#!/usr/bin/env python
"""Throughput and memory of BERT and a GPT-2-like model in bf16 with ZeRO-1, ours against DeepSpeed's pipeline.

``python scripts/bench/device.py`` starts K ranks, which share the GPUs that are there, and trains with interleaved
repetitions; then the planned peak of every stage beside the measured one. Some batches are traced by torch's profiler:
how long passes and copies between device and host take, the share of the time in which passes run, and of the copies'
time, and how often threads that compute wait for the device. Prints a block for docs/performance.md.

A micro-batch is large enough to occupy the device: with a quarter of it (``--batch 8``) an H200 waits for the host most
of the time, and it is the launching of kernels that is compared.

NCCL connects all ranks, as in users' runs; if they share a GPU, as ranks of different hosts, over the loopback
interface. With NVIDIA's multi-process service each such rank has its share of the multiprocessors, as if it were a
smaller GPU. Without it they compute in turns, in which a rank that waits for NCCL takes part, so that nothing is to be
compared. ``--cpu`` trains on the CPU, over gloo, where traces show nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common import (
    Say,
    add_sizes,
    bert_config,
    close_groups,
    ds_config,
    engine_for,
    machine,
    markdown,
    parser_of,
    sizes,
    slowest,
    start,
    trainer_of,
)
from deepspeed.pipe import LayerSpec
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import GPT2Config
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.engine.observe.statistics import PeakMemory
from ds_vpipe.models.bert.example import example
from ds_vpipe.partition import uniform_partition
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.planner import predict
from ds_vpipe.planning.profiler import profile_layers
from ds_vpipe.tables import show_bytes

ARMS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "bsp": {"sync_mode": "bsp"},
    "asp": {},
    "asp, recomputing": {"recompute_ratio": 1.0},
    "asp, swapping": {"swap_ratio": 1.0},
    "asp, gloo": {"link": "host"},
    "asp, IPC": {"link": "ipc"},
    "asp, NCCL": {"link": "nccl"},
}
ON_CPU = [arm for arm in ARMS if arm not in ("asp, IPC", "asp, NCCL")]
SETTLING = 3  # batches beside those that fill the pipeline
TRACED = 4  # batches
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMemcpy")

Interval = tuple[float, float]


class Trace(NamedTuple):
    """Of one stage, per micro-batch."""

    passes_ms: float  # 0 if the profiler does not see them
    busy: float  # share of the time, from first to last
    copies_ms: float
    beside: float  # share of that time in which passes run
    waits: float  # for the device, of threads that compute


class Measured(NamedTuple):
    """One repetition of an arm."""

    rate: float  # micro-batches per second
    peak: int  # bytes, of this rank, while they are counted
    loss: float  # before that, after as many batches in every arm
    trace: Trace | None


class Tokens(nn.Module):
    """Embeddings of tokens and positions."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.positions = nn.Embedding(config.n_positions, config.n_embd)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


def next_token_loss(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the tokens that follow."""
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def sample(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Layers, inputs, loss function and labels of ``bert`` or ``gpt2``."""
    if name == "bert":
        predictions = max(1, options.sequence // 7)
        return example(bert_config(options), options.batch, options.sequence, max_predictions=predictions)
    width, words = options.hidden, options.vocabulary
    gpt = GPT2Config(
        n_embd=width, n_head=max(1, width // 64), vocab_size=words, n_positions=options.sequence,
        attn_implementation="sdpa", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    blocks = [LayerSpec(GPT2Block, gpt) for _ in range(options.layers)]
    specs = [LayerSpec(Tokens, gpt), *blocks, LayerSpec(nn.LayerNorm, width), LayerSpec(nn.Linear, width, words, False)]
    shape, generator = (options.batch, options.sequence), torch.Generator().manual_seed(0)
    ids = torch.randint(words, shape, generator=generator)
    return {"layers": specs, "inputs": ids, "loss_fn": next_token_loss, "labels": ids}


def config_of(vpipe: dict[str, Any] | None, options: argparse.Namespace) -> dict[str, Any]:
    """The JSON of an arm; torch's Adam, since DeepSpeed's has to be compiled."""
    block = None if vpipe is None else {"peer_timeout_s": 120, **vpipe}
    config = ds_config(options.micro_batches, block, options.batch, "AdamW", torch_adam=True)
    return {**config, "bf16": {"enabled": True}, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}


def done(device: torch.device) -> float:
    """The time, once all work that has been begun is done."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()  # not the device, on which sends wait for receivers
    return time.perf_counter()


def union(intervals: list[Interval]) -> list[Interval]:
    """The same times in order and without overlaps."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def in_both(first: list[Interval], second: list[Interval]) -> float:
    """How long two unions last together."""
    total, at = 0.0, 0
    for begin, end in first:
        while at < len(second) and second[at][1] <= begin:
            at += 1
        for other, stop in second[at:]:
            if other >= end:
                break
            total += min(end, stop) - max(begin, other)
    return total


def reading(events: list[dict[str, Any]], micro_batches: int) -> Trace:
    """What a Chrome trace of torch's profiler says, per micro-batch."""

    def times(category: str, fits: Callable[[str], bool]) -> list[Interval]:
        chosen = [one for one in events if one.get("cat") == category and fits(one["name"])]
        return union([(one["ts"], one["ts"] + one["dur"]) for one in chosen])

    copies = times("gpu_memcpy", lambda name: "HtoD" in name or "DtoH" in name)
    passes = times("kernel", lambda name: "nccl" not in name.lower())  # whose kernels wait for other ranks
    lasted, computed = (sum(end - begin for begin, end in found) for found in (copies, passes))
    threads = {one.get("tid") for one in events if str(one.get("name")).startswith(LAUNCHES)}
    waits = sum(one.get("name") in WAITS and one.get("tid") in threads for one in events)
    busy = computed / (passes[-1][1] - passes[0][0]) if passes else 0.0
    beside = in_both(copies, passes) / lasted if lasted else 0.0
    return Trace(computed / 1000 / micro_batches, busy, lasted / 1000 / micro_batches, beside, waits / micro_batches)


def trace(engine: Any, train: Callable[[], Any], kept: Path | None) -> Trace:
    """Trace some batches. The pipeline is emptied around them: the profiler waits for the device.

    Args:
        kept: file for the trace, if it is to be kept.
    """
    settle = getattr(engine, "quiesce", lambda: None)
    settle()
    dist.barrier()
    activity = ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU  # which shows nothing
    with profile(activities=[activity]) as profiler:
        for _ in range(TRACED):
            train()
        settle()
    with tempfile.TemporaryDirectory() as directory:
        path = kept or Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    return reading(events, TRACED * engine.micro_batches)


def measured(name: str, arm: str, stages: int, options: argparse.Namespace, traced: bool) -> Measured:
    """Train in one arm."""
    made = sample(name, options)
    config, where = config_of(ARMS[arm], options), "cpu" if options.cpu else "cuda"
    engine = engine_for(made["layers"], stages, config, made["loss_fn"], built_on=where)  # which is faster there
    train = trainer_of(engine, (made["inputs"], made["labels"]))
    dist.barrier()
    for _ in range(SETTLING + 2 * stages // options.micro_batches):
        loss = train()
    peak = PeakMemory(engine.device, engine.module.parameters())
    early = float(loss)
    begin, batches = done(engine.device), 0
    while batches < options.batches and slowest(done(engine.device) - begin) < options.seconds:
        for _ in range(options.at_once):
            train()
        batches += options.at_once
    seconds = slowest(done(engine.device) - begin)
    found = Measured(batches * options.micro_batches / seconds, peak.bytes() or 0, early, None)
    if traced:
        file = f"{name}_{arm}_{stages}_{engine.stage_id}.json".replace(", ", "_")
        kept = Path(options.traces, file) if options.traces else None
        found = found._replace(trace=trace(engine, train, kept))
    engine.destroy()
    del engine, train, loss
    close_groups()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def planned(name: str, stages: int, options: argparse.Namespace, device: str) -> list[int]:
    """The planner's peak bytes of every stage, from a profile of the model's layers here."""
    made = sample(name, options)
    profile = profile_layers(**made, micro_batches=2, warm_up=1, device=device, dtype=torch.bfloat16)
    block, json = VPipeConfig.parse({}), DeepSpeedJson(config_of({}, options))
    split = tuple(uniform_partition(len(profile), stages))
    pipeline = replace(block.pipeline(stages, options.micro_batches), partition=split)
    return [memory.total for memory in predict(profile, pipeline, Devices.of(block, json)).rank_memory()]


def work(rank: int, say: Say, stages: int, options: argparse.Namespace) -> None:
    """One rank."""
    for name in options.models:
        compare(rank, say, stages, name, options)


def compare(rank: int, say: Say, stages: int, name: str, options: argparse.Namespace) -> None:
    """Measure and print all arms of one model."""
    rates: dict[str, list[float]] = {arm: [] for arm in options.arms}
    of_arm: dict[str, list[Any]] = {}
    for repetition in range(options.repetitions):
        first = repetition % len(options.arms)
        for arm in [*options.arms[first:], *options.arms[:first]]:
            last = repetition == options.repetitions - 1
            found = measured(name, arm, stages, options, traced=last)
            rates[arm].append(found.rate)
            if rank == 0:  # of use if there is no time for the rest
                print(f"{name} K={stages} {arm}: {found.rate:.1f} micro-batches/s", file=sys.stderr, flush=True)
            of_arm[arm] = [None] * stages
            dist.all_gather_object(of_arm[arm], found)
    try:
        plan = planned(name, stages, options, "cpu" if options.cpu else "cuda") if rank == 0 else []
    except Exception as error:  # the throughput is worth having all the same
        print(f"no plan: {type(error).__name__}: {error}", file=sys.stderr)
        plan = []
    in_turns = torch.cuda.device_count() < stages and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    stock = statistics.median(rates["stock"]) if "stock" in rates and (options.cpu or not in_turns) else None
    lines, traces = [], []
    for arm, found_rates in rates.items():
        middle, ranks = statistics.median(found_rates), of_arm[arm]
        ratio = f"{middle / stock:.2f}" if stock else ""
        peaks = " ".join(show_bytes(one.peak) for one in ranks)
        range_ = f"{min(found_rates):.1f} to {max(found_rates):.1f}"
        lines.append((arm, f"{middle:.1f}", range_, ratio, peaks, f"{ranks[0].loss:.4f}"))
        of_stages = [one.trace for one in ranks if one.trace is not None]
        if of_stages:
            texts = ("{0.passes_ms:.2f}", "{0.busy:.0%}", "{0.copies_ms:.2f}", "{0.beside:.0%}", "{0.waits:.2f}")
            traces.append((arm, *(" ".join(text.format(one) for one in of_stages) for text in texts)))
    head = ["arm", "micro-batches/s", "from", "x stock", "peak of each stage", "loss"]
    say(f"\n{name}, K={stages}, M={options.micro_batches}\n\n{markdown(head, lines)}")
    say(f"planned for asp: {' '.join(map(show_bytes, plan)) or 'unknown'}")
    if traces:
        head = ["arm", "passes, ms", "busy", "copies, ms", "of them beside passes", "waits for the device"]
        say(f"\nof each stage per micro-batch, traced\n\n{markdown(head, traces)}")


parser = parser_of(__doc__)
parser.add_argument("--cpu", action="store_true", help="on the CPU, to try the script")
parser.add_argument("--models", nargs="+", choices=("bert", "gpt2"), default=["bert", "gpt2"])
parser.add_argument("--arms", nargs="+", choices=list(ARMS), help="default: all that work here")
parser.add_argument("--stages", type=int, nargs="+", default=[2, 4], help="K")
parser.add_argument("--micro-batches", type=int, default=4, help="M")
add_sizes(parser, hidden=1024, layers=14, vocabulary=30528, batch=32, sequence=512)
parser.add_argument("--seconds", type=float, default=4.0, help="of an arm in a repetition, about")
parser.add_argument("--batches", type=int, default=10**6, help="at most, of an arm in a repetition")
parser.add_argument("--at-once", type=int, default=4, help="batches between looks at the clock")
parser.add_argument("--repetitions", type=int, default=3)
parser.add_argument("--traces", metavar="DIR", help="keep the traces in this folder, which exists")
parse = parser.parse_args


def main() -> None:
    """Run every K in a world of its own. One that fails does not stop the others."""
    options, failed = parse(), []
    if options.cpu:
        os.environ["DS_ACCELERATOR"] = "cpu"
    backend = "gloo" if options.cpu else "nccl"
    print(f"{machine(backend)}; bf16, ZeRO-1, torch's AdamW{sizes(options)}", flush=True)
    options.arms = options.arms or (ON_CPU if options.cpu else list(ARMS))
    for stages in options.stages:
        try:
            start(work, stages, stages, options, backend=backend)
        except Exception as error:
            failed.append(f"K={stages}: {error}")
    sys.exit("\n".join(failed) or 0)


if __name__ == "__main__":
    main()
