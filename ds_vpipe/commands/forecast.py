"""Forecast of asynchronous training, before there are devices for it: loss and time beside synchronous training.

Your model is trained on your data in this process, synchronously and as a pipeline of each number of stages would
train it: by the engine's updates, with late gradients, but all weights in float32, dropout drawn otherwise and tied
weights apart. Every training has as many updates. Give several DeepSpeed JSONs to compare their settings.

The model is named as for the command profile; the dict has "layers", "loss_fn" and "data": an iterator of micro-batches
(inputs, labels), the same at every call, which replicas take in turn. Seconds are of the layers measured here, one at a
time, or of a profile.

  loss    mean of the last tenth of the updates; "gap" is to the best synchronous training
  update  its time as a share of a synchronous pipeline's, of as many stages and micro-batches
  time    until the loss stays where the best synchronous training ends, or below, as a share of the time that a
          synchronous pipeline of as many stages takes for that training; none if it ends above

examples:
  python -m ds_vpipe forecast adamw.json soap.json --model ds_vpipe.models.bert.example:training --stages 4 8
  python -m ds_vpipe forecast ds_config.json --model my_model:training --stages 8 16 32 --minutes 20 --profile gpu.json
"""

import argparse
import math
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ds_vpipe.commands.argument_types import checked, count, rate
from ds_vpipe.commands.arguments import Answer, read_file, refuse_shapes
from ds_vpipe.commands.profile import example, setting
from ds_vpipe.config import VPipeConfig
from ds_vpipe.config.deepspeed_json import MICRO, DeepSpeedJson
from ds_vpipe.config.unsupported import refuse_unsupported
from ds_vpipe.errors import Refusal
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import ModelProfile
from ds_vpipe.staleness.automatic import settled
from ds_vpipe.tables import aligned

if TYPE_CHECKING:
    from ds_vpipe.schedules.pipeline import Pipeline
    from ds_vpipe.simulation.forecast import Pace

_SEED = 1
_WINDOW = 10  # part of the updates over which a loss is averaged


several = checked(int, lambda value: value >= 2, "a whole number >= 2; synchronous training is always beside them")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("configs", nargs="+", metavar="DS_CONFIG", help="DeepSpeed JSONs with a vpipe block")
    parser.add_argument("--model", required=True, metavar="MODULE:FUNCTION", help="the function that makes the model")
    parser.add_argument("--set", action="append", type=setting, default=[], metavar="KEY=VALUE", help="argument of it")
    parser.add_argument("--stages", type=several, nargs="+", default=[4, 8], metavar="K", help="default 4 8")
    parser.add_argument("--minutes", type=rate, default=20.0, metavar="T", help="for all trainings; default 20")
    parser.add_argument("--updates", type=count, metavar="N", help="of each training, however long they take")
    parser.add_argument("--profile", metavar="FILE", help="of the layers on the device meant, from the command profile")


@dataclass(frozen=True)
class _Training:
    """One row of the answer: a JSON at one number of stages, 1 for synchronous training."""

    name: str
    stages: int
    losses: list[float]
    delay: int = 0  # largest, in updates
    late: "tuple[Pace, VPipeConfig, Pipeline] | None" = None
    choice: str = ""  # a line about what was chosen where the JSON leaves "staleness" to be chosen


