"""Modules that a model may be split between: the elements of its lists of layers, or else all with parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import nn

_COMPANION = 4
_MOSTLY = 0.8
_NEVER_CALLED = {nn.ModuleList, nn.ModuleDict}


@dataclass(frozen=True)
class BlockList:
    """Modules that a model may be split between, such as the elements of a list."""

    name: str  # where they are in the model
    names: tuple[str, ...]  # of each of them
    modules: tuple[nn.Module, ...]
    merged: bool = False  # what is before the first and behind the last one is no piece of its own

    @property
    def kinds(self) -> set[type]:
        """Classes of the modules."""
        return {type(module) for module in self.modules}

    @property
    def size(self) -> int:
        """Number of elements of the parameters."""
        return sum(map(_size, self.modules))

    def overlaps(self, other: BlockList) -> bool:
        """Whether one contains modules of the other."""
        mine = {id(part) for module in self.modules for part in module.modules()}
        return any(id(part) in mine for module in other.modules for part in module.modules())


def block_choices(model: nn.Module) -> Iterator[BlockList]:
    """BlockList to be tried in turn: around every list those that are like it, or as large; the largest list first.

    A list of several classes, such as a whole model, comes after one of a single class that is most of it.
    """
    lists = sorted(_lists(model), key=lambda found: -found.size)
    plain = [found for found in lists if len(found.kinds) == 1]

    def is_late(found: BlockList) -> bool:
        return len(found.kinds) > 1 and any(2 * other.size >= found.size and other.overlaps(found) for other in plain)

    seen: set[tuple[str, ...]] = set()
    for main in sorted(lists, key=is_late):
        chosen = [main]
        for other in lists:
            alike = other.kinds == main.kinds or _COMPANION * other.size >= main.size
            if alike and not any(other.overlaps(one) for one in chosen):
                chosen.append(other)
        for choice in ([_expanded(one, lists) for one in chosen], chosen, [main]):
            blocks = _joined(model, choice)
            if blocks.names not in seen:
                seen.add(blocks.names)
                yield blocks


def all_modules(model: nn.Module) -> BlockList:
    """The innermost modules that have parameters of their own."""
    found = {
        name: module
        for name, module in model.named_modules()
        if any(parameter is not None for parameter in module._parameters.values())
        and not any(map(_size, module.children()))
    }
    return BlockList(type(model).__name__, tuple(found), tuple(found.values()), merged=True)


def _lists(model: nn.Module) -> list[BlockList]:
    """Lists of two or more modules with parameters."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            children = {
                f"{name}.{key}" if name else key: child for key, child in module.named_children() if _size(child)
            }
            if len(children) >= 2 and not any(type(child) in _NEVER_CALLED for child in children.values()):
                found.append(BlockList(name, tuple(children), tuple(children.values())))
    return found


def _expanded(found: BlockList, lists: Sequence[BlockList]) -> BlockList:
    """The list with elements that are mostly one inner list replaced by its modules."""
    names: list[str] = []
    modules: list[nn.Module] = []
    for name, module in zip(found.names, found.modules, strict=True):
        inner = [one for one in lists if one.name.startswith(f"{name}.") and len(one.kinds) == 1]
        best = max(inner, key=lambda one: one.size, default=found)
        if best is not found and best.size >= _MOSTLY * _size(module):
            names += best.names
            modules += best.modules
        else:
            names.append(name)
            modules.append(module)
    return BlockList(found.name, tuple(names), tuple(modules))


def _joined(model: nn.Module, lists: Sequence[BlockList]) -> BlockList:
    chosen = {id(module): name for one in lists for name, module in zip(one.names, one.modules, strict=True)}
    order = [(chosen[id(module)], module) for module in model.modules() if id(module) in chosen]
    names = " and ".join(dict.fromkeys(one.name or "its list of layers" for one in lists))
    return BlockList(names, tuple(name for name, _ in order), tuple(module for _, module in order))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
