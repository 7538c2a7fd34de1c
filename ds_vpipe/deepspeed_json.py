"""What a DeepSpeed JSON says, read as DeepSpeed 0.19 reads it.

The one reader for preparation, planner and commands, without DeepSpeed and its process groups. What DeepSpeed itself
refuses, such as an ``"auto"`` that nobody filled in, is left to it where a value is not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_vpipe.errors import Refusal

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
STEPS = "gradient_accumulation_steps"
_BUCKET = 500_000_000  # DeepSpeed's default of zero_optimization.reduce_bucket_size, in elements


@dataclass(frozen=True)
class DeepSpeedJson:
    """The content of a DeepSpeed JSON."""

    content: Mapping[str, Any]

    def get(self, path: str) -> Any:
        """The value at a dotted ``path``, or None where any part of it is missing or not an object."""
        value: Any = self.content
        for key in path.split("."):
            if not isinstance(value, Mapping):
                return None
            value = value.get(key)
        return value

    def on(self, path: str) -> bool:
        """Whether the value at ``path`` is read as true, as 1 and some words are too."""
        value = self.get(path)
        return value is True or value == 1 or (isinstance(value, str) and value.lower() in ("true", "1", "yes", "on"))

    def whole(self, path: str) -> int | None:
        """The value at ``path`` as it is read for a key of type int, or None if it is no int."""
        return _whole(self.get(path))

    @property
    def dtype(self) -> str:
        """Type of the weights that are trained: ``bfloat16``, ``float16`` or ``float32``."""
        if self.on("fp16.enabled"):
            return "float16"
        key = "bfloat16" if self.get("bf16") is None else "bf16"  # the old name counts only without the new one
        return "bfloat16" if self.on(f"{key}.enabled") else "float32"

    @property
    def zero_stage(self) -> int | None:
        """ZeRO stage, or None if it is not a number. A bare boolean is the deprecated form."""
        zero = self.content.get("zero_optimization", {})
        if isinstance(zero, bool):
            return int(zero)
        return _whole(zero.get("stage", 0)) if isinstance(zero, Mapping) else None

    @property
    def reduce_bucket(self) -> int:
        """Elements in a buffer of ZeRO's reduction."""
        return self.whole("zero_optimization.reduce_bucket_size") or _BUCKET

    @property
    def optimizer(self) -> str | None:
        """Type of the optimizer, or None if the script brings one."""
        name = self.get("optimizer.type")
        return None if name is None else str(name)

    @property
    def optimizer_params(self) -> Mapping[str, Any]:
        """Parameters of the optimizer."""
        params = self.get("optimizer.params")
        return params if isinstance(params, Mapping) else {}

    def micro_batches(self, replicas: int) -> int:
        """Micro-batches per batch, M, which two of the three batch sizes say.

        Raises:
            VPipeConfigError: no key says it, or not with a number.
        """
        total, micro, given = (self.get(key) for key in (TOTAL, MICRO, STEPS))
        if given is None and type(total) is int and type(micro) is int and micro > 0:
            return max(1, total // (micro * replicas))
        if given is None and (type(total) is int or type(micro) is int):
            return 1
        if type(given) is not int or given < 1:
            remedy = f"write it, or {TOTAL} and {MICRO}"
            raise Refusal(STEPS, given, "a whole number >= 1 in the JSON", remedy).error()
        return given


def _whole(value: object) -> int | None:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value == value // 1:
        return int(value)
    return int(value) if isinstance(value, str) and value.isdecimal() else None
