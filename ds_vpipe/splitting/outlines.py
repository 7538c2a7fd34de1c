"""What blocks return without their values: shapes and types, from a run on absent or on made-up values."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ds_vpipe.splitting.absent import Absent, Ledger, SplitError, ValueNeededError, outputs_like, place, written
from ds_vpipe.splitting.generators import untouched_generators
from ds_vpipe.splitting.slots import Slot


class AgainError(BaseException):
    """Ends a forward in which a block has turned out to look at values: what it has done by then is done again."""


class Guesses(TorchDispatchMode):
    """Gives absent values made-up ones, zeros at first, for code that looks at values and whose outline is wanted.

    Whatever is computed inside is absent, too, so that no made-up value gets out.

    Args:
        ledger: of the absent values.
        own: tensors with values that may be written to; by default all.
    """

    def __init__(self, ledger: Ledger, own: Sequence[torch.Tensor] | None) -> None:
        super().__init__()
        self._ledger = ledger
        self._own = None if own is None else {tensor.untyped_storage()._cdata for tensor in own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        absent = [leaf for leaf in leaves if isinstance(leaf, Absent)]
        target = written(func, args, kwargs or {})
        foreign = target is not None and not isinstance(target, Absent)
        if absent:
            self._ledger.note(func, absent, None if foreign else target, False)
        if foreign and self._own is not None and target.untyped_storage()._cdata not in self._own:  # type: ignore
            raise SplitError(
                f"{place()}: {func} writes into a tensor from outside a block that looks at values; allowed are "
                f"tensors of its own; change the forward"
            )
        values = [leaf.guessed() if isinstance(leaf, Absent) else leaf for leaf in leaves]
        found_args, found_kwargs = tree_unflatten(values, spec)
        result = func(*found_args, **found_kwargs)
        return target if target is not None else tree_map_only(torch.Tensor, self._hidden, result)

    def __enter__(self) -> Any:
        self._ledger.guessing = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._ledger.guessing = False
        super().__exit__(*error)

    def _hidden(self, value: torch.Tensor) -> Absent:
        made = Absent.like(value, self._ledger, "a value that a block has made")
        made.guess = value
        return made


class _Writes(TorchDispatchMode):
    """Notices writes into tensors that were not made inside.

    Args:
        own: others that may be written to.

    Attributes:
        outside: there was one.
    """

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.outside = False
        self._own = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in own)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = written(func, args, kwargs)
        result = func(*args, **kwargs)
        if isinstance(target, torch.Tensor) and not isinstance(target, Absent):
            self.outside |= target.untyped_storage()._cdata not in self._own
        elif target is None and not any(r.alias_info is not None for r in func._schema.returns):
            tree_map_only(torch.Tensor, self._note, result)
        return result

    def _note(self, value: torch.Tensor) -> None:
        if not isinstance(value, Absent):
            storage = value.untyped_storage()
            self._own[storage._cdata] = storage


Where = tuple[int, str]
"""A buffer: ``id`` of its module, and its name there."""

_MOST_KNOWN = 4096
_OF_MODULES = frozenset(nn.Module().__dict__)


@dataclass(frozen=True)
class _Passed:
    """An output that is one of the arguments, such as a mask that travels along."""

    index: int


class Outlines:
    """What blocks return for arguments of given shapes, without values.

    Args:
        ledger: of the absent values.
        slots: parameters in each block, by its ``id``.
    """

    def __init__(self, ledger: Ledger, slots: Mapping[int, Sequence[Slot]]) -> None:
        self._ledger, self._slots = ledger, slots
        self._known: dict[Any, tuple[list[Any], TreeSpec]] = {}
        self._looking: set[int] = set()
        self._remembering: set[int] = set()

    def outputs(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], again: bool, name: str
    ) -> tuple[list[Any], TreeSpec]:
        """Leaves and form of the block's outputs, with absent tensors.

        The block is run the first time, or every time if it returns what it has computed from the call's own
        arguments, writes into those, sets attributes or adds to lists, or if somebody listens inside of it, such as
        code that collects all attention weights, which would else miss entries without noticing.

        Args:
            block: to be run.
            args: its arguments.
            kwargs: its keyword arguments.
            again: run it in any case.
            name: of the outputs, for messages.
        """
        leaves, spec = tree_flatten((args, kwargs))
        key = (id(block), block.training, torch.is_grad_enabled(), spec, *(_outline(leaf) for leaf in leaves))
        if again or id(block) in self._remembering or key not in self._known or _watched(block):
            outputs, out_spec, same, _ = self._run(block, args, kwargs)
            places = {id(leaf): index for index, leaf in reversed(list(enumerate(leaves)))}
            memo: dict[int, Any] = {}
            kept = [memo.setdefault(id(leaf), _kept(leaf, places)) for leaf in outputs]
            if (
                same
                and id(block) not in self._remembering
                and all(leaf is None or isinstance(leaf, (Absent, _Passed)) for leaf in kept)
            ):
                if len(self._known) == _MOST_KNOWN:
                    self._known.clear()
                self._known[key] = kept, out_spec
            return outputs, out_spec
        kept, out_spec = self._known[key]
        distinct = {id(leaf): leaf for leaf in kept if isinstance(leaf, Absent)}
        made = dict(zip(distinct, _fresh(list(distinct.values()), name), strict=True))
        return [leaves[leaf.index] if isinstance(leaf, _Passed) else made.get(id(leaf)) for leaf in kept], out_spec

    def forget(self) -> None:
        """Run all blocks anew, whose parameters have been frozen or not."""
        self._known.clear()

    def trial(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[list[Any], TreeSpec, list[Where]]:
        """Leaves and form of the block's outputs, and the buffers that it writes to."""
        outputs, spec, _, written = self._run(block, args, kwargs)
        return outputs, spec, written

    def _run(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[list[Any], TreeSpec, bool, list[Where]]:
        """Leaves and form of outputs; whether nothing else has changed, and which buffers have."""
        with untouched_generators(), self._without_parameters(block), own_buffers(block) as copies:
            buffers, same = list(copies.values()), True
            attributes, (given, given_spec) = _attributes(block), tree_flatten((args, kwargs))
            if id(block) in self._looking:
                with Guesses(self._ledger, buffers):
                    outputs, spec = tree_flatten(block(*args, **kwargs))
                _refuse_numbers(block, outputs)
                outputs = self._without_guesses(outputs, tree_leaves((args, kwargs)))
            else:
                writes = _Writes(buffers)
                try:
                    with writes:
                        outputs, spec = tree_flatten(block(*args, **kwargs))
                except (ValueNeededError, RuntimeError) as error:  # an operation may have no shapes without values
                    if isinstance(error, SplitError) and not isinstance(error, ValueNeededError):
                        raise
                    self._looking.add(id(block))
                    raise AgainError from error
                same = not writes.outside
            after, after_spec = tree_flatten((args, kwargs))
            if attributes != _attributes(block) or given_spec != after_spec or not all(map(operator.is_, given, after)):
                self._remembering.add(id(block))
            return outputs, spec, same, _changed(block, copies)

    def _without_guesses(self, outputs: list[Any], given: list[Any]) -> list[Any]:
        """Other absent tensors in their places, so that no graph keeps the block's made-up values."""
        known = {id(leaf) for leaf in given}
        old = {
            id(leaf): leaf
            for leaf in outputs
            if isinstance(leaf, Absent) and leaf.slot is None and id(leaf) not in known
        }
        made = dict(zip(old, _fresh(list(old.values()), "a value that a block has made"), strict=True))
        return [made.get(id(leaf), leaf) for leaf in outputs]

    @contextmanager
    def _without_parameters(self, block: nn.Module) -> Iterator[None]:
        here = [slot for slot in self._slots[id(block)] if slot.shown]
        for slot in here:
            slot.stand_in()
        try:
            yield
        finally:
            for slot in here:
                slot.show()


@contextmanager
def own_buffers(model: nn.Module, only: Collection[Where] | None = None) -> Iterator[dict[Where, torch.Tensor]]:
    """Inside, a module has copies of its buffers, or only of some, which are what it gives."""
    kept = [
        (module, key, buffer)
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and (only is None or (id(module), key) in only)
    ]
    copies = {(id(module), key): buffer.clone() for module, key, buffer in kept}
    for module, key, _ in kept:
        module._buffers[key] = copies[id(module), key]
    try:
        yield copies
    finally:
        for module, key, buffer in kept:
            module._buffers[key] = buffer


def _changed(block: nn.Module, copies: Mapping[Where, torch.Tensor]) -> list[Where]:
    """Buffers that have been written to, or replaced."""
    modules = {id(module): module for module in block.modules()}
    return [
        (module, key)
        for (module, key), copy in copies.items()
        if copy._version or modules[module]._buffers.get(key) is not copy
    ]


def _attributes(block: nn.Module) -> list[tuple[int, str, int, int]]:
    """What the modules of a block remember, apart from what torch knows of."""
    return [
        (id(module), key, id(value), len(value) if isinstance(value, (list, dict, set)) else 0)
        for module in block.modules()
        for key, value in module.__dict__.items()
        if key not in _OF_MODULES
    ]


@contextmanager
def own_numbers(model: nn.Module) -> Iterator[None]:
    """Numbers that modules have as attributes, such as counters, are afterwards what they were before."""
    kept = [
        (module, {key: value for key, value in module.__dict__.items() if type(value) in (int, float)})
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for module, before in kept:
            module.__dict__.update(before)


def _refuse_numbers(block: nn.Module, outputs: list[Any]) -> None:
    for leaf in outputs:
        if isinstance(leaf, (bool, int, float)):
            raise SplitError(
                f"{type(block).__name__}: looks at values and returns a {type(leaf).__name__}, which other stages "
                f"cannot know; allowed are tensors; change the forward"
            )


def _kept(leaf: Any, places: Mapping[int, int]) -> Any:
    """What is remembered of an output, without its made-up value."""
    if isinstance(leaf, torch.Tensor) and id(leaf) in places:
        return _Passed(places[id(leaf)])
    return leaf.again() if isinstance(leaf, Absent) else leaf


def _fresh(absent: list[Absent], origin: str) -> list[Absent]:
    return outputs_like(absent, [leaf.requires_grad for leaf in absent], origin)


def _watched(block: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in block.modules())


def _outline(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (*leaf.shape, leaf.dtype, isinstance(leaf, Absent), leaf.requires_grad)
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)
