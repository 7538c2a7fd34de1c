"""Specs of what blocks return where they are skipped: shapes and types, from a run on no values or on made-up ones."""

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

from ds_vpipe.splitting.guards import untouched_generators
from ds_vpipe.splitting.meta_tensor import (
    AccessLog,
    MetaTensor,
    SplitError,
    ValueNeededError,
    fresh,
    place,
    written,
)
from ds_vpipe.splitting.parameter_slots import ParameterSlot

Where = tuple[int, str]
"""A buffer: ``id`` of its module, and its name there."""

_MOST_KNOWN = 4096
_OF_MODULES = frozenset(nn.Module().__dict__)


class RetryError(BaseException):
    """End of a forward in which a block has turned out to look at values: what it has done by then is done again."""


class MadeUpValues(TorchDispatchMode):
    """Made-up values for meta tensors, zeros at first, for code that looks at values and whose specs are wanted.

    Whatever is computed inside is a meta tensor, too, so that no made-up value gets out.

    Args:
        log: of the meta tensors.
        own: tensors with values that may be written to; by default all.
    """

    def __init__(self, log: AccessLog, own: Sequence[torch.Tensor] | None) -> None:
        super().__init__()
        self._log = log
        self._own = None if own is None else {tensor.untyped_storage()._cdata for tensor in own}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        absent = [leaf for leaf in leaves if isinstance(leaf, MetaTensor)]
        target = written(func, args, kwargs or {})
        foreign = None if isinstance(target, MetaTensor) else target
        if absent:
            self._log.note(func, absent, target if foreign is None else None, False)
        if foreign is not None and self._own is not None and foreign.untyped_storage()._cdata not in self._own:
            raise SplitError(
                f"{place()}: {func} writes into a tensor from outside a block that looks at values; allowed are "
                f"tensors of its own; change the forward"
            )
        found = [leaf.guessed() if isinstance(leaf, MetaTensor) else leaf for leaf in leaves]
        found_args, found_kwargs = tree_unflatten(found, spec)
        result = func(*found_args, **found_kwargs)
        return target if target is not None else tree_map_only(torch.Tensor, self._hidden, result)

    def __enter__(self) -> Any:
        self._log.guessing = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._log.guessing = False
        super().__exit__(*error)

    def _hidden(self, value: torch.Tensor) -> MetaTensor:
        made = MetaTensor.like(value, self._log, "a value that a block has made")
        made.guess = value
        return made


class _ForeignWrites(TorchDispatchMode):
    """Watch for writes into tensors that were not made inside, nor are in ``own``."""

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.seen = False
        self._own = {storage._cdata: storage for storage in (tensor.untyped_storage() for tensor in own)}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = written(func, args, kwargs)
        result = func(*args, **kwargs)
        if target is None and not any(r.alias_info is not None for r in func._schema.returns):
            tree_map_only(torch.Tensor, self._note, result)
        elif target is not None and not isinstance(target, MetaTensor):
            self.seen |= target.untyped_storage()._cdata not in self._own
        return result

    def _note(self, value: torch.Tensor) -> None:
        if not isinstance(value, MetaTensor):
            storage = value.untyped_storage()
            self._own[storage._cdata] = storage


@dataclass(frozen=True)
class _Passed:
    """Output that is one of the arguments, such as a mask that travels along."""

    index: int


