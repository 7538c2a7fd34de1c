"""Hugging Face models in pipelines: each rank reads the weights of its own stage, and no others.

A model is built on the meta device, where it has shapes and no values. :func:`ds_vpipe.initialize` splits it and gives
values to the parameters that the stage keeps, by the model's own ``_init_weights(module)``; the model of
:func:`from_pretrained` reads its tensors there. What does not fit is found before, from the headers of the
files, by every rank alike. To write the model back, call its ``save_pretrained(folder)`` on every rank.
"""

import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from deepspeed.utils import logger
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME

from ds_vpipe.errors import Refusal, did_you_mean, one_line
from ds_vpipe.splitting.parameter_slots import READ

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
MODEL_CONFIG = "model_config"  # in checkpoints, see model_state
_KEY = "model"
_OLDER = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}  # ends of names before 2019


def model_state(model: PreTrainedModel | PreTrainedConfig) -> dict[str, Any]:
    """Client state of a checkpoint that names its model, for :mod:`ds_vpipe.models.export`.

    A configuration alone names the class that it was saved with, or none if it is new.
    """
    if isinstance(model, PreTrainedModel):
        return {MODEL_CONFIG: {**model.config.to_dict(), "architectures": [type(model).__name__]}}
    return {MODEL_CONFIG: model.to_dict()}


def from_pretrained(
    folder: str | Path, make: Callable[[Any], PreTrainedModel] | None = None, **changes: Any
) -> PreTrainedModel:
    """A model on the meta device whose stages read their own weights.

    Args:
        folder: with ``config.json`` and safetensors, in one file or several with an index.
        make: the class, or a function of the configuration such as ``AutoModelForCausalLM.from_config``; by default
            the class that the configuration names.
        changes: fields of the configuration, such as ``num_labels``.

    Raises:
        VPipeConfigError: the folder cannot be read, or a tensor is missing or of another shape.
    """
    folder = Path(folder)
    config = read_config(folder, **changes)
    model = build_meta(model_class(config, str(folder)) if make is None else make, config, str(folder))
    weights = StoredWeights(folder, model)
    if str(weights) and os.environ.get("RANK", "0") == "0":
        logger.warning(f"ds_vpipe: {folder}: {weights}")
    for path, module in model.named_modules():
        vars(module)[READ] = partial(weights.fill, prefix=f"{path}." if path else "")
        if isinstance(module, PreTrainedModel):
            vars(module)["resize_token_embeddings"] = partial(_resized, module, str(folder))
    read_generation_config(model, folder)
    return model


def _resized(
    model: PreTrainedModel, folder: str, new_num_tokens: int | None = None, pad_to_multiple_of: int | None = None,
    *args: Any, **kwargs: Any,
) -> Any:  # fmt: skip
    """Embeddings of as many tokens as are asked for. Refused if they have no values yet and no file has them."""
    embeddings: Any = model.get_input_embeddings()
    if not embeddings.weight.is_meta:
        return type(model).resize_token_embeddings(model, new_num_tokens, pad_to_multiple_of, *args, **kwargs)
    stored, multiple = len(embeddings.weight), pad_to_multiple_of or 1
    size = -(-(new_num_tokens or stored) // multiple) * multiple
    if size != stored:
        remedy = "let transformers read the folder, resize and save_pretrained() it once, and read that"
        allowed = f"{stored}, as many tokens as {folder} has"
        raise Refusal("resize_token_embeddings()", size, allowed, remedy).error()
    return embeddings


def read_config(folder: Path, **changes: Any) -> Any:
    """The configuration in a folder or JSON file. Refused if unreadable."""
    path = folder if folder.is_file() else folder / "config.json"
    if not path.is_file():
        remedy = "correct the path; a model of the hub has to be downloaded before: hf download NAME --local-dir DIR"
        raise Refusal(_KEY, str(folder), "a folder written by save_pretrained(), with config.json", remedy).error()
    try:
        config, unknown = AutoConfig.from_pretrained(path, local_files_only=True, return_unused_kwargs=True, **changes)
    except (OSError, TypeError, ValueError, KeyError, StrictDataclassError) as error:
        allowed = "the config.json of a model that transformers knows"
        raise Refusal(_KEY, str(path), allowed, "correct the file", str(error)).error() from error
    for name, value in unknown.items():
        allowed = f"a field of {type(config).__name__}{did_you_mean(name, dir(config))}"
        raise Refusal(f"{name} for {path}", value, allowed, "correct the name").error()
    config.dtype = torch.float32  # DeepSpeed makes of it what the JSON says
    return config


def read_generation_config(model: PreTrainedModel, folder: Path) -> None:
    """Settings of generation from a folder, if it has some that can be read, as transformers has them."""
    path = folder / GENERATION_CONFIG_NAME
    if not (model.can_generate() and path.is_file()):
        return  # a model that is built from its configuration has made its own
    try:
        model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, TypeError, ValueError) as error:
        logger.warning(f"ds_vpipe: {path}: no settings of generation, it cannot be read: {one_line(error)}")


def model_class(config: Any, where: str) -> Callable[[Any], PreTrainedModel]:
    """The class that a configuration names. Refused if transformers has none."""
    found: Any = next((getattr(transformers, name, None) for name in config.architectures or ()), None)
    if found is None:
        remedy = "name a config.json that save_pretrained() has written, or pass the class"
        allowed = "the name of a class of transformers"
        raise Refusal(f"architectures in {where}", config.architectures, allowed, remedy).error()
    return found


