"""Seconds and bytes of every layer of a model.

Measured on the device at hand with a few micro-batches, one layer at a time, or computed from its operations for models
and devices that are not there (--analytic).

The model is named as MODULE:FUNCTION. The function gets micro_batch_size, and what --set says, by keyword and returns
a dict: "layers", the list that PipelineModule gets; "inputs", one micro-batch of the first layer's input; and, to have
the loss counted, "loss_fn" and "labels".

examples:
  python -m ds_vpipe profile ds_config.json --model ds_vpipe.models.bert.example:pretraining -o bert.json
  python -m ds_vpipe profile ds_config.json --model my_model:example --set hidden=1024 --device cuda -o mine.json
  python -m ds_vpipe profile --model my_model:example --micro-batch-size 4 --analytic --flops 200e12 -o mine.json

A model of the current directory is found. Then: plan --profile bert.json, simulate --profile bert.json
"""

import argparse
import importlib
import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Sized
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ds_vpipe.commands.argument_types import count, formed, output, rate
from ds_vpipe.commands.arguments import Answer, read_file
from ds_vpipe.config.deepspeed_json import MICRO, DeepSpeedJson
from ds_vpipe.errors import Refusal
from ds_vpipe.planning.layer_profile import ModelProfile
from ds_vpipe.tables import aligned, show_bytes

_PROFILED = {"layers", "inputs", "loss_fn", "labels"}
_UNEVEN = 2  # beyond what inputs that need no gradient save


