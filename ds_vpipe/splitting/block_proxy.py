"""Proxies in the places of a model's blocks, which pass calls on while the user's forward runs in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

BlockHandler = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]
"""Gets a block and the arguments of a call; returns the block's outputs, or ends the forward."""


class Finished(BaseException):
    """Early end of the user's forward, with the activations of the next stage. No error, hence no ``Exception``."""

    def __init__(self, activations: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.activations = activations


class BlockProxy(nn.Module):
    """Stand-in for a block during one forward; whatever is asked of it but a call, the block answers."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        del self.__dict__["training"]  # the block's
        self.__dict__["handler"] = None
        self._modules["block"] = block

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The block's, for forwards that ask what a block is."""
        return type(self.__dict__["_modules"]["block"])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["handler"](self.__dict__["_modules"]["block"], args, kwargs)

    forward = __call__

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.__dict__["_modules"]["block"])

    def __len__(self) -> int:
        return len(self.__dict__["_modules"]["block"])

    def __getitem__(self, index: Any) -> Any:
        return self.__dict__["_modules"]["block"][index]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_modules"]["block"], name)


class BlockProxies:
    """Proxies for the blocks of a model."""

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._proxies = {id(block): BlockProxy(block) for block in blocks}
        self._places = [
            (module._modules, key, child)
            for module in model.modules()
            for key, child in module._modules.items()
            if child is not None and id(child) in self._proxies
        ]

    @contextmanager
    def installed(self, handler: BlockHandler) -> Iterator[None]:
        """Inside, calls of the blocks go to ``handler``."""
        self._hand_to(handler)
        for modules, key, block in self._places:
            modules[key] = self._proxies[id(block)]
        try:
            yield
        finally:
            for modules, key, block in self._places:
                modules[key] = block
            self._hand_to(None)

    def _hand_to(self, handler: BlockHandler | None) -> None:
        for proxy in self._proxies.values():
            proxy.__dict__["handler"] = handler
