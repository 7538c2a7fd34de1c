"""Random generators and buffers, which a pass leaves as they were; settings and hooks of saved tensors around it."""

import random
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy
import torch
from torch import nn

Where = tuple[int, str]
"""A buffer: ``id`` of its module, and its name there."""
_CASTING = ("cpu", "cuda")


def random_states() -> tuple[Any, ...]:
    """States of the generators of torch, the device, numpy and Python."""
    device = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), device, numpy.random.get_state(legacy=False), random.getstate()


def drawn_between(one: tuple[Any, ...], other: tuple[Any, ...], torch_too: bool = True) -> bool:
    """Whether numbers have been drawn between two states."""
    tensors = zip(one[:2], other[:2], strict=True) if torch_too else ()
    same = all(a is b or (a is not None and b is not None and torch.equal(a, b)) for a, b in tensors)
    return not (same and _equal(one[2], other[2]) and one[3] == other[3])


def _equal(one: Any, other: Any) -> bool:
    """Whether states of numpy's generator are the same, of whichever kind it is."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    return bool(numpy.all(one == other))


def restore(state: tuple[Any, ...]) -> None:
    """Go back to a state of the random generators."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.cuda.set_rng_state(state[1])
    numpy.random.set_state(state[2])
    random.setstate(state[3])


@contextmanager
def untouched_generators() -> Iterator[None]:
    """Numbers drawn inside are drawn again afterwards."""
    state = random_states()
    try:
        yield
    finally:
        restore(state)


@contextmanager
def own_buffers(model: nn.Module, only: Collection[Where] | None = None) -> Iterator[dict[Where, torch.Tensor]]:
    """Context in which a module has copies of its buffers, or of some. Yields the copies."""
    kept = [
        (module, key, buffer)
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and (only is None or (id(module), key) in only)
    ]
    copies = {(id(module), key): buffer.clone() for module, key, buffer in kept}
    for module, key, _ in kept:
        module._buffers[key] = copies[id(module), key]
    try:
        yield copies
    finally:
        for module, key, buffer in kept:
            module._buffers[key] = buffer


def buffer_name(model: nn.Module, where: Where) -> str:
    """The words "buffer" and its name in the model."""
    path = next(path for path, module in model.named_modules() if id(module) == where[0])
    return f"buffer {path}.{where[1]}" if path else f"buffer {where[1]}"


def autocast() -> tuple[Any, ...]:
    """Devices on which operations cast here, and to which types."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in _CASTING if torch.is_autocast_enabled(kind))


def casting_as_here() -> Callable[[], AbstractContextManager[Any]]:
    """Factory of contexts that repeat the present autocast, for what runs again in a backward pass."""
    states = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in _CASTING]

    @contextmanager
    def casting() -> Iterator[None]:
        with ExitStack() as stack:
            for state in states:
                stack.enter_context(torch.autocast(*state))
            yield

    return casting


@contextmanager
def put_back_settings() -> Iterator[None]:
    """Context after which gradients and autocast are on or off as before.

    A forward that switches them by calls, and not by ``with``, is ended before it switches them back.
    """
    enabled, cached, before = torch.is_grad_enabled(), torch.is_autocast_cache_enabled(), _nesting()
    casts = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _CASTING]
    try:
        yield
    finally:
        torch.set_grad_enabled(enabled)
        torch.set_autocast_cache_enabled(cached)
        for kind, casting, dtype in casts:
            torch.set_autocast_enabled(kind, casting)
            torch.set_autocast_dtype(kind, dtype)
        for _ in range(_nesting() - before):
            torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()  # of weights, which would be old ones after an update


def _nesting() -> int:
    """Number of open autocast contexts; closing the outermost one drops its cached casts of parameters."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@contextmanager
def saving_nothing() -> Iterator[None]:
    """Inside, graphs save nothing where a checkpointed function counts what they save.

    Pieces are recomputed there, and code before them need not run alike twice: specs of blocks are known the second
    time.
    """
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: None)  # type: ignore[arg-type,return-value]
    with hooks if saved_tensors_hook() else nullcontext():
        yield


def saved_tensors_hook() -> int:
    """Identifies the hook that sees what graphs save here, such as a checkpointed function's. 0 if there is none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return id(hooks[0]) if hooks else 0


def in_a_function() -> bool:
    """Whether a ``torch.autograd.Function``, such as a reentrant checkpointed one, is running."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != torch.autograd.function.__file__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