def build_meta(make: Callable[[Any], PreTrainedModel], config: Any, where: str) -> PreTrainedModel:
    """The model without values. Refused if the configuration does not allow it."""
    try:
        with torch.device("meta"):
            return make(config)
    except (ArithmeticError, LookupError, RuntimeError, StrictDataclassError, TypeError, ValueError) as error:
        allowed = "a configuration from which the model can be built"
        raise Refusal(_KEY, where, allowed, "correct the configuration", one_line(error)).error() from error


class StoredTensor(NamedTuple):
    """A tensor's place in a file, and its shape."""

    file: Path
    name: str
    shape: tuple[int, ...]


class StoredWeights:
    """The tensors of a Hugging Face folder under the names of a model.

    Names may lack the prefix of the part without heads or have it in addition, or be those of older checkpoints. A
    tensor that the model ties may have any of its names. Headers of files are read first; a tensor that is missing or
    of another shape is refused.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        stored = _stored_tensors(folder)
        base = f"{model.base_model_prefix}."
        others = _other_names(model, bool(getattr(read_config(folder), "tie_word_embeddings", False)))
        self._tensors: dict[str, StoredTensor] = {}
        self.initialised: list[str] = []  # the whole of a head or a pooler
        for name, parameter in model.state_dict().items():
            known = (form for other in others[name] for form in _forms(other, base))
            found = next((stored[form] for form in known if form in stored), None)
            if found is None:
                self.initialised.append(name)
                continue
            if found.shape != tuple(parameter.shape):
                allowed = f"the shape {list(parameter.shape)} that config.json gives {name}"
                remedy = f"correct config.json or {WEIGHTS}"
                raise Refusal(f"tensor {found.name} in {found.file}", list(found.shape), allowed, remedy).error()
            self._tensors[name] = found
        has_heads = any(name.startswith(base) for name in model.state_dict())
        for name in self.initialised:
            inner = name.removeprefix(base)
            if (inner != name or not has_heads) and not inner.startswith("pooler."):
                allowed = f"all weights of a {type(model).__name__} as config.json describes it"
                remedy = "copy the folder again; if transformers converts its tensors, use its own from_pretrained()"
                raise Refusal(f"{_KEY} {folder}", name, allowed, remedy, "no file has this tensor").error()
        used = {tensor.name for tensor in self._tensors.values()}
        self.unused = tuple(name for name in stored if name not in used)

    def __str__(self) -> str:
        """One line for the log, empty if everything fits."""
        parts = []
        for what, names in (("initialised, not in the folder", self.initialised), ("not used", self.unused)):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                parts.append(f"{what}: {names[0]}{more}")
        return "; ".join(parts)

    @torch.no_grad()
    def fill(self, name: str, target: torch.Tensor, prefix: str = "") -> bool:
        """Overwrite a tensor with what is stored of ``prefix + name`` in the model. False if nothing is."""
        place = self._tensors.get(prefix + name)
        if place is not None:
            with safe_open(place.file, framework="pt") as opened:
                target.copy_(opened.get_tensor(place.name))
        return place is not None


def _other_names(model: PreTrainedModel, tied: bool) -> dict[str, list[str]]:
    """Names of one tensor, the own one first. For a folder with tied weights also those that the class would tie."""
    groups: dict[int, list[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        groups.setdefault(id(tensor), []).append(name)
    found = {name: sorted(names, key=lambda other: other != name) for names in groups.values() for name in names}
    keys = model._tied_weights_keys
    for one, other in keys.items() if tied and isinstance(keys, dict) else ():
        for name, partner in ((one, other), (other, one)):
            if name in found and partner in found and partner not in found[name]:
                found[name].append(partner)
    return found


def _forms(name: str, base: str) -> Iterator[str]:
    for known in (name, name.removeprefix(base), base + name):
        yield known
        for end, older in _OLDER.items():
            if known.endswith(end):
                yield known.removesuffix(end) + older


def _stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    found: dict[str, StoredTensor] = {}
    for file in _files(folder):
        if not file.is_file():
            raise Refusal(_KEY, str(file), f"every file that {INDEX} names", "copy the missing file").error()
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    found[name] = StoredTensor(file, name, tuple(opened.get_slice(name).get_shape()))
        except (OSError, SafetensorError) as error:
            raise Refusal(_KEY, str(file), "a safetensors file", "copy it again", str(error)).error() from error
    return found


def _files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if index.is_file():
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return [folder / name for name in sorted(set(names))]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            allowed = 'a JSON object with a "weight_map" from tensors to files'
            raise Refusal(_KEY, str(index), allowed, "save the model again", str(error)).error() from error
    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if not pickles:
        remedy = "correct the path, or save the model there with save_pretrained()"
        raise Refusal(_KEY, str(folder), f"a folder with {WEIGHTS} or {INDEX}", remedy).error()
    allowed = f"{WEIGHTS}, which is read tensor by tensor and runs no code"
    remedy = "convert it once: load the folder with transformers' from_pretrained() and save_pretrained() it"
    raise Refusal(_KEY, str(pickles[0]), allowed, remedy).error()
