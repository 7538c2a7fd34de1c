"""One piece of a split model as a module, the layer that a pipeline sees."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from ds_vpipe.splitting.stage_model import StageModel


class Piece(nn.Module):
    """The parameters and buffers of a piece, with their names in the model, and its part of the forward.

    Attributes:
        index: of the piece.
        kind: type name of its module, for partitions by type.
    """

    def __init__(self, stage: StageModel, index: int, kind: str) -> None:
        super().__init__()
        self._stage, self.index, self.kind = stage, index, kind

    def forward(self, value: Any) -> Any:
        """Run the piece; see :meth:`.stage_model.StageModel.run`."""
        return self._stage.run(value, self.index, self.index + 1)

    def hold(self, model: nn.Module | None, members: frozenset[tuple[int, str]]) -> None:
        """Have the parameters and buffers ``(id(module), key)`` of ``model``, or none.

        Modules that are members with everything they have are taken as they are; of others their names remain.
        """
        self._modules.clear()
        self._parameters.clear()
        self._buffers.clear()
        self._non_persistent_buffers_set.clear()
        if model is not None:
            _take(self, model, members)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """What the piece holds here, and nothing of other stages."""
        with self._stage.own_states():
            return super().state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Piece:
        self._stage.apply(fn)
        return self

    def train(self, mode: bool = True) -> Piece:
        """Set the mode of the whole model, whose forward runs in one mode."""
        self._stage.train(mode)
        return super().train(mode)


def _take(into: nn.Module, module: nn.Module, members: frozenset[tuple[int, str]]) -> None:
    for key, parameter in module._parameters.items():
        if parameter is not None and (id(module), key) in members:
            into._parameters[key] = parameter
    for key, buffer in module._buffers.items():
        if buffer is not None and (id(module), key) in members:
            into._buffers[key] = buffer
            if key in module._non_persistent_buffers_set:
                into._non_persistent_buffers_set.add(key)
    for key, child in module._modules.items():
        if child is None:
            continue
        tensors = _tensors(child)
        if tensors and tensors <= members:
            into._modules[key] = child
        elif tensors & members:
            into._modules[key] = branch = nn.Module()
            branch.training = child.training
            _take(branch, child, members)


def _tensors(module: nn.Module) -> set[tuple[int, str]]:
    """Names of everything in a module that has or has had a value."""
    return {
        (id(part), key)
        for part in module.modules()
        for store in (part._parameters, part._buffers)
        for key, tensor in store.items()
        if isinstance(tensor, torch.Tensor) or key in part.__dict__
    }
