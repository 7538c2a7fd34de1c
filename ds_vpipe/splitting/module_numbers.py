"""Numbers that modules have as attributes, such as counters of their calls, and their modes."""

from collections.abc import Collection, Iterable
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
