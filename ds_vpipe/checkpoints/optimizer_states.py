"""States of DeepSpeed's optimizers by parameter, in every saved form.

A plain optimizer keeps a state per parameter. The mixed-precision wrappers add fp32 master weights, most
of them flattened: one long vector per parameter group, and ZeRO-1 cuts that vector into one partition per
replica. :func:`unpack` turns each of these forms into one entry per parameter and :func:`pack` turns
such entries back into the form of the receiving optimizer, so that states can move between stages,
numbers of replicas, and wrappers.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ds_vpipe.errors import VPipeError

Members = Sequence[tuple[str, Sequence[int]]]
"""Names and shapes of one parameter group's parameters, in the order in which the optimizer holds them."""

Groups = Sequence[Members]  # the same for all groups of one optimizer

_NUMBERS = ("step", "mu_product", "eta", "mu")  # tensors of torch's optimizers that are no entries per element

PADDINGS = "param_alignment_paddings"  # key of the gaps after each parameter of a ZeRO group's vector, in elements


@dataclass(frozen=True)
class Form:
    """Layout of an optimizer's state dict."""

    base: str | None = None  # key of the inner optimizer's own state dict; None if there is no wrapper around it
    masters: str | None = None  # key of the fp32 master weights per group; None if the weights themselves are trained
    flat: bool = False  # parameters of a group are one vector, master weights and state alike
    partitioned: bool = False  # the vectors are cut into equal partitions, one per replica
    padded: bool = False  # partitions of master weights are saved with their padding, as by BF16_Optimizer
    scale: tuple[str, ...] = ()  # keys that belong to training rather than to a parameter: loss scale, clipping

    def inner(self, saved: Mapping[str, Any]) -> Mapping[str, Any]:
        """The inner optimizer's own state dict."""
        return saved if self.base is None else saved[self.base]

    def vector_size(self, saved: Mapping[str, Any], index: int) -> int:
        """Elements of a flat form's state vectors. ZeRO-1's master weights are saved without their padding."""
        assert self.masters is not None
        padding = saved["group_paddings"][index] if self.partitioned and not self.padded else 0
        return int(saved[self.masters][index].numel() + padding)


