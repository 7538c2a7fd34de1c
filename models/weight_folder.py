"""A folder as Hugging Face's ``save_pretrained`` writes it: a configuration, and tensors that are read one by one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ds_vpipe.errors import Refusal, VPipeConfigError
from ds_vpipe.models.architecture import Architecture
from ds_vpipe.models.attention import DEFAULT_ATTENTION

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
_KEY = "from_pretrained"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies; the file's header has said it."""

    file: Path
    name: str
    shape: tuple[int, ...]


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of a folder by name. Only headers are read.

    Raises:
        VPipeConfigError: the folder has no safetensors, or not all, or a file is broken.
    """
    index = folder / INDEX
    if (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    elif index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            allowed = 'a JSON object with a "weight_map" from tensors to files'
            raise Refusal(_KEY, str(index), allowed, "save the model again").error()
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        raise _without_weights(folder).error()
    found: dict[str, StoredTensor] = {}
    for file in files:
        if not file.is_file():
            raise Refusal(_KEY, str(file), f"every file that {index.name} names", "copy the missing file").error()
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    found[name] = StoredTensor(file, name, tuple(opened.get_slice(name).get_shape()))
        except (OSError, SafetensorError) as error:
            raise Refusal(_KEY, str(file), "a safetensors file", "copy it again", str(error)).error() from error
    return found


def read_tensors(stored: Iterable[StoredTensor]) -> Iterator[tuple[StoredTensor, Tensor]]:
    """The tensors that are asked for and no others, each file opened once."""
    for file, group in groupby(sorted(stored, key=lambda tensor: tensor.file), key=lambda tensor: tensor.file):
        with safe_open(file, framework="pt") as opened:
            for tensor in group:
                yield tensor, opened.get_tensor(tensor.name)


def read_config(
    folder: Path, architectures: Iterable[Architecture], attention: str = DEFAULT_ATTENTION
) -> tuple[Architecture, Any]:
    """The configuration of a folder, or of a JSON file, and which of ``architectures`` it is of.

    Raises:
        VPipeConfigError: there is none, it is not readable, or of another model.
    """
    path = folder if folder.is_file() else folder / "config.json"
    if not path.is_file():
        raise Refusal(
            _KEY,
            str(folder),
            "a folder written by save_pretrained(), with config.json",
            "correct the path; a model of the hub has to be downloaded before: hf download NAME --local-dir DIR",
        ).error()
    return config_of(_read_json(path), str(path), architectures, attention)


def config_of(
    fields: dict[str, Any], place: str, architectures: Iterable[Architecture], attention: str = DEFAULT_ATTENTION
) -> tuple[Architecture, Any]:
    """A configuration from its fields, and which of ``architectures`` it is of.

    Raises:
        VPipeConfigError: the fields are wrong, or of another model.
    """
    known = {architecture.model_type: architecture for architecture in architectures}
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in known:
        allowed = "model_type " + " or ".join(json.dumps(name) for name in known)
        raise Refusal(f"model_type in {place}", kind, allowed, "give a folder of such a model").error()
    architecture = known[kind]
    try:
        config = architecture.config_type.from_dict({**fields, "attn_implementation": attention})
    except (TypeError, ValueError, StrictDataclassError) as error:
        allowed = f"fields of {architecture.config_type.__name__}"
        raise Refusal(place, kind, allowed, "correct the file", str(error)).error() from error
    for size in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if getattr(config, size) < 1:
            raise Refusal(f"{size} in {place}", getattr(config, size), "at least 1", "correct the file").error()
    for switch in ("is_decoder", "add_cross_attention"):
        # GPT-2 is a decoder and has no switch for it.
        if getattr(config, switch, False):
            raise Refusal(f"{switch} in {place}", True, "false", "give a model without it").error()
    return architecture, config


def _without_weights(folder: Path) -> Refusal:
    pickles = sorted(path.name for path in folder.glob("pytorch_model*.bin"))
    if not pickles:
        remedy = "correct the path, or save the model there with save_pretrained()"
        return Refusal(_KEY, str(folder), f"a folder with {WEIGHTS} or {INDEX}", remedy)
    return Refusal(
        _KEY,
        str(folder / pickles[0]),
        f"{WEIGHTS}, which is read tensor by tensor and runs no code",
        "convert it once: load the folder with transformers' from_pretrained() and save_pretrained() it",
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refusal(_KEY, str(path), "a JSON file", "copy it again", str(error)).error() from error
    if not isinstance(content, dict):
        raise VPipeConfigError(f"{_KEY}: got {str(path)!r}, which holds no JSON object; copy it again")
    return content
