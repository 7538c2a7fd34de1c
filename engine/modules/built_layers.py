"""Layers as they were built: what they keep besides tensors, and what of it has changed since."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import torch
from deepspeed.utils import logger
from torch import nn

from ds_vpipe.splitting.stage_model import Piece

Settings = dict[tuple[str, str], float | str]
"""Numbers, strings and modes of a layer's modules, by the names of module and attribute."""

_PLAIN = (int, float, str)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def settings_of(module: nn.Module) -> Settings:
    """Numbers, strings and modes that a module and its parts have as attributes."""
    named = ((name, key, value) for name, part in module.named_modules() for key, value in vars(part).items())
    plain = ((at, key, value) for at, key, value in named if isinstance(value, _PLAIN))
    return {(at, key): value for at, key, value in plain if not isinstance(value, Enum)}  # not all can be sent


def structure_of(layer: nn.Module) -> dict[str, int | str]:
    """Classes of a layer's modules by name, how many hooks of each kind they have, and whether another forward."""
    found: dict[str, int | str] = {}
    for prefix, part in layer.named_modules():
        at, attributes = f"{prefix}.".lstrip("."), vars(part)
        found |= {f"{at}{name}": len(attributes[name]) for name in _HOOKS}
        found[f"{at}class"] = type(part).__qualname__
        # A scripted module that was loaded remembers its forward when it has run.
        found[f"{at}forward"] = "forward" in attributes and not isinstance(part, torch.jit.ScriptModule)
    return found


class Built(NamedTuple):
    """A layer as it was when the engine or another stage had it first."""

    settings: Settings
    structure: dict[str, int | str]

    @classmethod
    def of(cls, layer: Any) -> Built:
        """The layer as it is now. Functions have nothing, and pieces what the script's model has on every rank."""
        alone = isinstance(layer, nn.Module) and not isinstance(layer, Piece)
        return cls(settings_of(layer), structure_of(layer)) if alone else cls({}, {})

    def changed(self, layer: Any) -> list[tuple[str, str]]:
        """Settings, but for modes, that are others by now; not those that the layer has only had since.

        A layer that is built anew lacks those, such as the size of a cache with the cache, and computes them again.
        """
        if not self.settings:
            return []  # a function, or a piece
        parts = dict(layer.named_modules())
        found = []
        for at, value in settings_of(layer).items():
            was = self.settings.get(at, getattr(type(parts[at[0]]), at[1], None))  # a count may begin in the class
            if at[1] != "training" and isinstance(was, _PLAIN) and was != value:
                found.append(at)
        return found


def take_settings(layer: nn.Module, number: int, settings: Settings, changed: Iterable[tuple[str, str]]) -> None:
    """Give a layer that was built anew what has changed of the one that it replaces, and warn of what else differs.

    Layers may number themselves, or know their device: such values are right as they are built again.
    """
    parts, fresh = dict(layer.named_modules()), settings_of(layer)
    for name, key in changed:
        part = parts[name]
        # What belongs to a cache that this layer has not, such as its size, is not taken; extra state comes by itself.
        has_it = isinstance(getattr(part, key, None), _PLAIN)
        if has_it and type(part).get_extra_state is nn.Module.get_extra_state:
            setattr(part, key, settings[name, key])
    same = settings.keys() - {*changed, *(at for at in settings if at[1] == "training")}
    if other := sorted(at for at in same if at in fresh and fresh[at] != settings[at]):
        name, key = other[0]
        logger.warning(
            f"ds_vpipe: layer {number} ({type(layer).__name__}) has moved to another stage, where {name}.{key} is "
            f"{fresh[name, key]!r}, as it is built again, and was {settings[name, key]!r}; if the script has set that "
            f"before deepspeed.initialize(), let the layer's specification set it"
        )
