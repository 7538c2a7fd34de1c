"""A user's model as one stage has it: some pieces with their parameters, and a forward that runs those.

Between pieces go, in this order, the mark of the call's form, the tensors among the call's arguments and the
activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils._pytree import tree_leaves, tree_map_only

from ds_vpipe.splitting.call import CallForm, CallForms, Packed, find_loss, loss_of
from ds_vpipe.splitting.forward_pass import DivergedError
from ds_vpipe.splitting.forward_split import ForwardSplit
from ds_vpipe.splitting.meta_tensor import SplitError
from ds_vpipe.splitting.model_hooks import StateHooks, refuse_direct_calls
from ds_vpipe.splitting.parameter_slots import ParameterSlot, empty_parameter, materialise
from ds_vpipe.splitting.piece import Piece


class StageModel:
    """Pieces of a model.

    Args:
        model: with all its parameters. It is changed: it keeps those of the stage.
        split: runs its pieces.
        slots: its parameters.

    Attributes:
        model: the user's.
        pieces: all of them; those that are not kept have no parameters.
        last_output: what the forward returned the last time without gradients, on the last stage.
        state_hooks: make the model's state dicts whole, if there is somebody who can.
    """

    def __init__(self, model: nn.Module, split: ForwardSplit, slots: list[ParameterSlot]) -> None:
        self.model, self._split, self._slots = model, split, slots
        self._forms = CallForms()
        self._tried: set[Any] = set()
        self._written: dict[int, set[int]] = {}
        self._spare: dict[int, nn.Parameter] = {}
        self._kept: frozenset[int] = frozenset()
        self._released = False
        self._stage_of: Callable[[int], int] | None = None
        self.last_output: Any = None
        self.state_hooks: StateHooks | None = None
        kinds = _kinds(model, split.piece_names)
        self.pieces = [Piece(self, index, kind) for index, kind in enumerate(kinds)]
        self.keep(range(len(self.pieces)))

    # Which pieces

    @property
    def piece_names(self) -> list[str]:
        """Names of the pieces."""
        return list(self._split.piece_names)

    @property
    def num_pieces(self) -> int:
        """How many pieces there are."""
        return len(self.pieces)

    def trained_sizes(self) -> list[int]:
        """Numbers of elements of the trained parameters of each piece."""
        sizes: list[dict[int, int]] = [{} for _ in self.pieces]
        for slot in self._slots:
            for piece in self._split.pieces_of[slot.name]:
                if slot.trained:
                    sizes[piece][slot.tie] = slot.size
        return [sum(found.values()) for found in sizes]

    def ties(self) -> dict[str, dict[int, str]]:
        """Parameters that several pieces use, by their first name: for every piece, a name that it uses it by."""
        uses: dict[int, dict[int, str]] = {}
        first: dict[int, str] = {}
        for slot in self._slots:
            first.setdefault(slot.tie, slot.name)
            for piece in self._split.pieces_of[slot.name]:
                uses.setdefault(slot.tie, {}).setdefault(piece, slot.name)
        return {first[tie]: dict(sorted(found.items())) for tie, found in uses.items() if len(found) > 1}

    def keep(self, pieces: Iterable[int], stage_of: Callable[[int], int] | None = None) -> None:
        """Have the parameters of these pieces only. Others are put aside until :meth:`release`.

        Args:
            pieces: to keep.
            stage_of: the stage of every piece, for parameters that turn out to be used elsewhere.

        Raises:
            SplitError: the parameters of the others have been released.
        """
        if self._released:
            raise SplitError("model: got another split after training has begun, allowed is one before; build it again")
        self._kept, self._stage_of = frozenset(pieces), stage_of
        for slot in self._slots:
            parameter = self._spare.pop(id(slot), None)
            slot.parameter = slot.parameter if parameter is None else parameter
            if self._kept.isdisjoint(self._split.pieces_of[slot.name]):
                assert slot.parameter is not None
                self._spare[id(slot)] = slot.parameter
                slot.parameter = None
            slot.rest()
        self._refresh()

    def release(self, device: torch.device | None = None) -> None:
        """Drop the parameters of all pieces that are not kept, and give values to those on the meta device.

        Args:
            device: where to, by default the CPU.
        """
        if not self._released and len(self._kept) < len(self.pieces):
            refuse_direct_calls(self.model, self._split)
        self._released = True
        kept = {slot.tie for slot in self._slots if slot.parameter is not None}
        for parameter in self._spare.values():
            if id(parameter) not in kept:
                empty_parameter(parameter)
        self._spare.clear()
        materialise(self.model, self._slots, device or torch.device("cpu"))
        self._refresh()

    def own_parameters(self, given: Iterable[Any]) -> list[Any]:
        """Of parameters of the whole model, or of groups of them, what this stage has, in the same order.

        A parameter that was on the meta device is replaced by the one that has its values.
        """
        here = {slot.tie: slot.parameter for slot in self._slots if slot.parameter is not None}
        here |= {id(parameter): parameter for parameter in here.values()}
        found: list[Any] = []
        for item in given:
            if isinstance(item, dict):
                found.append({**item, "params": self.own_parameters(_members(item["params"]))})
            elif id(item) in here:
                found.append(here[id(item)])
        return found

    def name_here(self, tie: str) -> str | None:
        """A name under which the stage has a tied parameter; None if it has not."""
        names = self.ties()[tie]
        return next((names[piece] for piece in sorted(self._kept) if piece in names), None)

    def homes(self) -> dict[str, tuple[str, int]]:
        """For all names of the whole model's state dict: a name and a piece where its value is.

        Of a tied parameter that is the first piece that uses it.
        """
        first: dict[int, tuple[int, str]] = {}
        for slot in self._slots:
            here = min(self._split.pieces_of[slot.name]), slot.name
            first[slot.tie] = min(first.get(slot.tie, here), here)
        found = {slot.name: (first[slot.tie][1], first[slot.tie][0]) for slot in self._slots}
        for path, module in self.model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for key in module._buffers:
                if (id(module), key) in self._split.buffer_piece:
                    found[prefix + key] = prefix + key, self._split.buffer_piece[id(module), key]
            homes = [found[prefix + key][1] for key in (*module._parameters, *module._buffers) if prefix + key in found]
            if homes:
                found[prefix + _EXTRA_STATE_KEY_SUFFIX] = prefix + _EXTRA_STATE_KEY_SUFFIX, homes[0]
        return found

    @contextmanager
    def own_states(self) -> Iterator[None]:
        """Let state dicts have what is here, and nothing of other stages, for a while."""
        with nullcontext() if self.state_hooks is None else self.state_hooks.parts():
            yield

    def _refresh(self) -> None:
        """Give the pieces what the model has now."""
        self._split.forget_layout()
        members: list[set[tuple[int, str]]] = [set() for _ in self.pieces]
        for slot in self._slots:
            for piece in self._split.pieces_of[slot.name]:
                members[piece].add((id(slot.module), slot.key))
        for module in self.model.modules():
            for key in module._buffers:
                members[self._split.buffer_piece[id(module), key]].add((id(module), key))
        for made, found in zip(self.pieces, members, strict=True):
            made.hold(self.model if made.index in self._kept else None, frozenset(found))

    # As a module

    def apply(self, function: Callable[..., Any]) -> None:
        """As ``Module._apply``, to everything that the stage has, and to the types and devices of what it has not.

        Parameters on the meta device stay there until :meth:`release`.
        """
        self.model._apply(lambda tensor: tensor if tensor.is_meta else function(tensor))
        for slot in self._slots:
            if slot.parameter is not None:
                slot.parameter = slot.module._parameters[slot.key]
            slot.convert(function)
        self._refresh()

    def train(self, mode: bool = True) -> None:
        """Set the model's mode."""
        self.model.train(mode)

    # Calls

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Packed:
        """A call of the user's forward as the input of the first piece: a flat tuple of tensors.

        Every rank packs every call before it runs its part of it: the tuple of the first stage says only by a
        fingerprint what else there is in the call.

        Raises:
            SplitError: the call cannot be run in pieces.
        """
        self._follow_types()
        packed, form = self._forms.pack(args, kwargs)
        if self._split.mode(form) not in self._tried:
            self._try_out(form, packed[1:])
        return packed

    def _follow_types(self) -> None:
        """Give what is absent the types of what is here: DeepSpeed casts parameters one by one, not by ``apply``.

        Of the types that parameters with the same type at first have now, an absent one gets the first.
        """
        changed: dict[torch.dtype, torch.dtype] = {}
        for slot in self._slots:
            if slot.parameter is not None and slot.parameter.dtype is not slot.meta.dtype:
                changed.setdefault(slot.meta.dtype, slot.parameter.dtype)
        if not changed:
            return
        for slot in self._slots:
            here = slot.parameter
            slot.convert(_to(changed.get(slot.meta.dtype, slot.meta.dtype) if here is None else here.dtype))

    def _try_out(self, form: CallForm, given: Packed) -> None:
        split = self._split
        device = next((slot.meta.device for slot in self._slots), torch.device("cpu"))
        # Every run has to find what the script gave, so that none may write into it.
        copies = [tensor.to(device).clone() for tensor in given if tensor is not None]
        marks = [tensor._version for tensor in copies]
        dry = split.try_out(form, form.rebuild(tuple(copies)))
        written = {at for at, copy in enumerate(copies) if dry.cut_short or copy._version != marks[at]}
        self._written.setdefault(form.fingerprint, set()).update(written)
        for slot in self._slots:
            known = split.pieces_of[slot.name]
            for piece in dry.touched.get(str(slot.meta.slot), set()) - set(known):
                self._refuse_elsewhere(slot.name, piece, known)
                split.pieces_of[slot.name] = tuple(sorted({*split.pieces_of[slot.name], piece}))
                split.forget_layout()
        for where, piece in dry.writers.items():
            self._refuse_elsewhere(f"buffer {where[1]}", piece, (split.buffer_piece[where],))
        self._tried.add(split.mode(form))

    def _refuse_elsewhere(self, name: str, piece: int, known: tuple[int, ...]) -> None:
        stages = {other if self._stage_of is None else self._stage_of(other) for other in known}
        if (piece if self._stage_of is None else self._stage_of(piece)) not in stages:
            raise SplitError(
                f"{name}: used by {self.piece_names[piece]} (piece {piece}), which the example of a call did not show, "
                f"allowed is {self.piece_names[known[0]]} (piece {known[0]}); give initialize() training_data whose "
                f"samples are like the batches"
            )

    def run(self, value: Packed, start: int, stop: int) -> Any:
        """Run pieces ``start`` to ``stop - 1``, which the stage keeps.

        Args:
            value: what :meth:`pack` returned for the first piece, and what piece ``start - 1`` returned for others.
            start: first piece.
            stop: behind the last piece.

        Returns:
            The input of piece ``stop``, or the loss, without dimensions. Without gradients a call without a loss gives
            None.

        Raises:
            SplitError: the forward does something that cannot be run in pieces, or returns no loss.
        """
        form = self._forms.form_of(value)
        behind = 1 + form.num_tensors
        written = self._written.get(form.fingerprint, ())
        holder = f"the stage with pieces {start} to {stop - 1}"
        if self._split.mode(form) not in self._tried:
            self._try_out(form, value[1:behind])
        for again in (False, True):
            given = (t.clone() if at in written and t is not None else t for at, t in enumerate(value[1:behind]))
            call = form.rebuild(tuple(given))
            try:
                output = self._split.run(form, call, value[behind:], start, stop, holder)  # type: ignore[arg-type]
                break
            except DivergedError as error:
                if again:
                    raise SplitError(
                        f"{type(self.model).__name__}: the forward of {holder} does not go as it does without "
                        f"parameters{''.join(f': {arg}' for arg in error.args)}, allowed is one that calls the same "
                        f"functions; change the forward"
                    ) from None
                self._try_out(form, value[1:behind])  # as every rank does that sees these arguments
        if stop < len(self.pieces):
            return (*value[:behind], *output)
        if torch.is_grad_enabled():
            return loss_of(output, type(self.model).__name__)
        self.last_output = output
        return find_loss(output)

    def take_output(self) -> Any:
        """What the forward returned the last time without gradients, whole; then forget it."""
        output, self.last_output = self.last_output, None
        return tree_map_only(torch.Tensor, torch.Tensor.detach, output) if tree_leaves(output) else output


def _to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype)


def _members(params: Any) -> list[Any]:
    return [params] if isinstance(params, torch.Tensor) else list(params)


def _kinds(model: nn.Module, names: list[str]) -> list[str]:
    modules = dict(model.named_modules())
    return [type(modules[name]).__name__ if name in modules else name for name in names]
