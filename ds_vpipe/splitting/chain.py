"""Where a model's blocks are: the list of modules of one class that its forward goes through in order."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Chain:
    """A list of blocks in a model.

    Attributes:
        name: of the list in the model.
        container: the list.
        keys: of the blocks in it, in order.
    """

    name: str
    container: nn.Module
    keys: tuple[str, ...]

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks in order."""
        return [self.container._modules[key] for key in self.keys]  # type: ignore[misc]

    def names(self) -> list[str]:
        """The blocks' names in the model."""
        return [f"{self.name}.{key}" if self.name else key for key in self.keys]


def chains(model: nn.Module) -> list[Chain]:
    """Lists of two or more modules of one class that have parameters, the one with the most parameters first."""
    found = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        blocks = list(module.children())
        kinds = {type(block) for block in blocks}
        if len(blocks) == len(module._modules) >= 2 and len(kinds) == 1 and _size(blocks[0]):
            found.append(Chain(name, module, tuple(module._modules)))
    return sorted(found, key=lambda chain: -sum(_size(block) for block in chain.blocks))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