def _setting(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise ValueError(text)
    try:
        return key, json.loads(value)
    except ValueError:
        return key, value


setting = formed(_setting, "KEY=VALUE, such as hidden=128")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", nargs="?", metavar="DS_CONFIG", help="a DeepSpeed JSON: micro-batch size, precision")
    parser.add_argument("--model", required=True, metavar="MODULE:FUNCTION", help="the function that makes the model")
    parser.add_argument("--set", action="append", type=setting, default=[], metavar="KEY=VALUE", help="argument of it")
    parser.add_argument("--micro-batch-size", type=count, metavar="B", help="default: train_micro_batch_size_per_gpu")
    group = parser.add_argument_group("measured")
    group.add_argument("--device", choices=("cpu", "cuda"), help="default cpu")
    group.add_argument("--repeat", type=count, metavar="N", help="micro-batches to take the median of; default 5")
    group = parser.add_argument_group("computed")
    group.add_argument("--analytic", action="store_true", help="compute, on a device model, without memory for weights")
    group.add_argument("--flops", type=rate, metavar="X", help="per second; default 100e12")
    group.add_argument("--memory-bandwidth", type=rate, metavar="X", help="bytes/s; default 1e12")
    group = parser.add_argument_group("output")
    group.add_argument(
        "-o", "--output", type=output, default="profile.json", metavar="FILE", help="default profile.json"
    )


def run(arguments: argparse.Namespace) -> Answer:
    ds_config = {} if arguments.config is None else read_file(arguments.config)
    size = arguments.micro_batch_size or ds_config.get(MICRO)
    if not isinstance(size, int) or size < 1:
        raise Refusal(MICRO, size, "a whole number >= 1", "give --micro-batch-size B").error()
    made = example(arguments.model, size, arguments.set, {"layers", "inputs"})
    profile = _profile({key: made[key] for key in _PROFILED & made.keys()}, arguments, size, ds_config)
    profile.save(arguments.output)
    lines = [_table(profile), *_uneven(profile), str(arguments.output)]
    return Answer(lambda: asdict(profile), lambda: "\n".join(lines))


def example(name: str, size: int, given: list[tuple[str, Any]], needed: set[str]) -> dict[str, Any]:
    """What the function that makes the model returns. The current directory is imported from, as by ``python FILE``.

    Raises:
        VPipeConfigError: there is no such function, it takes other arguments, or ``needed`` is not in what it returns.
    """
    settings = dict(given)
    if len(settings) < len(given):
        raise Refusal("--set", given, "every argument once", "leave the others out").error()
    module, _, function = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        make = getattr(importlib.import_module(module), function)
        if not callable(make):
            raise ValueError(f"it is of type {type(make).__name__}")
    except (ImportError, AttributeError, ValueError) as error:
        allowed = "MODULE:FUNCTION that can be imported from here"
        raise Refusal("--model", name, allowed, "correct the name", str(error)).error() from None
    try:
        inspect.signature(make).bind(micro_batch_size=size, **settings)
    except TypeError as error:
        allowed = f"keywords of {name}{inspect.signature(make)}"
        raise Refusal("--set", settings, allowed, "correct them, or the function", str(error)).error() from None
    made = make(micro_batch_size=size, **settings)
    keys = _PROFILED | {"data"}
    if not isinstance(made, dict) or not needed <= made.keys() <= keys:
        what = sorted(made) if isinstance(made, dict) else type(made).__name__
        listed = [", ".join(f'"{key}"' for key in sorted(some)) for some in (needed, keys - needed)]
        allowed = f"a function that returns a dict with {listed[0]} and maybe {listed[1]}"
        raise Refusal("--model", what, allowed, f"change what {name} returns").error()
    layers = made["layers"]
    if not isinstance(layers, Sized) or not layers:
        allowed = "a list of at least one layer"
        raise Refusal('"layers"', repr(layers), allowed, f"change what {name} returns").error()
    return made


def _profile(made: dict[str, Any], arguments: argparse.Namespace, size: int, ds_config: dict[str, Any]) -> ModelProfile:
    import torch

    from ds_vpipe.planning.meters import Roofline
    from ds_vpipe.planning.profiler import profile_layers

    analytic = arguments.analytic
    for name, computes in (("flops", True), ("memory_bandwidth", True), ("device", False), ("repeat", False)):
        value = getattr(arguments, name)
        if value is not None and computes != analytic:
            why, allowed, fix = "without it the layers are measured", "the option with --analytic", "add it, or leave"
            if analytic:
                why, allowed, fix = "the layers are computed", "the option without --analytic", "leave that, or"
            option = f"--{name.replace('_', '-')}"
            raise Refusal(option, value, allowed, f"{fix} this out", why).error()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise Refusal("--device", "cuda", "cpu here", "use a machine with a GPU, or --analytic", "no GPU").error()
    options: dict[str, Any] = {"micro_batch_size": size, "device": arguments.device or "cpu"}
    dtype, autocast = DeepSpeedJson(ds_config).dtype, DeepSpeedJson(ds_config).is_set("torch_autocast.enabled")
    if autocast and arguments.analytic:
        why = "--analytic does not know what is cast"
        raise Refusal(
            "torch_autocast.enabled", True, "false with --analytic", "measure, without --analytic", why
        ).error()
    if autocast:
        options["autocast"] = torch.bfloat16  # the only type that training takes
    if dtype != "float32":
        options["dtype"] = getattr(torch, dtype)
    if arguments.analytic:
        given = {"flops_per_s": arguments.flops, "bytes_per_s": arguments.memory_bandwidth}
        options["roofline"] = Roofline(**{name: value for name, value in given.items() if value is not None})
    return profile_layers(**made, micro_batches=arguments.repeat or 5, **options)


def _uneven(profile: ModelProfile) -> list[str]:
    """Hint at the two layers of one kind whose times differ most, if they are far apart, as on a busy machine."""
    alike = defaultdict(list)
    for number, layer in enumerate(profile.layers):
        alike[replace(layer, forward_s=0.0, backward_s=0.0)].append((layer.forward_s + layer.backward_s, number))
    pairs = [(max(seconds), min(seconds)) for seconds in alike.values()]
    found = [(high[0] - low[0], high, low) for high, low in pairs if high[0] > _UNEVEN * low[0]]
    if not found:
        return []
    _, (high_s, high), (low_s, low) = max(found)
    line = f"layers {low} and {high} are of one kind and took {low_s * 1e3:.3f} and {high_s * 1e3:.3f} ms"
    return [f"{line}; measure on an idle machine, or give a larger --repeat"]


def _table(profile: ModelProfile) -> str:
    return aligned(
        [
            {
                "layer": number,
                "name": layer.name,
                "forward ms": f"{layer.forward_s * 1e3:.3f}",
                "backward ms": f"{layer.backward_s * 1e3:.3f}",
                "parameters": show_bytes(layer.parameter_bytes),
                "activations": show_bytes(layer.activation_bytes),
                "boundary": show_bytes(layer.boundary_bytes),
            }
            for number, layer in enumerate(profile.layers)
        ]
    )
