"""Learning-rate policies that pipelines of vPipe and PipeDream train with, as pure functions of the update's number.

A DeepSpeed JSON selects one like DeepSpeed's own schedules; the learning rate that it scales is the optimizer's::

    "scheduler": {"type": "PolyWarmupLR", "params": {"total_num_steps": 36320, "warmup_num_steps": 7264}}

With n the number of an update, counted from 1, w = ``warmup_num_steps``, T = ``total_num_steps``, the learning rate of
update n is that of the optimizer times n / w while n < w, and after that times

===================== =================================================================
``ConstantWarmupLR``  1
``PolyWarmupLR``      (1 - n / T) ** ``degree``; 0.5 unless given
``LinearWarmupLR``    (T - n) / (T - w)
``CosineWarmupLR``    (1 + cos(pi (n - w) / (T - w))) / 2
``TrapezoidWarmupLR`` 1, and in the last d = ``decay_num_steps`` updates (T - n) / d
``StepWarmupLR``      ``gamma`` ** ((n - 1) // ``step_size``)
===================== =================================================================

and 0 after update T, where there is a T. The polynomial is that of NVIDIA's BERT, which vPipe's runs use: it counts
from the first update and not from the end of the warm-up, so that the rate falls by a step there.
"""

from __future__ import annotations

import math
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from ds_vpipe.errors import Refusal, did_you_mean


class LRPolicy(BaseModel):
    """A warm-up, and what :meth:`after_warmup` says. Instances are immutable; :func:`lr_policy` makes them."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    warmup_num_steps: int = Field(default=0, ge=0)

    def factor(self, update: int) -> float:
        """What the learning rate of an update, numbered from 1, is multiplied with: in [0, 1]."""
        if update < self.warmup_num_steps:
            return update / self.warmup_num_steps
        return self.after_warmup(update)

    def after_warmup(self, update: int) -> float:
        """The factor of an update that is not in the warm-up."""
        raise NotImplementedError


class ConstantWarmupLR(LRPolicy):
    """The optimizer's learning rate."""

    def after_warmup(self, update: int) -> float:
        """1."""
        return 1.0


class StepWarmupLR(LRPolicy):
    """Falls by ``gamma`` after every ``step_size`` updates."""

    step_size: int = Field(ge=1)
    gamma: float = Field(default=0.1, gt=0, le=1)

    def after_warmup(self, update: int) -> float:
        """``gamma`` to the number of falls."""
        return float(self.gamma ** ((update - 1) // self.step_size))


class _EndingPolicy(LRPolicy):
    """Falls to 0 at the last update."""

    total_num_steps: int = Field(ge=1)

    @model_validator(mode="after")
    def _warmup_ends(self) -> Self:
        if self.warmup_num_steps >= self.total_num_steps:
            raise PydanticCustomError("long_warmup", "warm-up never ends", {})
        return self

    def progress(self, update: int) -> float:
        """Share of the updates after the warm-up that are done, in [0, 1]."""
        return min(1.0, (update - self.warmup_num_steps) / (self.total_num_steps - self.warmup_num_steps))


class PolyWarmupLR(_EndingPolicy):
    """A power of the share of updates to come."""

    degree: float = Field(default=0.5, gt=0)

    def after_warmup(self, update: int) -> float:
        """(1 - n / T) ** degree."""
        return float(max(0.0, 1.0 - update / self.total_num_steps) ** self.degree)


class LinearWarmupLR(_EndingPolicy):
    """A straight line from the end of the warm-up."""

    def after_warmup(self, update: int) -> float:
        """1 - progress."""
        return 1.0 - self.progress(update)


class CosineWarmupLR(_EndingPolicy):
    """Half a cosine from the end of the warm-up."""

    def after_warmup(self, update: int) -> float:
        """(1 + cos(pi progress)) / 2."""
        return 0.5 * (1.0 + math.cos(math.pi * self.progress(update)))


class TrapezoidWarmupLR(_EndingPolicy):
    """Constant, then a straight line to 0: warmup-stable-decay (Haegele et al., NeurIPS 2024)."""

    decay_num_steps: int = Field(ge=1)

    @model_validator(mode="after")
    def _decay_begins(self) -> Self:
        if self.warmup_num_steps + self.decay_num_steps > self.total_num_steps:
            raise PydanticCustomError("long_decay", "decay begins in the warm-up", {})
        return self

    def after_warmup(self, update: int) -> float:
        """1, at the end (T - n) / d."""
        return min(1.0, max(0.0, (self.total_num_steps - update) / self.decay_num_steps))


LR_POLICIES: dict[str, type[LRPolicy]] = {
    policy.__name__: policy
    for policy in (ConstantWarmupLR, PolyWarmupLR, LinearWarmupLR, CosineWarmupLR, TrapezoidWarmupLR, StepWarmupLR)
}

_ALLOWED = {
    "warmup_num_steps": "an int >= 0, less than total_num_steps",
    "total_num_steps": "an int >= 1, the updates of the whole run",
    "decay_num_steps": "an int >= 1, with warmup_num_steps not more than total_num_steps",
    "degree": "a number > 0",
    "step_size": "an int >= 1, updates between two falls",
    "gamma": "a number in (0, 1]",
}

_TOO_LONG = {"long_warmup": "warmup_num_steps", "long_decay": "decay_num_steps"}


def lr_policy(ds_config: dict[str, Any]) -> LRPolicy | None:
    """The policy that the ``"scheduler"`` of a DeepSpeed JSON names, None if it is not one of those here.

    Raises:
        VPipeConfigError: a parameter is missing, unknown or wrong.
    """
    block = ds_config.get("scheduler")
    name = block.get("type") if isinstance(block, dict) else None
    if not isinstance(block, dict) or not isinstance(name, str) or name not in LR_POLICIES:
        return None
    given = block.get("params", {})
    policy = LR_POLICIES[name]
    keys = ", ".join(policy.model_fields)
    try:
        return policy.model_validate(given)
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
    path = details["loc"]
    if not path and details["type"] not in _TOO_LONG:
        raise Refusal("scheduler.params", given, f"an object with {keys}", "give one").error()
    key = str(path[0]) if path else _TOO_LONG[details["type"]]
    full_key = f"scheduler.params.{key}"
    if details["type"] == "missing":
        raise Refusal(full_key, None, _ALLOWED[key], f"add the key, which {name} needs").error()
    if details["type"] == "extra_forbidden":
        raise Refusal(
            full_key, details["input"], f"{keys} of {name}", f"remove the key{did_you_mean(key, policy.model_fields)}"
        ).error()
    raise Refusal(full_key, given.get(key), _ALLOWED[key], "correct the number").error()
