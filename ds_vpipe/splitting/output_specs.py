"""Specs of what blocks return where they are skipped: shapes and types, from a run on no values or on made-up ones."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from ds_vpipe.splitting.guards import Where, autocast, own_buffers, untouched_generators
from ds_vpipe.splitting.meta_tensor import AccessLog, MetaTensor, SplitError, ValueNeededError, place, renewed, written
from ds_vpipe.splitting.python_state import OF_MODULES

_MOST_KNOWN = 4096
_MADE_UP = "a value that a block has made"


class RetryError(BaseException):
    """End of a forward that has turned out to look at values.

    What it has done by then is done again.

    Args:
        behind_calls: number of calls of blocks before it does; 0 if that is within one.
    """

    def __init__(self, behind_calls: int = 0) -> None:
        super().__init__()
        self.behind_calls = behind_calls


class MadeUpValues(TorchDispatchMode):
    """Made-up values for meta tensors, zeros at first, where code looks at values.

    Whatever is computed inside is a meta tensor, too, so that no made-up value gets out. Of tensors with values it may
    write to those in ``own``; by default to all.
    """

    def __init__(self, log: AccessLog, own: Sequence[torch.Tensor] | None = None) -> None:
        super().__init__()
        self._log, self._own = log, None if own is None else _storages(own)
        self.looks = False  # at values that are there

    def __enter__(self) -> MadeUpValues:
        self._before, self._log.made_up = self._log.made_up, True
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._log.made_up = self._before
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = tree_flatten((args, kwargs or {}))
        absent = [leaf for leaf in leaves if isinstance(leaf, MetaTensor)]
        targets = written(func, args, kwargs or {})
        target = targets[0] if targets else None
        foreign = [one for one in targets if not isinstance(one, MetaTensor)]
        if absent:
            self._log.note(func, absent, [one for one in targets if isinstance(one, MetaTensor)], False)
        else:
            self.looks |= MetaTensor.looks_at_values(func, args)
        if self._own is not None and not _storages(foreign).keys() <= self._own.keys():
            raise SplitError(
                f"{place()}: {func} writes into a tensor from outside a block that looks at values; allowed are "
                f"tensors of its own; change the forward"
            )
        found = [leaf.guessed() if isinstance(leaf, MetaTensor) else leaf for leaf in leaves]
        found_args, found_kwargs = tree_unflatten(found, spec)
        result = func(*found_args, **found_kwargs)
        if isinstance(target, MetaTensor) and torch.Tag.inplace_view in func.tags:
            return target.reshape_in_place(func, args, kwargs or {})
        if target is not None:
            return target if func._schema.returns else None
        results = tree_map_only(torch.Tensor, self._hidden, result)
        if absent:
            absent[0].note_views(func, results)
        return results

    def _hidden(self, value: torch.Tensor) -> MetaTensor:
        made = MetaTensor.like(value, self._log, _MADE_UP)
        made.guess = value
        return made


class _ForeignWrites(TorchDispatchMode):
    """Watch for writes into tensors that were not made inside, nor are in ``own``, and for looks at values."""

    def __init__(self, own: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.seen, self.looks, self._own = False, False, _storages(own)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        targets = written(func, args, kwargs)
        result = func(*args, **kwargs)
        if not targets and not any(r.alias_info is not None for r in func._schema.returns):
            self._own |= _storages(tree_leaves(result))
        self.seen |= not _storages(targets).keys() <= self._own.keys()
        self.looks |= MetaTensor.looks_at_values(func, args)
        return result


def _storages(tensors: Sequence[Any]) -> dict[int, Any]:
    """Storages of the tensors that have values, by address, which nobody else has as long as they are kept."""
    return {storage._cdata: storage for storage in map(storage_of, tensors) if storage is not None}


def storage_of(value: Any) -> torch.UntypedStorage | None:
    """Storage of a tensor that has values, and has them in one."""
    if not isinstance(value, torch.Tensor) or isinstance(value, MetaTensor) or value.layout is not torch.strided:
        return None
    return value.untyped_storage()


@dataclass(frozen=True)
class _Passed:
    """Output that is one of the arguments, such as a mask that travels along."""

    index: int


class OutputSpecs:
    """Specs of the outputs of blocks, by the shapes of their arguments."""

    def __init__(self, log: AccessLog) -> None:
        self._log = log
        self._known: dict[Any, tuple[list[Any], TreeSpec]] = {}
        self._looking: set[int] = set()  # ``id``s of blocks that look at values: run with made-up ones
        self._remembering: set[int] = set()  # those of blocks whose calls change attributes or containers: run always
        self._modules: dict[int, tuple[nn.Module, ...]] = {}

    def outputs(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], again: bool, name: str) -> Any:
        """Outputs of a block that is skipped, as meta tensors.

        The block is run the first time, or every time if it returns what it has computed from the call's own
        arguments, looks at their values, writes into those, changes the shape of others, sets attributes or adds to
        lists, or if somebody listens inside of it, such as code that collects all attention weights, which would else
        miss entries without noticing; or if told ``again``.
        """
        leaves, spec = _flattened(args, kwargs)
        shapes = tuple(map(_shape_of, leaves))
        key = (id(block), block.training, torch.is_grad_enabled(), autocast(), spec, shapes)
        if not again and id(block) not in self._remembering and key in self._known and not self._watched(block):
            kept, out_spec = self._known[key]
            made = renewed(kept, name)
            return tree_unflatten([leaves[one.index] if isinstance(one, _Passed) else one for one in made], out_spec)
        outputs, writes, _ = self.run(block, args, kwargs)
        found, out_spec = tree_flatten(outputs)
        places = {id(leaf): index for index, leaf in reversed(list(enumerate(leaves)))}
        memo: dict[int, Any] = {}
        kept = [memo.setdefault(id(leaf), _kept(leaf, places)) for leaf in found]
        alike = all(leaf is None or isinstance(leaf, (MetaTensor, _Passed)) for leaf in kept)
        writes |= shapes != tuple(map(_shape_of, leaves))  # an absent one may have another shape, or need a gradient
        if alike and not writes and id(block) not in self._remembering:
            if len(self._known) == _MOST_KNOWN:
                self._known.clear()
            self._known[key] = kept, out_spec
        return outputs

    def _watched(self, block: nn.Module) -> bool:
        modules = self._modules.get(id(block))
        if modules is None:
            modules = self._modules[id(block)] = tuple(block.modules())
        return any(module._forward_hooks or module._forward_pre_hooks for module in modules)

    def forget(self) -> None:
        """Run all blocks anew, whose parameters have been frozen or not."""
        self._known.clear()

    def run(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, bool, list[Where]]:
        """Outputs of a block, whether it writes outside, and its written buffers.

        Raises:
            RetryError: it has turned out to look at values, and is run with made-up ones from now on.
        """
        # Else torch.compile would never compile the block's code, which it has met under such a mode.
        with untouched_generators(), own_buffers(block) as copies, torch.compiler.set_stance("force_eager"):
            attributes, (given, given_spec) = _attributes(block), tree_flatten((args, kwargs))
            writes, buffers = False, list(copies.values())
            if id(block) in self._looking:
                with MadeUpValues(self._log, buffers) as made_up:
                    outputs = block(*args, **kwargs)
                looks = made_up.looks
                outputs = _without_guesses(block, outputs, tree_leaves((args, kwargs)))
            else:
                try:
                    with _ForeignWrites(buffers) as foreign:
                        outputs = block(*args, **kwargs)
                except (ValueNeededError, RuntimeError) as error:  # an operation may have no shapes without values
                    if isinstance(error, SplitError) and not isinstance(error, ValueNeededError):
                        raise
                    self._looking.add(id(block))
                    if self._watched(block):
                        warnings.warn(
                            f"ds_vpipe: a {type(block).__name__} that has forward hooks, or they, look at values; on "
                            f"ranks that have not this block, and while its pieces are found, they are made up, zeros "
                            f"mostly: log what a hook finds on the rank whose stage has the block",
                            stacklevel=2,
                        )
                    raise RetryError() from error
                writes, looks = foreign.seen, foreign.looks
            if looks:  # at the call's own masks and numbers, others in the next call, by which rows are chosen
                self._remembering.add(id(block))
            after, after_spec = tree_flatten((args, kwargs))
            if attributes != _attributes(block) or given_spec != after_spec or not all(map(operator.is_, given, after)):
                self._remembering.add(id(block))
            modules = {id(module): module for module in block.modules()}
            changed = [
                (module, key)
                for (module, key), copy in copies.items()
                if copy._version or modules[module]._buffers.get(key) is not copy
            ]
            return outputs, writes, changed


def _attributes(block: nn.Module) -> list[tuple[int, str, int, int]]:
    """What the modules of a block remember, apart from what torch knows of."""
    return [
        (id(module), key, id(value), len(value) if isinstance(value, (list, dict, set)) else 0)
        for module in block.modules()
        for key, value in module.__dict__.items()
        if key not in OF_MODULES
    ]


def _without_guesses(block: nn.Module, outputs: Any, given: list[Any]) -> Any:
    """Outputs with new meta tensors. No graph keeps the block's made-up values."""
    leaves, spec = tree_flatten(outputs)
    for leaf in leaves:
        if isinstance(leaf, (bool, int, float)):
            raise SplitError(
                f"{type(block).__name__}: looks at values and returns a {type(leaf).__name__}, which other stages "
                f"cannot know; allowed are tensors; change the forward"
            )
    parameters = {id(leaf) for leaf in leaves if isinstance(leaf, MetaTensor) and leaf.slot is not None}
    return tree_unflatten(renewed(leaves, _MADE_UP, {*map(id, given), *parameters}), spec)


def _kept(leaf: Any, places: Mapping[int, int]) -> Any:
    """What is remembered of an output, without its made-up value."""
    if isinstance(leaf, torch.Tensor) and id(leaf) in places:
        return _Passed(places[id(leaf)])
    return leaf.again() if isinstance(leaf, MetaTensor) else leaf


def _flattened(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Leaves of a call's arguments, and their nesting. Most calls have none, and this runs in every pass."""
    leaves = [*args, *kwargs.values()]
    if all(leaf is None or isinstance(leaf, (torch.Tensor, bool, int, float, str)) for leaf in leaves):
        return leaves, (len(args), *kwargs)
    return tree_flatten((args, kwargs))


def _shape_of(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype, isinstance(leaf, MetaTensor), leaf.requires_grad
    return type(leaf), leaf if isinstance(leaf, (bool, int, float, str)) else None  # 1 and 1.0 give other types
