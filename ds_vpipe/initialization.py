"""``ds_vpipe.initialize``: DeepSpeed's, with the engine that a ``"vpipe"`` block asks for."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.tensor_parallel.init_utils import load_ds_config
from deepspeed.utils import logger

from ds_vpipe.config import StageSettings, VPipeConfig, block_of, refuse_unsupported
from ds_vpipe.engine.engine import VPipeEngine
from ds_vpipe.engine.recompute import apply_recompute
from ds_vpipe.engine.repartition import repartition, stage_counts
from ds_vpipe.engine.stage_grid import StageLocalGrid
from ds_vpipe.errors import VPipeConfigError


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    *others: Any,
    **kwargs: Any,
) -> tuple[Any, Any, Any, Any]:
    """Make an engine, as ``deepspeed.initialize`` does and with the same arguments and returns.

    With a ``"vpipe"`` block in the DeepSpeed configuration the engine is a
    :class:`~ds_vpipe.engine.engine.VPipeEngine` and ``model`` is split, recomputed and scheduled as the
    block says. Without one this is ``deepspeed.initialize``.

    Returns:
        ``(engine, optimizer, training_dataloader, lr_scheduler)``.

    Raises:
        VPipeConfigError: on every rank, with one line that names the key, the value and what is allowed.
    """
    theirs = deepspeed_initialize()
    positional = (args, model, optimizer, model_parameters, training_data, lr_scheduler, *others)
    given = inspect.signature(theirs).bind(*positional, **kwargs).arguments
    ds_config = _load_config(given)
    block = None if ds_config is None else block_of(ds_config)
    if ds_config is None or block is None:
        return tuple(theirs(**given))
    config = VPipeConfig.parse(block)
    if not isinstance(model, PipelineModule):
        raise VPipeConfigError(
            f"model: got {type(model).__name__}, allowed with a vpipe block is a deepspeed.pipe.PipelineModule; "
            f"build one from a list of layers, or remove the block"
        )
    if isinstance(model, DualPipeVModule):
        raise VPipeConfigError(
            f"model: got {type(model).__name__}, allowed with a vpipe block is a plain PipelineModule; DualPipeV has a "
            f"schedule of its own, so build a PipelineModule or remove the block"
        )
    refuse_unsupported(ds_config, config, model.num_stages)
    settings = config.resolve(model.num_stages, model._num_layers)
    given["model_parameters"] = _split(model, settings, optimizer, model_parameters)
    if config.sync_mode == "asp" and model.num_stages > 1:
        grid = StageLocalGrid(model.mpu())
        model.mpu = lambda: grid
    apply_recompute(model, settings.recompute_ratio[model.stage_id])
    _limit_cpu_threads()
    with _engine_class(VPipeEngine):
        return tuple(theirs(**given))


def deepspeed_initialize() -> Any:
    """DeepSpeed's own ``initialize``, also where :mod:`ds_vpipe.run` has put ours in its place."""
    return getattr(deepspeed.initialize, "__wrapped__", deepspeed.initialize)


def _load_config(given: dict[str, Any]) -> dict[str, Any] | None:
    from_arguments = getattr(given.get("args"), "deepspeed_config", None)
    for candidate in (given.get("config"), given.get("config_params"), from_arguments):
        if candidate is not None:
            return candidate if isinstance(candidate, dict) else load_ds_config(candidate)
    return None


def _split(model: PipelineModule, settings: StageSettings, optimizer: Any, model_parameters: Any) -> Any:
    """Split ``model`` as the settings say and return the parameters to train."""
    if settings.partition is None:
        return model_parameters
    counts = stage_counts(model, settings.partition)
    before = {id(p) for p in model.parameters() if p.requires_grad}
    if model_parameters is not None and not isinstance(model_parameters, list):
        model_parameters = list(model_parameters)
    moved = repartition(model, counts)
    if not moved or (optimizer is None and model_parameters is None):
        return model_parameters
    if isinstance(optimizer, torch.optim.Optimizer):
        raise VPipeConfigError(
            f"vpipe.partition: got {list(counts)}, which moves layers between stages, but the optimizer given to "
            f"initialize() was built before; allowed is the module's own split; build the module with this partition, "
            f"or name the optimizer in the DeepSpeed JSON"
        )
    if model_parameters is None:
        return None
    flat = [p for p in model_parameters if isinstance(p, torch.Tensor)]
    if len(flat) != len(model_parameters) or {id(p) for p in flat if p.requires_grad} != before:
        raise VPipeConfigError(
            f"vpipe.partition: got {list(counts)}, which moves layers between stages, but model_parameters names "
            f"parameters of the old split; allowed is the module's own split; build the module with this partition, "
            f"or leave model_parameters out"
        )
    return [p for p in model.parameters() if p.requires_grad]


def _limit_cpu_threads() -> None:
    """Share the cores among the ranks of a machine, unless the user has decided that."""
    ranks = int(os.environ.get("LOCAL_SIZE", "1"))
    if "OMP_NUM_THREADS" in os.environ or ranks < 2 or torch.cuda.is_available():
        return
    threads = max(1, (os.cpu_count() or 1) // ranks)
    if torch.get_num_threads() > threads:
        torch.set_num_threads(threads)
        if int(os.environ.get("LOCAL_RANK", "0")) == 0:
            logger.info(f"ds_vpipe: OMP_NUM_THREADS is not set; {ranks} ranks here, {threads} CPU thread(s) each")


@contextmanager
def _engine_class(engine: type) -> Iterator[None]:
    """DeepSpeed looks its pipeline engine up by name when it builds one; for that moment it is ours."""
    original = deepspeed.PipelineEngine
    deepspeed.PipelineEngine = engine
    try:
        yield
    finally:
        deepspeed.PipelineEngine = original
