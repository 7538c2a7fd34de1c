"""The end of a looping script: micro-batches still in flight are trained, and other ranks get what they still need."""

import atexit
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress

import torch
from deepspeed.utils import logger

from ds_vpipe.engine.engine import VPipeEngine
from ds_vpipe.engine.loop.rounds import Rounds
from ds_vpipe.engine.modules.split_module import SplitModule
from ds_vpipe.errors import VPipeError
from ds_vpipe.uncollected import keep_at_end


class ScriptEnd:
    """Last drain of a script that has its own loop, when the interpreter ends.

    ``drain`` trains those on every stage, and takes the name of the call that needs it.
    """

    def __init__(self, engine: VPipeEngine, rounds: Rounds, drain: Callable[[str], None]) -> None:
        self._engine, self._rounds, self._drain = engine, rounds, drain
        self.idle = True  # nothing has been handed in since the last drain
        atexit.register(serve_at_end, weakref.ref(self))

    def expect(self) -> None:
        """Something is in flight from now on. Until it is not, the interpreter keeps the engine for its end."""
        if self.idle:
            self.idle = False
            atexit.register(self.at_end)

    def forget(self) -> None:
        """Nothing is in flight any more."""
        self.idle = True
        atexit.unregister(self.at_end)

    def complete(self) -> None:
        """Train what is in flight for a script that has ended well, while a failure can still be its exit status."""
        known = not self._engine.forked and torch.distributed.is_initialized()
        if not self.idle and known and self._rounds.order.between_rounds:
            self._finish()

    def end_block(self) -> None:
        """As :meth:`complete`, where the process goes on; also serve ranks whose blocks are still saving."""
        stage = self._engine.stage
        alive = torch.distributed.is_initialized() and stage.failure is None and not stage.closed
        if alive and self._rounds.order.between_rounds:
            at_rest = not self.idle
            if at_rest:
                self._drain("the end of the block")
            self.serve(at_rest, for_good=False)

    def _finish(self) -> None:
        self._drain("the end of the script")
        self.serve(True)

    def serve_others(self) -> None:
        """Serve ranks whose scripts are still saving, if nothing is in flight here."""
        if self._engine.forked or self._engine.stage.failure is not None or not torch.distributed.is_initialized():
            return
        if _error_of_script() is None and self._rounds.order.between_rounds and self.idle:
            self.serve(False)

    def serve(self, at_rest: bool, for_good: bool = True) -> None:
        """Take part in calls of ranks whose scripts go on; ``for_good``: no rank makes any afterwards."""
        whole_model, split = self._engine.whole_model, self._engine.module
        if whole_model.alone or not isinstance(split, SplitModule):
            return
        with suppress(VPipeError):  # they have a line of their own
            whole_model.serve(split.own_state, at_rest)
        if for_good:
            whole_model.leave()
            whole_model.alone = True

    def at_end(self) -> None:
        """Train what is in flight, if the script ends between two rounds."""
        engine = self._engine
        if engine.forked:
            keep_at_end()
            return
        if not torch.distributed.is_initialized():
            logger.warning(
                "ds_vpipe: the process group was destroyed with micro-batches in flight, which are not trained on all "
                "stages; call engine.destroy() before"
            )
            keep_at_end()  # collected while the interpreter goes down, graphs in flight would end it with torch's abort
            return
        failed = _error_of_script()
        if failed is not None:
            engine.failures.script_failed(failed)
        elif self._rounds.order.between_rounds:
            try:
                self._finish()
            except Exception as error:
                logger.error(f"ds_vpipe: the last micro-batches are not trained on all stages: {error}")
        else:
            logger.warning(
                "ds_vpipe: the script ended between engine(...) and engine.step(), so that the micro-batches in flight "
                "are not trained on all stages; call engine.backward(loss) and engine.step() first"
            )
            keep_at_end()


def _error_of_script() -> BaseException | None:
    failed: BaseException | None = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return failed


def serve_at_end(end: weakref.ref[ScriptEnd]) -> None:
    """At the end of the interpreter, let other ranks have what they need."""
    alive = end()
    if alive is not None:
        alive.serve_others()
