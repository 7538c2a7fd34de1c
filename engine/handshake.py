"""DeepSpeed's first exchange between neighbouring stages, left out.

``PipelineEngine`` sends a number to its neighbours when it is built, over the default group. This engine has links of
its own: the exchange would only make NCCL build communicators that nobody uses, and where stages compute on
accelerators but the default group is gloo it fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.pipe import p2p

_BUILDING = threading.Lock()  # what is replaced below belongs to the process


@contextmanager
def without_handshake() -> Iterator[None]:
    """Let this thread build an engine that sends nothing to its neighbours; others send as ever."""
    me = threading.get_ident()

    def unless_building(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return None if threading.get_ident() == me else function(*args, **kwargs)

        return call

    with _BUILDING:
        kept = p2p.send, p2p.recv
        p2p.send, p2p.recv = map(unless_building, kept)
        try:
            yield
        finally:
            p2p.send, p2p.recv = kept
