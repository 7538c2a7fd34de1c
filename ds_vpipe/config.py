"""The ``"vpipe"`` block of a DeepSpeed JSON: a strict model of it, and what it means for K stages.

DeepSpeed accepts unknown keys in silence, so everything is checked here, and worded in
:mod:`ds_vpipe.config_help`. Reading the block needs neither torch nor DeepSpeed nor a process group, so that a
config can be checked before anything is launched.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import Self

from ds_vpipe.config_help import HELP, refusal_of
from ds_vpipe.errors import Refusal, raise_first
from ds_vpipe.split_file import is_split_file, merge_split_file
from ds_vpipe.staleness.settings import KEYS as STALENESS_KEYS
from ds_vpipe.staleness.settings import Staleness
from ds_vpipe.unsupported import block_of, refuse_unsupported

__all__ = ["StageSettings", "TimelineConfig", "VPipeConfig", "block_of", "refuse_unsupported"]

PARTITION_METHODS = ("uniform", "parameters", "profile")

_LEFT_TO_PLANNER = {"partition": "profile", "recompute_ratio": "auto", "stage_to_depth_map": "auto"}


def _refuse(value: object, index: int | None = None, *, key: str = "", reason: str = "", remedy: str = "") -> NoReturn:
    """Refuse ``value`` inside a validator; ``index`` points into a list, ``key`` names it in model validators."""
    path = "" if index is None else f"[{index}]"
    context = {"path": path, "value": value, "key": key, "reason": reason, "remedy": remedy}
    raise PydanticCustomError("vpipe_refusal", "refused", context)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_ratio(value: object) -> bool:
    return (_is_int(value) or isinstance(value, float)) and 0 <= value <= 1  # type: ignore[operator]


class TimelineConfig(BaseModel):
    """Recording of what every stage does when."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    enabled: bool = False
    path: str = "timeline"


@dataclass(frozen=True)
class StageSettings:
    """What the block means for a model of known size on K stages.

    Attributes:
        partition: Layer counts of the K stages, the name of a method for
            :func:`ds_vpipe.partition.resolve_partition`, or None to keep the module's own bounds.
        recompute_ratio: Fraction of its layers that each of the K * v parts recomputes, in [0, 1].
        depth: Warm-up depth of each of the K stages, in micro-batches.
        virtual_stages: Parts of the model on each stage, v; ``partition`` has v times K counts.
    """

    partition: tuple[int, ...] | str | None
    recompute_ratio: tuple[float, ...]
    depth: tuple[int, ...]
    virtual_stages: int = 1