def run(arguments: argparse.Namespace) -> Answer:
    from ds_vpipe.simulation.forecast import planned_pace

    settings = [_Settings.read(path) for path in arguments.configs]
    if len({one.name for one in settings}) < len(settings):
        settings = [replace(one, name=path) for one, path in zip(settings, arguments.configs, strict=True)]
    batch = {one.size * one.micro_batches * one.json.replicas for one in settings}
    if len(batch) > 1:
        allowed = "the same number of samples per update in all JSONs"
        raise Refusal("batch size", sorted(batch), allowed, "change the JSONs").error()
    budget = arguments.minutes * 60 / (len(settings) * (1 + len(arguments.stages)))
    found: list[_Training] = []
    updates = arguments.updates
    for one in settings:
        profile = _profile(arguments, one)
        paces = [
            planned_pace(
                profile,
                one.config.pipeline(stages, one.micro_batches),
                one.devices,
                hide_transfers=one.config.stage_to_depth_map == "auto",
            )
            for stages in arguments.stages
        ]
        for pipeline, _ in paces:
            settled(one.config, pipeline, one.json)  # what it refuses, before the trainings
        losses = _train(arguments, one, one.config, None, updates, budget)
        updates = len(losses)
        found.append(_Training(one.name, 1, losses))
        for stages, (pipeline, pace) in zip(arguments.stages, paces, strict=True):
            config, choice = settled(one.config, pipeline, one.json, updates=updates)
            losses = _train(arguments, one, config, pipeline, updates, budget)
            late = pace, config, pipeline
            found.append(_Training(one.name, stages, losses, pipeline.delays[0], late, choice.line))
    rows = _rows(found)
    return Answer(
        lambda: [row | _json_extras(one) for row, one in zip(rows, found, strict=True)],
        lambda: "\n".join(
            [_text(rows), *(f"{one.stages} stages, {one.name}: {one.choice}" for one in found if one.choice)]
        ),
        0 if any(row["stages"] == 1 and math.isfinite(row["loss"]) for row in rows) else 1,
    )


def _json_extras(one: _Training) -> dict[str, Any]:
    """What only scripts get of a training."""
    if one.late is None:
        return {"partition": None, "staleness": None, "losses": one.losses}
    _, config, pipeline = one.late
    return {"partition": pipeline.partition, "staleness": config.to_dict()["staleness"], "losses": one.losses}


@dataclass(frozen=True)
class _Settings:
    name: str
    json: DeepSpeedJson
    config: VPipeConfig
    size: int  # samples of a micro-batch
    micro_batches: int
    devices: Devices

    @classmethod
    def read(cls, path: str) -> "_Settings":
        json = DeepSpeedJson(read_file(path))
        refuse_shapes(json)
        config, size = VPipeConfig.parse(json.block or {}), json.whole(MICRO)
        if config.sync_mode != "asp" or config.virtual_stages > 1:
            raise Refusal("vpipe.sync_mode", config.sync_mode, '"asp", to forecast what it does', "change it").error()
        if size < 1:
            raise Refusal(MICRO, json.get(MICRO), "a whole number >= 1", f"write it in {path}").error()
        refuse_unsupported(json, config, json.stages or 2)  # what is for several stages is for any number
        json.refuse_batch_sizes(json.replicas, 1)
        config = config.model_copy(update={"partition": None, "swap_ratio": 0.0, "recompute_ratio": 0.0})
        devices = Devices.of(config, json, replicas=json.replicas)
        return cls(Path(path).name, json, config, size, json.micro_batches(json.replicas), devices)


def _profile(arguments: argparse.Namespace, one: _Settings) -> ModelProfile:
    from ds_vpipe.planning.planner import read_profile
    from ds_vpipe.planning.profiler import profile_layers
    from ds_vpipe.simulation.forecast import ended

    path, made = arguments.profile or one.config.profile, _build_example(arguments, one)
    if path is not None:
        return read_profile(path, one.json, len(made["layers"]))
    first = next(iter(made["data"]), None)
    if first is None:
        raise ended(0, 0)
    if not isinstance(first, tuple | list) or len(first) != 2:
        allowed = "micro-batches (inputs, labels)"
        raise Refusal('"data"', type(first).__name__, allowed, f"change what {arguments.model} returns").error()
    inputs, labels = first
    return profile_layers(
        made["layers"], inputs, loss_fn=made["loss_fn"], labels=labels, micro_batch_size=one.size, micro_batches=3
    )


