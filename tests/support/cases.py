"""What a rank of a multi-process test does: build an engine on the toy model, train, report."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import toy
from simulated_device import simulated_copies
from torch import nn

LINK = os.environ.get("DS_VPIPE_TEST_LINK", "auto")
"""Payload of links in tests that name none."""
DEVICE = os.environ.get("DS_VPIPE_TEST_DEVICE", "cpu")
"""Where engines of tests compute that do not say: ``cpu``, on a ``simulated`` accelerator, or on GPUs, ``cuda``."""
if DEVICE not in ("cpu", "simulated", "cuda"):
    raise ValueError(f"DS_VPIPE_TEST_DEVICE: got {DEVICE!r}; allowed: cpu, simulated, cuda")


def config(micro_batches: int, optimizer: dict[str, Any], vpipe: dict[str, Any] | None, **extra: Any) -> dict[str, Any]:
    """A DeepSpeed configuration for the toy model."""
    result: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": toy.MICRO_BATCH,
        "gradient_accumulation_steps": micro_batches,
        "optimizer": optimizer,
        "gradient_clipping": 0.0,  # DeepSpeed clips at 1.0 unless told otherwise
        "steps_per_print": 10**9,
        **extra,
    }
    if vpipe is not None:
        # The oracle knows no default of "staleness".
        result["vpipe"] = {"peer_timeout_s": 60, "link": LINK, "staleness": "off", **vpipe}
    return result


def engine(
    ds_config: dict[str, Any],
    stages: int | None,
    loss_fn: Any = None,
    dropout: float = 0.0,
    specs: Callable[[], list[Any]] | None = None,
    device: str = DEVICE,
    **module: Any,
) -> Any:
    """An engine from ``ds_vpipe.initialize`` for a plain ``PipelineModule``."""
    import deepspeed
    from deepspeed.runtime import torch_autocast

    import ds_vpipe

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = False  # DeepSpeed means to have one engine in a process
    if "fp16" in ds_config:
        deepspeed.get_accelerator().is_fp16_supported = lambda: True  # it is, only slow
    net = deepspeed.pipe.PipelineModule(
        toy.layer_specs(dropout) if specs is None else specs(),
        num_stages=stages,
        loss_fn=nn.CrossEntropyLoss() if loss_fn is None else loss_fn,
        partition_method="uniform",
        **module,
    )
    link = ds_config.get("vpipe", {}).get("link")
    if link in ("ipc", "nccl") and not torch.cuda.is_available():
        device = "simulated"
    if device != "simulated" or "vpipe" not in ds_config:  # the process chooses between CPU and GPU
        return ds_vpipe.initialize(model=net, config=ds_config)[0]
    return on_simulated(lambda: ds_vpipe.initialize(model=net, config=ds_config)[0])


def on_simulated(build: Callable[[], Any]) -> Any:
    """An engine that computes on a simulated accelerator, which ends with it."""
    copies = simulated_copies(seed=torch.distributed.get_rank())
    with mock.patch("ds_vpipe.engine.build.copies_of", return_value=copies):
        trained = build()
    destroy = trained.destroy

    def end() -> None:
        destroy()
        copies.accelerator.end()  # type: ignore[attr-defined]

    trained.destroy = end
    return trained


def parameters(trained: Any) -> dict[str, torch.Tensor]:
    """This stage's parameters by layer number and name, on the CPU: they may go to another process."""
    return {
        name if name[0].isdigit() else f"other.{name}": value.detach().float().cpu().clone()
        for name, value in trained.module.named_parameters()
    }


def train(
    ds_config: dict[str, Any],
    stages: int | None,
    batches: int,
    *,
    stop: int | None = None,
    keep_history: bool = False,
    **module: Any,
) -> dict[str, Any]:
    """Train ``batches`` batches, or until the data end, and report."""
    torch.manual_seed(1234)
    trained = engine(ds_config, stages, **module)
    iterator = toy.data(stop, replica=trained.grid.data_parallel_id)
    losses, alive, history, scales = [], [], [], []
    ended = False
    for _ in range(batches):
        if keep_history:
            history.append(parameters(trained))
        if trained.fp16_enabled():
            scales.append(trained.optimizer.loss_scale)
        try:
            losses.append(float(trained.train_batch(iterator)))
        except StopIteration:
            ended = True
            break
        if "vpipe" in ds_config:
            alive.append(trained.stashing_optimizer.num_versions)
    report = {
        "stage": trained.stage_id,
        "place": (trained.grid.data_parallel_id, trained.grid.get_slice_parallel_rank()),
        "parameters": parameters(trained),
        "losses": losses,
        "alive": alive,
        "ended": ended,
        "steps": trained.global_steps,
        "skipped": trained.skipped_steps,
        "history": history,
        "scales": scales,
    }
    if "vpipe" in ds_config:
        report["latest"] = trained.stashing_optimizer.latest_version
        report["allocated"] = trained.stashing_optimizer.versions.allocated
    trained.destroy()
    return report


def train_each(ds_configs: list[dict[str, Any]], stages: int, batches: int, **module: Any) -> list[dict[str, Any]]:
    """:func:`train` for several configurations in one world."""
    reports = []
    for ds_config in ds_configs:
        reports.append(train(ds_config, stages, batches, **module))
        close_groups()
    return reports


def train_twice(ds_config: dict[str, Any], stages: int, first: int, second: int, **module: Any) -> dict[str, Any]:
    """Train from two iterators of ``first`` and ``second`` micro-batches, with a drain between."""
    trained = engine(ds_config, stages, **module)
    for stop in (first, second):
        iterator = toy.data(stop, replica=trained.grid.data_parallel_id)
        with contextlib.suppress(StopIteration):
            while True:
                trained.train_batch(iterator)
    report = {"stage": trained.stage_id, "parameters": parameters(trained)}
    trained.destroy()
    return report


def close_groups() -> None:
    """Close every process group but the world's: each has threads that poll and sockets.

    Engines sit in reference cycles, and a group lives as long as an engine that knows it.
    """
    torch.distributed.barrier()
    gc.collect()
    world = torch.distributed.group.WORLD
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        if group is not world:
            torch.distributed.destroy_process_group(group)
    del group
    gc.collect()


def end(engine: Any) -> None:
    """Destroy an engine, and the process groups that it leaves."""
    engine.destroy()
    close_groups()


def merged(reports: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Parameters of all stages of one pipeline."""
    return {name: value for report in reports for name, value in report["parameters"].items()}
