"""Keys of the ``"vpipe"`` block: every text about one is kept in its field of the model.

A field names the values that a key accepts, what the key means, and an example. Refusals, the command
``python -m ds_vpipe config`` and docs/configuration.md are made from that.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, get_args

from pydantic import BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticCustomError

from ds_vpipe.errors import Refusal, did_you_mean, show


class Settings(BaseModel):
    """An object of settings: immutable, strict about types, without unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def key(default: object, allowed: str, meaning: str, example: object, *, entry: str = "", **limits: Any) -> Any:
    """The field of a key.

    Args:
        default: its value if it is not given.
        allowed: the values that it accepts, in words.
        meaning: its effect, in Markdown.
        example: a value that is often right, for the remedy.
        entry: the values that an entry accepts, for lists.
        limits: pydantic's, such as ``ge``.
    """
    extra: dict[str, Any] = {"allowed": allowed, "entry": entry}
    return Field(default, description=meaning, examples=[example], json_schema_extra=extra, **limits)


def refuse(value: object, index: int | None = None, *, key: str = "", reason: str = "", remedy: str = "") -> NoReturn:
    """Refuse ``value`` inside a validator. ``index`` points into a list, ``key`` names it in model validators."""
    path = "" if index is None else f"[{index}]"
    # In a list, which pydantic does not read: not every string of JSON is one of Rust's.
    context = {"path": path, "value": [value], "key": key, "reason": reason, "remedy": remedy}
    raise PydanticCustomError("vpipe_refusal", "refused", context)


def checked_list(value: object, accepts: Callable[[Any], bool]) -> tuple[Any, ...]:
    """Entries of a list with at least one, each of which ``accepts`` holds for."""
    if not isinstance(value, (list, tuple)) or not value:
        refuse(value)
    for index, entry in enumerate(value):
        if not accepts(entry):
            refuse(entry, index)
    return tuple(value)


def is_number(value: object) -> bool:
    """True for an int or a float that is no bool."""
    return type(value) in (int, float)


def refusal_of(detail: ErrorDetails, model: type[Settings], origin: Mapping[str, str]) -> Refusal:
    """Refusal of a wrong block, from pydantic's error. ``origin`` has the files that keys were read from."""
    context = detail.get("ctx", {})
    name, loc = context.get("key") or ".".join(str(part) for part in detail["loc"]), detail["loc"]
    fields = dict(all_keys(model))
    if detail["type"] == "string_unicode" and (not loc or _object_of(fields[name])):  # of a key, which it does not name
        name, loc = ".".join(map(str, (*loc, detail["input"]))), (*loc, detail["input"])
    if name not in fields or detail["type"] in ("extra_forbidden", "invalid_key"):
        *parents, word = loc
        for parent in parents:
            model = _object_of(model.model_fields[str(parent)]) or model
        hint = did_you_mean(word, model.model_fields)
        allowed = ", ".join(model.model_fields)
        return Refusal(f"vpipe.{name}", detail["input"], allowed, "rename or remove it", f"unknown key{hint}")

    [value], path = context.get("value", [detail["input"]]), context.get("path", "")
    field = fields[name]
    allowed = _texts(field)["entry" if path else "allowed"]
    reason = context.get("reason", "")
    if isinstance(value, float) and not math.isfinite(value):
        reason = "it is not a finite number"
    elif not reason and isinstance(value, str):
        reason = did_you_mean(value, re.findall(r'"(\w+)"', allowed)).lstrip(", ")
    remedy = f"write a value such as {show(_example(field))}, or remove the key"
    full = f"vpipe.{name}{path}"
    if name in origin:
        full = f"{full} (file {origin[name]}, key {name}{path})"
    return Refusal(full, value, allowed, context.get("remedy") or remedy, reason)


def all_keys(model: type[Settings], parent: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Names and fields of all keys. Those of an object follow it, with its name in front."""
    for name, field in model.model_fields.items():
        yield f"{parent}{name}", field
        inner = _object_of(field)
        if inner is not None:
            yield from all_keys(inner, f"{parent}{name}.")


def as_markdown(model: type[Settings], start: str = "") -> str:
    """Markdown sections of the keys whose names begin with ``start``."""
    sections = []
    for name, field in all_keys(model):
        if name.startswith(start):
            example = f'"{name.rpartition(".")[2]}": {show(_example(field))}'
            default = field.default.model_dump() if isinstance(field.default, BaseModel) else field.default
            line = f"{_texts(field)['allowed']}; default {show(default)}. Example: `{example}`"
            sections.append(f"{'#' * (2 + name.count('.'))} `{name}`\n\n{line}\n\n{field.description}\n")
    return "\n".join(sections).removesuffix("\n")


def _object_of(field: FieldInfo) -> type[Settings] | None:
    """The model of a key whose value is an object."""
    candidates = (field.annotation, *get_args(field.annotation))
    return next((one for one in candidates if isinstance(one, type) and issubclass(one, Settings)), None)


def _texts(field: FieldInfo) -> dict[str, str]:
    return field.json_schema_extra  # type: ignore[return-value]  # as key() made it


def _example(field: FieldInfo) -> Any:
    return (field.examples or [None])[0]
