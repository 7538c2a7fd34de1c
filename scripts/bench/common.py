"""Parts of every benchmark: emulated and real layers, engines, ranks on this machine, the first line of a table."""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from report import add_row

WIDTH = 1024
BATCH = 16
ACTIVATION_BYTES = 4 * WIDTH * BATCH
REAL_WIDTH, REAL_BATCH, REAL_LINEARS = 512, 256, 4


def build(kind: str, count: int, layer_ms: float) -> list[Any]:
    """Specs of ``count`` equal layers.

    Args:
        kind: ``emulated``: sleeps for a third of ``layer_ms`` milliseconds in its forward pass, a third for the
            gradient of its input and a third for that of its weight, so that two cores can stand for any number of
            devices; ``real``: matrix products.
        count: how many.
        layer_ms: of an emulated layer, per micro-batch.
    """
    import torch
    from deepspeed.pipe import LayerSpec
    from torch import nn

    class Sleep(torch.autograd.Function):
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
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            part = layer_ms / 3000
            return Sleep.apply(value * Sleep.apply(self.scale, 0.0, part), part, part)

    class Real(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(*[nn.Linear(REAL_WIDTH, REAL_WIDTH) for _ in range(REAL_LINEARS)])

    return [LayerSpec(Emulated if kind == "emulated" else Real) for _ in range(count)]


def micro_batch(kind: str) -> tuple[Any, Any]:
    """Inputs and labels that suit :func:`build`."""
    import torch

    inputs = torch.randn(BATCH, WIDTH) if kind == "emulated" else torch.randn(REAL_BATCH, REAL_WIDTH)
    return inputs, torch.zeros_like(inputs)


def endless(kind: str) -> Iterator[tuple[Any, Any]]:
    """The same micro-batch over and over."""
    item = micro_batch(kind)
    while True:
        yield item


def ds_config(
    micro_batches: int, vpipe: dict[str, Any] | None, samples: int = BATCH, optimizer: str = "SGD", **params: Any
) -> dict[str, Any]:
    """A DeepSpeed configuration that prints nothing; without ``vpipe`` for DeepSpeed's own engine."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-4, **params}},
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
    }
    return config if vpipe is None else {**config, "vpipe": vpipe}


def engine_for(
    layers: list[Any], stages: int, config: dict[str, Any], loss: Any = None, module_class: str = "PipelineModule"
) -> Any:
    """An engine for layers that are split evenly; ``loss`` is the mean squared error unless given."""
    import deepspeed
    import torch

    import ds_vpipe

    torch.manual_seed(0)
    module = getattr(deepspeed.pipe, module_class)(
        layers, num_stages=stages, loss_fn=loss or torch.nn.functional.mse_loss, partition_method="uniform"
    )
    return ds_vpipe.initialize(model=module, config=config)[0]


def join(rank: int, world: int, port: int, backend: str = "gloo") -> Any:
    """Become ``rank`` of a world of this machine's processes; returns the stream to print to."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(world), LOCAL_SIZE=str(world))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    import deepspeed
    import torch
    from deepspeed.utils import logger

    torch.set_num_threads(1)
    logger.setLevel("ERROR")
    printed, sys.stdout = sys.stdout, open(os.devnull, "w")  # noqa: SIM115 - DeepSpeed prints its topology
    deepspeed.init_distributed(dist_backend=backend)
    return printed


def close_groups() -> None:
    """Close every process group but the world's, on all ranks together.

    Each has a thread that wakes a hundred times a second for as long as anything knows the group, so that processes
    that have had many engines measure something else.
    """
    import torch.distributed as dist

    dist.barrier()
    gc.collect()  # engines sit in reference cycles
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()


def start(work: Callable[..., None], world: int, *arguments: Any) -> None:
    """Run ``work(rank, world, port, *arguments)`` on every rank of a world of its own, to the end."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch.multiprocessing as mp
    from torch.distributed import TCPStore

    # A port that is free now may be taken when rank 0 comes to listen on it, so this process listens in its place.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # told to rank 0, which does not listen then
    try:
        mp.spawn(work, args=(world, store.port, *arguments), nprocs=world)
    finally:
        del os.environ["TORCHELASTIC_USE_AGENT_STORE"]


def machine() -> str:
    """Processor and versions, for the first line of a table."""
    import deepspeed
    import torch

    device = f", {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if torch.cuda.is_available() else ""
    return (
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores{device}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, deepspeed {deepspeed.__version__}"
    )


def print_row(row: dict[str, Any], text: str, printed: Any, path: str | None) -> None:
    """Print a row of the table, and append it to the file ``path``, if any."""
    print(text, file=printed, flush=True)
    add_row(row, path)