class OutputSpecs:
    """Specs of the outputs of blocks, by the shapes of their arguments.

    Args:
        log: of the meta tensors.
        slots: parameters in each block, by its ``id``.
    """

    def __init__(self, log: AccessLog, slots: Mapping[int, Sequence[ParameterSlot]]) -> None:
        self._log, self._slots = log, slots
        self._known: dict[Any, tuple[list[Any], TreeSpec]] = {}
        self._looking: set[int] = set()
        self._remembering: set[int] = set()

    def outputs(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], again: bool, name: str) -> Any:
        """Outputs of a block that is skipped, as meta tensors.

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
        key = (id(block), block.training, torch.is_grad_enabled(), spec, *(_shape_of(leaf) for leaf in leaves))
        if not again and id(block) not in self._remembering and key in self._known and not _watched(block):
            kept, out_spec = self._known[key]
            distinct = {id(leaf): leaf for leaf in kept if isinstance(leaf, MetaTensor)}
            made = dict(zip(distinct, fresh(list(distinct.values()), name), strict=True))
            found = [leaves[leaf.index] if isinstance(leaf, _Passed) else made.get(id(leaf)) for leaf in kept]
            return tree_unflatten(found, out_spec)
        outputs, out_spec, same, _ = self._run(block, args, kwargs)
        places = {id(leaf): index for index, leaf in reversed(list(enumerate(leaves)))}
        memo: dict[int, Any] = {}
        kept = [memo.setdefault(id(leaf), _kept(leaf, places)) for leaf in outputs]
        alike = all(leaf is None or isinstance(leaf, (MetaTensor, _Passed)) for leaf in kept)
        if same and alike and id(block) not in self._remembering:
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            self._known[key] = kept, out_spec
        return tree_unflatten(outputs, out_spec)

    def forget(self) -> None:
        """Run all blocks anew, whose parameters have been frozen or not."""
        self._known.clear()

    def dry_run(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[Any, list[Where]]:
        """Outputs of a block, and the buffers that it writes to."""
        outputs, spec, _, written_to = self._run(block, args, kwargs)
        return tree_unflatten(outputs, spec), written_to

    def _run(self, block: nn.Module, args: Any, kwargs: Any) -> tuple[list[Any], TreeSpec, bool, list[Where]]:
        """Leaves and spec of outputs; whether nothing else has changed, and which buffers have."""
        with untouched_generators(), self._without_parameters(block), own_buffers(block) as copies:
            buffers, same = list(copies.values()), True
            attributes, (given, given_spec) = _attributes(block), tree_flatten((args, kwargs))
            if id(block) in self._looking:
                with MadeUpValues(self._log, buffers):
                    outputs, spec = tree_flatten(block(*args, **kwargs))
                outputs = _without_guesses(block, outputs, tree_leaves((args, kwargs)))
            else:
                try:
                    with _ForeignWrites(buffers) as writes:
                        outputs, spec = tree_flatten(block(*args, **kwargs))
                except (ValueNeededError, RuntimeError) as error:  # an operation may have no shapes without values
                    if isinstance(error, SplitError) and not isinstance(error, ValueNeededError):
                        raise
                    self._looking.add(id(block))
                    raise RetryError from error
                same = not writes.seen
            after, after_spec = tree_flatten((args, kwargs))
            if attributes != _attributes(block) or given_spec != after_spec or not all(map(operator.is_, given, after)):
                self._remembering.add(id(block))
            modules = {id(module): module for module in block.modules()}
            changed = [
                (module, key)
                for (module, key), copy in copies.items()
                if copy._version or modules[module]._buffers.get(key) is not copy
            ]
            return outputs, spec, same, changed

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


def _attributes(block: nn.Module) -> list[tuple[int, str, int, int]]:
    """What the modules of a block remember, apart from what torch knows of."""
    return [
        (id(module), key, id(value), len(value) if isinstance(value, (list, dict, set)) else 0)
        for module in block.modules()
        for key, value in module.__dict__.items()
        if key not in _OF_MODULES
    ]


def _without_guesses(block: nn.Module, outputs: list[Any], given: list[Any]) -> list[Any]:
    """Other meta tensors in their places, so that no graph keeps the block's made-up values."""
    for leaf in outputs:
        if isinstance(leaf, (bool, int, float)):
            raise SplitError(
                f"{type(block).__name__}: looks at values and returns a {type(leaf).__name__}, which other stages "
                f"cannot know; allowed are tensors; change the forward"
            )
    known = {id(leaf) for leaf in given}
    own = [leaf for leaf in outputs if isinstance(leaf, MetaTensor) and leaf.slot is None and id(leaf) not in known]
    old = {id(leaf): leaf for leaf in own}
    made = dict(zip(old, fresh(list(old.values()), "a value that a block has made"), strict=True))
    return [made.get(id(leaf), leaf) for leaf in outputs]


def _kept(leaf: Any, places: Mapping[int, int]) -> Any:
    """What is remembered of an output, without its made-up value."""
    if isinstance(leaf, torch.Tensor) and id(leaf) in places:
        return _Passed(places[id(leaf)])
    return leaf.again() if isinstance(leaf, MetaTensor) else leaf


def _watched(block: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in block.modules())


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return (*leaf.shape, leaf.dtype, isinstance(leaf, MetaTensor), leaf.requires_grad)
    return leaf if isinstance(leaf, (bool, int, float, str, type(None))) else type(leaf)
