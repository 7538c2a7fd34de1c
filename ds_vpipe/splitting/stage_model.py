"""A user's model as one stage has it: some pieces with their parameters, and a forward that runs those.

Between pieces go, in this order, the mark of the call's form, the tensors among the call's arguments and the
activations.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _EXTRA_STATE_KEY_SUFFIX
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from ds_vpipe.splitting.call import CallForm, CallForms, Packed, find_loss, loss_of
from ds_vpipe.splitting.forward_pass import Crossings, DivergedError, Watch
from ds_vpipe.splitting.forward_split import ForwardSplit
from ds_vpipe.splitting.guards import Where, buffer_name
from ds_vpipe.splitting.layout import dummy_inputs_of
from ds_vpipe.splitting.meta_tensor import SplitError
from ds_vpipe.splitting.model_hooks import DirectCalls, StateHooks
from ds_vpipe.splitting.module_numbers import put_back
from ds_vpipe.splitting.parameter_slots import ParameterSlot, empty_parameter, materialise, overlapping
from ds_vpipe.splitting.piece_tensors import hold_members
from ds_vpipe.splitting.python_state import Held, holding, hooks_since, remove_hooks
from ds_vpipe.splitting.python_state import put_back as put_back_held

Caller = Callable[[Callable[[Any], Any], Any], Any]


def call_now(function: Callable[[Any], Any], value: Any) -> Any:
    """Caller that only calls."""
    return function(value)


class Piece(nn.Module):
    """Layer of a pipeline: the tensors of a piece, with their names in the model, and its part of the forward."""

    def __init__(self, stage_model: StageModel, index: int, kind: str) -> None:
        super().__init__()
        self._stage_model, self.index, self.kind = stage_model, index, kind

    def forward(self, value: Any) -> Any:
        """Run the piece; see :meth:`StageModel.run`."""
        return self._stage_model.run(value, self.index, self.index + 1)

    @property
    def numbers(self) -> list[Any]:
        """Values of the numbers of its blocks' modules, such as counters, in an order that all ranks have."""
        return [value for *_, value in self._stage_model.numbers.read(self._stage_model.modules_in(self.index))]

    @numbers.setter
    def numbers(self, values: list[Any]) -> None:
        now = self._stage_model.numbers.read(self._stage_model.modules_in(self.index))
        put_back([(*place, value) for (*place, _), value in zip(now, values, strict=True)])

    def hold(self, model: nn.Module | None, members: Set[Where]) -> None:
        """Have the parameters and buffers ``(id(module), key)`` of ``model``, or none.

        Modules that are members with everything they have are taken as they are; of others their names remain.
        """
        for store in (self._modules, self._parameters, self._non_persistent_buffers_set):
            store.clear()
        self._buffers = {}
        if model is not None:
            hold_members(self, model, members)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """What the piece holds here, and nothing of other stages."""
        return self._stage_model.own_state(partial(super().state_dict, *args, **kwargs))

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Piece:
        self._stage_model.apply(fn)
        return self

    def train(self, mode: bool = True) -> Piece:
        """Set the mode of the whole model, whose forward runs in one mode."""
        self._stage_model.model.train(mode)
        return super().train(mode)


