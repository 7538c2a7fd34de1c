"""The ``"staleness"`` object of the ``"vpipe"`` block: which mitigations a run uses.

The delay of stage s is ceil(W_s / M) updates, W_s its warm-up depth and M the micro-batches per batch: what
:func:`ds_vpipe.schedules.schedule.update_delay` gives, for a pipeline that runs undisturbed. A stage without a delay,
such as the last one, does none of this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from ds_vpipe.errors import Refusal


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class NAdam(_Settings):
    """Options of :mod:`ds_vpipe.staleness.nadam`; they take the place of the optimizer's own betas.

    Attributes:
        betas: decay of the first and second moment.
        momentum_decay: how slowly the momentum grows towards ``betas[0]``.
    """

    betas: tuple[float, float] = (0.99, 0.999)
    momentum_decay: float = Field(default=4e-3, ge=0, allow_inf_nan=False)

    @field_validator("betas", mode="before")
    @classmethod
    def _two_rates(cls, value: object) -> object:
        numbers = [float(v) for v in value if _is_number(v)] if isinstance(value, (list, tuple)) else []
        if len(numbers) != 2 or len(value) != 2 or not all(0 <= number < 1 for number in numbers):  # type: ignore[arg-type]
            raise PydanticCustomError("vpipe_refusal", "refused", {"value": value})
        return tuple(numbers)


class ErrorFeedback(_Settings):
    """Options of error feedback.

    Attributes:
        scale: share of the change between the last two updates that is added; 0 adds nothing.
    """

    scale: float = Field(default=1.0, ge=0, le=1)


class LRRescheduling(_Settings):
    """Options of learning-rate rescheduling.

    Attributes:
        num_steps: updates until the learning rate is that of a run without delay, T.
    """

    num_steps: int = Field(ge=1)

    def factor(self, updates: int, delay: int) -> float:
        """Factor of the learning rate: delay ** -(1 - min(updates / T, 1)).

        Args:
            updates: made asynchronously so far.
            delay: that of the stage, in updates.

        Source: PipeMare (Yang et al., MLSys 2021), technique 1.
        """
        return float(max(delay, 1)) ** -(1.0 - min(updates / self.num_steps, 1.0))


class Staleness(_Settings):
    """Mitigations in use; each is off unless named. ``true`` stands for an object without keys.

    Attributes:
        synchronous_updates: number of updates at the start of training that are synchronous: the pipeline drains after
            every batch, and no gradient is late. The other mitigations but ``nadam`` begin afterwards. Clipping and
            loss scaling are those of asynchronous training all the time.
            Source: PipeMare (Yang et al., MLSys 2021), technique 3.
        delay_warmup_updates: number of updates after those over which drains become rarer, so that delays grow from
            none to those of the depths: :mod:`ds_vpipe.staleness.delay_warmup`.
    """

    nadam: NAdam | None = None
    error_feedback: ErrorFeedback | None = None
    lr_rescheduling: LRRescheduling | None = None
    synchronous_updates: int = Field(default=0, ge=0)
    delay_warmup_updates: int = Field(default=0, ge=0)

    @property
    def kept_weights(self) -> int:
        """Copies of a stage's weights besides the versions, where gradients are late.

        Error feedback holds the last change.
        """
        return int(self.error_feedback is not None)

    @field_validator("nadam", "error_feedback", mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        return {} if value is True else None if value is False else value


KEYS: dict[str, tuple[str, ...]] = {
    "staleness": tuple(Staleness.model_fields),
    "staleness.nadam": tuple(NAdam.model_fields),
    "staleness.error_feedback": tuple(ErrorFeedback.model_fields),
    "staleness.lr_rescheduling": tuple(LRRescheduling.model_fields),
}
"""The keys of each object, for messages."""

HELP: dict[str, tuple[str, str]] = {
    "staleness": (
        "an object with nadam, error_feedback, lr_rescheduling, synchronous_updates or "
        'delay_warmup_updates, with sync_mode "asp" only',
        'name what to use, such as {"nadam": true}, or remove the key',
    ),
    "staleness.nadam": ("true, false or an object", "write true for betas [0.99, 0.999]"),
    "staleness.nadam.betas": ("two numbers in [0, 1)", "give such as [0.99, 0.999]"),
    "staleness.nadam.momentum_decay": ("a number >= 0", "give such as 0.004"),
    "staleness.error_feedback": (
        "true, false or an object, where no stage is more than one update behind",
        "write true or remove the key",
    ),
    "staleness.error_feedback.scale": ("a number in [0, 1]", "give such as 1"),
    "staleness.lr_rescheduling": ('an object {"num_steps": ...}', 'write such as {"num_steps": 1000}'),
    "staleness.synchronous_updates": ("an int >= 0", "give the updates until the loss has begun to fall, such as 1000"),
    "staleness.delay_warmup_updates": ("an int >= 0", "give the updates over which delays are to grow, such as 1000"),
    "staleness.lr_rescheduling.num_steps": ("an int >= 1", "give the updates over which the learning rate recovers"),
}
"""Key -> (what it accepts, what to do about a value that it does not accept), as in :mod:`ds_vpipe.config_help`."""


def refuse_delays(settings: Staleness | None, delays: Sequence[int]) -> None:
    """Refuse settings that do not work with the stages' delays.

    Raises:
        VPipeConfigError: error feedback, and a stage is more than one update behind.
    """
    if settings is None or settings.error_feedback is None or max(delays) <= 1:
        return
    stage = next(stage for stage, delay in enumerate(delays) if delay > 1)
    why = f"stage {stage} is {delays[stage]} updates behind, and it makes up for one"
    fix = "raise gradient_accumulation_steps to K-1 or more, or use nadam"
    given = settings.error_feedback.model_dump(exclude_unset=True) or True
    raise Refusal("vpipe.staleness.error_feedback", given, "where no stage is further behind", fix, why).error()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
