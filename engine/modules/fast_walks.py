"""Training mode of all modules of a stage, set over a list made once and not by a walk in every batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


def parts_to_switch(module: nn.Module) -> tuple[nn.Module, ...] | None:
    """Modules whose mode ``module.train()`` sets; None if any overrides ``train()``."""
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
