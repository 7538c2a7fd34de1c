"""Slots of a model's parameters, each of which shows the parameter or a meta tensor in its stead.

Between calls a parameter of another stage is a plain attribute, so that ``parameters()`` and ``state_dict()`` know
nothing of it. While the user's forward runs it is among the module's parameters, because code such as
``next(self.parameters()).dtype`` is common.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ds_vpipe.splitting.meta_tensor import AccessLog, MetaTensor


class ParameterSlot:
    """One name of one parameter in a model.

    Attributes:
        name: as in the model's ``state_dict()``.
        module: that the parameter is registered in.
        key: its name there.
        parameter: None once it has been dropped.
        meta: stands for it.
    """

    def __init__(self, name: str, module: nn.Module, key: str, parameter: nn.Parameter, meta: MetaTensor) -> None:
        self.name, self.module, self.key = name, module, key
        self.parameter: nn.Parameter | None = parameter
        self.tie = id(parameter)
        self.size = parameter.numel()
        self.trained = parameter.requires_grad
        self.meta = meta

    def show(self) -> None:
        """Let the module have its parameter."""
        self.module.__dict__.pop(self.key, None)
        self.module._parameters[self.key] = self.parameter

    def hide(self) -> None:
        """Let the module have no parameter, but the attribute."""
        self.module._parameters[self.key] = None
        self.module.__dict__[self.key] = self.meta

    def stand_in(self, anew: bool = False) -> MetaTensor:
        """Let the module have the meta tensor as a parameter, and return it.

        Args:
            anew: another one than before, so that code which has that is told from code that looks here again.
        """
        meta = self.meta.again() if anew else self.meta
        self.module.__dict__.pop(self.key, None)
        self.module._parameters[self.key] = meta  # type: ignore[assignment]
        return meta

    def follow(self) -> bool:
        """Let the meta tensor require a gradient if the parameter here does; whether that is new."""
        if self.parameter is None or self.parameter.requires_grad == self.meta.requires_grad:
            return False
        self.meta.requires_grad = self.parameter.requires_grad
        return True

    def rest(self) -> None:
        """Let the module have its parameter or the attribute, as between calls."""
        if self.parameter is None:
            self.hide()
        else:
            self.show()

    @property
    def shown(self) -> bool:
        """The module has the parameter."""
        return self.parameter is not None and self.module._parameters[self.key] is self.parameter

    def convert(self, function: Callable[[torch.Tensor], Any]) -> None:
        """Change type and device of the meta tensor, as ``Module._apply`` does with parameters."""
        with torch.no_grad():
            old, changed = self.meta, function(self.meta)
        if isinstance(changed, MetaTensor):
            self.meta = MetaTensor(
                changed.bare, changed.device, changed.access_log, old.origin, old.slot, old.requires_grad
            )
        if self.module.__dict__.get(self.key) is old:
            self.module.__dict__[self.key] = self.meta


def slots_of(model: nn.Module, log: AccessLog) -> list[ParameterSlot]:
    """All slots in the order of ``model.state_dict()``; a shared parameter has several.

    Args:
        model: with all its parameters.
        log: of the meta tensors, which are where the parameters are, or on the CPU for those on the meta device.
    """
    found: list[ParameterSlot] = []
    metas: dict[tuple[int, str], MetaTensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            name, where = f"{prefix}.{key}" if prefix else key, (id(module), key)
            if where not in metas:
                bare = torch.empty_like(parameter, device="meta", requires_grad=False)
                device = torch.device("cpu") if parameter.is_meta else parameter.device
                metas[where] = MetaTensor(bare, device, log, f"parameter {name}", name, parameter.requires_grad)
            found.append(ParameterSlot(name, module, key, parameter, metas[where]))
    return found


def empty_parameter(parameter: nn.Parameter) -> None:
    """Take the values of a parameter; shape and type stay for a script that has it in a list.

    One that something else refers to in ways that torch cannot follow stays as it is.
    """
    if not parameter.is_meta:
        with suppress(RuntimeError):
            bare = torch.empty_like(parameter, device="meta", requires_grad=False)
            torch.utils.swap_tensors(parameter, nn.Parameter(bare, parameter.requires_grad))