_SCALE = ("dynamic_loss_scale", "cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
_ZERO_SCALE = ("loss_scaler", "dynamic_loss_scale", "overflow", "clip_grad")
_PARTITIONS = Form("base_optimizer_state", "single_partition_of_fp32_groups", flat=True, partitioned=True)
_FORMS = (
    replace(_PARTITIONS, padded=True, scale=("clip_grad",)),
    replace(_PARTITIONS, scale=_ZERO_SCALE),
    Form("optimizer_state_dict", "fp32_groups_flat", flat=True, scale=(*_SCALE, "clip_grad")),
    Form("optimizer_state_dict", "fp32_groups", scale=_SCALE),
    Form(),
)


def form_of(saved: Mapping[str, Any]) -> Form:
    """Form of an optimizer's state dict, recognised by its keys.

    Raises:
        VPipeError: an unknown form.
    """
    for form in _FORMS:
        base = saved if form.base is None else saved.get(form.base)
        known = isinstance(base, Mapping) and "param_groups" in base and "state" in base
        padded = form.partitioned and "zero_stage" not in saved
        if known and (form.masters is None or form.masters in saved) and form.padded == padded:
            return form
    raise VPipeError(
        f"optimizer state: got keys {sorted(map(str, saved))}, allowed are those of a torch optimizer, "
        f"FP16_Optimizer, FP16_UnfusedOptimizer, BF16_Optimizer or ZeRO-1 (without elastic_checkpoint); save it from "
        f"one of these"
    )


def carry_scale(target: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Copy loss scale and clipping from ``saved``; of another form the state of a dynamic scale."""
    form = form_of(target)
    if form_of(saved) == form:
        target.update({key: saved[key] for key in form.scale if key in saved})
    elif saved.get("dynamic_loss_scale") and target.get("dynamic_loss_scale"):
        values = vars(saved["loss_scaler"]) if "loss_scaler" in saved else saved
        known = {key: values[key] for key in _SCALE if key in values}
        if "loss_scaler" in target:
            target["loss_scaler"] = copy.copy(target["loss_scaler"])
            vars(target["loss_scaler"]).update({k: v for k, v in known.items() if k in vars(target["loss_scaler"])})
        else:
            target.update(known)


@dataclass(frozen=True)
class ParameterState:
    """Optimizer state of one parameter."""

    master: torch.Tensor | None  # fp32 master weight in its shape, or None where the optimizer keeps none
    state: dict[str, Any]  # by name: tensors in its shape such as ``exp_avg``, and numbers such as ``step``
    origin: tuple[int, int]  # stage and index of the parameter group it comes from
    options: Mapping[str, Any]  # that group's hyperparameters


def unpack(saved: Sequence[Mapping[str, Any]], groups: Groups, stage: int = 0) -> dict[str, ParameterState]:
    """States of one stage's optimizer by name of the parameter. Tensors are views where the form allows it.

    ``saved`` has the state dicts of all replicas in order for a partitioned form, else the only one.

    Raises:
        VPipeError: ``groups`` do not fit, or a state cannot be cut into parameters.
    """
    form = form_of(saved[0])
    base = form.inner(saved[0])
    _check_groups(len(base["param_groups"]), len(groups))
    states: dict[str, ParameterState] = {}
    masters: Sequence[torch.Tensor | None]
    for index, (group, members) in enumerate(zip(base["param_groups"], groups, strict=True)):
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        if form.flat:
            masters, parts = _cut(form, saved, index, members)
        else:
            if len(group["params"]) != len(members):
                raise _misfit(f"{len(group['params'])} parameters in group {index}", f"{len(members)}")
            none = [None] * len(members)
            masters = none if form.masters is None else saved[0][form.masters][index]
            parts = [dict(base["state"].get(key, {})) for key in group["params"]]
            parts = counted_together(parts) if "step" in group else parts
        if options.get("step") == 0:
            del options["step"]  # the mark of a FusedAdam, see counted_together()
        for (name, _), master, state in zip(members, masters, parts, strict=True):
            states[name] = ParameterState(None if master is None else master.detach(), state, (stage, index), options)
    return states


def pack(
    template: Mapping[str, Any],
    states: Mapping[str, ParameterState],
    groups: Groups,
    replica: int = 0,
    warn: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """State dict for an optimizer's ``load_state_dict``: the inverse of :func:`unpack`.

    Args:
        template: state dict of the optimizer that is to receive the states; gives form, sizes and keys.
        states: at least the parameters of ``groups``. A missing master weight leaves the template's.
        groups: the receiving optimizer's parameters.
        replica: which partition to make of a partitioned form.
        warn: gets a line for each number that has to be the same within a group and is not.

    Raises:
        VPipeError: parameter groups with other hyperparameters would be merged, or states do not fit.
    """
    form = form_of(template)
    base = form.inner(template)
    _check_groups(len(base["param_groups"]), len(groups))
    param_groups, new_state = [], {}
    masters: list[Any] = []
    for index, (group, members) in enumerate(zip(base["param_groups"], groups, strict=True)):
        entries = [states[name] for name, _ in members]
        kept = {key: group[key] for key in ("params", "param_names") if key in group}
        param_groups.append({**group, **_options(index, members, entries), **kept})
        if form.flat:
            master, state = _join(form, template, index, members, entries, replica, warn)
            if state:
                new_state[group["params"][0]] = state
            masters.append(master)
        else:
            for key, entry in zip(group["params"], entries, strict=True):
                if entry.state:
                    new_state[key] = {name: _own(value) for name, value in entry.state.items()}
            if form.masters is not None:
                old = template[form.masters][index]
                masters.append([o if e.master is None else e.master for o, e in zip(old, entries, strict=True)])
    whole = {**base, "state": new_state, "param_groups": param_groups}
    if form.base is None or form.masters is None:
        return whole
    return {**template, form.base: whole, form.masters: masters}


def _offsets(saved: Mapping[str, Any], index: int, members: Members) -> list[int]:
    """Where each parameter starts in its group's vector, and where the last one ends."""
    paddings = saved[PADDINGS][index] if PADDINGS in saved else [0] * len(members)
    if len(paddings) != len(members):
        raise _misfit(f"{len(paddings)} parameters in group {index}", f"{len(members)}")
    sizes = [prod(shape) + padding for (_, shape), padding in zip(members, paddings, strict=True)]
    return [0, *accumulate(sizes)]


def _cut(
    form: Form, saved: Sequence[Mapping[str, Any]], index: int, members: Members
) -> tuple[list[torch.Tensor], list[dict[str, Any]]]:
    """Master weights and states of a group's parameters, from its vectors."""
    assert form.masters is not None
    offsets = _offsets(saved[0], index, members)
    flats = [replica[form.masters][index] for replica in saved]
    bases = [form.inner(replica) for replica in saved]
    inner = [base["state"].get(base["param_groups"][index]["params"][0], {}) for base in bases]
    sizes = [form.vector_size(replica, index) for replica in saved]

    def parameters(whole: torch.Tensor) -> list[torch.Tensor]:
        return [whole[at : at + prod(s)].view(tuple(s)) for at, (_, s) in zip(offsets, members, strict=False)]

    found = sum(flat.numel() for flat in flats)
    if form.padded:
        found -= sum(replica["group_paddings"][index] for replica in saved)
    if found != offsets[-1]:
        raise _misfit(f"master weights with {found} elements in group {index}", f"{offsets[-1]}")
    masters = parameters(flats[0] if len(flats) == 1 else torch.cat(flats))
    parts: list[dict[str, Any]] = [{} for _ in members]
    for key, first in inner[0].items():
        if isinstance(first, torch.Tensor) and first.dim() > 0:
            pieces = [state[key] for state in inner]
            if [tuple(piece.shape) for piece in pieces] != [(size,) for size in sizes]:
                raise _misfit(f"{key} of shape {tuple(first.shape)} in group {index}", f"{(sizes[0],)}")
            values: list[Any] = parameters(pieces[0] if len(pieces) == 1 else torch.cat(pieces))
        elif not isinstance(first, torch.Tensor) and any(isinstance(one, torch.Tensor) for one in tree_leaves(first)):
            raise VPipeError(
                f"optimizer state {key!r}: got a {type(first).__name__} with tensors, allowed with ZeRO-1, where "
                f"layers move or are read one by one, are tensors of a weight's size and numbers; keep one of these"
            )
        else:
            values = [first] * len(members)
        for part, value in zip(parts, values, strict=True):
            part[key] = value
    return masters, parts


def _join(
    form: Form,
    template: Mapping[str, Any],
    index: int,
    members: Members,
    entries: Sequence[ParameterState],
    replica: int,
    warn: Callable[[str], None],
) -> tuple[torch.Tensor, dict[str, Any]]:
    """A group's vector of master weights and its state: the inverse of :func:`_cut` for one replica."""
    assert form.masters is not None
    offsets = _offsets(template, index, members)
    old = template[form.masters][index].detach()
    size = form.vector_size(template, index)
    start = replica * size

    def vector(values: Sequence[torch.Tensor | None], into: torch.Tensor) -> torch.Tensor:
        """Copy what falls into this replica's partition."""
        for at, value in zip(offsets, values, strict=False):
            if value is None:
                continue
            low, high = max(at, start), min(at + value.numel(), start + into.numel())
            if low < high:
                into[low - start : high - start].copy_(value.detach().reshape(-1)[low - at : high - at])
        return into

    master = vector([entry.master for entry in entries], old.clone())
    state: dict[str, Any] = {}
    for key in dict.fromkeys(key for entry in entries for key in entry.state):
        values = [entry.state.get(key) for entry in entries]
        known = [value for value in values if value is not None]
        if _is_spread(key, values, [tuple(shape) for _, shape in members]):
            state[key] = vector(values, torch.zeros(size, dtype=known[0].dtype, device=old.device))
        else:
            state[key] = _agreed(key, known, index, warn) if known else None
    return master, state


def counted_together(states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """States of a group's parameters, each with the group's number of updates.

    DeepSpeed's FusedAdam counts updates in the state of the group's last parameter alone, and gives the group itself a
    ``step``, which stays 0. Other optimizers count those of each parameter.
    """
    most = max((state["step"] for state in states if "step" in state), key=float, default=0)
    return [{**state, "step": _own(most)} if "step" in state else {**state} for state in states]


def _own(value: Any) -> Any:
    """A tensor that nothing else refers to: optimizers count ``step`` in place and take tensors as they are given."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _is_spread(key: str, values: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> bool:
    """Whether a state has an entry per element, which those of scalar parameters do not tell."""
    found = [(value, shape) for value, shape in zip(values, shapes, strict=True) if isinstance(value, torch.Tensor)]
    larger = [tuple(value.shape) == shape for value, shape in found if shape]
    return any(larger) if larger else bool(found) and key not in _NUMBERS


def _agreed(key: str, values: Sequence[Any], index: int, warn: Callable[[str], None]) -> Any:
    """Value that the whole group shares. The largest where stages have skipped updates."""
    if any(isinstance(value, torch.Tensor) and value.dim() > 0 for value in values):
        raise _misfit(f"{key} in a shape of its own in group {index}", "one entry per element, or a number")
    if all(bool(value == values[0]) for value in values[1:]):
        return _own(values[0])
    try:
        largest = _own(max(values, key=float))
    except (TypeError, ValueError):
        raise _misfit(f"different values of {key} in group {index}", "one value") from None
    warn(
        f"optimizer state {key}: parameters that are now in one group have {float(min(values, key=float)):g} to "
        f"{float(largest):g}, since stages skip updates by themselves; the group goes on with {float(largest):g}"
    )
    return largest


def _options(index: int, members: Members, entries: Sequence[ParameterState]) -> Mapping[str, Any]:
    """Hyperparameters for a group: its first parameter's.

    Groups of the same index belong together, even if a learning rate differs because a stage has skipped an
    update. Other groups may only be merged if they agree.
    """
    if not entries:
        return {}
    first = entries[0]
    for (name, _), entry in zip(members, entries, strict=True):
        if entry.origin[1] == first.origin[1]:
            continue
        for key in sorted({*first.options, *entry.options}):
            one, other = first.options.get(key), entry.options.get(key)
            if one != other:
                raise VPipeError(
                    f"parameter group {index}: got {key} {one} for {members[0][0]} and {other} for {name} in the "
                    f"checkpoint, allowed is one value per group; build the optimizer with the checkpoint's groups"
                )
    return first.options


def _check_groups(found: int, expected: int) -> None:
    if found != expected:
        raise _misfit(f"{found} parameter groups", f"{expected}")


def _misfit(found: str, expected: str) -> VPipeError:
    return VPipeError(
        f"optimizer state: got {found}, allowed is {expected}; the file does not belong to these layers"
        f" or this optimizer"
    )
