"""What DeepSpeed does to every module and parameter of a stage in every batch, over lists made once.

Walking the tree of modules takes longer than everything else that an engine does in a batch with hundreds of
parameter tensors. Its structure does not change once there is an optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

_PLAIN = (bool, int, float, type(None), torch.Tensor)  # by type: a parameter is none of them


class ModuleWalksMixin(PipelineEngine):
    """Training mode, zeroing and filling of gradients without walks.

    Attributes:
        stage_parameters: all parameters of this stage, each once.
    """

    stage_parameters: tuple[nn.Parameter, ...]
    _parts: tuple[nn.Module, ...] | None

    def __setattr__(self, name: str, value: Any) -> None:
        # An engine is a module, whose attributes are looked through for parameters; a count or a loss is none.
        if type(value) in _PLAIN and name in self.__dict__:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def _list_modules(self) -> None:
        """Make the lists; the module is complete."""
        self.stage_parameters = tuple(self.module.parameters())
        self._parts = parts_to_switch(self.module)

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for parameter in self.stage_parameters:
            parameter.grad = None

    def _fill_gradients(self) -> None:
        """Zeros where a parameter got no gradient, as a reduction over replicas makes them."""
        for parameter in self.stage_parameters:
            if parameter.grad is None and parameter.requires_grad and parameter.numel():
                parameter.grad = torch.zeros_like(parameter, memory_format=torch.contiguous_format)


def parts_to_switch(module: nn.Module) -> tuple[nn.Module, ...] | None:
    """The modules whose mode ``module.train()`` sets; None if some have a ``train()`` of their own, which is asked."""
    parts = tuple(module.modules())
    asked = any(type(part).train is not nn.Module.train or "train" in vars(part) for part in parts)
    return None if asked else parts


@contextmanager
def training_by_list(module: nn.Module, parts: Sequence[nn.Module] | None) -> Iterator[None]:
    """Inside, the next ``module.train()`` sets the mode of those ``parts`` only that have another one.

    The module has nothing of this before and afterwards, so that it can be copied and pickled.
    """
    if parts is None:
        yield
        return

    def train(mode: bool = True) -> nn.Module:
        vars(module).pop("train", None)
        for part in parts:
            if part.training is not mode:
                part.training = mode
        return module

    vars(module)["train"] = train
    try:
        yield
    finally:
        vars(module).pop("train", None)
