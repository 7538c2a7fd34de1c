"""Parameters and buffers of a model that one of its pieces has, under their names in the model."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Set
from typing import Any

import torch
from torch import nn

from ds_vpipe.splitting.guards import Where


class _SomeBuffers(MutableMapping[str, Any]):
    """Those of a module's buffers that a piece has. The forward and the script may put others in their place."""

    def __init__(self, module: nn.Module, keys: list[str]) -> None:
        self._module, self._keys = module, keys

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys:
            raise KeyError(key)
        return self._module._buffers[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._module._buffers[key] = value

    def __delitem__(self, key: str) -> None:
        del self._module._buffers[key]

    def __iter__(self) -> Iterator[str]:
        return (key for key in self._keys if key in self._module._buffers)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def hold_members(into: nn.Module, module: nn.Module, members: Set[Where]) -> None:
    """Members of a module, registered under the same names in ``into``.

    They are given as ``(id(module), key)``. Parts of it that are members as a whole are registered themselves.
    """
    for key, tensor in module._parameters.items():
        if tensor is not None and (id(module), key) in members:
            into._parameters[key] = tensor
    buffers = [key for key in module._buffers if (id(module), key) in members]
    if buffers:
        into._buffers = _SomeBuffers(module, buffers)  # type: ignore[assignment]
        into._non_persistent_buffers_set.update(module._non_persistent_buffers_set.intersection(buffers))
    for key, child in module._modules.items():
        tensors = set() if child is None else _tensors(child)
        if tensors and tensors <= members:
            into._modules[key] = child
        elif child is not None and tensors & members:
            into._modules[key] = branch = nn.Module()
            branch.training = child.training
            hold_members(branch, child, members)


def _tensors(module: nn.Module) -> set[Where]:
    """Names of everything in a module that has or has had a value."""
    return {
        (id(part), key)
        for part in module.modules()
        for store in (part._parameters, part._buffers)
        for key, tensor in store.items()
        if isinstance(tensor, torch.Tensor) or key in part.__dict__
    }
