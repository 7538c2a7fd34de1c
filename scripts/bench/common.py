"""Parts of every benchmark: emulated and real layers, engines, ranks on this machine, tables and pictures."""

import argparse
import gc
import json
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from deepspeed.pipe import LayerSpec
from deepspeed.utils import logger
from torch import nn
from transformers import BertConfig

import ds_vpipe
from ds_vpipe.timelines.figure import Curve as Curve  # which benchmarks import from here
from ds_vpipe.timelines.figure import draw as draw

Row = dict[str, Any]
Say = Callable[[str], None]
PRELOADED = ["deepspeed.runtime.zero.muon.muon_optimizer", "ds_vpipe.initialization"]  # an optimizer imports the first

WIDTH = 1024
BATCH = 16
# For NCCL between ranks that share a GPU, which it refuses on one host: each also says that its host is another one.
SHARED_GPU = {"NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
ACTIVATION_BYTES = 4 * WIDTH * BATCH
REAL_WIDTH, REAL_BATCH, REAL_LINEARS = 512, 256, 4


class Sleep(torch.autograd.Function):
    """Emulated device time of a forward and a backward pass, in seconds."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, forward_s: float, backward_s: float) -> torch.Tensor:
        ctx.seconds = backward_s
        if forward_s:
            time.sleep(forward_s)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class Emulated(nn.Module):
    """Layer that sleeps, so that two cores can stand for any number of devices.

    Args:
        milliseconds: per micro-batch: a third in the forward pass, a third for the gradient of the input and a third
            for that of the weight.
    """

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self._part = milliseconds / 3000

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(value * Sleep.apply(self.scale, 0.0, self._part), self._part, self._part)


class Adapted(nn.Module):
    """Frozen layer with LoRA's adapters, which sleeps.

    Args:
        milliseconds: per micro-batch: half in the forward pass and half for the gradient of the input; that of the
            frozen weight nobody needs.
    """

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        from peft import LoraConfig, inject_adapter_in_model

        self.base = nn.Linear(64, 64)  # narrow, so that it is the sleep that takes time
        inject_adapter_in_model(LoraConfig(r=8, target_modules=["base"]), self)
        self._part = milliseconds / 2000

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        return Sleep.apply(self.base(value.unflatten(-1, (-1, 64))).flatten(-2), self._part, self._part)


class Linears(nn.Sequential):
    """Layer of ``count`` matrix products of width ``width``."""

    def __init__(self, count: int = REAL_LINEARS, width: int = REAL_WIDTH) -> None:
        super().__init__(*[nn.Linear(width, width) for _ in range(count)])


def build(kind: str, count: int, layer_ms: float) -> list[LayerSpec]:
    """Specs of equal layers: ``emulated`` ones or ones with ``adapters``, of ``layer_ms``, or ``real`` ones."""
    specs = {
        "emulated": LayerSpec(Emulated, layer_ms), "adapters": LayerSpec(Adapted, layer_ms), "real": LayerSpec(Linears)
    }  # fmt: skip
    return [specs[kind]] * count


def micro_batch(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels that suit :func:`build`."""
    inputs = torch.randn(REAL_BATCH, REAL_WIDTH) if kind == "real" else torch.randn(BATCH, WIDTH)
    return inputs, torch.zeros_like(inputs)


def ds_config(
    micro_batches: int, vpipe: dict[str, Any] | None, samples: int = BATCH, optimizer: str = "SGD", **params: Any
) -> dict[str, Any]:
    """A DeepSpeed configuration that prints nothing. Without ``vpipe`` for DeepSpeed's own engine."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-4, **params}},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    return config if vpipe is None else {**config, "vpipe": {"staleness": "off", **vpipe}}


def engine_for(
    layers: list[Any], stages: int, config: dict[str, Any], loss: Any = None, module_class: str = "PipelineModule",
    built_on: str = "cpu",
) -> Any:  # fmt: skip
    """An engine for layers that are split evenly. ``loss`` is the mean squared error unless given."""
    torch.manual_seed(0)
    with torch.device(built_on):
        module = getattr(deepspeed.pipe, module_class)(
            layers, num_stages=stages, loss_fn=loss or nn.functional.mse_loss, partition_method="uniform"
        )
    return ds_vpipe.initialize(model=module, config=config)[0]


def trainer_of(engine: Any, batch: tuple[Any, Any]) -> Callable[[], Any]:
    """A function that trains a batch of the same micro-batch over and over."""
    iterator = repeat(batch)
    return lambda: engine.train_batch(iterator)


def seconds_of(train: Callable[[], Any], batches: int, settling: int) -> float:
    """Seconds of ``batches`` on the slowest rank, after ``settling`` ones."""
    dist.barrier()
    for _ in range(settling):
        train()
    begin = time.perf_counter()
    for _ in range(batches):
        train()
    return slowest(time.perf_counter() - begin)


def slowest(seconds: float) -> float:
    """The most of all ranks' seconds."""
    found = torch.tensor([seconds], dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def _join(rank: int, world: int, port: int, backend: str) -> Any:
    """Become ``rank`` of a world of this machine's processes. Returns the stream to print to."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # rank 0 does not listen
    gpus = torch.cuda.device_count() if os.environ.get("DS_ACCELERATOR") != "cpu" else 0
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % gpus if gpus else rank))  # ranks may share a GPU
    torch.set_num_threads(1)
    gc.freeze()  # what is imported is no garbage of engines
    logger.setLevel("ERROR")
    printed, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115 - DeepSpeed prints its topology
    if gpus:
        torch.cuda.set_device(rank % gpus)
    if gpus and backend == "gloo":
        # DeepSpeed would bind the group to the GPU, and torch then split it for every group of some ranks only.
        dist.init_process_group("gloo")
    if 0 < gpus < world:
        os.environ.update(SHARED_GPU, NCCL_HOSTID=f"host {rank // gpus}")
    deepspeed.init_distributed(dist_backend=backend)
    return printed


def close_groups() -> None:
    """Close every process group but the world's, on all ranks together.

    Each has a thread that wakes a hundred times a second for as long as anything knows the group, so that processes
    that have had many engines measure something else.
    """
    dist.barrier()
    gc.collect()  # engines sit in reference cycles
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def start(work: Callable[..., None], world: int, *arguments: Any, backend: str = "gloo") -> None:
    """Run ``work(rank, say, *arguments)`` on every rank of a world of its own, to the end. ``say`` prints on rank 0.

    To import everything takes a rank some seconds: ranks are forked from a process that has, unless they may use CUDA.
    That process is started once and keeps the environment of the first world.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # A port that is free now may be taken when rank 0 comes to listen on it, so this process listens in its place.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ours = sorted(name for name in sys.modules if name.startswith("ds_vpipe."))
    multiprocessing.set_forkserver_preload([*PRELOADED, *ours])
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    mp.start_processes(_rank, args=(work, world, store.port, backend, arguments), nprocs=world, start_method=method)


def _rank(
    rank: int, work: Callable[..., None], world: int, port: int, backend: str, arguments: tuple[Any, ...]
) -> None:
    printed = _join(rank, world, port, backend)

    def say(text: str) -> None:
        if rank == 0:
            print(text, file=printed, flush=True)

    work(rank, say, *arguments)


def machine(backend: str = "gloo") -> str:
    """Processor and versions, for the first line of a table."""
    device = f", {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if torch.cuda.is_available() else ""
    return (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores{device}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, deepspeed {deepspeed.__version__}, {backend}"
    )


def run(work: Callable[..., None], world: int, *arguments: Any, about: str = "") -> None:
    """:func:`start`, after a line that names the machine."""
    print(f"{machine()}{about}", flush=True)
    start(work, world, *arguments)


def add_sizes(parser: argparse.ArgumentParser, **defaults: int) -> None:
    """Add the sizes of a model and of its micro-batches."""
    of = {"hidden": "a multiple of 64", "layers": "encoder layers or blocks", "vocabulary": "words"}
    of |= {"batch": "samples per micro-batch", "sequence": "tokens per sample"}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=of[name])


def sizes(options: argparse.Namespace) -> str:
    """The sizes, for the line that names the machine."""
    model = f"hidden {options.hidden}, {options.layers} layers, vocabulary {options.vocabulary}"
    return f"; {model}, batch {options.batch} x {options.sequence}"


def bert_config(options: argparse.Namespace) -> BertConfig:
    """A BERT of these sizes; without a tie, all versions and buffers are those of the pipeline itself."""
    return BertConfig(
        hidden_size=options.hidden, num_hidden_layers=options.layers, num_attention_heads=max(1, options.hidden // 64),
        intermediate_size=4 * options.hidden, vocab_size=options.vocabulary, attn_implementation="sdpa",
        tie_word_embeddings=False, max_position_embeddings=max(512, options.sequence),
    )  # fmt: skip


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser described by the first line of a module's docstring."""
    return argparse.ArgumentParser(description=(description or "").splitlines()[0])


def read_rows(path: str | Path) -> list[Row]:
    """Rows of a file of JSON lines, none if there is no file."""
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()] if Path(path).exists() else []


def add_row(row: Row, path: str | Path | None) -> None:
    """Append a row to a file of JSON lines, if one is named."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(map(str, cells))} |\n" for cells in (head, *rows)]
    return "".join([lines[0], "|---" * len(head) + "|\n", *lines[1:]])