class StageModel:
    """A user's model on one stage: its pieces, its parameters and its forward."""

    def __init__(self, model: nn.Module, split: ForwardSplit, slots: list[ParameterSlot]) -> None:
        self.model = model  # the user's, which keeps the parameters of the stage
        self.piece_names, self.blocks = split.layout.piece_names, split.layout.blocks
        self._split, self._slots = split, slots
        self.remark: str | None = None  # on how it is split, to be said once
        split.layout.parameter_writes.clear()  # of examples
        self._forms = CallForms()
        self._tried: set[Any] = set()
        self._kept: frozenset[int] = frozenset()
        self._done: dict[tuple[int, int], tuple[set[int], set[int]]] = {}  # see _done_before()
        self._released = False
        self._shared: list[tuple[ParameterSlot, list[int]]] = []  # used on several stages, with their numbers
        self._last_output: Any = None
        self.numbers = split.numbers
        self.direct_calls: DirectCalls | None = None  # of the model itself, once it has only some pieces
        self.state_hooks: StateHooks | None = None  # make the model's state dicts whole, if there is somebody who can
        kinds = {name: type(module).__name__ for name, module in model.named_modules()}
        # All of them; those that are not kept have no parameters.
        self.pieces = [Piece(self, index, kinds.get(name, name)) for index, name in enumerate(self.piece_names)]
        self.keep(range(len(self.pieces)))

    # Which pieces

    def trained_sizes(self) -> list[int]:
        """Numbers of elements of the trained parameters of each piece."""
        sizes: list[dict[int, int]] = [{} for _ in self.pieces]
        for slot in self._slots:
            for piece in slot.pieces if slot.trained else ():
                sizes[piece][slot.tie] = slot.size
        return [sum(found.values()) for found in sizes]

    def of_every_rank(self) -> dict[str, Any]:
        """What has to be the same where the model is split on several ranks."""
        parameters = [(slot.name, slot.size, slot.trained, sorted(slot.pieces)) for slot in self._slots]
        digest = hashlib.sha256(repr((parameters, self.ties())).encode()).hexdigest()[:12]
        return {"trained values of the model's pieces": self.trained_sizes(), "digest of its parameters": digest}

    def ties(self) -> dict[str, dict[int, str]]:
        """Parameters that several pieces use, by their first name: for every piece, a name that it uses it by."""
        uses: dict[int, dict[int, str]] = {}
        first: dict[int, str] = {}
        for slot in self._slots:
            first.setdefault(slot.tie, slot.name)
            for piece in slot.pieces:
                uses.setdefault(slot.tie, {}).setdefault(piece, slot.name)
        return {first[tie]: dict(sorted(found.items())) for tie, found in uses.items() if len(found) > 1}

    def keep(self, pieces: Iterable[int], stage_of: Callable[[int], int] = lambda piece: piece) -> None:
        """Have the parameters of these pieces only. Others are put aside until :meth:`release`.

        By ``stage_of``, the stage of every piece, parameters are refused that turn out to be used on another one.

        Raises:
            SplitError: the parameters of the others have been released.
        """
        if self._released:
            raise SplitError("model: got another split after training has begun, allowed is one before; build it again")
        self._kept, self._stage_of = frozenset(pieces), stage_of
        for slot in self._slots:
            value, apart = slot.value, self._kept.isdisjoint(slot.pieces)
            slot.parameter, slot.spare = (None, value) if apart else (value, None)
            slot.restore()
        self._refresh()

    def take(self, pieces: Iterable[int]) -> None:
        """Have these pieces from now on, after :meth:`release`. Parameters that were not here have no values yet."""
        self._kept = frozenset(pieces)
        here = {slot.tie: slot.parameter for slot in self._slots if slot.parameter is not None}
        for slot in self._slots:
            if self._kept.isdisjoint(slot.pieces):
                slot.parameter = None
            else:
                if slot.tie not in here:
                    here[slot.tie] = slot.without_values()
                slot.parameter = here[slot.tie]
            slot.restore()
        kept = {id(slot.parameter) for slot in self._slots}
        for parameter in here.values():
            if id(parameter) not in kept:
                empty_parameter(parameter)
        self._refresh()

    def release(self, device: torch.device | None = None) -> None:
        """Drop the parameters of all pieces that are not kept, and give values on ``device`` to those without any.

        Raises:
            SplitError: parameters of several stages belong together in a way that only one process can keep up.
        """
        self._check_ties()
        if not self._released and len(self._kept) < len(self.pieces):
            self.direct_calls = DirectCalls(self.model, self._split.layout.log)
        self._released = True
        kept = {slot.tie for slot in self._slots if slot.parameter is not None}
        for slot in self._slots:
            if slot.spare is not None and slot.tie not in kept:
                empty_parameter(slot.spare)
            slot.spare = None
        materialise(self.model, self._slots, device or torch.device("cpu"))
        self._refresh()

    def _check_ties(self) -> None:
        stages: dict[int, set[int]] = {}
        for slot in self._slots:
            stages.setdefault(slot.tie, set()).update(map(self._stage_of, slot.pieces))
        self._shared = [(slot, sorted(stages[slot.tie])) for slot in self._slots if len(stages[slot.tie]) > 1]
        self.refuse_hooks("_backward_hooks", "_post_accumulate_grad_hooks")  # of which DeepSpeed has some later
        first: dict[int, tuple[ParameterSlot, torch.Tensor]] = {}
        for slot in self._slots:
            if slot.value is not None:
                first.setdefault(slot.tie, (slot, slot.value))
        different = list(first.values())
        for at, there in overlapping(value for _, value in different):
            one, other = different[at][0], different[there][0]
            if (one.trained or other.trained) and len(stages[one.tie] | stages[other.tie]) > 1:
                raise SplitError(
                    f"{other.name}: has the memory of {one.name} and is another parameter, so that only one process "
                    f"can train both together, allowed on several stages is one parameter with both names; write "
                    f"model.{other.name} = model.{one.name}, or give it values of its own with .clone()"
                )

    def refuse_hooks(self, *kinds: str) -> None:
        """Refuse hooks on gradients of which each of several stages has a part.

        Args:
            kinds: names of the tensor's attributes that have them.

        Raises:
            SplitError: there is one.
        """
        for slot, there in self._shared:
            if any(getattr(slot.value, kind, None) for kind in kinds):
                raise SplitError(
                    f"{slot.name}: has a hook on its gradient and is used on stages {', '.join(map(str, there))}, each "
                    f"of which has only a part of that, allowed are hooks on parameters of one stage; remove it, or "
                    f"put the pieces that use it on one stage"
                )

    def own_parameters(self, given: Iterable[Any]) -> list[Any]:
        """Of a script's ``model_parameters``, what this stage has, in the same order. Groups may become empty.

        A parameter that was on the meta device is replaced by the one that has its values.
        """
        here = {slot.tie: slot.parameter for slot in self._slots if slot.parameter is not None}
        here |= {id(parameter): parameter for parameter in here.values()}
        found: list[Any] = []
        for item in given:
            if isinstance(item, dict):
                members = [item["params"]] if isinstance(item["params"], torch.Tensor) else item["params"]
                found.append({**item, "params": self.own_parameters(members)})
            elif id(item) in here:
                found.append(here[id(item)])
        return found

    def refuse_replaced(self, call: str) -> None:
        """Refuse ``call`` if the script has put others in the place of parameters, which passes would put back.

        Raises:
            SplitError: it has.
        """
        for slot in self._slots:
            if slot.module._parameters.get(slot.key, slot.parameter) is not slot.parameter:
                raise SplitError(
                    f"{call}: {slot.name}: got another parameter after initialize(), allowed are writes into the one "
                    f"that was there; use copy_(), or load_state_dict() without assign"
                )

    def owners(self) -> dict[str, tuple[str, int]]:
        """For all names of the whole model's state dict: a name and a piece, the first one, where its value is."""
        first: dict[int, tuple[int, str]] = {}
        for slot in self._slots:
            here = min(slot.pieces), slot.name
            first[slot.tie] = min(first.get(slot.tie, here), here)
        found = {slot.name: (first[slot.tie][1], first[slot.tie][0]) for slot in self._slots}
        for path, module in self.model.named_modules(remove_duplicate=False):
            prefix = f"{path}." if path else ""
            for key in module._buffers:
                if (id(module), key) in self._split.buffer_piece:
                    found[prefix + key] = prefix + key, self._split.buffer_piece[id(module), key]
            keys = (prefix + key for key in (*module._parameters, *module._buffers))
            if owners := [found[key][1] for key in keys if key in found]:
                found[prefix + _EXTRA_STATE_KEY_SUFFIX] = prefix + _EXTRA_STATE_KEY_SUFFIX, owners[0]
        return found

    def uses_buffer(self, module: int, key: str) -> bool:
        """Whether a buffer of the module with this ``id`` is one of this stage, or of none."""
        piece = self._split.buffer_piece.get((module, key))
        return piece is None or piece in self._kept

    def modules_in(self, piece: int) -> set[int]:
        """The ``id`` of each module in the blocks that a piece calls."""
        return self._split.layout.modules_in(piece, piece + 1)

    def own_state(self, read: Callable[[], Any]) -> Any:
        """State dict of what is here, made by ``read``."""
        return read() if self.state_hooks is None else self.state_hooks.own_state(read)

    def _refresh(self) -> None:
        """Give the pieces what the model has now."""
        self._done.clear()
        self._split.layout.single_stage = len(self._kept) == len(self.pieces)
        members: list[set[Where]] = [set() for _ in self.pieces]
        for slot in self._slots:
            for piece in slot.pieces:
                members[piece].add((id(slot.module), slot.key))
        for where, piece in self._split.buffer_piece.items():
            members[piece].add(where)
        for made, found in zip(self.pieces, members, strict=True):
            made.hold(self.model if made.index in self._kept else None, found)

    # Types and devices

    def apply(self, function: Callable[..., Any]) -> None:
        """As ``Module._apply``, to everything that the stage has, and to the types and devices of what it has not.

        Parameters on the meta device stay there until :meth:`release`.
        """
        self.model._apply(lambda tensor: tensor if tensor.is_meta else function(tensor))
        for slot in self._slots:
            if slot.parameter is not None:
                slot.parameter = slot.module._parameters[slot.key]
        self._follow()
        self._refresh()

    def _follow(self) -> None:
        """Give what is absent the types and devices of what is here. DeepSpeed casts parameters one by one.

        Of those that parameters with the same ones at first have now, an absent one gets the first.
        """
        here = [slot for slot in self._slots if slot.parameter is not None and not slot.parameter.is_meta]
        changed: dict[Any, Any] = {}
        for slot in here:
            if _kind(slot.parameter) != _kind(slot.meta):
                changed.setdefault(_kind(slot.meta), _kind(slot.parameter))
        if changed:
            self._tried.clear()  # which a stage without parameters has done in other types
            self._split.layout.specs.forget()
            for slot in self._slots:
                slot.convert(*changed.get(_kind(slot.meta), _kind(slot.meta)))
            for slot in here:
                slot.convert(*_kind(slot.parameter))

    # Calls

    def pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Packed:
        """A call of the user's forward as the input of the first piece: a flat tuple of tensors.

        Every rank packs every call before it runs its part of it: the tuple of the first stage says only by a
        fingerprint what else there is in the call.

        Raises:
            SplitError: the call cannot be run in pieces.
        """
        self._follow()
        trains = self.model.training and torch.is_grad_enabled()
        packed, form = self._forms.pack(args, kwargs, for_training=trains)
        if self._split.mode(form) not in self._tried:
            self._try_out(form, packed[1:])
        self._check_writes()
        return packed

    def _try_out(self, form: CallForm, given: Packed) -> None:
        split = self._split
        device = next((slot.meta.device for slot in self._slots), torch.device("cpu"))
        # Every run has to find what the script gave, so that none may write into it.
        copies = [tensor.to(device).clone() for tensor in given if tensor is not None]
        marks = [tensor._version for tensor in copies]
        dry = split.try_out(form, form.rebuild(tuple(copies)))
        self._check_writes()
        form.written |= {at for at, copy in enumerate(copies) if dry.cut_short or copy._version != marks[at]}
        for slot in self._slots:
            known = slot.pieces
            for piece in dry.touched.get(str(slot.meta.slot), set()) - set(known):
                self._refuse_elsewhere(slot.name, piece, known)
                slot.pieces = tuple(sorted({*slot.pieces, piece}))
        for where, piece in dry.writers.items():
            self._refuse_elsewhere(buffer_name(self.model, where), piece, (split.buffer_piece[where],))
        self._check_shared_buffers(dry.writers)
        self._tried.add(split.mode(form))

    def _check_shared_buffers(self, writers: Mapping[Where, int]) -> None:
        """Refuse writes into a buffer that modules of several stages have in common."""
        found = [
            (f"{path}.{key}".lstrip("."), (id(module), key), buffer)
            for path, module in (self.model.named_modules() if writers else ())
            for key, buffer in module._buffers.items()
            if buffer is not None and (id(module), key) in self._split.buffer_piece
        ]
        pairs = [(found[a], found[b]) for a, b in overlapping(buffer for *_, buffer in found)]
        for (name, where, _), (other, there, _) in (*pairs, *((b, a) for a, b in pairs)):
            piece = writers.get(where)
            if piece is not None and self._stage_of(self._split.buffer_piece[there]) != self._stage_of(piece):
                raise SplitError(
                    f"buffer {name}: is written in {self.piece_names[piece]} (piece {piece}) and has memory of {other} "
                    f"on another stage, which does not see it; allowed are buffers that the modules of one stage have "
                    f"in common; register one for each module"
                )

    def _check_writes(self) -> None:
        """Refuse writes of the forward into parameters that another stage uses, where they would be lost."""
        writes = self._split.layout.parameter_writes
        users: dict[int, set[int]] = {}
        for slot in self._slots if writes else ():
            users.setdefault(slot.tie, set()).update(slot.pieces)
        for (name, piece), what in writes.items():
            for other in sorted(users[self._split.layout.slot(name).tie]):
                if self._stage_of(other) != self._stage_of(piece):
                    raise SplitError(
                        f"{what} writes into parameter {name} in {self.piece_names[piece]} (piece {piece}), and "
                        f"{self.piece_names[other]} (piece {other}) on another stage does not see it; allowed are "
                        f"writes on the one stage that uses it; write there, compute a new tensor where it is used, or "
                        f"put these pieces on one stage"
                    )

    def _refuse_elsewhere(self, name: str, piece: int, known: tuple[int, ...]) -> None:
        if self._stage_of(piece) not in map(self._stage_of, known):
            raise SplitError(
                f"{name}: used by {self.piece_names[piece]} (piece {piece}), which the example of a call did not show, "
                f"allowed is {self.piece_names[known[0]]} (piece {known[0]}); give initialize() training_data, or "
                f"{dummy_inputs_of(self.model)}, like the batches, or leave out what uses it there"
            )

    def run(
        self, value: Packed, start: int, stop: int, watch: Watch | None = None, caller: Caller = call_now
    ) -> Any:  # fmt: skip
        """Run pieces ``start`` to ``stop - 1``, which the stage has, on what :meth:`pack` or piece ``start - 1`` gave.

        ``watch`` is as :meth:`.ForwardSplit.run` has it. ``caller`` calls a function with a value, and may do so again
        in the backward pass, as checkpointing does: the call goes the same way then.

        Returns:
            The input of piece ``stop``, or the loss; without gradients None if there is none.

        Raises:
            SplitError: the forward does something that cannot be run in pieces, or returns no loss.
        """
        form = self._forms.form_of(value)
        if self._split.mode(form) not in self._tried:
            self._try_out(form, form.parts(value)[0])
        diverged, found = DivergedError(), [] if caller is call_now else self._split.held()
        for way in self._ways(form, value, start):
            try:
                output = caller(self._portion(form, way, start, stop, watch, found), value)
            except DivergedError as error:
                diverged = DivergedError(*error.args)  # with the other's frames end checkpoint()'s hooks
            else:
                self._split.prefer(form, way)
                return output
        raise self._diverged(start, stop, diverged)

    def _ways(self, form: CallForm, value: Packed, start: int) -> Iterator[Crossings]:
        """Ways that a call may go: those that are known, and at last that of this one.

        They are tried outside of what a caller calls, where graphs of an attempt that has ended would count.
        """
        given, arrived = form.parts(value)
        yield from self._split.ways(form, start, arrived)
        self._split.layout.specs.forget()  # the script may have changed settings of blocks
        self._try_out(form, given)  # as every rank does that sees these arguments
        yield self._split.ways(form)[0]

    def in_portions(self, portions: Sequence[tuple[int, int]]) -> Iterator[int]:
        """Yield the number of each of these portions, runs of pieces that follow on each other, when it is to be run.

        Each calls the forward from its beginning, where it shall find numbers such as counters, attributes outside the
        blocks and hooks as the first one did. Numbers and hooks of a block are afterwards as the portion has left them
        that has run it, and not only skipped it.
        """
        first_hook, hooks = RemovableHandle.next_id, Held()
        before = after = self.numbers.read(late=True) if len(portions) > 1 else []
        held = self._split.held() if len(portions) > 1 else []
        for number, portion in enumerate(portions):
            if number:
                put_back_held(held)
                put_back(before)
                remove_hooks(hooks_since(self.model.modules(), first_hook), first_hook)
            yield number
            if len(portions) > 1:
                run_before = self._done_before(*portion)[0]
                put_back(after, run_before)
                registered = {id(store) for store, *_ in hooks_since(self.model.modules(), first_hook)}
                put_back_held([held for held in hooks if id(held[0]) not in registered], run_before)
                after, hooks = self.numbers.read(late=True), hooks_since(self.model.modules(), first_hook)

    def _portion(
        self, form: CallForm, way: Crossings, start: int, stop: int, watch: Watch | None, found: Held
    ) -> Callable[[Packed], Any]:  # fmt: skip
        """A function that runs pieces of a call that goes this way. When it runs again it finds what is ``found``."""
        ended, (run_before, called_again) = False, self._done_before(start, stop)

        def portion(value: Packed) -> Any:
            nonlocal ended
            given, arrived = form.parts(value)
            own = (t.clone() if at in form.written and t is not None else t for at, t in enumerate(given))
            call, shown = form.rebuild(tuple(own)), None if ended else watch
            try:
                with holding(found, self._split.held()) if ended else nullcontext():
                    output = self._split.run(way, call, arrived, start, stop, shown, run_before, called_again)
            except DivergedError as error:
                if not ended:
                    raise
                raise self._diverged(start, stop, error, "it did before, when it is run again") from None
            first, ended = not ended, True
            self._check_writes()
            if stop < len(self.pieces):
                return (value[0], *given, *output)
            if first:
                self._last_output = output
            return loss_of(output, type(self.model).__name__) if torch.is_grad_enabled() else find_loss(output)

        return portion

    def _done_before(self, start: int, stop: int) -> tuple[set[int], set[int]]:
        """Two sets of modules, by ``id``, in blocks that this stage runs before piece ``start``.

        Those that pieces ``start`` to ``stop - 1`` do not call, and those that they do.
        """
        if (start, stop) not in self._done:
            earlier = set[int]().union(*(self.modules_in(piece) for piece in self._kept if piece < start))
            here = self._split.layout.modules_in(start, stop)
            self._done[start, stop] = earlier - here, earlier & here
        return self._done[start, stop]

    def _diverged(
        self, start: int, stop: int, error: DivergedError, other: str = "it does without parameters"
    ) -> SplitError:  # fmt: skip
        where = "".join(f": {arg}" for arg in error.args[:1])
        remedy = error.args[1] if len(error.args) > 1 else "change the forward"
        return SplitError(
            f"{type(self.model).__name__}: the forward of the stage with pieces {start} to {stop - 1} does not go as "
            f"{other}{where}, allowed is one that calls the same functions; {remedy}"
        )

    def take_output(self, with_graph: bool = False) -> Any:
        """What the forward returned the last time, whole. Then forget it."""
        output, self._last_output = self._last_output, None
        if with_graph or not tree_leaves(output):
            return output
        return tree_map_only(torch.Tensor, torch.Tensor.detach, output)


def _kind(tensor: Any) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device
