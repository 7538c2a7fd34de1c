"""End of a stage's part in the pipeline: with the run, or by a failure, of which all ranks learn."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ds_vpipe.engine.links.groups import is_closed, is_of_collective, is_of_lost_rank
from ds_vpipe.engine.links.link import abort_all
from ds_vpipe.engine.stage import Stage
from ds_vpipe.errors import PipelinePeerError, VPipeError, one_line

_EXIT_GRACE_S = 60.0


class Failures:
    """Failures of one stage, which all ranks learn of, and refusals of what cannot follow one.

    Attributes:
        at_abort: called once the others know.
        refusals: raise what else refuses a call that needs weights and states of one moment; they get its name.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.at_abort: list[Callable[[], None]] = []
        self.refusals: list[Callable[[str], None]] = []

    @contextmanager
    def aborting(self) -> Iterator[None]:
        """Block whose failure ends training on every rank; the end of the data is no failure."""
        try:
            yield
        except BaseException as error:  # once failed, a block within this one has reported it
            if self._stage.failure is None and not isinstance(error, StopIteration):
                self.abort(error)
            raise

    @contextmanager
    def aborting_if_lost(self, call: str) -> Iterator[None]:
        """Block in which only a lost rank ends training: other failures all ranks raise together, and may go on."""
        self._stage.action = call
        try:
            yield
        except RuntimeError as error:
            if is_of_lost_rank(error):
                self.abort(error)
            raise

    def abort(self, error: BaseException) -> None:
        """Report to all ranks why this one stops.

        Raises:
            PipelinePeerError: the error comes from a DeepSpeed collective that another rank's failure has ended.
        """
        try:
            self._report(error)
        finally:
            for end in self.at_abort:
                end()

    def script_failed(self, error: BaseException) -> None:
        """Report to all ranks that the script has failed between two calls; a failure within one is known."""
        if self._stage.failure is None and not self._stage.closed:
            self._stage.action = "the script"
            self.abort(error)

    def _report(self, error: BaseException) -> None:
        stage, failures, me = self._stage, self._stage.groups.failures, self._stage.links.me
        reason = error.reason if isinstance(error, PipelinePeerError) else None
        elsewhere = None
        if reason is None and is_of_collective(error):
            reason = failures.reason()
            elsewhere = f"{me} stopped waiting in {stage.action}: {reason}" if reason is not None else None
            if reason is None and is_of_lost_rank(error):  # all others may be gone, and the store with them
                gone = "one is gone or did not come in time; see the other ranks' logs for the cause"
                elsewhere = reason = f"{me} waited in {stage.action} for other ranks: {gone}"
        if reason is None:
            reason = f"{me} failed in {stage.action}: {one_line(error)}"
        stage.failure = reason
        lost = error.__cause__ if isinstance(error, PipelinePeerError) else error if is_of_lost_rank(error) else None
        failures.publish(reason, by_lost=is_closed(lost))
        abort_all(stage.senders, reason)
        failures.wait_until_seen()
        if elsewhere is not None:
            raise PipelinePeerError(elsewhere, reason) from error

    def refuse(self, call: str) -> None:
        """Refuse a call that may not begin, as :meth:`refuse_closed`, or while a checkpoint is loaded in part."""
        self.refuse_closed(call)
        if self._stage.half_loaded:
            raise VPipeError(
                f"{call} after load_checkpoint() has failed half-way: weights and states may be of different "
                f"checkpoints; load one that is complete"
            )
        for refuse in self.refusals:
            refuse(call)

    def refuse_closed(self, call: str) -> None:
        """Refuse a call after a failure or ``destroy()``, and in the midst of another."""
        if self._stage.failure is not None:
            raise VPipeError(f"{call} after a failure: {self._stage.failure}; restart from a checkpoint")
        if self._stage.closed:
            raise VPipeError(f"{call}: called {self._stage.closed.format(self._stage.action)}")


def finish_sends(stage: Stage) -> None:
    """Wait until the neighbours have received what they still need of this stage; a failure ends that."""
    if stage.failure is not None:
        return
    links, deadline = stage.links, time.monotonic() + _EXIT_GRACE_S
    needed = [*(link.gradients for link in links.before), *stage.ties.gradients_out]
    if stage.progress.drained:  # the end of the data, and the final tied weights
        needed += [*(link.activations for link in links.after), *stage.ties.weights_out]
    for sender in needed:
        sender.wait_for_all(deadline)
    for receiver in stage.ties.weights_in:  # an owner may know of an end of the data that this stage has not met
        receiver.leave()
