"""Thread of a stage for links between devices, whose ends have work while the stage does something else."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

from ds_vpipe.engine.links.device import Accelerator
from ds_vpipe.engine.links.send_thread import Task

_INTERVAL_S = 0.5
_PATIENCE_S = 2.0  # for the thread, once it has to end


class IdleThread:
    """Thread that keeps links going while the stage does something else.

    It calls methods regularly, as long as their objects live, and ends with :meth:`stop` or its last reference.

    Args:
        accelerator: of the stage.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._methods: list[weakref.WeakMethod[Task]] = []
        ended = threading.Event()
        arguments = (accelerator.use, self._methods, ended)
        thread = threading.Thread(target=_work, args=arguments, name="ds_vpipe-idle", daemon=True)
        thread.start()
        self.stop: Callable[[], object] = weakref.finalize(self, _stop, thread, ended)

    def add(self, method: Task) -> None:
        """Call one more method."""
        self._methods.append(weakref.WeakMethod(method))


def _work(use: Callable[[], None], methods: list[weakref.WeakMethod[Task]], ended: threading.Event) -> None:
    with suppress(RuntimeError):  # of a device that has failed; the stage's own thread says so
        use()
    while not ended.wait(_INTERVAL_S):
        for found in list(methods):
            method = found()
            if method is not None:
                with suppress(Exception):  # what takes messages keeps its own; the others have to go on
                    method()
            del method


def _stop(thread: threading.Thread, ended: threading.Event) -> None:
    ended.set()
    if thread is not threading.current_thread():
        thread.join(_PATIENCE_S)
