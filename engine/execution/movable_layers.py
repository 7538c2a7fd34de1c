"""Reasons for which layers cannot move while training runs, which a call refuses on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from torch import nn

from ds_vpipe.checkpoints.stage_layout import PLACEHOLDER
from ds_vpipe.config.live_moves import unfit_settings
from ds_vpipe.engine.deepspeed_internals import PatchedPipelineEngine
from ds_vpipe.engine.modules.built_layers import Built, structure_of
from ds_vpipe.engine.modules.interleaved import InterleavedMixin
from ds_vpipe.engine.modules.recompute import has_own_forward
from ds_vpipe.engine.modules.split_module import SplitModule
from ds_vpipe.engine.stage import Stage
from ds_vpipe.planning.profiler import parameters_of

_PLAIN = (bool, int, float, str)
_RATES = ("lr", "momentum")
_OPTIMIZERS = (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)  # whose state is by parameter


def layer_form(layer: Any) -> list[tuple[str, ...]]:
    """Parameters that a layer is made of, and its modules."""
    if not isinstance(layer, nn.Module):
        return []
    parameters = [(name, str(tuple(found.shape)), str(found.dtype)) for name, found in layer.named_parameters()]
    return [*parameters, *((name, str(value)) for name, value in structure_of(layer).items())]


def options_of(engine: PatchedPipelineEngine, number: int = 0) -> dict[str, Any]:
    """Options of a parameter group, which have to be those of the other stages' for parameters that come here.

    Not those that a schedule may have changed on some stages only, where updates are skipped for an overflow.
    """
    skipped = {"params", "param_names", "step", *(_RATES if engine.fp16_enabled() else ())}
    group = engine.basic_optimizer.param_groups[number]
    return {name: value for name, value in group.items() if isinstance(value, _PLAIN) and name not in skipped}


def other_options(options: Sequence[dict[str, Any]]) -> str | None:
    """Which option is not the same in all stages' optimizers, or None."""
    different = sorted(name for name, value in options[0].items() if any(one.get(name) != value for one in options))
    return f"the optimizers of the stages differ in {different[0]}" if different else None


def _steps_otherwise(optimizer: Any) -> bool:
    """Whether an update is more than the step of the optimizer's class, which a late update of a layer would miss."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return False
    step = vars(optimizer).get("step")
    own = step is not None and not hasattr(step, "_wrapped_by_lr_sched")  # torch's schedulers count steps
    return own or bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def unfit_configuration(engine: PatchedPipelineEngine, stage: Stage) -> str | None:
    """Why layers of this configuration cannot move while training runs, or None."""
    module, optimizer, pipeline = stage.module, engine.optimizer, stage.pipeline
    split = isinstance(module, (SplitModule, InterleavedMixin))
    flat = engine.zero_optimization() or engine.get_data_types()[0] != torch.float32 or engine.torch_autocast_enabled()
    settings = unfit_settings(
        flat=flat,
        optimizer=None if type(optimizer) in _OPTIMIZERS else type(optimizer).__name__,
        clips=engine.gradient_clipping() > 0,
        replicated=engine.grid.world_size != pipeline.num_stages,
        recomputes=any(pipeline.recompute_ratio or ()) or module.activation_checkpoint_interval > 0,
        swaps=stage.swap is not None,
        mitigates=stage.staleness is not None and any(pipeline.delays),
    )
    reasons: list[tuple[bool, str | None]] = [
        (split, f"the module is a {type(module).__name__}"),
        (has_own_forward(module), "the module has a forward of the script's"),
        (any(isinstance(spec, TiedLayerSpec) for spec in module._layer_specs), "the model has tied layers"),
        (settings is not None, settings),
        (len(getattr(optimizer, "param_groups", ())) != 1, "the optimizer has several groups of parameters"),
        (PLACEHOLDER in engine.param_names.values(), "a stage has nothing to train"),
        (stage.device.type != "cpu", f"stages compute on {stage.device.type}"),
        (_steps_otherwise(optimizer), "the optimizer has hooks or a step() of the script's"),
    ]
    return next((reason for holds, reason in reasons if holds), None)


def unfit_layers(module: PipelineModule, built: Mapping[int, Built]) -> dict[int, str]:
    """Layers here that cannot move, by number, each with the reason.

    Of layers that ``built`` lacks, settings may have changed since they were built.
    """
    users = Counter(id(parameter) for layer in module.forward_funcs for parameter in set(parameters_of(layer)))
    found = {}
    for number, layer in enumerate(module.forward_funcs, module._local_start):
        reason = _unfit(layer, users) if isinstance(layer, nn.Module) else None
        if reason is None and number in built and (changed := built[number].changed(layer)):
            reason = f"keeps a {changed[0][1]} that passes may change: it is another than when the layer was built"
        if reason is not None:
            found[number] = f"layer {number} {reason}"
    return found


def _unfit(layer: nn.Module, users: Counter[int]) -> str | None:
    parameters, parts = [*layer.parameters()], [*layer.modules()]
    reasons = {
        "shares parameters with another one": any(users[id(p)] > 1 for p in parameters),
        "has buffers, which passes may change": any(True for _ in layer.buffers()),
        "has hooks": any(
            p._forward_pre_hooks or p._forward_hooks or p._backward_pre_hooks or p._backward_hooks for p in parts
        ),
        "has extra state, which passes may change": any(
            type(p).get_extra_state is not nn.Module.get_extra_state for p in parts
        ),
        "has sparse gradients": any(getattr(part, "sparse", False) is True for part in parts),  # as nn.Embedding's
        "has parameters with hooks": any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
