"""Functions that a forward checkpoints itself, with blocks in them.

torch and DeepSpeed run a checkpointed function again from what it was given. A later stage does not have that if a cut
is inside of the function, so that it is called as it is, and each block that it calls is checkpointed by itself.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils import checkpoint as of_torch

_OF_DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"


@contextmanager
def into_blocks(around: Callable[[], AbstractContextManager[bool]]) -> Iterator[None]:
    """Inside, checkpointed functions run in ``around()``, which says whether they are called as they are.

    However a script has imported ``checkpoint()``, it looks these names up in its module.
    """
    generator, of_deepspeed = of_torch._checkpoint_without_reentrant_generator, sys.modules.get(_OF_DEEPSPEED)

    def generate(
        function: Any, preserve: bool = True, contexts: Any = None, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        if contexts not in (None, of_torch.noop_context_fn):  # which code between the blocks would be without
            yield from generator(function, preserve, contexts, *args, **kwargs)
            return
        with around() as called:
            if called:
                yield
            else:
                yield from generator(function, preserve, of_torch.noop_context_fn, *args, **kwargs)

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


def run(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Outputs of a block that is checkpointed.

    Its second run may come after other micro-batches. It finds attributes of modules, as a forward may set them before
    it calls the block, and states of DeepSpeed's tracker of random numbers as the first did.
    """
    attributes = [(vars(module), dict(vars(module))) for module in block.modules()]
    of_deepspeed = sys.modules.get(_OF_DEEPSPEED)
    tracker = None if of_deepspeed is None else of_deepspeed.get_cuda_rng_tracker()
    states = None if tracker is None else tracker.get_states()

    @contextmanager
    def again() -> Iterator[None]:
        present = [(place, dict(place)) for place, _ in attributes]
        now = None if tracker is None else tracker.get_states()
        _put(attributes)
        if tracker is not None:
            tracker.set_states(states)
        try:
            yield
        finally:
            _put(present)
            if tracker is not None:
                tracker.set_states(now)

    return of_torch.checkpoint(
        partial(block, **kwargs), *args, use_reentrant=False, context_fn=lambda: (nullcontext(), again())
    )


def _put(attributes: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for place, values in attributes:
        place.clear()
        place.update(values)
