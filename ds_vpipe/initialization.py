"""``ds_vpipe.initialize``: DeepSpeed's, with the engine that a ``"vpipe"`` block asks for."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.utils import groups, logger

from ds_vpipe.accelerators import own_config
from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson, load_deepspeed_json
from ds_vpipe.engine.build import Prepared, prepare
from ds_vpipe.engine.engine import VPipeEngine
from ds_vpipe.engine.loop.engine import VPipeLoopEngine
from ds_vpipe.engine.modules.split_module import SplitModule, pipeline_from_module
from ds_vpipe.engine.reduction_buffers import unnamed_buffers
from ds_vpipe.engine.updates.parameter_groups import listed
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.extension_builds import extension_builds
from ds_vpipe.lr_policies import lr_policy
from ds_vpipe.lr_schedule import LRSchedule

_ORIGINAL = deepspeed.initialize  # ours may be in its place later, and around ours what a script puts there
_IN_ARGUMENTS = ("deepscale_config", "deepspeed_config")  # DeepSpeed still reads its former name, and reads it first


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
    block says. A ``model`` that is no ``PipelineModule`` is made one, and the engine is a
    :class:`~ds_vpipe.engine.loop.engine.VPipeLoopEngine`, which is called as DeepSpeed's for such a model; an
    ``optimizer`` or ``model_parameters`` made of the whole model are cut down to the stage. Without the block this is
    ``deepspeed.initialize``. The ``"scheduler"`` may in both cases also be one of :mod:`ds_vpipe.lr_policies`.

    Returns:
        ``(engine, optimizer, training_dataloader, lr_scheduler)``.

    Raises:
        VPipeConfigError: on every rank, with one line that names the key, the value and what is allowed.
    """
    original = deepspeed_initialize()
    positional = (args, model, optimizer, model_parameters, training_data, lr_scheduler, *others)
    given = inspect.signature(original).bind(*positional, **kwargs).arguments
    with extension_builds(), unnamed_buffers():
        return _initialize(original, given)


def _initialize(original: Callable[..., Any], given: dict[str, Any]) -> tuple[Any, Any, Any, Any]:
    model = given.get("model")
    ds_config = _load_config(given)
    policy = None if ds_config is None else lr_policy(ds_config)
    if policy is not None and given.get("lr_scheduler") is None:
        given["lr_scheduler"] = functools.partial(LRSchedule, policy=policy)
    if ds_config is None or DeepSpeedJson(ds_config).block is None:
        with _without_stages(given, ds_config or {}):
            return tuple(original(**given))
    json = DeepSpeedJson(ds_config)
    if given.get("mpu") is not None:
        raise VPipeConfigError(
            f"initialize(mpu): got a {type(given['mpu']).__name__}, allowed with a vpipe block is None, as the engine "
            f"divides the ranks into stages and replicas itself; leave it out, and ask engine.mpu for groups"
        )
    config = VPipeConfig.parse(json.block)  # errors in it are reported before there are process groups
    if isinstance(model, SplitModule):
        model = model.user_module  # which is refused: there is one stage of it here
    if isinstance(model, PipelineModule):
        optimizer = given.get("optimizer")
        prepared = prepare(model, json.next_to(optimizer), config, optimizer, given.get("model_parameters"))
        given["model_parameters"] = prepared.model_parameters
        kind: type[VPipeEngine] = VPipeEngine
    else:
        json, prepared = _prepare_whole(given, model, json, config)
        kind = VPipeLoopEngine
    # DeepSpeed looks its pipeline engine up by name when it builds one.
    engine_class = patch.object(deepspeed, "PipelineEngine", functools.partial(kind, prepared=prepared))
    with engine_class, _as_configuration(given, json.content):
        return tuple(original(**given))


def _without_stages(given: Mapping[str, Any], ds_config: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Context in which DeepSpeed makes a whole model's engine beside a pipeline.

    It takes the groups of the pipeline made last for those of every later engine, and looks for slices of the model.
    While such an engine trains it would add gradients over these groups, to which ranks of other stages do not belong.
    """
    whole = given.get("mpu") is None and not isinstance(given.get("model"), PipelineModule)
    if not whole or not isinstance(groups.mpu, PipelineParallelGrid) or groups.mpu.get_model_parallel_world_size() == 1:
        return nullcontext()
    if given.get("optimizer") is not None or "optimizer" in ds_config:
        where = "as an argument" if given.get("optimizer") is not None else "in the JSON"
        raise VPipeConfigError(
            f"initialize(): got an optimizer {where} for a {type(given.get('model')).__name__} without a vpipe block, "
            f"in a process that has a pipeline, allowed is a model that is only evaluated, as DeepSpeed would reduce "
            f"its gradients over the pipeline's groups; leave the optimizer out, or train this model in another run"
        )
    return patch.object(groups, "mpu", None)


def _prepare_whole(
    given: dict[str, Any], model: Any, json: DeepSpeedJson, config: VPipeConfig
) -> tuple[DeepSpeedJson, Prepared]:
    """Split a plain module. What ``given`` names of its parameters is cut down once the engine is there."""
    given["model_parameters"] = listed(given.get("model_parameters"))
    examples = given.get("training_data"), given.get("collate_fn")
    module, groups = pipeline_from_module(model, json.content, config, *examples)
    given["model"] = module
    json, by_accelerator = own_config(json, module.num_stages)
    json, changed = json.corrected(torch.distributed.get_world_size(), module.num_stages)
    if changed and not by_accelerator and module.global_rank == 0:
        logger.warning(f"ds_vpipe: {changed}")
    return json, prepare(module, json.next_to(given.get("optimizer")), config, None, None, groups)


def deepspeed_initialize() -> Any:
    """DeepSpeed's own ``initialize``, as it was when this module was imported.

    :mod:`ds_vpipe.run` puts ours in its place.
    """
    return _ORIGINAL


@contextmanager
def _set_to(args: Any, name: str, value: Any) -> Iterator[None]:
    """Context for arguments of any class: attributes may be items of a dict, computed as GPT-NeoX's are, or frozen."""
    if isinstance(inspect.getattr_static(args, name, None), property):
        with patch.object(type(args), name, value):
            yield
        return
    frozen = getattr(getattr(type(args), "__dataclass_params__", None), "frozen", False)
    put: Callable[[Any, str, Any], None] = object.__setattr__ if frozen else setattr
    before = getattr(args, name)
    put(args, name, value)
    try:
        yield
    finally:
        put(args, name, before)


def _as_configuration(given: dict[str, Any], ds_config: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Context in which DeepSpeed finds ``ds_config`` where the script has given its configuration."""
    args = given.get("args")
    for name in _IN_ARGUMENTS:
        if getattr(args, name, None) is not None:
            return _set_to(args, name, ds_config)  # not a copy of args: DeepSpeed writes into it
    given["config"] = ds_config
    return nullcontext()


def _load_config(given: dict[str, Any]) -> dict[str, Any] | None:
    in_arguments = [getattr(given.get("args"), name, None) for name in _IN_ARGUMENTS]
    for candidate in (given.get("config"), given.get("config_params"), *in_arguments):
        if candidate is not None:
            return candidate if isinstance(candidate, dict) else load_deepspeed_json(candidate)
    return None
