"""The ``"staleness"`` object of the ``"vpipe"`` block: mitigations of late gradients.

The delay of stage s is ceil(W_s / M) updates, W_s its warm-up depth and M the micro-batches per batch, for a pipeline
that runs undisturbed (:func:`ds_vpipe.schedules.one_f_one_b.update_delay`). A stage without a delay, such as the last
one, uses none of this.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import GetJsonSchemaHandler, SerializerFunctionWrapHandler, field_validator, model_serializer
from pydantic_core import CoreSchema

from ds_vpipe.config.keys import Settings, is_number, key, refuse
from ds_vpipe.errors import VPipeConfigError


class NAdam(Settings):
    """Options of :mod:`ds_vpipe.staleness.nadam`."""

    betas: tuple[float, float] = key(
        (0.99, 0.999),
        "two numbers in [0, 1)",
        "Decay of the first and of the second moment, in place of the optimizer's own betas.",
        [0.99, 0.999],
    )
    momentum_decay: float = key(
        4e-3, "a number >= 0", "Speed at which the momentum grows towards `betas[0]`.", 0.004, ge=0, allow_inf_nan=False
    )

    @field_validator("betas", mode="before")
    @classmethod
    def _two_rates(cls, value: object) -> object:
        if not isinstance(value, (list, tuple)) or len(value) != 2 or not all(map(is_number, value)):
            refuse(value)
        return tuple(map(float, value)) if all(0 <= rate < 1 for rate in value) else refuse(value)


class Staleness(Settings):
    """Mitigations in use; each is off unless named. ``true`` stands for an object without keys."""

    word: ClassVar[str] = ""  # what stands in the block in the place of an object, if anything

    nadam: NAdam | None = key(
        None,
        "true, false or an object",
        "Nesterov's direction with a long memory, in the place of Adam's or LAMB's.",
        True,
    )
    synchronous_updates: int = key(
        0,
        "an int >= 0",
        "Updates at the start of training after each of which the pipeline drains, as in synchronous training. No "
        "gradient is late then. Clipping and loss scaling stay those of asp. Give the updates until the loss has begun "
        "to fall. Source: PipeMare, technique 3.",
        1000,
        ge=0,
    )
    delay_warmup_updates: int = key(
        0,
        "an int >= 0",
        "Updates after those over which the pipeline drains ever less often, so that delays grow from none to what the "
        "depths give.",
        1000,
        ge=0,
    )

    @field_validator("nadam", mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        return {} if value is True else None if value is False else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        keys = handler.resolve_ref_schema(handler(schema))
        keys["properties"]["nadam"]["anyOf"].append({"type": "boolean"})  # see _switch
        return {"anyOf": [keys, {"enum": ["auto", "off"]}]}

    @model_serializer(mode="wrap")
    def _word_or_keys(self, keys: SerializerFunctionWrapHandler) -> Any:
        return self.word or keys(self)


class Auto(Staleness):
    """Mitigations that :mod:`ds_vpipe.staleness.automatic` is to choose."""

    word = "auto"


class Off(Staleness):
    """No mitigation, as the block says."""

    word = "off"


WORDS: dict[object, Staleness] = {"auto": Auto(), "off": Off()}
"""Values of the key ``"staleness"`` that are no objects."""


def without_moments(optimizer: str) -> VPipeConfigError:
    """Refusal of NAdam next to an optimizer of this type."""
    return VPipeConfigError(
        f"vpipe.staleness.nadam: got an optimizer of type {optimizer}, allowed are Adam, AdamW and LAMB, whose moments "
        f"it needs; remove the key or change the optimizer"
    )


def refuse_options(options: Mapping[str, Any]) -> None:
    """Refuse options of an optimizer that have no NAdam form."""
    for option, allowed in (("bias_correction", True), ("amsgrad", False), ("maximize", False), ("max_grad_norm", 0)):
        given = options.get(option, allowed)
        if bool(given) is not bool(allowed):
            found = f"got an optimizer with {option} {given}, allowed is {allowed}"
            raise VPipeConfigError(f"vpipe.staleness.nadam: {found}; remove one of the two")
