"""Functions that a forward checkpoints itself, in its blocks or with blocks in them.

torch and DeepSpeed run a checkpointed function again from what it was given, and in a pipeline other micro-batches come
before that: attributes and buffers that it uses are kept for it. Inside of a function with blocks may be a cut, and a
later stage has not what it was given, so that it is called as it is, and each of its blocks is checkpointed by itself.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint as of_torch

from ds_vpipe.splitting.guards import casting_as_here

_OF_DEEPSPEED = "deepspeed.runtime.activation_checkpointing.checkpointing"

Around = Callable[[bool], AbstractContextManager[Iterable[nn.Module] | None]]
"""Context of a checkpointed function. Told whether it has contexts of its own, gives the modules whose attributes it
may use, or None if it is called as it is."""


@contextmanager
def followed(around: Around) -> Iterator[None]:
    """Inside, checkpointed functions run in ``around``, and again with what they found.

    However a script has imported ``checkpoint()``, it looks these names up in its module.
    """
    ours: list[tuple[Any, str, Any]] = [
        (of_torch, "_checkpoint_without_reentrant_generator", _Generator(around)),
        (of_torch, "CheckpointFunction", _Reentrant(around, of_torch)),
    ]
    if (of_deepspeed := sys.modules.get(_OF_DEEPSPEED)) is not None:
        ours.append((of_deepspeed, "CheckpointFunction", _Reentrant(around, of_deepspeed)))
    theirs = [(module, name, getattr(module, name)) for module, name, _ in ours]
    try:
        for replaced in ours:  # unittest.mock's patch() would take ten times as long, for every pass
            setattr(*replaced)
        yield
    finally:
        for kept in theirs:
            setattr(*kept)


class _Generator:
    """Torch's generator for functions that are not reentrant, which goes on behind the function's first call."""

    def __init__(self, around: Around) -> None:
        self._around, self._generator = around, of_torch._checkpoint_without_reentrant_generator

    def __call__(
        self, function: Any, preserve: bool = True, contexts: Any = of_torch.noop_context_fn, *args: Any, **kwargs: Any
    ) -> Iterator[None]:
        with self._around(contexts not in (None, of_torch.noop_context_fn)) as modules:
            if modules is None:
                yield
            else:  # which calls the function only where it runs again
                yield from self._generator(_as_found(function, modules, 0), preserve, contexts, *args, **kwargs)


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
    """A function that after its ``first`` calls finds modules as they are now.

    A forward may set attributes and buffers before each call. States of DeepSpeed's tracker of random numbers are
    treated alike, and autocast, which DeepSpeed's function does not know.
    """
    known, casting = list(modules), casting_as_here()
    found, calls = _kept(known), 0
    of_deepspeed = sys.modules.get(_OF_DEEPSPEED)
    tracker = None if of_deepspeed is None else of_deepspeed.get_cuda_rng_tracker()
    states = None if tracker is None else tracker.get_states()

    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls <= first:
            return function(*args, **kwargs)
        present, now = _kept(known), None if tracker is None else tracker.get_states()
        _put(found)
        if tracker is not None:
            tracker.set_states(states)
        try:
            with casting(), followed(lambda _: nullcontext(known)):  # functions that are checkpointed within this one
                return function(*args, **kwargs)
        finally:
            _put(present)
            if tracker is not None:
                tracker.set_states(now)
            # A reentrant function's graph keeps this closure, and an attribute's may be that of the one before.
            if first and not torch._C._autograd._get_current_graph_task_keep_graph():
                found.clear()

    return called


def _kept(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], Mapping[str, Any], dict[str, Any]]]:
    """Attributes and buffers, but for what is in the places of parameters, which differs in a backward pass."""
    places: Iterable[tuple[dict[str, Any], Mapping[str, Any]]] = (
        (place, module._parameters) for module in modules for place in (vars(module), module._buffers)
    )
    return [(place, other, {n: value for n, value in place.items() if n not in other}) for place, other in places]


def _put(kept: list[tuple[dict[str, Any], Mapping[str, Any], dict[str, Any]]]) -> None:
    for place, other, values in kept:
        for name in [name for name in place if name not in values and name not in other]:
            del place[name]
        place.update(values)
