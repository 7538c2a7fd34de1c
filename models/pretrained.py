"""Pipeline layers that start from the weights of a Hugging Face model, each rank reading those of its own layers.

A layer's specification carries the places of its tensors, which are read when the layer is built. So it does not matter
how many ranks there are, how layers are split, and whether they are split anew later: who builds a layer reads it.
What does not fit is found before anything is built, from the headers of the files, and by every rank alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn
from transformers import PreTrainedConfig

from ds_vpipe.errors import Refusal
from ds_vpipe.models.architecture import Architecture, LayerNames, full_name
from ds_vpipe.models.attention import DEFAULT_ATTENTION
from ds_vpipe.models.weight_folder import WEIGHTS, StoredTensor, read_config, read_tensors, stored_tensors

LayerTensors = Mapping[str, StoredTensor]
"""Names within a pipeline layer, and where their tensors lie."""


@dataclass(frozen=True)
class PretrainedModel:
    """A model whose layers are going to read their weights.

    Attributes:
        architecture: which of those that were allowed.
        config: of the model; ``tie_word_embeddings`` is as the layers have it.
        layers: specifications for a ``PipelineModule``.
        initialised: names of what the folder lacks.
        unused: names of what the folder has besides.
    """

    architecture: Architecture
    config: PreTrainedConfig
    layers: list[LayerSpec]
    initialised: tuple[str, ...]
    unused: tuple[str, ...]

    def __str__(self) -> str:
        """One line for the log."""
        parts = [f"{self.architecture.model_type}, {len(self.layers)} pipeline layers"]
        for what, names in (("initialised, not in the folder", self.initialised), ("not used", self.unused)):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                parts.append(f"{what}: {names[0]}{more}")
        return "; ".join(parts)


def from_pretrained(
    folder: str | Path,
    architectures: Iterable[Architecture],
    *,
    tied: bool | None = None,
    seed: int = 0,
    attention: str = DEFAULT_ATTENTION,
) -> PretrainedModel:
    """The pipeline layers of the model in ``folder``; no tensor is read yet.

    Args:
        folder: with ``config.json`` and safetensors, in one file or several with an index.
        architectures: which models it may be.
        tied: whether the decoder is tied to the word embeddings; default: as the configuration says. Without a tie
            the decoder of a tied model begins as a copy.
        seed: of what the folder lacks; layer i is initialised from ``seed + i``.
        attention: Hugging Face's attention implementation.

    Raises:
        VPipeConfigError: the folder cannot be read, or a tensor is missing or of another shape.
    """
    folder = Path(folder)
    architecture, config = read_config(folder, architectures, attention)
    was_tied = config.tie_word_embeddings
    tied = was_tied if tied is None else tied
    if tied and not was_tied:
        allowed = "a decoder of its own, as the model in the folder has it"
        raise Refusal(
            f"tie_word_embeddings with {folder}", True, allowed, "do not tie, or give a model that is tied"
        ).error()
    config.tie_word_embeddings = tied
    stored = stored_tensors(folder)
    specs = architecture.layers(config, seed, tied)
    names = architecture.names(config, tied)
    lookup = _Lookup(architecture, stored, was_tied)
    layers = []
    for index, spec in enumerate(specs):
        try:
            shapes = _shapes(spec)
        except (KeyError, TypeError, ValueError) as error:
            allowed = f"a configuration from which layer {index} can be built"
            raise Refusal("from_pretrained", str(folder), allowed, "correct config.json", str(error)).error() from error
        layers.append(filled(spec, lookup.tensors(index, shapes, names[index], folder)))
    unused = tuple(name for name in stored if name not in lookup.used)
    return PretrainedModel(architecture, config, layers, tuple(lookup.initialised), unused)


def filled(spec: LayerSpec, tensors: LayerTensors) -> LayerSpec:
    """``spec``, with weights from ``tensors``."""
    if not tensors:
        return spec
    return _FilledTiedLayerSpec(tensors, spec) if isinstance(spec, TiedLayerSpec) else _FilledLayerSpec(tensors, spec)


class _FilledLayerSpec(LayerSpec):
    def __init__(self, tensors: LayerTensors, spec: LayerSpec) -> None:
        super().__init__(spec.typename, *spec.module_args, **spec.module_kwargs)
        self.tensors = tensors

    def build(self, log: bool = False) -> nn.Module:
        return _fill(super().build(log), self.tensors)


class _FilledTiedLayerSpec(TiedLayerSpec):
    def __init__(self, tensors: LayerTensors, spec: TiedLayerSpec) -> None:
        super().__init__(
            spec.key,
            spec.typename,
            *spec.module_args,
            forward_fn=spec.forward_fn,
            tied_weight_attr=spec.tied_weight_attr,
            **spec.module_kwargs,
        )
        self.tensors = tensors

    def build(self, log: bool = False) -> nn.Module:
        return _fill(super().build(log), self.tensors)


@torch.no_grad()
def _fill(layer: nn.Module, tensors: LayerTensors) -> nn.Module:
    targets = layer.state_dict(keep_vars=True)
    names: dict[StoredTensor, list[str]] = {}
    for name, stored in tensors.items():
        names.setdefault(stored, []).append(name)
    for stored, tensor in read_tensors(names):
        for name in names[stored]:
            targets[name].copy_(tensor)
    return layer


def _shapes(spec: LayerSpec) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(tensor.shape) for name, tensor in spec.build().state_dict().items()}


class _Lookup:
    """Finds tensors under any of the names that checkpoints have for them, and notes what it has found."""

    def __init__(self, architecture: Architecture, stored: Mapping[str, StoredTensor], tied: bool) -> None:
        self._architecture = architecture
        self._stored = stored
        pairs = {**architecture.same, **(architecture.tied if tied else {})}
        self._other = {**pairs, **{theirs: own for own, theirs in pairs.items()}}
        self.used: set[str] = set()
        self.initialised: dict[str, None] = {}

    def tensors(
        self, index: int, shapes: Mapping[str, tuple[int, ...]], names: LayerNames, folder: Path
    ) -> LayerTensors:
        """The tensors of layer ``index``."""
        found: dict[str, StoredTensor] = {}
        for own, shape in shapes.items():
            name = full_name(names, own)
            if name is None:
                raise LookupError(f"layer {index}: names() of {self._architecture.model_type} does not say {own}")
            stored = next((self._stored[known] for known in self._known_as(name) if known in self._stored), None)
            if stored is None:
                if not name.startswith(self._architecture.optional):
                    allowed = f"all weights of a {self._architecture.model_type} as config.json describes it"
                    raise Refusal(
                        f"from_pretrained {folder}", name, allowed, "copy the folder again", "no file has this tensor"
                    ).error()
                self.initialised[name] = None
                continue
            if stored.shape != shape:
                raise Refusal(
                    f"tensor {stored.name} in {stored.file}",
                    list(stored.shape),
                    f"the shape {list(shape)} that config.json gives layer {index}",
                    f"correct config.json or {WEIGHTS}",
                ).error()
            found[own] = stored
            self.used.add(stored.name)
        return found

    def _known_as(self, name: str) -> Iterator[str]:
        base = self._architecture.base
        for known in (name, self._other.get(name)):
            if known is None:
                continue
            yield known
            yield known.removeprefix(base)
            for end, older in self._architecture.older.items():
                if known.endswith(end):
                    yield known.removesuffix(end) + older
                    yield known.removesuffix(end).removeprefix(base) + older