def part_ratios(ratio: float | tuple[float, ...], parts: int) -> tuple[float, ...]:
    """The ratio of every part: one for all, one for each, or one for each stage, which holds for all of its parts."""
    given = ratio if isinstance(ratio, tuple) else (ratio,)
    return given * (parts // len(given))


class VPipeConfig(BaseModel):
    """The ``"vpipe"`` block. Build it with :meth:`parse`, which words errors for users; instances are immutable."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    sync_mode: Literal["asp", "bsp"] = "asp"
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    virtual_stages: int = Field(default=1, ge=1)
    weight_sync: Literal["stash", "vertical", "none"] = "stash"
    partition: tuple[int, ...] | str | None = None
    recompute_ratio: float | tuple[float, ...] | Literal["auto"] = 0.0
    stage_to_depth_map: Literal["default", "auto"] | tuple[int, ...] = "default"
    profile: str | None = None
    memory_budget: int | tuple[int, ...] | None = None
    link_bandwidth: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    gradient_clipping_scope: Literal["stage", "delayed_global"] = "stage"
    peer_timeout_s: float = Field(default=300.0, gt=0, allow_inf_nan=False)
    staleness: Staleness | None = None
    timeline: TimelineConfig = TimelineConfig()

    @field_validator("partition", mode="before")
    @classmethod
    def _check_partition(cls, value: object) -> tuple[int, ...] | str | None:
        if value is None or (isinstance(value, str) and value in PARTITION_METHODS):
            return value
        if isinstance(value, str) and value.startswith("type:"):
            try:
                re.compile(value.removeprefix("type:"))
            except re.error as error:
                _refuse(value, reason=f"REGEX does not compile: {error}", remedy="correct the regular expression")
            if value == "type:":
                _refuse(value, reason="REGEX is empty", remedy='name a layer type, such as "type:Block"')
            return value
        if not isinstance(value, (list, tuple)) or not value:
            _refuse(value)
        for index, count in enumerate(value):
            if not _is_int(count) or count < 1:
                _refuse(count, index)
        return tuple(value)

    @field_validator("recompute_ratio", mode="before")
    @classmethod
    def _check_recompute_ratio(cls, value: object) -> float | tuple[float, ...] | str:
        if value == "auto":
            return "auto"
        if not isinstance(value, (list, tuple)):
            return float(value) if _is_ratio(value) else _refuse(value)  # type: ignore[arg-type]
        if not value:
            _refuse(value)
        for index, ratio in enumerate(value):
            if not _is_ratio(ratio):
                _refuse(ratio, index)
        return tuple(float(ratio) for ratio in value)

    @field_validator("stage_to_depth_map", mode="before")
    @classmethod
    def _check_depth(cls, value: object) -> str | tuple[int, ...]:
        if isinstance(value, str) and value in ("default", "auto"):
            return value
        if not isinstance(value, (list, tuple)) or not value:
            _refuse(value)
        for index, depth in enumerate(value):
            if not _is_int(depth) or depth < 0:
                _refuse(depth, index)
            if index and depth > value[index - 1]:
                _refuse(depth, index, reason=f"it rises from {value[index - 1]} at stage {index - 1}")
        if value[-1] != 0:
            _refuse(value[-1], len(value) - 1, reason="the last stage has nothing to run ahead of")
        return tuple(value)

    @field_validator("memory_budget", mode="before")
    @classmethod
    def _check_memory_budget(cls, value: object) -> object:
        if value is None or (_is_int(value) and value > 0):  # type: ignore[operator]
            return value
        if not isinstance(value, (list, tuple)) or not value:
            _refuse(value)
        for index, size in enumerate(value):
            if not _is_int(size) or size < 1:
                _refuse(size, index)
        return tuple(value)

    @field_validator("peer_timeout_s", "link_bandwidth", mode="before")
    @classmethod
    def _check_number(cls, value: object) -> object:
        return _refuse(value) if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check_mode(self) -> Self:
        if self.sync_mode == "asp" and self.virtual_stages > 1:
            why = 'sync_mode is "asp", which has no bubble to make smaller'
            _refuse(self.virtual_stages, key="virtual_stages", reason=why, remedy="remove the key")
        if self.sync_mode == "asp" and self.schedule != "1f1b":
            why = 'sync_mode is "asp", which has an order of its own'
            _refuse(self.schedule, key="schedule", reason=why, remedy='add "sync_mode": "bsp", or remove the key')
        if self.sync_mode == "bsp":
            if (self.schedule == "interleaved") != (self.virtual_stages > 1):
                why = f'schedule is "{self.schedule}"'
                fix = "write 2" if self.schedule == "interleaved" else "remove the key"
                _refuse(self.virtual_stages, key="virtual_stages", reason=why, remedy=fix)
            if "weight_sync" in self.model_fields_set:
                _refuse(self.weight_sync, key="weight_sync", reason='sync_mode is "bsp"', remedy="remove the key")
            if self.stage_to_depth_map != "default":
                depth = self.stage_to_depth_map
                _refuse(depth, key="stage_to_depth_map", reason='sync_mode is "bsp"', remedy="remove the key")
            if self.gradient_clipping_scope != "stage":
                scope, why = self.gradient_clipping_scope, 'sync_mode is "bsp", which clips by the norm of all stages'
                _refuse(scope, key="gradient_clipping_scope", reason=why, remedy="remove the key")
            if self.staleness is not None:
                given = self.staleness.model_dump(exclude_unset=True)
                _refuse(given, key="staleness", reason='sync_mode is "bsp", which has none', remedy="remove the key")
        return self

    @model_validator(mode="after")
    def _check_plan(self) -> Self:
        left = [key for key, word in _LEFT_TO_PLANNER.items() if getattr(self, key) == word]
        if left and self.profile is None:
            fix = 'make one with "python -m ds_vpipe profile" and name it'
            _refuse(None, key="profile", reason=f"{left[0]} is {_LEFT_TO_PLANNER[left[0]]!r}", remedy=fix)
        if "stage_to_depth_map" in left and self.link_bandwidth is None:
            why = "stage_to_depth_map is 'auto', which hides transfers"
            _refuse(None, key="link_bandwidth", reason=why, remedy="give it, such as 10000000000")
        return self

    @property
    def leaves_to_planner(self) -> bool:
        """Whether something is to be planned from :attr:`profile`, by :mod:`ds_vpipe.planning.configured_plan`."""
        return any(getattr(self, key) == word for key, word in _LEFT_TO_PLANNER.items())

    @classmethod
    def parse(cls, block: object) -> VPipeConfig:
        """Check ``block``, the value of the ``"vpipe"`` key, and resolve a partition file named in it.

        Raises:
            VPipeConfigError: Something is wrong. One line names the first key, the value given, what is
                allowed and what to do, and how many more keys are wrong.
        """
        if not isinstance(block, dict):
            raise Refusal("vpipe", block, *HELP[""]).error()
        settings: dict[Any, Any] = block
        origin: dict[str, str] = {}
        if is_split_file(settings.get("partition")):
            settings, origin = merge_split_file(settings)
        try:
            return cls.model_validate(settings)
        except ValidationError as error:
            known = {"": tuple(cls.model_fields), "timeline": tuple(TimelineConfig.model_fields)}
            known |= STALENESS_KEYS
            raise_first([refusal_of(detail, known, origin) for detail in error.errors(include_url=False)])
            raise  # not reached: a ValidationError has at least one detail

    def to_dict(self) -> dict[str, Any]:
        """Return the keys that were given, as JSON types; :meth:`parse` of it gives an equal config."""
        return self.model_dump(mode="json", exclude_unset=True)

    def resolve(self, num_stages: int, num_layers: int) -> StageSettings:
        """Check lengths and sums against ``num_stages`` stages and ``num_layers`` layers, and fill in defaults.

        Raises:
            VPipeConfigError: A list does not have one entry per stage, the counts of ``partition`` do not sum
                to ``num_layers``, or there are fewer layers than stages.
        """
        refusals: list[Refusal] = []
        parts = num_stages * self.virtual_stages
        if self.virtual_stages > 1 and num_stages == 1:
            why = "with one stage there is nothing to interleave"
            refusals.append(Refusal("vpipe.virtual_stages", self.virtual_stages, "1", "remove the key", why))

        def check_length(key: str, values: object, length: int, what: str) -> None:
            if isinstance(values, tuple) and len(values) != length:
                allowed = f"one entry per {what}, {length} for {num_stages} stages"
                fix = f"give {length} or change the number of stages"
                refusals.append(Refusal(f"vpipe.{key}", values, allowed, fix, f"it has {len(values)} entries"))

        part = "stage" if self.virtual_stages == 1 else "part"
        check_length("partition", self.partition, parts, part)
        if isinstance(self.partition, tuple) and not refusals and sum(self.partition) != num_layers:
            total = sum(self.partition)
            allowed = f"{parts} counts that sum to {num_layers}"
            fix = f"{'add' if total < num_layers else 'remove'} {abs(num_layers - total)}"
            reason = f"it sums to {total} but the model has {num_layers} layers"
            refusals.append(Refusal("vpipe.partition", self.partition, allowed, fix, reason))
        elif num_layers < parts:
            allowed = f"at least one layer per {part}"
            reason = f"the model has {num_layers} layers for {parts} {part}s"
            refusals.append(Refusal("vpipe.partition", self.partition, allowed, f"use fewer {part}s", reason))
        ratio = self.recompute_ratio
        if not (isinstance(ratio, tuple) and len(ratio) == parts):
            check_length("recompute_ratio", ratio, num_stages, "stage")
        check_length("stage_to_depth_map", self.stage_to_depth_map, num_stages, "stage")
        raise_first(refusals)

        depth = self.stage_to_depth_map
        if ratio == "auto":  # the planner has not been asked; a settled block has numbers
            ratio = 0.0
        return StageSettings(
            partition="uniform" if self.partition is None and self.virtual_stages > 1 else self.partition,
            recompute_ratio=part_ratios(ratio, parts),
            depth=depth if isinstance(depth, tuple) else tuple(range(num_stages - 1, -1, -1)),
            virtual_stages=self.virtual_stages,
        )
