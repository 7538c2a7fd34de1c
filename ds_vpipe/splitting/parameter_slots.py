"""Slots of a model's parameters: each holds the parameter or a meta tensor.

Between calls a parameter of another stage is a plain attribute, so that ``parameters()`` and ``state_dict()`` know
nothing of it. While the user's forward runs it is among the module's parameters, because code such as
``next(self.parameters()).dtype`` is common. Parameters of a model that was built on the meta device get values once
it is known which of them a stage keeps, its buffers before.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_vpipe.splitting.meta_tensor import AccessLog, MetaTensor, SplitError, bare_of, strides_of

READ = "_ds_vpipe_read"
"""Attribute of modules of stored models: a function that fills a tensor there, by its name, or returns False."""


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
        self._packed = _is_packed(module, key, parameter)
        self._forward = vars(module).get("forward")  # that somebody has put on this module

    @property
    def value(self) -> nn.Parameter | None:
        """The parameter, also one that is put aside."""
        return self.spare if self.parameter is None else self.parameter

    def put(self, value: torch.Tensor | None) -> None:
        """Set the module's parameter. With None, the meta tensor becomes an attribute."""
        attributes = self.module.__dict__
        self.module._parameters[self.key] = value  # type: ignore[assignment]
        if value is None:
            attributes[self.key] = self.meta
        else:
            attributes.pop(self.key, None)
        if self._packed:
            meta = self.meta if value is None else value
            forward = partial(_linear, self.module, meta) if isinstance(meta, MetaTensor) else self._forward
            if forward is None:
                attributes.pop("forward", None)
            else:
                attributes["forward"] = forward

    def without_values(self) -> nn.Parameter:
        """A parameter such as the meta tensor stands for."""
        meta = self.meta
        size, stride = meta.shape, meta.bare.stride()
        return nn.Parameter(torch.empty_strided(size, stride, dtype=meta.dtype, device=meta.device), meta.requires_grad)

    def restore(self) -> None:
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
        """Let the meta tensor require a gradient if the parameter here does. Returns whether that is new."""
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
            self.restore()


def _is_packed(module: nn.Module, key: str, parameter: torch.Tensor) -> bool:
    """Whether a parameter is a linear layer's quantized weight: other code than torch's knows what it stands for."""
    if not isinstance(module, nn.Linear) or key != "weight":
        return False
    return not parameter.is_floating_point() or parameter.numel() != module.out_features * module.in_features


def _linear(module: Any, meta: MetaTensor, inputs: torch.Tensor) -> torch.Tensor:
    """Output of a linear layer whose quantized weight is absent. Its own forward needs more than the shape of that."""
    weight = meta.new_empty((module.out_features, module.in_features), dtype=inputs.dtype)
    bias = None if module.bias is None else module.bias.to(inputs.dtype)
    return nn.functional.linear(inputs, weight, bias)


def slots_of(model: nn.Module, log: AccessLog) -> list[ParameterSlot]:
    """All slots in the order of ``model.state_dict()``. A shared parameter has several.

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
                bare = bare_of(parameter)
                device = torch.device("cpu") if parameter.is_meta else parameter.device
                metas[where] = MetaTensor(bare, device, log, f"parameter {name}", name, parameter.requires_grad)
            found.append(ParameterSlot(name, module, key, parameter, metas[where]))
    return found


def memory(tensor: torch.Tensor) -> tuple[int, int]:
    """Addresses where a tensor's memory begins and ends. One without any has a place by its ``id``."""
    if type(tensor.data) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return -id(tensor), 1 - id(tensor)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, strides_of(tensor), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def overlapping(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[int, int]]:
    """Pairs of tensors with memory in common, by their numbers, the smaller one first."""
    reaching: list[tuple[int, int]] = []  # those that have not ended, with their ends
    for begin, end, number in sorted((*memory(tensor), number) for number, tensor in enumerate(tensors)):
        reaching = [(stop, other) for stop, other in reaching if begin < stop]
        yield from ((min(number, other), max(number, other)) for _, other in reaching)
        reaching.append((end, number))


