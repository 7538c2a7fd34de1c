"""Layers that are run again in the backward pass: what they find, and whether they compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ds_vpipe.errors import VPipeError
from ds_vpipe.splitting.module_numbers import ABSENT, ModuleNumbers, put_value
from ds_vpipe.splitting.python_state import Held, PythonState, hooks_since, put_back, remove_hooks

_SMALL_BYTES = 4096

Value = tuple[Any, str, Any, int | None]
"""A buffer, frozen weight or number, with the dict and the key where a module has it.

The last one is autograd's count of changes of what is not copied.
"""


class Remembered(NamedTuple):
    """What modules had when a forward pass began."""

    values: list[Value]  # buffers, frozen weights and numbers
    trained: list[torch.nn.Parameter]  # weights that were trained
    held: Held  # all attributes, in a first pass, which may register buffers and hooks and remember that it has
    first_hook: int  # number of the next hook
    hooks: Held  # dicts in which a first pass has registered some
    attributes: list[tuple[Any, str, Any]]  # those that a first pass has put anew, each with the dict and the key


class ModuleMemory:
    """Buffers and numbers that recomputed layers change, such as counters, and weights that are not trained.

    The recomputation finds them as its forward pass did, and leaves nothing behind. Buffers may be large, so copies are
    made only of those that the first forward pass in training mode has changed, and of small ones, in which evaluations
    may count. The others, and frozen weights, may be replaced but not changed in place. What that pass puts into other
    attributes anew is put back too, as it is: a cache has to fit the number that says how long it is.

    Args:
        modules: that have them.
        copies_all: copy all buffers, where the first forward pass does not run all modules.
        numbers: of these modules; by default those that they have now.
    """

    def __init__(
        self, modules: Iterable[torch.nn.Module], copies_all: bool = False, numbers: ModuleNumbers | None = None
    ) -> None:  # fmt: skip
        self._parts = parts = list(modules)
        self._numbers = numbers or ModuleNumbers(parts)
        self._buffers = [part._buffers for part in parts]  # to which a pass may add
        self._weights = [part._parameters for part in parts]
        self._uncopied: set[tuple[int, str]] = set()  # buffers that need no copies: identity of the dict, and key
        self._anew: list[tuple[Any, str]] = []  # attributes that a pass puts anew
        self._copies_all = self._known = copies_all  # whether that is settled

    def read(self) -> Remembered:
        """Their present values."""
        values: list[Value] = [(place, key, value, None) for _, place, key, value in self._numbers.read()]
        trained, copies = list[torch.nn.Parameter](), dict[int, torch.Tensor]()  # modules may share a buffer
        for place, key, value in _items(self._buffers):
            if (id(place), key) in self._uncopied:
                values.append(_uncopied(place, key, value))
            else:
                values.append((place, key, _copy(value, copies), None))
        for place, key, value in _items(self._weights):
            if value is not None and value.requires_grad:
                trained.append(value)
            else:
                values.append(_uncopied(place, key, value))
        attributes = [(place, key, place.get(key, ABSENT)) for place, key in self._anew]
        held = [] if self._known else PythonState(self._parts).held()
        return Remembered(values, trained, held, RemovableHandle.next_id, [], attributes)

    def note_changes(self, before: Remembered, training: bool) -> None:
        """Compare with the values that a forward pass has found.

        Raises:
            VPipeError: one has changed in place that the first forward pass left alone; its old value is lost. Or a
                hook has been registered where modules are run several times before any of them is run again.
        """
        hooks = hooks_since(self._parts, before.first_hook) if self._copies_all else []
        if hooks:
            owner, kind = hooks[0][2]
            raise VPipeError(
                f"pipeline.activation_checkpoint_interval: got a forward that registers a hook ({kind} of a "
                f"{type(owner).__name__}) and leaves it there, where it would be registered again in the backward "
                f"pass; allowed are hooks that are there before, or gone afterwards; use vpipe.recompute_ratio"
            )
        for _, key, value, version in before.values:
            if version is not None and value._version != version:
                raise VPipeError(
                    f"vpipe.recompute_ratio: got a layer whose {key!r} changes in place in a forward pass, allowed are "
                    f"buffers that change in the first too, and no frozen weights; write 0 for this stage"
                )
        if training and not self._known:
            self._known = True
            found = {(id(place), key): value for place, key, value, _ in before.values}
            self._uncopied = {
                (id(place), key)
                for place, key, value in _items(self._buffers)
                if not _is_small(value) and _same(value, found.get((id(place), key)))
            }
            earlier = {id(place): values for place, values, _ in before.held}
            for place in map(vars, self._parts):
                had = earlier.get(id(place), place)
                for key in had.keys() | place.keys():
                    value, now = had.get(key, ABSENT), place.get(key, ABSENT)
                    anew = value is not now and (id(place), key) not in found
                    if anew and _is_plain(value) and _is_plain(now):
                        before.attributes.append((place, key, value))
            self._anew = [(place, key) for place, key, _ in before.attributes]
            before.hooks.extend(hooks_since(self._parts, before.first_hook))

    @contextmanager
    def as_remembered(self, remembered: Remembered, knows_modules: bool) -> Iterator[None]:
        """Context in which modules have the values remembered; afterwards they have the present ones again."""
        with self._without_late(remembered) if remembered.held else nullcontext():
            present = [(place, key, place[key]) for place, key, _, _ in remembered.values if key in place]
            absent = [(place, key) for place, key, _, _ in remembered.values if key not in place]
            anew = [(place, key, place.get(key, ABSENT)) for place, key, _ in remembered.attributes]
            frozen = [weight for weight in remembered.trained if not weight.requires_grad]
            copies = dict[int, torch.Tensor]()
            for place, key, value, version in remembered.values:
                if knows_modules and version is not None and value._version != version:
                    raise VPipeError(changed_meanwhile(f"{key!r} of recomputed layers"))
                if key not in place or value is not place[key]:
                    put_value(place, key, _copy(value, copies) if isinstance(value, torch.Tensor) else value)
            for place, key, value in remembered.attributes:
                put_value(place, key, value)
            for weight in frozen:
                weight.requires_grad_(True)
            try:
                yield
            finally:
                for place, key, value in anew:
                    put_value(place, key, value)
                for place, key, now in present:
                    place[key] = now
                for place, key in absent:
                    place.pop(key, None)
                for weight in frozen:
                    weight.requires_grad_(False)

    @contextmanager
    def _without_late(self, remembered: Remembered) -> Iterator[None]:
        """Context without the buffers and hooks that the first pass has registered, as if it had not been run."""
        known = {(id(place), key) for place, key, *_ in remembered.values}
        late = {
            id(part): (place, dict(place.items()))
            for part, place in zip(self._parts, self._buffers, strict=True)
            if any((id(place), key) not in known for key, _ in place.items())
        }
        modules = None if remembered.hooks else late.keys()  # flags, and handles of hooks, may be anywhere
        now, first_again = PythonState(self._parts).held(), RemovableHandle.next_id
        hooks: Held = [(store, dict(store), owner) for store, _, owner in remembered.hooks]
        put_back(remembered.held, modules)
        remove_hooks(remembered.hooks, remembered.first_hook)
        for place, buffers in late.values():
            for key in buffers:
                if (id(place), key) not in known:
                    del place[key]
        try:
            yield
        finally:
            put_back(now, modules)
            remove_hooks(hooks_since(self._parts, first_again), first_again)
            put_back(hooks)
            for place, buffers in late.values():
                place.clear()
                place.update(buffers)


def _items(places: Iterable[Any]) -> Iterator[tuple[Any, str, Any]]:
    """What is in dicts of modules, of which torch.jit's are no dicts."""
    return ((place, key, value) for place in places for key, value in place.items())


