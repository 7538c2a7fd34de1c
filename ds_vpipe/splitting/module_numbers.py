"""Numbers that modules have as attributes, such as counters of their calls, and their modes."""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

Numbers = list[tuple[int, dict[str, Any], str, Any]]
"""Values, each with the module's ``id``, its attributes, and the name."""


class ModuleNumbers:
    """Number attributes of modules, those that they have at first; their mode is one.

    They are found once: to look through all attributes in every pass takes longer than most passes of small models.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places = [
            (id(module), vars(module), name)
            for module in modules
            for name, value in vars(module).items()
            if isinstance(value, (int, float))
        ]

    def read(self, modules: Collection[int] | None = None) -> Numbers:
        """Present values, of the modules with these ``id``s or of all."""
        return [
            (module, place, name, place[name])
            for module, place, name in self._places
            if name in place and (modules is None or module in modules)
        ]


def put_back(numbers: Numbers, modules: Collection[int] | None = None) -> None:
    """Give modules the values that they had, those with these ``id``s or all."""
    for module, place, name, value in numbers:
        if modules is None or module in modules:
            place[name] = value


@contextmanager
def as_before(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Context after which buffers and numbers of modules are what they were."""
    known = list(modules)
    numbers = ModuleNumbers(known).read()
    buffers = [
        (module._buffers, name, buffer, buffer.clone())
        for module in known
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        put_back(numbers)
        for place, name, buffer, before in buffers:
            place[name] = buffer
            buffer.data.copy_(before)  # which autograd does not count: graphs from before find what they knew