def empty_parameter(parameter: nn.Parameter) -> None:
    """Take the values of a parameter. Shape and type stay for a script that has it in a list.

    One that something else refers to in ways that torch cannot follow stays as it is.
    """
    if not parameter.is_meta:
        with suppress(RuntimeError):
            torch.utils.swap_tensors(parameter, nn.Parameter(bare_of(parameter), parameter.requires_grad))


def materialise(model: nn.Module, slots: Sequence[ParameterSlot], device: torch.device) -> None:
    """Allocate and initialise what is on the meta device.

    A module is initialised by the ``_init_weights(module)`` of the innermost module around it that has one, as Hugging
    Face's models do, or by its own ``reset_parameters()``; inner modules first, whose values outer ones may replace. A
    weight that several share is the first one's, as where it is tied later; the others initialise one that is dropped.
    Values of stored models are read last, and a module with neither needs none but those. Random numbers are drawn from
    the current generators.

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
                fresh[slot.tie] = nn.Parameter(_allocated(bare, device), requires_grad=bare.requires_grad)
                vars(fresh[slot.tie]).update(vars(bare))  # marks, such as DeepSpeed's of weights that other stages have
            slot.parameter = fresh[slot.tie]
            slot.restore()
    _initialise(model, slots, affected, device, fresh.values())


def materialise_buffers(model: nn.Module, slots: Sequence[ParameterSlot]) -> None:
    """Give values on the CPU to buffers on the meta device, which every stage needs. Parameters stay as they are.

    Raises:
        SplitError: an adapter is on the meta device.
    """
    for name, module in model.named_modules():
        parts = [getattr(module, part, None) for part in getattr(module, "adapter_layer_names", ())]  # PEFT's
        if any(p.is_meta for part in parts if isinstance(part, nn.Module) for p in part.parameters()):
            raise SplitError(
                f"{name}: is an adapter on the meta device, allowed are adapters with values: they begin with zeros, "
                f"which the model around them does not know; give them values before (docs/fine_tuning.md), or build "
                f"the model on the CPU"
            )
    if any(buffer.is_meta for buffer in model.buffers()):
        for slot in slots:
            slot.put(None)
        _initialise(model, slots, {}, torch.device("cpu"), ())
        for slot in slots:
            slot.restore()


def _initialise(
    model: nn.Module,
    slots: Sequence[ParameterSlot],
    affected: dict[int, str],
    device: torch.device,
    parameters: Iterable[torch.Tensor],
) -> None:
    """Allocate buffers, and initialise modules: ``affected``, by ``id`` with a name for messages, and the buffers'.

    ``parameters`` are those that have been allocated.
    """
    allocated = list(parameters)
    initialisers: dict[int, Callable[[nn.Module], Any]] = {}
    for name, module in model.named_modules():  # outer ones first
        initialise = getattr(module, "_init_weights", None)
        if callable(initialise):
            initialisers |= {id(part): initialise for part in module.modules()}
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[key] = _allocated(buffer, device)
                allocated.append(module._buffers[key])
                affected.setdefault(id(module), f"{name}.{key}")
    made = {id(tensor) for tensor in allocated}
    places = {slot: (id(slot.module), slot.key) for slot in slots}  # a module may have several names
    first = {slot.tie: places[slot] for slot in reversed(slots) if id(slot.module._parameters[slot.key]) in made}
    others = [slot for slot in slots if places[slot] != first.get(slot.tie)]
    for slot in others:  # of which initialisers need no values, or must not change them
        bare, shared = slot.meta.bare, slot.tie in first
        slot.put(nn.Parameter(_allocated(bare, device), requires_grad=False) if shared else bare)
    around = {id(module) for module in model.modules() if not affected.keys().isdisjoint(map(id, module.modules()))}
    in_order: list[nn.Module] = []
    model.apply(in_order.append)  # as they have been built
    without: list[nn.Module] = []
    with torch.no_grad():
        for module in dict.fromkeys(in_order):
            own = id(module) in affected
            reset = getattr(module, "reset_parameters", None)
            if isinstance(module, nn.MultiheadAttention):
                reset = module._reset_parameters
            if own and callable(reset):
                reset()  # some initialisers leave parts to it
            if id(module) in initialisers and own:
                initialisers[id(module)](module)
            elif id(module) in initialisers and id(module) in around:
                _initialise_around(module, initialisers[id(module)])
            elif own and not callable(reset):
                without.append(module)
    for slot in others:
        slot.restore()
    without_values = made - _read(model, slots, made)  # last, as initialisers of outer modules write into inner ones
    for module in without:
        if not without_values.isdisjoint(map(id, (*module._parameters.values(), *module._buffers.values()))):
            raise SplitError(
                f"{affected[id(module)]}: is on the meta device, and {type(module).__name__} has no "
                f"reset_parameters(), allowed are modules that can initialise themselves, or models with "
                f"_init_weights(module); add one, or build the model on the CPU"
            )
    filled = (pair for pair in (*model.named_parameters(), *model.named_buffers()) if id(pair[1]) in made)
    unset = [name for name, tensor in filled if bool(tensor.isnan().any())]
    if unset:
        more = f" and {len(unset) - 1} more" if unset[1:] else ""
        warnings.warn(
            f"ds_vpipe: {unset[0]}{more}: got weights or buffers that were built on the meta device and get no values "
            f"from reset_parameters() or _init_weights(module), so that they are NaN; load_checkpoint() may fill them; "
            f"else let one of the two give them values, or build the model on the CPU",
            stacklevel=2,
        )


def _read(model: nn.Module, slots: Sequence[ParameterSlot], made: set[int]) -> set[int]:
    """Those of the tensors ``made``, by ``id``, that a stored model has filled.

    A weight with several names is read by the first one that is stored, whichever of its modules are here. A module
    that a script has put in another's place cannot read, but one around it knows the name.
    """
    modules = dict(model.named_modules(remove_duplicate=False))

    def filled(name: str, tensor: torch.Tensor) -> bool:
        path = name.split(".")
        around = ((vars(modules[".".join(path[:at])]).get(READ), at) for at in reversed(range(len(path))))
        return any(read(".".join(path[at:]), tensor) for read, at in around if read is not None)

    names: dict[int, list[str]] = {}
    for slot in slots:
        names.setdefault(slot.tie, []).append(slot.name)
    weights = {slot.tie: slot.parameter for slot in slots if slot.parameter is not None}
    tensors: list[tuple[list[str], torch.Tensor]] = [(names[tie], weight) for tie, weight in weights.items()]
    tensors += [([name], buffer) for name, buffer in model.named_buffers()]
    new = ((known, tensor) for known, tensor in tensors if id(tensor) in made)
    return {id(tensor) for known, tensor in new if any(filled(name, tensor) for name in known)}


def _allocated(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor with no values yet: NaN, or 0 where there is none."""
    made = torch.empty_like(meta, device=device, requires_grad=False)
    with suppress(NotImplementedError):  # sparse ones
        made.fill_(math.nan if made.is_floating_point() else 0)
    return made


def _initialise_around(module: nn.Module, initialise: Callable[[nn.Module], Any]) -> None:
    """Initialise a module with no tensors of its own, whose inner ones have been initialised."""
    try:
        initialise(module)
    except (RuntimeError, NotImplementedError) as error:  # torch's, of values on the meta device
        if "meta" not in str(error) and "set_data" not in str(error):
            raise
        raise SplitError(
            f"{type(module).__name__}: its initialisation by _init_weights(module) needs values of weights that other "
            f"stages have, or that were not built on the meta device ({str(error).splitlines()[0]}), allowed is one "
            f"that writes alone; build the model on the CPU"
        ) from error