def _uncopied(place: Any, key: str, value: Any) -> Value:
    return place, key, value, None if value is None or value.is_inference() else value._version


def _copy(value: torch.Tensor | None, copies: dict[int, torch.Tensor]) -> torch.Tensor | None:
    """A copy of a buffer, the same one wherever it is."""
    if value is None:
        return None
    if id(value) not in copies:
        copies[id(value)] = value.detach().clone()
    return copies[id(value)]


class Anew(AbstractContextManager[None]):
    """Context that is made each time that it is entered.

    A layer that differentiates may be run again twice.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: list[AbstractContextManager[None]] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def _is_plain(value: Any) -> bool:
    """Whether it is made of numbers, strings and tensors without a graph, which would keep other passes alive."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, torch.Tensor):
        return not value.requires_grad
    return value is None or value is ABSENT or isinstance(value, (int, float, str))


def _is_small(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() * value.element_size() <= _SMALL_BYTES


def _same(value: Any, before: Any) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(before, torch.Tensor):
        return value.shape == before.shape and torch.equal(value.nan_to_num(), before.nan_to_num())
    return False


class OutputCheck:
    """The output of one micro-batch, for comparison with that of its recomputation."""

    def __init__(self, report: Callable[[float], None]) -> None:
        self._report = report
        self._outputs: list[torch.Tensor] | None = None

    def run(self, function: Callable[[Any], Any], value: Any) -> Any:
        """Run ``function``, the first time in the forward pass and the second time in the backward pass."""
        result = function(value)
        outputs = [_dense(leaf.detach()) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        if self._outputs is None:
            self._outputs = [output.clone() for output in outputs]
        elif self._outputs:
            before, self._outputs = self._outputs, []
            alike = len(before) == len(outputs)
            self._report(max(map(_difference, before, outputs), default=0.0) if alike else math.inf)
        return result


def _dense(value: torch.Tensor) -> torch.Tensor:
    """The tensor in a layout that torch compares."""
    if value.is_nested:
        return value.to_padded_tensor(0.0)
    return value if value.layout is torch.strided else value.to_dense()


def _difference(first: torch.Tensor, second: torch.Tensor) -> float:
    """Norm of the difference by that of ``first``; 0 if another order of sums on the device may explain it."""
    if first.shape != second.shape or first.dtype != second.dtype:
        return math.inf
    if torch.equal(first, second):  # with no temporary, or a byte per number, for which a plan has no room
        return 0.0
    if not torch.equal(*(value.masked_fill(value.isfinite(), 0).nan_to_num(1.0) for value in (first, second))):
        return math.inf  # no order of sums makes an infinity of a number
    before, again = (value.nan_to_num(0.0, 0.0, 0.0) for value in (first, second))
    if torch.equal(before, again):
        return 0.0
    if not first.is_floating_point():
        return math.inf
    part = float((before.double() - again.double()).norm() / before.double().norm())
    tolerated = 0.0 if first.device.type == "cpu" else max(4 * torch.finfo(first.dtype).eps, 1e-4)
    return 0.0 if part <= tolerated else part


def changed_meanwhile(what: str) -> str:
    """The line of an error where ``what`` is not what the forward pass has found."""
    return (
        f"backward pass: got {what} that a layer or the script has changed in place since the forward pass, allowed is "
        f"to change buffers and weights in an empty pipeline; call engine.quiesce() before, or engine.drain() if the "
        f"script calls engine(...), on every rank, or put another tensor in the place, and leave optimizer.step() to "
        f"engine.step()"
    )
