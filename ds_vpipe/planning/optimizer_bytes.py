"""How many bytes an optimizer needs per byte of trained weights, by its type and precision.

Mixed-precision wrappers and ZeRO-1 add fp32 master weights; ZeRO-1 divides those and the optimizer's state by the
number of replicas. Counts are those of DeepSpeed 0.19 and torch 2: Adam and LAMB keep two fp32 values per weight, SGD
with momentum and Lion one, plain SGD none (Rajbhandari et al., ZeRO, SC 2020, section 3, has the same sums).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.errors import Refusal

_MASTER = 4  # bytes of an fp32 master weight
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}

# Values of the weight's size that an optimizer keeps per weight.
_STATE = {
    "sgd": 0,
    "musgd": 0,
    "lion": 1,
    "fusedlion": 1,
    "muon": 2,  # one for matrices, two for the rest, which Adam trains
    "adagrad": 1,
    "rmsprop": 1,
    "asgd": 1,
    "onebitadam": 4,  # and the errors of worker and server
    "onebitlamb": 4,
    "zerooneadam": 4,
}
_FUSED = frozenset(["adam", "adamw", "fusedadam", "fusedlamb", "lion", "fusedlion"])  # one kernel, in place
_TEMPORARIES = 2  # of one weight's size at a time: a root and what is divided by it; torch's others need no more
_OTHER_STATE = 2  # Adam, AdamW, LAMB, Adadelta, Adamax, NAdam, RAdam, and whatever is not known


@dataclass(frozen=True)
class OptimizerBytes:
    """What training needs besides the weights.

    Attributes:
        gradient: bytes of gradients per byte of trained weights.
        held: bytes of master weights and state per byte of trained weights; they stay.
        update: bytes per byte of trained weights that exist only during an update.
        bucket_bytes: bytes of a reduction's buffer, which exist only during an update.
        temporary: bytes per byte of the largest trained parameter that exist only during an update, of parameters that
            are updated one by one.
    """

    gradient: Fraction = Fraction(1)
    held: Fraction = Fraction(0)
    update: Fraction = Fraction(0)
    bucket_bytes: int = 0
    temporary: Fraction = Fraction(0)


NO_OPTIMIZER = OptimizerBytes()
"""Gradients only, as for SGD without momentum in fp32."""


def dtype_bytes(dtype: str) -> int:
    """Bytes of one value.

    Raises:
        ValueError: not a floating-point type that weights may have.
    """
    if dtype not in _DTYPE_BYTES:
        raise ValueError(f"dtype: got {dtype!r}; allowed: {', '.join(_DTYPE_BYTES)}")
    return _DTYPE_BYTES[dtype]


def state_values(optimizer: str, params: Mapping[str, Any] | None = None) -> int:
    """Values per weight that an optimizer keeps; two for one that is not known, as Adam.

    Args:
        optimizer: its type, as in a DeepSpeed JSON; case does not count.
        params: its parameters; momentum, ``amsgrad`` and ``centered`` count.
    """
    params = params or {}
    extra = sum(bool(params.get(key)) for key in ("amsgrad", "centered"))
    if optimizer.lower() in ("sgd", "musgd", "rmsprop"):
        extra += bool(params.get("momentum"))
    return _STATE.get(optimizer.lower(), _OTHER_STATE) + extra


def temporaries(optimizer: str, params: Mapping[str, Any] | None = None) -> int:
    """Values that an optimizer needs per weight of the parameter that it is updating, as it does on the CPU.

    Args:
        optimizer: its type, as in a DeepSpeed JSON; case does not count. Adam is DeepSpeed's fused one.
        params: its parameters; ``torch_adam`` means torch's own.
    """
    params = params or {}
    if optimizer.lower() == "sgd":
        return sum(bool(params.get(key)) for key in ("weight_decay", "nesterov"))
    if optimizer.lower() in _FUSED and not params.get("torch_adam"):
        return 0
    return 3 if optimizer.lower() == "rprop" else _TEMPORARIES


def optimizer_bytes(
    optimizer: str = "adam",
    params: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    zero_stage: int = 0,
    replicas: int = 1,
    bucket_elements: int = 500_000_000,
) -> OptimizerBytes:
    """Bytes that an optimizer needs.

    Args:
        optimizer: its type, as in a DeepSpeed JSON.
        params: its parameters.
        dtype: of the weights.
        zero_stage: 0 or 1.
        replicas: data-parallel ranks of the stage.
        bucket_elements: DeepSpeed's ``reduce_bucket_size``, for ZeRO-1.
    """
    size, values = dtype_bytes(dtype), state_values(optimizer, params)
    if zero_stage == 0 and size >= _MASTER:
        return OptimizerBytes(held=Fraction(values), temporary=Fraction(temporaries(optimizer, params)))
    share = replicas if zero_stage else 1
    held = Fraction(_MASTER * (1 + values), size * share)
    # Gradients are copied to fp32 for the update: each of them and then all in one vector, or with ZeRO the partition
    # in one vector and then as fp32.
    update = Fraction(size + _MASTER, size * share) if zero_stage else Fraction(2 * _MASTER, size)
    return OptimizerBytes(held=held, update=update, bucket_bytes=bucket_elements * size if zero_stage else 0)


def configured_optimizer_bytes(ds_config: DeepSpeedJson, replicas: int = 1) -> OptimizerBytes:
    """:func:`optimizer_bytes` of a DeepSpeed JSON. One that names no optimizer counts as Adam.

    Raises:
        VPipeConfigError: the ZeRO stage is not a number.
    """
    stage = ds_config.zero_stage
    if stage is None or stage > 3:
        given = ds_config.get("zero_optimization.stage")
        raise Refusal("zero_optimization.stage", given, "0 or 1", "correct the JSON").error()
    kind, params = ds_config.optimizer or "adam", ds_config.optimizer_params
    return optimizer_bytes(kind, params, ds_config.dtype, stage, replicas, ds_config.reduce_bucket)
