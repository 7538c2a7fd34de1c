"""End of a stage's part in the pipeline: with the run, or by a failure, of which all ranks learn."""

import time

from ds_vpipe.engine.links.groups import is_of_collective, is_of_lost_rank
from ds_vpipe.engine.links.link import abort_all
from ds_vpipe.engine.stage import Stage
from ds_vpipe.errors import PipelinePeerError

_EXIT_GRACE_S = 60.0


def report_failure(stage: Stage, error: BaseException) -> None:
    """Let all ranks know why this one stops.

    Raises:
        PipelinePeerError: the error comes from a DeepSpeed collective that another rank's failure has ended.
    """
    failures, me = stage.groups.failures, stage.links.me
    reason = error.reason if isinstance(error, PipelinePeerError) else None
    elsewhere = None
    if reason is None and is_of_collective(error):
        reason = failures.reason()
        elsewhere = f"{me} stopped waiting in {stage.action}: {reason}" if reason is not None else None
        if reason is None and is_of_lost_rank(error):  # all others may be gone, and the store with them
            what = f"{me} waited in {stage.action} for other ranks"
            elsewhere = reason = f"{what}: one is gone or did not come in time; see the other ranks' logs for the cause"
    if reason is None:
        text = " ".join(str(error).split())
        reason = f"{me} failed in {stage.action}: {type(error).__name__}: {text}"
    stage.failure = reason
    failures.publish(reason)
    abort_all(stage.senders, reason)
    failures.wait_until_seen()
    if elsewhere is not None:
        raise PipelinePeerError(elsewhere, reason) from error


def finish_sends(stage: Stage) -> None:
    """Wait until the neighbours have received what they still need of this stage; a failure ends that."""
    if stage.failure is not None:
        return
    links, deadline = stage.links, time.monotonic() + _EXIT_GRACE_S
    needed = [*([links.previous.gradients] if links.has_previous else []), *stage.ties.gradients_out]
    if stage.progress.drained:  # the end of the data, and the final tied weights
        needed += [*([links.next.activations] if links.has_next else []), *stage.ties.weights_out]
    for sender in needed:
        sender.wait_for_all(deadline)