def _build_example(arguments: argparse.Namespace, one: _Settings) -> dict[str, Any]:
    import torch

    torch.manual_seed(_SEED)
    return example(arguments.model, one.size, arguments.set, {"layers", "loss_fn", "data"})


def _train(
    arguments: argparse.Namespace,
    one: _Settings,
    config: VPipeConfig,
    pipeline: Any,
    updates: int | None,
    seconds: float,
) -> list[float]:
    """Mean losses of so many updates, or of those that so many seconds are enough for."""
    from ds_vpipe.simulation.forecast import ended, replay_of

    made, begin, last = _build_example(arguments, one), time.monotonic(), ""
    replay = replay_of(made, one.json, config, pipeline, one.micro_batches, one.json.replicas)
    data, losses = iter(made["data"]), list[float]()
    arm = f"{one.name}, {f'{pipeline.num_stages} stages' if pipeline else 'synchronous'}"
    while len(losses) != updates:
        try:
            losses.append(replay.train_batch(data))
        except StopIteration:
            raise ended(replay.batches * replay.micro_batches, replay.batches) from None
        spent = time.monotonic() - begin
        if updates is None and spent > seconds:
            break
        share = spent / seconds if updates is None else len(losses) / updates
        line = f"{arm}: {min(share, 1):.0%}"
        if line != last and sys.stderr and sys.stderr.isatty():
            print(f"\r{line}, loss {losses[-1]:.4f} ", end="", file=sys.stderr, flush=True)
            last = line
    print(f"{chr(13) if last else ''}{arm}: {len(losses)} updates, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return losses


def _rows(found: list[_Training]) -> list[dict[str, Any]]:
    from ds_vpipe.simulation.forecast import updates_to

    updates = len(found[0].losses)
    window = max(1, updates // _WINDOW)
    ends = [fmean(one.losses[-window:]) for one in found if one.stages == 1]
    level = min(filter(math.isfinite, ends), default=math.nan)
    rows = []
    for one in found:
        loss = fmean(one.losses[-window:])
        row: dict[str, Any] = {"settings": one.name, "stages": one.stages, "late by": one.delay, "updates": updates}
        row |= {"loss": loss, "gap": (loss - level) / abs(level) if level else None, "update": None, "time": None}
        reached = updates_to(one.losses, level, window)
        row["time"] = None if reached is None else reached / updates
        if one.late is not None:
            pace, config, _ = one.late
            row["update"] = pace.update
            row["time"] = None if reached is None else pace.time(reached, config.staleness, one.delay) / updates
        rows.append(row)
    return rows


def _text(rows: list[dict[str, Any]]) -> str:
    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.0%}"

    def gap(value: float | None) -> str:
        return "" if value is None else f"{value:+.2%}" if math.isfinite(value) else "diverged"

    shown = [
        row
        | {"stages": "synchronous" if row["stages"] == 1 else row["stages"], "loss": f"{row['loss']:.4f}"}
        | {"gap": gap(row["gap"]), "update": share(row["update"]), "time": share(row["time"])}
        for row in rows
    ]
    lines = [aligned(shown)]
    if not any(row["stages"] == 1 and math.isfinite(row["loss"]) for row in rows):
        return f"{lines[0]}\nno synchronous training ended at a finite loss; lower the learning rate"
    for stages in dict.fromkeys(row["stages"] for row in rows if row["stages"] > 1):
        here = [row for row in rows if row["stages"] == stages]
        timed = [row for row in here if row["time"] is not None]
        if timed:
            best = min(timed, key=lambda row: float(row["time"]))
            line = f"{best['settings']}, to the synchronous loss in {share(best['time'])} of the time"
        else:
            best = min(here, key=lambda row: (not math.isfinite(row["loss"]), float(row["loss"])))
            line = ", ".join(filter(None, (best["settings"], gap(best["gap"]))))
            line += "; none came to the synchronous loss, see docs/convergence.md"
        lines.append(f"{stages} stages: {line}")
    return "\n".join(lines)
