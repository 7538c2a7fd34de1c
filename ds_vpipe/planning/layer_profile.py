"""What each layer of a model costs, as plain data: seconds of its passes and bytes that it occupies.

Profiles are measured by :mod:`.profiler` or computed by :mod:`.analytic_profile`, kept as JSON,
and read by the planner and the simulator. A profile may cover only some layers, so that every rank can
measure its own; :func:`merge_profiles` puts them together.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NoReturn

from ds_vpipe.errors import Refusal, VPipeConfigError, did_you_mean, show

SOURCES = ("measured", "analytic")
_CONTENT = "a profile written by ds_vpipe, a JSON object with layers and sizes"


@dataclass(frozen=True)
class LayerProfile:
    """One layer, for one micro-batch. Seconds and bytes.

    What a layer keeps from its forward to its backward pass is split where layers meet, because a tensor on the
    boundary may be kept by the layer before it, by the one after it, or by both, and exists once.

    Attributes:
        name: name or type, for tables.
        forward_s: forward pass.
        backward_s: backward pass, without recomputation; 0 if nothing requires a gradient.
        parameter_bytes: all parameters.
        activation_bytes: kept from forward to backward, without the layer's input and without parameters.
        boundary_bytes: the output, which is sent if the next layer is on another rank.
        input_kept_bytes: what it keeps of its input.
        output_kept_bytes: what it keeps of its output; part of ``activation_bytes``.
        workspace_bytes: most that exists for a moment during one of its passes, beyond what is kept.
        frozen_bytes: the parameters that are not trained; part of ``parameter_bytes``.
        largest_weight_bytes: the largest trained parameter; what an optimizer needs for a moment is a multiple of it.
    """

    name: str
    forward_s: float
    backward_s: float
    parameter_bytes: int
    activation_bytes: int
    boundary_bytes: int
    input_kept_bytes: int = 0
    output_kept_bytes: int = 0
    workspace_bytes: int = 0
    frozen_bytes: int = 0
    largest_weight_bytes: int = 0

    def __post_init__(self) -> None:
        for name in ("forward_s", "backward_s"):
            value = getattr(self, name)
            if not _is_number(value) or not math.isfinite(value) or value < 0:
                raise _wrong(f"{self.name}: {name}", value, "seconds, a finite number >= 0")
        for name in _BYTES:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise _wrong(f"{self.name}: {name}", value, "bytes, an int >= 0")
        for part, whole in _PARTS:
            if getattr(self, part) > getattr(self, whole):
                raise _wrong(f"{self.name}: {part}", getattr(self, part), f"at most {whole}, {getattr(self, whole)}")


@dataclass(frozen=True)
class ModelProfile:
    """Consecutive layers of a model.

    Attributes:
        layers: in the order of the model.
        input_bytes: input of the first of ``layers``, for one micro-batch.
        micro_batch_size: samples per micro-batch.
        device: where it was measured, or the name of the device model.
        dtype: of the parameters, such as ``float32`` or ``bfloat16``.
        source: ``measured`` or ``analytic``.
        first_layer: index in the model of the first of ``layers``.
    """

    layers: tuple[LayerProfile, ...]
    input_bytes: int
    micro_batch_size: int
    device: str
    dtype: str
    source: Literal["measured", "analytic"]
    first_layer: int = 0

    def __post_init__(self) -> None:
        if not self.layers:
            raise _wrong("layers", [], "at least one layer")
        if self.source not in SOURCES:
            raise _wrong("source", self.source, " or ".join(SOURCES))
        for name, least in (("input_bytes", 0), ("micro_batch_size", 1), ("first_layer", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise _wrong(name, value, f"an int >= {least}")

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def on_host(self) -> bool:
        """True if it was measured on the CPU, where messages take the memory that is planned."""
        return self.source == "measured" and self.device == "cpu"

    def to_json(self) -> dict[str, Any]:
        """As JSON types; :meth:`from_json` is the inverse."""
        return asdict(self) | {"layers": [asdict(layer) for layer in self.layers]}

    @classmethod
    def from_json(cls, content: object, path: str = "") -> ModelProfile:
        """The inverse of :meth:`to_json`.

        Args:
            content: what was read.
            path: where from, for the message.

        Raises:
            VPipeConfigError: it is not a profile.
        """
        try:
            values = _checked_keys(cls, content)
            if not isinstance(values["layers"], list):
                raise _wrong("layers", values["layers"], "a list of layers")
            layers = tuple(LayerProfile(**_checked_keys(LayerProfile, layer)) for layer in values["layers"])
            return cls(**{**values, "layers": layers})
        except VPipeConfigError as error:
            raise VPipeConfigError(f"{path}: {error}" if path else str(error)) from None

    def save(self, path: str | Path) -> None:
        """Write the profile to a JSON file."""
        Path(path).write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ModelProfile:
        """Read a profile from a JSON file.

        Raises:
            VPipeConfigError: the file is missing, is not JSON, or holds no profile.
        """
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            _refuse_file(path, f"the file cannot be read: {error.strerror} (current directory {Path.cwd()})")
        except (ValueError, RecursionError) as error:
            _refuse_file(path, f"the file is not JSON: {error}")
        return cls.from_json(content, str(path))


_PARTS = (
    ("output_kept_bytes", "activation_bytes"),
    ("frozen_bytes", "parameter_bytes"),
    ("largest_weight_bytes", "parameter_bytes"),
)
_BYTES = tuple(field.name for field in fields(LayerProfile) if field.name.endswith("_bytes"))


def merge_profiles(parts: Sequence[ModelProfile]) -> ModelProfile:
    """Put profiles of consecutive layers together, in any order.

    Raises:
        VPipeConfigError: layers are missing or twice there, or the parts differ in micro-batch size, dtype or source.
    """
    if not parts:
        raise _wrong("parts", [], "at least one profile")
    ordered = sorted(parts, key=lambda part: part.first_layer)
    first, known = ordered[0], ordered[0].first_layer
    for part in ordered:
        if part.first_layer != known:
            what = "missing" if part.first_layer > known else "there twice"
            low, high = sorted((known, part.first_layer))
            raise _wrong("layers", [low, high - 1], f"consecutive layers; layers {low} to {high - 1} are {what}")
        known += len(part)
        for name in ("micro_batch_size", "dtype", "source"):
            one, other = getattr(first, name), getattr(part, name)
            if one != other:
                raise _wrong(name, other, f"{show(one)}, as in the part that begins at layer {first.first_layer}")
    devices = ", ".join(dict.fromkeys(part.device for part in ordered))
    return ModelProfile(
        layers=tuple(layer for part in ordered for layer in part.layers),
        input_bytes=first.input_bytes,
        micro_batch_size=first.micro_batch_size,
        device=devices,
        dtype=first.dtype,
        source=first.source,
        first_layer=first.first_layer,
    )


def _checked_keys(kind: type[LayerProfile] | type[ModelProfile], content: object) -> dict[str, Any]:
    if not isinstance(content, Mapping):
        raise _wrong("content", content, "an object")
    known = [field.name for field in fields(kind)]
    for key in content:
        if key not in known:
            raise _wrong("unknown key", key, f"{', '.join(known)}{did_you_mean(key, known)}")
    for field in fields(kind):
        if field.name not in content and field.name in _REQUIRED[kind]:
            raise _wrong("keys", sorted(content), f"all of {', '.join(_REQUIRED[kind])}; {field.name} is missing")
    return dict(content)


_REQUIRED: dict[type, tuple[str, ...]] = {
    LayerProfile: ("name", "forward_s", "backward_s", "parameter_bytes", "activation_bytes", "boundary_bytes"),
    ModelProfile: ("layers", "input_bytes", "micro_batch_size", "device", "dtype", "source"),
}


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _wrong(key: str, value: object, allowed: str) -> VPipeConfigError:
    return Refusal(f"profile: {key}", value, allowed, "profile the model again, or correct the file").error()


def _refuse_file(path: str | Path, reason: str) -> NoReturn:
    raise Refusal("profile", str(path), _CONTENT, "correct the path, or profile the model again", reason).error()
