"""Functions that a forward checkpoints itself, in its blocks or with blocks in them.

torch and DeepSpeed run a checkpointed function again from what it was given, and in a pipeline other micro-batches come
before that: what else it uses is kept for it. Inside of a function with blocks may be a cut, and a later stage has not
what it was given, so that it is called as it is, and each of its blocks is checkpointed by itself.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils import checkpoint as of_torch

_OF_DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"

Around = Callable[[bool], AbstractContextManager[Iterable[nn.Module] | None]]
"""Context of a checkpointed function. Told whether it has contexts of its own, gives the modules whose attributes it
may use, or None if it is called as it is."""


@contextmanager
def followed(around: Around) -> Iterator[None]:
    """Inside, checkpointed functions run in ``around``, and again with what they found.

    However a script has imported ``checkpoint()``, it looks these names up in its module.
    """
    generator, of_deepspeed = of_torch._checkpoint_without_reentrant_generator, sys.modules.get(_OF_DEEPSPEED)

    def generate(
        function: Any, preserve: bool = True, contexts: Any = of_torch.noop_context_fn, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        with around(contexts not in (None, of_torch.noop_context_fn)) as modules:
            if modules is None:
                yield
            else:  # which calls the function only where it runs again
                yield from generator(_as_found(function, modules, 0), preserve, contexts, *args, **kwargs)

    with ExitStack() as patches:
        patches.enter_context(patch.object(of_torch, "_checkpoint_without_reentrant_generator", generate))
        patches.enter_context(patch.object(of_torch, "CheckpointFunction", _Reentrant(around, of_torch)))
        if of_deepspeed is not None:
            patches.enter_context(patch.object(of_deepspeed, "CheckpointFunction", _Reentrant(around, of_deepspeed)))
        yield


class _Reentrant:
    """A module's ``CheckpointFunction``, in the place of the class."""

    def __init__(self, around: Around, module: Any) -> None:
        self._around, self._apply = around, module.CheckpointFunction.apply

    def apply(self, function: Callable[..., Any], other: Any, *args: Any) -> Any:
        """Call the function. ``other`` is whether random states are kept, or DeepSpeed's list for the outputs."""
        with self._around(False) as modules:
            if modules is not None:
                return self._apply(_as_found(function, modules, 1), other, *args)
            outputs = function(*args)
        if isinstance(other, list):
            other += [outputs] if isinstance(outputs, torch.Tensor) else outputs
        return outputs


def _as_found(function: Callable[..., Any], modules: Iterable[nn.Module], first: int) -> Callable[..., Any]:
    """A function that behind its ``first`` calls finds attributes of modules as they are now.

    A forward may set them before each call. So it does states of DeepSpeed's tracker of random numbers.
    """
    attributes = [(module, _attributes(module)) for module in modules]
    of_deepspeed = sys.modules.get(_OF_DEEPSPEED)
    tracker = None if of_deepspeed is None else of_deepspeed.get_cuda_rng_tracker()
    states = None if tracker is None else tracker.get_states()
    calls = 0

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls <= first:
            return function(*args, **kwargs)
        present = [(module, _attributes(module)) for module, _ in attributes]
        now = None if tracker is None else tracker.get_states()
        _put(attributes)
        if tracker is not None:
            tracker.set_states(states)
        try:
            return function(*args, **kwargs)
        finally:
            _put(present)
            if tracker is not None:
                tracker.set_states(now)

    return called


def _attributes(module: nn.Module) -> dict[str, Any]:
    """All but those in the places of parameters, which are other ones in a forward than in a backward pass."""
    return {name: value for name, value in vars(module).items() if name not in module._parameters}


def _put(attributes: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, values in attributes:
        for name in _attributes(module).keys() - values.keys():
            del vars(module)[name]
        vars(module).update(values)
