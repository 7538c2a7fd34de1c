"""Forecast of asynchronous training: losses by a replay in this process, time by simulating the planner's split.

The replay's updates are the engine's (:mod:`ds_vpipe.staleness.replay`), but for what it leaves out, and here every
layer has weights of its own, also where the model ties some. Seconds come from a profile of the layers, so that they
are in proportion to one another and not those of another device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.utils import logger

from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.config.staleness import Staleness
from ds_vpipe.errors import Refusal, VPipeConfigError
from ds_vpipe.lr_policies import lr_policy
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import ModelProfile
from ds_vpipe.planning.planner import plan
from ds_vpipe.planning.profiler import built, modules_of
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload
from ds_vpipe.simulation.costs import planned_costs
from ds_vpipe.simulation.simulator import simulate
from ds_vpipe.staleness.delay_warmup import DelayWarmup
from ds_vpipe.staleness.replay import MakeOptimizer, Replay
from ds_vpipe.staleness.soap import SOAP

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": torch.optim.AdamW,  # DeepSpeed's Adam decays weights as AdamW does, unless it is told not to
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
    "soap": SOAP,
}
_OF_DEEPSPEED = ("adam_w_mode", "torch_adam", "fp32_optimizer_states")  # arguments that torch's Adam lacks
_BEYOND = 10  # batches after the pipeline is full


@dataclass(frozen=True)
class Pace:
    """Duration of asynchronous updates, in units of an update of the synchronous pipeline."""

    update: float  # for an update while it is full
    drain: float  # more for a drain and for being filled again, as after every batch of a synchronous pipeline

    def time(self, updates: float, settings: Staleness | None, delay: int) -> float:
        """Time of the first ``updates``, with the drains that ``settings`` ask for; ``delay`` is the largest one."""
        warmup = DelayWarmup.of(settings, delay)
        drains, end = 0, warmup.drain_interval(0)[1]
        while end is not None and end <= updates:
            drains, end = drains + 1, warmup.drain_interval(end)[1]
        return updates * self.update + drains * self.drain


def planned_pace(
    profile: ModelProfile, pipeline: Pipeline, devices: Devices, *, hide_transfers: bool = False
) -> tuple[Pipeline, Pace]:
    """The asynchronous ``pipeline`` in the planner's split, and its pace beside a synchronous one in its own.

    To ``hide_transfers`` it also gets the planner's depths.

    Raises:
        VPipeConfigError: nothing fits.
    """

    def seconds(wanted: Pipeline) -> tuple[Pipeline, float]:
        found = plan(profile, wanted, devices, hide_transfers=hide_transfers)
        workload = Workload(_BEYOND + found.pipeline.delays[0])
        costs = planned_costs(found, devices)
        return found.pipeline, wanted.micro_batches / simulate(found.pipeline, costs, workload).throughput

    own, own_s = seconds(replace(pipeline, partition=None, recompute_ratio=None))
    sizes = pipeline.num_stages, pipeline.micro_batches
    _, synchronous_s = seconds(Pipeline("1f1b", *sizes, swap_ratio=pipeline.swap_ratio))
    share = own_s / synchronous_s
    return own, Pace(share, 1 - share)


class ForecastLayer(torch.nn.Module):
    """A layer as the replay takes it: a module, also where the layer is a function or a function of a module."""

    def __init__(self, spec: Any) -> None:
        super().__init__()
        self._run, _ = built(spec, meta=False)
        self.held = torch.nn.ModuleList(modules_of(self._run))

    def forward(self, value: Any) -> Any:
        return self._run(value)


def replay_of(
    example: Mapping[str, Any],
    json: DeepSpeedJson,
    config: VPipeConfig,
    pipeline: Pipeline | None,
    micro_batches: int,
    replicas: int,
) -> Replay:
    """The model of ``example`` as replicas of ``pipeline`` train it; None trains synchronously.

    Raises:
        VPipeConfigError: the JSON asks for an optimizer or a schedule that the forecast does not know.
    """
    if config.gradient_clipping_scope == "delayed_global":
        given, fix = config.gradient_clipping_scope, "forecast with the default, which clips each stage by its own norm"
        raise Refusal("vpipe.gradient_clipping_scope", given, '"stage" in a forecast', fix).error()
    layers = [ForecastLayer(spec) for spec in example["layers"]]
    late: dict[str, Any] = {}
    clip = json.clipping
    if not isinstance(clip, (int, float)):
        raise Refusal("gradient_clipping", clip, "a number", "write one, 1.0 is the default").error()
    if pipeline is not None:
        # Replicas take micro-batches in turn: with depths as many times as large each has the version of its replica.
        depths = [depth * replicas for depth in pipeline.depths]
        late = {"depths": depths, "weight_sync": pipeline.weight_sync, "staleness": config.staleness}
    return Replay(
        layers,
        (pipeline and pipeline.partition) or [len(layers)],
        micro_batches * replicas,
        _optimizer(json),
        lambda outputs, labels: _first(example["loss_fn"](outputs, labels)),
        clip=clip,
        factor=_factor(json),
        **late,
    )


def ended(micro_batches: int, updates: int) -> VPipeConfigError:
    """Refusal of data that end."""
    fix = "let the function yield more" + (f", or give --updates {updates}" if updates else "")
    return Refusal('"data"', micro_batches, "micro-batches without an end", fix, "they ended").error()


def updates_to(losses: Sequence[float], level: float, window: int) -> int | None:
    """Updates after which the mean of the last ``window`` losses stays at ``level`` or below; None if it ends above.

    What a noisy loss reaches once and leaves again is no result.
    """
    above = (count for count in range(window, len(losses) + 1) if not fmean(losses[count - window : count]) <= level)
    last = max(above, default=window - 1)
    return None if last == len(losses) else last + 1


def _optimizer(json: DeepSpeedJson) -> MakeOptimizer:
    name, params = json.optimizer, dict(json.optimizer_params)
    kind = _OPTIMIZERS.get((name or "").lower())
    if (name or "").lower() == "adam" and params.get("adam_w_mode") is False:
        kind = torch.optim.Adam
    if kind is None:
        allowed, fix = "Adam, AdamW, SGD, SOAP", "forecast with one of them"
        raise Refusal("optimizer.type", name, allowed, fix).error()
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        if not params.get("torch_adam"):
            params.setdefault("weight_decay", 0.0)  # the default of DeepSpeed's own Adam
        params = {key: value for key, value in params.items() if key not in _OF_DEEPSPEED}
    try:
        kind([torch.nn.Parameter(torch.zeros(1, device="cpu"))], **params)
    except (TypeError, ValueError) as error:
        allowed = f"{name}'s own"
        raise Refusal("optimizer.params", params, allowed, "correct them", str(error)).error() from None
    return lambda parameters: kind(parameters, **params)


def _factor(json: DeepSpeedJson) -> Callable[[int], float] | None:
    """Factor of the learning rate in an update, numbered from 1, as the ``"scheduler"`` says."""
    policy, name = lr_policy(dict(json.content)), json.get("scheduler.type")
    if policy is not None:
        return policy.factor
    if name is None:
        return None
    if name not in lr_schedules.VALID_LR_SCHEDULES:
        raise Refusal("scheduler.type", name, "a schedule of DeepSpeed or of ds_vpipe", "correct the name").error()
    if name == "OneCycle" and json.get("scheduler.params.cycle_momentum") is not False:
        given, fix = json.get("scheduler.params.cycle_momentum"), "write false, to forecast the learning rate alone"
        raise Refusal("scheduler.params.cycle_momentum", given, "false in a forecast", fix).error()
    base = float(json.get("optimizer.params.lr") or 1e-3)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device="cpu"))], base)
    logger.disabled = True  # it warns of what every start of a schedule does
    try:
        schedule = getattr(lr_schedules, name)(optimizer, **(json.get("scheduler.params") or {}))
    except (TypeError, ValueError) as error:
        given, allowed = json.get("scheduler.params"), f"{name}'s own"
        raise Refusal("scheduler.params", given, allowed, "correct them", str(error)).error() from None
    finally:
        logger.disabled = False
    factors: list[float] = []

    def factor(update: int) -> float:
        while len(factors) < update:
            factors.append(optimizer.param_groups[0]["lr"] / base)
            schedule.step()
        return factors[update - 1]

    return factor


def _first(loss: Any) -> torch.Tensor:
    found: torch.Tensor = loss[0] if isinstance(loss, tuple | list) else loss
    return found
