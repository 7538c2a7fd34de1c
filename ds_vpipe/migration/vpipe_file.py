"""The YAML file of a vPipe or PipeDream run, read as it is.

The files have one quoted ``'key': value`` pair a line and no braces, which is a YAML mapping. Some are edited by people
who think of Python: a comma at the end of a line, a tab, ``None``. All of these are read, and nothing is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from ds_vpipe.errors import Refusal, did_you_mean
from ds_vpipe.migration.machines import Machine, machine

MODEL_TYPES = ("bert", "translation", "image_classification", "speech_to_text")


@dataclass(frozen=True)
class VPipeFile:
    """What a file says. Paths are as written; None is what it does not say.

    Attributes:
        path: the file.
        dialect: ``pipedream`` if it has none of the keys that only vPipe's driver knows.
        batch_size: samples per micro-batch and rank.
        print_frequency: in micro-batches, as ``verbose_frequency``.
        unknown: keys that neither driver knows, with their values.
        given: everything as written, in order.
    """

    path: Path
    dialect: Literal["vpipe", "pipedream"]
    machines: tuple[Machine, ...]
    model_type: str
    sync_mode: str
    distributed_backend: str
    data_dir: str | None = None
    directory: str | None = None
    module: str | None = None
    partition: str | None = None
    config_file: str | None = None
    container: str | None = None
    log_directory: str | None = None
    batch_size: int | None = None
    learning_rate: float | None = None
    learning_rate_policy: str | None = None
    weight_decay: float | None = None
    epochs: int | None = None
    print_frequency: int | None = None
    verbose_frequency: int = 0
    lr_warmup: bool = False
    recompute: bool = False
    macrobatch: bool = False
    synthetic_data: bool = False
    no_input_pipelining: bool = False
    compress_activations: bool = False
    compress_in_gpu: bool = False
    unknown: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError
    return value


def _one_of(*words: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if value not in words:
            raise ValueError
        return str(value)

    return read


def _whole(least: int) -> Callable[[object], int]:
    def read(value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError
        return value

    return read


def _number(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < float("inf"):
        raise ValueError
    return float(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError
    return value


def _machines(value: object) -> tuple[Machine, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError
    machines = tuple(machine(item) for item in value)
    if len(set(machines)) < len(machines):
        raise ValueError
    return machines


_TEXT = (_text, "a text", "write it in quotes")
_NUMBER = (_number, "a number >= 0, without quotes", "write it with a point, such as 0.05 (YAML takes 5e-2 for a text)")
_COUNT = (_whole(1), "a whole number >= 1, without quotes", "write such a number")
_FREQUENCY = (_whole(0), "a whole number >= 0, without quotes", "write such a number")
_FLAG = (_flag, "True or False, without quotes", "write one of them")
_BACKEND = "gloo", "nccl"

# key: how it is read, what is allowed, what to do about anything else
FIELDS: dict[str, tuple[Callable[[object], Any], str, str]] = {
    "directory": _TEXT,
    "log_directory": _TEXT,
    "module": _TEXT,
    "data_dir": _TEXT,
    "config_file": _TEXT,
    "partition": _TEXT,
    "container": _TEXT,
    "machines": (_machines, "a list of different 'HOST:GPU'", "write one per rank, such as ['localhost:0']"),
    "sync_mode": (_one_of("asp", "bsp"), "asp or bsp", "write one of them"),
    "model_type": (_one_of(*MODEL_TYPES), ", ".join(MODEL_TYPES), "write one of them"),
    "distributed_backend": (_one_of(*_BACKEND), " or ".join(_BACKEND), "write one of them"),
    "batch_size": _COUNT,
    "learning_rate": _NUMBER,
    "learning_rate_policy": _TEXT,
    "weight_decay": _NUMBER,
    "epochs": _COUNT,
    "print_frequency": _FREQUENCY,
    "verbose_frequency": _FREQUENCY,
    "lr_warmup": _FLAG,
    "recompute": _FLAG,
    "macrobatch": _FLAG,
    "synthetic_data": _FLAG,
    "no_input_pipelining": _FLAG,
    "compress_activations": _FLAG,
    "compress_in_gpu": _FLAG,
}
_ONLY_VPIPE = ("directory", "sync_mode", "partition")
_REQUIRED = ("machines", "model_type", "sync_mode", "distributed_backend")


def read_vpipe_file(path: str | Path) -> VPipeFile:
    """Read and check the YAML file at ``path``.

    Raises:
        VPipeConfigError: the file cannot be read, is no mapping, or a key is missing or has a wrong value. The line
            names file and key.
    """
    path = Path(path)
    given = {key: value for key, value in _mapping(path).items() if value is not None and value != "None"}
    dialect: Literal["vpipe", "pipedream"] = "vpipe" if any(key in given for key in _ONLY_VPIPE) else "pipedream"
    found: dict[str, Any] = {"sync_mode": "asp"} if dialect == "pipedream" else {}
    for key, (read, allowed, remedy) in FIELDS.items():
        if key in given:
            try:
                found[key] = read(given[key])
            except ValueError:
                raise Refusal(f"{path}: {key}", given[key], allowed, remedy).error() from None
    required = [*_REQUIRED, *([] if found.get("synthetic_data") else ["data_dir"])]
    for key in required:
        if key not in found:
            reason = next((hint for word in given if (hint := did_you_mean(word, [key]))), "").removeprefix(", ")
            raise Refusal(f"{path}: {key}", None, FIELDS[key][1], f"add '{key}': ... to the file", reason).error()
    if "partition" not in found and "config_file" not in found:
        remedy = "add one of them to the file"
        raise Refusal(f"{path}: partition", None, "partition or config_file, a JSON with the stages", remedy).error()
    unknown = {key: value for key, value in given.items() if key not in FIELDS}
    return VPipeFile(path, dialect, **found, unknown=unknown, given=given)


class _Loader(yaml.SafeLoader):
    """Plain data only, and every key once: of two equal keys YAML keeps the last in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                mark = node.start_mark
                raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} is there twice", mark)
        return super().construct_mapping(node, deep)


def _mapping(path: Path) -> dict[Any, Any]:
    allowed, remedy = "a YAML file with one 'key': value a line", "correct the path or the file"
    try:
        content = yaml.load(plain_yaml(path.read_text(encoding="utf-8-sig")), Loader=_Loader)  # a safe loader
    except OSError as error:
        raise Refusal("file", str(path), allowed, remedy, error.strerror or str(error)).error() from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise Refusal("file", str(path), allowed, remedy, f"it is not plain YAML: {error}").error() from None
    if not isinstance(content, dict):
        raise Refusal("file", str(path), allowed, remedy, "it holds no mapping").error()
    return content


def plain_yaml(text: str) -> str:
    """``text`` without what Python allows and YAML does not: tabs, and a comma after a value at the end of a line."""
    result: list[str] = []
    depth, quote, before = 0, "", "\n"  # before: the last character that is no blank
    for position, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"" and before in "\n,:[{":
            quote = char
        elif char in "[{":
            depth += 1
        elif char in "]}":
            depth -= 1
        elif char == "\t":
            char = " "
        elif char == "," and depth == 0 and not text[position + 1 :].partition("\n")[0].partition("#")[0].strip():
            char = ""
        result.append(char)
        before = char if char.strip() or char == "\n" else before
    return "".join(result)
