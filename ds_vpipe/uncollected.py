"""Imports that Python's collector of garbage leaves alone.

Torch, DeepSpeed and what they import are a million objects, hardly any of them garbage. The collector would look at all
of them several times on the way, and again when the process ends.
"""

import atexit
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected(*, for_good: bool) -> Iterator[None]:
    """Context in which no garbage is collected.

    Args:
        for_good: the collector never looks at what there is by the end of it, so that cycles in it stay as long as the
            process: for one that has done nothing but import.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
        if for_good:
            freeze()
    finally:
        if collects:
            gc.enable()


def freeze() -> None:
    """Let the collector look at nothing that there is now, but for Triton's sake when the process ends."""
    gc.freeze()
    atexit.register(_unfreeze_for_triton)


def keep_at_end() -> None:
    """Let the collector look at nothing that there is now, not even when the process ends."""
    atexit.unregister(_unfreeze_for_triton)
    gc.freeze()


def _unfreeze_for_triton() -> None:
    if "triton" in sys.modules:  # it lists, line by line, what it finds alive at the end
        gc.unfreeze()
