"""Values for the parameters and buffers that a stage keeps of a model that was built on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ds_vpipe.splitting.meta_tensor import SplitError
from ds_vpipe.splitting.parameter_slots import ParameterSlot


def materialise(model: nn.Module, slots: Sequence[ParameterSlot], device: torch.device) -> None:
    """Allocate what is on the meta device and initialise it as the model itself does.

    A module is initialised by the ``_init_weights(module)`` of the innermost module around it that has one, as Hugging
    Face's models do, or by its own ``reset_parameters()``. Random numbers are drawn from the current generators.

    Args:
        model: whose parameters that this stage does not keep are absent.
        slots: those kept.
        device: to allocate on.

    Raises:
        SplitError: a module has neither.
    """
    kept = [slot for slot in slots if slot.parameter is not None and slot.parameter.is_meta]
    affected = {id(slot.module): slot.name for slot in kept}
    fresh: dict[int, nn.Parameter] = {}
    for slot in kept:
        bare = slot.parameter
        assert bare is not None
        if slot.tie not in fresh:
            empty = torch.empty_like(bare, device=device, requires_grad=False)
            fresh[slot.tie] = nn.Parameter(empty, requires_grad=bare.requires_grad)
            vars(fresh[slot.tie]).update(vars(bare))  # marks, such as DeepSpeed's of weights that other stages have
        slot.parameter = fresh[slot.tie]
        slot.show()
    affected |= _allocate_buffers(model, device)
    _run_initialisers(model, affected)


def materialise_buffers(model: nn.Module, slots: Sequence[ParameterSlot]) -> None:
    """Give values on the CPU to buffers on the meta device, which every stage needs; parameters stay as they are.

    Raises:
        SplitError: as :func:`materialise`.
    """
    if not any(buffer.is_meta for buffer in model.buffers()):
        return
    for slot in slots:
        slot.hide()
    _run_initialisers(model, _allocate_buffers(model, torch.device("cpu")))
    for slot in slots:
        slot.show()


def _allocate_buffers(model: nn.Module, device: torch.device) -> dict[int, str]:
    affected: dict[int, str] = {}
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = torch.empty_like(buffer, device=device)
                affected.setdefault(id(module), f"{name}.{key}")
    return affected


def _run_initialisers(model: nn.Module, affected: dict[int, str]) -> None:
    initialisers = _initialisers(model)
    with torch.no_grad():
        for module in model.modules():
            if id(module) in affected:
                _initialise(module, initialisers.get(id(module)), affected[id(module)])


def _initialisers(model: nn.Module) -> dict[int, Callable[[nn.Module], Any]]:
    found: dict[int, Callable[[nn.Module], Any]] = {}
    for module in model.modules():  # outer ones first
        initialise = getattr(module, "_init_weights", None)
        if callable(initialise):
            found |= {id(part): initialise for part in module.modules()}
    return found


def _initialise(module: nn.Module, initialise: Callable[[nn.Module], Any] | None, name: str) -> None:
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()  # some initialisers leave parts to it
    if initialise is not None:
        initialise(module)
    elif not callable(reset):
        raise SplitError(
            f"{name}: is on the meta device, and {type(module).__name__} has no reset_parameters(), allowed are "
            f"modules that can initialise themselves, or models with _init_weights(module); add one, or build the "
            "model on the CPU"
        )
