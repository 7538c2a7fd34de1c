"""Numbers that modules have as attributes, such as counters of their calls, and their modes."""

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

Numbers = list[tuple[int, dict[str, Any], str, Any]]
"""Values, each with the module's ``id``, its attributes, and the name."""


ABSENT = ...  # in the place of a number that is not there, also on another rank


class ModuleNumbers:
    """Number attributes of modules, those that they have at first and those found later; their mode is one.

    Those found later are other ones on other ranks, and may describe tensors, as the length of a cache does that is
    None at first: whoever puts numbers back without tensors leaves these alone.

    To look through all attributes in every pass takes longer than most passes of small models.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._places, self._late = dict[tuple[int, str], dict[str, Any]](), dict[tuple[int, str], dict[str, Any]]()
        self.find()
        self._places, self._late = self._late, self._places

    def find(self) -> None:
        """Look for more of them, such as counters of a class that a pass has made a module's."""
        for module in self._modules:
            for name, value in vars(module).items():
                if isinstance(value, (int, float)) and (id(module), name) not in self._places:
                    self._late[id(module), name] = vars(module)

    def read(self, modules: Collection[int] | None = None, late: bool = False) -> Numbers:
        """Present values, of the modules with these ``id``s or of all; with ``late`` of those found later, too."""
        return [
            (module, place, name, place.get(name, ABSENT))
            for (module, name), place in (self._places | self._late if late else self._places).items()
            if modules is None or module in modules
        ]


def put_back(numbers: Numbers, modules: Collection[int] | None = None) -> None:
    """Give modules the values that they had, those with these ``id``s or all."""
    for module, place, name, value in numbers:
        if modules is None or module in modules:
            put_value(place, name, value)


def put_value(place: dict[str, Any], name: str, value: Any) -> None:
    """Give an attribute the value that it had, or take it away."""
    if value is ABSENT:
        place.pop(name, None)
    else:
        place[name] = value
