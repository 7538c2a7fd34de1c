"""Slots of a model's parameters, each of which holds the parameter or a meta tensor in its stead.

Between calls a parameter of another stage is a plain attribute, so that ``parameters()`` and ``state_dict()`` know
nothing of it. While the user's forward runs it is among the module's parameters, because code such as
``next(self.parameters()).dtype`` is common. Parameters of a model that was built on the meta device get values once
it is known which of them a stage keeps, its buffers before.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ds_vpipe.splitting.meta_tensor import AccessLog, MetaTensor, SplitError


class ParameterSlot:
    """One name of one parameter in a model."""

    def __init__(self, name: str, module: nn.Module, key: str, parameter: nn.Parameter, meta: MetaTensor) -> None:
        self.name = name  # as in the model's ``state_dict()``
        self.module, self.key = module, key  # where the parameter is registered, and its name there
        self.meta = meta  # stands for it
        self.parameter: nn.Parameter | None = parameter  # None if the stage does not keep it
        # A parameter that is put aside until it is known that the stage does not keep it.
        self.spare: nn.Parameter | None = None
        self.pieces: tuple[int, ...] = ()  # that use it
        self.tie = id(parameter)  # the same for all names of one parameter
        self.size, self.trained = parameter.numel(), parameter.requires_grad

    def put(self, value: torch.Tensor | None) -> None:
        """Let the module have ``value`` as its parameter, or none, but the meta tensor as an attribute."""
        self.module._parameters[self.key] = value  # type: ignore[assignment]
        if value is None:
            self.module.__dict__[self.key] = self.meta
        else:
            self.module.__dict__.pop(self.key, None)

    def rest(self) -> None:
        """Let the module have what it has between calls."""
        self.put(self.parameter)

    def stand_in(self, anew: bool = False) -> MetaTensor:
        """Let the module have the meta tensor as a parameter, and return it.

        With ``anew`` it is another one than before: code which has that is told from code that looks here again.
        """
        meta = self.meta.again() if anew else self.meta
        self.put(meta)
        return meta

    def follow(self) -> bool:
        """Let the meta tensor require a gradient if the parameter here does; whether that is new."""
        if self.parameter is None or self.parameter.requires_grad == self.meta.requires_grad:
            return False
        self.meta.requires_grad = self.parameter.requires_grad
        return True

    def convert(self, dtype: torch.dtype, device: torch.device) -> None:
        """Change type and device of the meta tensor."""
        old = self.meta
        if (old.dtype, old.device) != (dtype, device):
            bare = old.bare.to(dtype)
            self.meta = MetaTensor(bare, device, old.access_log, old.origin, old.slot, old.requires_grad)
            self.rest()


def slots_of(model: nn.Module, log: AccessLog) -> list[ParameterSlot]:
    """All slots in the order of ``model.state_dict()``; a shared parameter has several.

    Meta tensors are where the parameters are, or on the CPU for those on the meta device.
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


def materialise(model: nn.Module, slots: Sequence[ParameterSlot], device: torch.device) -> None:
    """Allocate what is on the meta device and initialise it as the model itself does.

    A module is initialised by the ``_init_weights(module)`` of the innermost module around it that has one, as Hugging
    Face's models do, or by its own ``reset_parameters()``. Random numbers are drawn from the current generators.

    Raises:
        SplitError: a module has neither.
    """
    affected: dict[int, str] = {}
    fresh: dict[int, nn.Parameter] = {}
    for slot in slots:
        bare = slot.parameter
        if bare is not None and bare.is_meta:
            affected[id(slot.module)] = slot.name
            if slot.tie not in fresh:
                empty = torch.empty_like(bare, device=device, requires_grad=False)
                fresh[slot.tie] = nn.Parameter(empty, requires_grad=bare.requires_grad)
                vars(fresh[slot.tie]).update(vars(bare))  # marks, such as DeepSpeed's of weights that other stages have
            slot.parameter = fresh[slot.tie]
            slot.rest()
    _initialise(model, affected, device)


def materialise_buffers(model: nn.Module, slots: Sequence[ParameterSlot]) -> None:
    """Give values on the CPU to buffers on the meta device, which every stage needs; parameters stay as they are."""
    if any(buffer.is_meta for buffer in model.buffers()):
        for slot in slots:
            slot.put(None)
        _initialise(model, {}, torch.device("cpu"))
        for slot in slots:
            slot.rest()


def _initialise(model: nn.Module, affected: dict[int, str], device: torch.device) -> None:
    """Allocate buffers, and initialise modules: ``affected``, by ``id`` with a name for messages, and the buffers'."""
    initialisers: dict[int, Callable[[nn.Module], Any]] = {}
    for name, module in model.named_modules():  # outer ones first
        initialise = getattr(module, "_init_weights", None)
        if callable(initialise):
            initialisers |= {id(part): initialise for part in module.modules()}
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)
                affected.setdefault(id(module), f"{name}.{key}")
    with torch.no_grad():
        for module in model.modules():
            if id(module) not in affected:
                continue
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()  # some initialisers leave parts to it
            if id(module) in initialisers:
                initialisers[id(module)](module)
            elif not callable(reset):
                raise SplitError(
                    f"{affected[id(module)]}: is on the meta device, and {type(module).__name__} has no "
                    f"reset_parameters(), allowed are modules that can initialise themselves, or models with "
                    f"_init_weights(module); add one, or build the model on the CPU"
                )
