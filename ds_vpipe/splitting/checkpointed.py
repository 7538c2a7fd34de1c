"""Functions that a forward checkpoints itself, with blocks in them.

torch and DeepSpeed run a checkpointed function again from what it was given. A later stage does not have that if a cut
is inside of the function, so that it is called as it is, and each block that it calls is checkpointed by itself.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import checkpoint as of_torch

_OF_DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"


@contextmanager
def into_blocks(around: Callable[[], AbstractContextManager[bool]]) -> Iterator[None]:
    """Inside, checkpointed functions run in ``around()``, which says whether they are called as they are.

    However a script has imported ``checkpoint()``, it looks these names up in its module.
    """
    generator, of_deepspeed = of_torch._checkpoint_without_reentrant_generator, sys.modules.get(_OF_DEEPSPEED)

    def generate(*args: Any, **kwargs: Any) -> Iterator[None]:
        with around() as called:
            if called:
                yield
            else:
                yield from generator(*args, **kwargs)

    with ExitStack() as patches:
        patches.enter_context(patch.object(of_torch, "_checkpoint_without_reentrant_generator", generate))
        patches.enter_context(patch.object(of_torch, "CheckpointFunction", _Reentrant(around, of_torch)))
        if of_deepspeed is not None:
            patches.enter_context(patch.object(of_deepspeed, "CheckpointFunction", _Reentrant(around, of_deepspeed)))
        yield


class _Reentrant:
    """A module's ``CheckpointFunction``, in the place of the class."""

    def __init__(self, around: Callable[[], AbstractContextManager[bool]], module: Any) -> None:
        self._around, self._apply = around, module.CheckpointFunction.apply

    def apply(self, function: Callable[..., Any], other: Any, *args: Any) -> Any:
        """Call the function. ``other`` is whether random states are kept, or DeepSpeed's list for the outputs."""
        with self._around() as called:
            if not called:
                return self._apply(function, other, *args)
            outputs = function(*args)
        if isinstance(other, list):
            other += [outputs] if isinstance(outputs, torch.Tensor) else outputs
        return outputs
