"""What modules remember outside of torch, attributes and hooks, and how it is put back after a pass."""

import operator
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

OF_MODULES = frozenset(nn.Module().__dict__)
"""Names of the attributes that every module has."""
_BUFFERS = {"_buffers", "_non_persistent_buffers_set"}
_HOOKS = {key for key in OF_MODULES if key.endswith("hooks") or "_hooks_" in key}
_PLACES = {dict, list, set, deque, OrderedDict, defaultdict, Counter}
_ABSENT = object()
Owner = tuple[nn.Module, str]
Held = list[tuple[Any, Any, Owner]]
"""Places, each with a copy of what it held, and with the module and its attribute that it belongs to."""
_DEEPEST, _MOST_ENTRIES, _MOST_COPIED, _SMALL = 2, 1000, 2**26, 2**20


class _Remembered(NamedTuple):
    """State of Python at one time."""

    next_hook: int  # number of the next hook
    held: Held
    tensors: list[tuple[torch.Tensor, int, torch.Tensor, Owner]]  # with autograd's count of changes, and copies
    sizes: list[tuple[Any, int, Owner]]  # of places that are too large to copy


class PythonState:
    """Attributes and hooks of modules.

    Lists, dicts, sets and objects there are looked into. Objects are those of classes in the package of the module's
    own class, unless that is torch. A place is the dict, list or set itself, so that whoever else has it finds it put
    back as well.

    Args:
        modules: that have them.
        before: what was known of the same modules.
    """

    def __init__(self, modules: Iterable[nn.Module], before: "PythonState | None" = None) -> None:
        self._modules = list(modules)
        # By ``id``, each with a module, and the module's attribute that has it.
        self._places: dict[int, tuple[Any, Owner]] = {}
        # Tensors by ``id`` that are no buffers: small ones, and others that have been written; at first all.
        self._written: dict[int, tuple[torch.Tensor, Owner]] = {}
        self._known: dict[int, torch.Tensor] = {} if before is None else before._known
        for module in self._modules:
            attributes = vars(module)
            self._places[id(attributes)] = attributes, (module, "")
            for key in [key for key in attributes if key not in OF_MODULES]:
                self._find(attributes[key], (module, key), _DEEPEST)

    def _find(self, value: Any, owner: Owner, depth: int) -> None:
        kind = type(value)
        dense = kind is torch.Tensor and value.layout is torch.strided
        if dense and value.nbytes <= _MOST_COPIED and not value.is_inference():
            self._written[id(value)] = value, owner
            return
        held: Any = value
        if kind not in _PLACES:
            held = getattr(value, "__dict__", None) if _package(value) == _package(owner[0]) != "torch" else None
        if type(held) not in _PLACES or isinstance(value, nn.Module) or id(held) in self._places:
            return
        self._places[id(held)] = held, owner
        if depth and len(held) <= _MOST_ENTRIES:
            for part in list(held.values() if isinstance(held, dict) else held):
                self._find(part, owner, depth - 1)

    def read(self) -> _Remembered:
        """What is remembered now, for :meth:`put_back`. Every micro-batch does this."""
        with torch.no_grad():
            tensors = [(tensor, tensor._version, tensor.clone(), owner) for tensor, owner in self._written.values()]
        sizes = [(place, len(place), owner) for place, owner in self._places.values() if len(place) > _MOST_ENTRIES]
        return _Remembered(RemovableHandle.next_id, self.held(), tensors, sizes)

    def put_back(self, before: _Remembered) -> None:
        """Let the places hold what they held, and remove new hooks, of which attributes say that they are there."""
        self.remove_hooks(before.next_hook)
        put_back(before.held)
        changed = [(tensor, value) for tensor, version, value, _ in before.tensors if tensor._version != version]
        self._known |= {id(tensor): tensor for tensor, _ in changed}
        self._written = {
            key: (tensor, owner)
            for key, (tensor, owner) in self._written.items()
            if tensor.nbytes <= _SMALL or key in self._known
        }
        _copy_back(changed)

    def put_back_in(self, modules: Collection[int], before: _Remembered) -> Owner | None:
        """Let the places of modules with these ``id``s hold what they held.

        Returns:
            A module and its attribute that is too large for that, and has another size now, if there is one.
        """
        put_back(before.held, modules)
        _copy_back(
            (tensor, value)
            for tensor, version, value, (module, _) in before.tensors
            if id(module) in modules and tensor._version != version
        )
        large = (owner for place, size, owner in before.sizes if id(owner[0]) in modules and len(place) != size)
        return next(large, None)

    @staticmethod
    def changed_in(modules: Collection[int], before: _Remembered) -> Owner | None:
        """A module with one of these ``id``s and its attribute that has changed; None if none has.

        A place has more entries, or a tensor other values.
        """
        sizes = [*before.sizes, *((place, len(values), owner) for place, values, owner in before.held if owner[1])]
        changed = [owner for place, size, owner in sizes if len(place) > size]
        changed += [owner for tensor, _, value, owner in before.tensors if not torch.equal(tensor, value)]
        return next((owner for owner in changed if id(owner[0]) in modules), None)

    def remove_hooks(self, first: int) -> None:
        """Remove hooks with this number and later ones."""
        remove_hooks(hooks_since(self._modules, first), first)

    def held(self, without: Collection[int] = ()) -> Held:
        """What the places hold now, but for large ones and those of modules with these ``id``s."""
        return [
            (place, place.copy(), owner)
            for place, owner in self._places.values()
            if len(place) <= _MOST_ENTRIES and id(owner[0]) not in without
        ]

    @staticmethod
    def differences(one: Held, other: Held) -> list[tuple[nn.Module, str]]:
        """Modules, and the names of attributes that are not the same, in an order that all ranks have."""
        found = []
        held: dict[int, Any] = {id(place): values for place, values, _ in other}
        for place, here, (owner, name) in one:
            there: Any = held.get(id(place), here)
            if isinstance(here, dict):
                names = here.keys() | there.keys()
                others = {n for n in names if not _alike(here.get(n, _ABSENT), there.get(n, _ABSENT))}
                found += [(owner, attribute) for attribute in sorted({name or str(entry) for entry in others})]
            elif len(here) != len(there) or not all(map(_alike, here, there)):
                found.append((owner, name))
        return found

    def _stores(self, keys: Collection[str]) -> list[Any]:
        return [vars(module)[key] for module in self._modules for key in keys if key in vars(module)]

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Context after which all is as before: removed hooks, and which buffers there are, too."""
        before, stores = self.read(), [(store, store.copy()) for store in self._stores(_HOOKS | _BUFFERS)]
        try:
            yield
        finally:
            self.put_back(before)
            for store, held in stores:
                _put(store, held)


def _alike(one: Any, other: Any) -> bool:
    numbers = isinstance(one, (int, float, str)) and type(one) is type(other)
    return one is other or (numbers and one == other)


def _package(value: Any) -> str:
    return str(type(value).__module__).partition(".")[0]


def _copy_back(values: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    with torch.no_grad():
        for tensor, value in values:
            tensor.copy_(value)


def hooks_since(modules: Iterable[nn.Module], first: int) -> Held:
    """Dicts of hooks that have one with this number or a later one, with all that they hold."""
    if RemovableHandle.next_id == first:
        return []
    every = ((vars(module).get(key), (module, key)) for module in modules for key in _HOOKS)
    return [(store, dict(store), owner) for store, owner in every if store and max(store) >= first]


def remove_hooks(found: Held, first: int) -> None:
    """Remove the hooks with this number and later ones from dicts that :func:`hooks_since` has found."""
    for store, handles, _ in found:
        for handle in handles:
            if handle >= first:
                store.pop(handle, None)


@contextmanager
def registrations() -> Iterator[set[int]]:
    """Context that gives the ``id``s of dicts in which hooks are registered inside."""
    found, original = set[int](), RemovableHandle.__init__

    def noted(handle: RemovableHandle, hooks_dict: Any, **others: Any) -> None:
        found.add(id(hooks_dict))
        original(handle, hooks_dict, **others)

    with patch.object(RemovableHandle, "__init__", noted):
        yield found


def put_back(held: Held, modules: Collection[int] | None = None) -> None:
    """Let places hold what they held, those of modules with these ``id``s or all."""
    for place, values, owner in held:
        if modules is None or id(owner[0]) in modules:
            _put(place, values)


@contextmanager
def holding(held: Held, now: Held) -> Iterator[None]:
    """Context in which places hold what they held; afterwards they hold what they hold now."""
    put_back(held)
    try:
        yield
    finally:
        put_back(now)


def _put(place: Any, values: Any) -> None:
    """Let a place hold these very values."""
    if isinstance(place, dict):
        same = all(key in place and place[key] is value for key, value in values.items())
    else:
        same = all(map(operator.is_, place, values))
    if not same or len(place) != len(values):
        place.clear()
        (place.extend if hasattr(place, "extend") else place.update)(values)
