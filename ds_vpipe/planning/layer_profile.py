"""A profile: seconds and bytes of every layer of a model, as plain data.

Profiles are made by :mod:`.profiler` or by a running pipeline, kept as JSON, and read by the planner and the simulator.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from typing_extensions import Self

from ds_vpipe.errors import Refusal, show

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0, le=2**50)]  # sums of them are computed in 64 bits

_STRICT = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class LayerProfile:
    """Costs of one layer, for one micro-batch.

    Bytes that a layer keeps from its forward to its backward pass are split where layers meet, because a tensor on the
    boundary may be kept by the layer before it, by the one after it, or by both, and exists once.
    """

    name: str  # name or type, for tables
    forward_s: Seconds  # forward pass
    backward_s: Seconds  # backward pass, without recomputation; 0 if nothing requires a gradient
    parameter_bytes: Bytes  # all parameters and buffers
    activation_bytes: Bytes  # kept from forward to backward, without the layer's input, parameters and buffers
    boundary_bytes: Bytes  # the output, which is sent if the next layer is on another rank
    input_kept_bytes: Bytes = 0  # share of the input that is kept
    output_kept_bytes: Bytes = 0  # share of the output that is kept; part of activation_bytes
    workspace_bytes: Bytes = 0  # most that exists for a moment during a pass, beyond what is kept
    frozen_bytes: Bytes = 0  # parameters that are not trained, and buffers; part of parameter_bytes
    largest_weight_bytes: Bytes = 0  # the largest trained parameter; an optimizer needs a multiple of it for a moment

    @property
    def trained_bytes(self) -> int:
        """Parameters that are trained."""
        return self.parameter_bytes - self.frozen_bytes

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        kinds = ("output_kept", "activation"), ("frozen", "parameter"), ("largest_weight", "parameter")
        for part, whole in ((f"{part}_bytes", f"{whole}_bytes") for part, whole in kinds):
            if getattr(self, part) > getattr(self, whole):
                raise ValueError(f"{part} {getattr(self, part)} is more than {whole}, {getattr(self, whole)}")
        return self


@dataclass(frozen=True, config=_STRICT)
class ModelProfile:
    """Costs of the layers of a model, or of one of its stages.

    ``input_bytes`` are those of the first one's input for one micro-batch, ``device`` is where it was measured or the
    name of the roofline, ``dtype`` that of the parameters, such as ``bfloat16``.
    """

    layers: Annotated[tuple[LayerProfile, ...], Field(min_length=1)]
    input_bytes: Bytes
    micro_batch_size: Annotated[int, Field(ge=1)]
    device: str
    dtype: str
    source: Literal["measured", "analytic"]

    def __len__(self) -> int:
        return len(self.layers)

    @property
    def on_host(self) -> bool:
        """True if measured on the CPU, where messages take planned memory."""
        return self.source == "measured" and self.device == "cpu"

    def text(self) -> str:
        """The profile as JSON."""
        return _MODEL.dump_json(self).decode()

    @classmethod
    def from_text(cls, text: str) -> ModelProfile:
        """The inverse of :meth:`text`."""
        return _MODEL.validate_json(text)

    def save(self, path: str | Path) -> None:
        """Write the profile to a JSON file."""
        Path(path).write_bytes(_MODEL.dump_json(self, indent=1) + b"\n")

    @classmethod
    def load(cls, path: str | Path) -> ModelProfile:
        """Read a profile from a JSON file.

        Raises:
            VPipeConfigError: the file is missing, is not JSON, or holds no profile.
        """
        allowed = "a profile written by ds_vpipe, a JSON object with layers and sizes"
        remedy = "correct the path, or profile the model again"
        try:
            return _MODEL.validate_json(Path(path).read_bytes())
        except OSError as error:
            reason = f"the file cannot be read: {error.strerror} (current directory {Path.cwd()})"
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "content"
            given = "" if first["type"] == "json_invalid" else f", got {show(first['input'])}"
            reason = f"{where}: {first['msg']}{given}"
        raise Refusal("profile", str(path), allowed, remedy, reason).error()


_MODEL = TypeAdapter(ModelProfile)
