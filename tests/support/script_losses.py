"""Losses that a looping script knows after each of its rounds, by the rules of the schedule."""

from __future__ import annotations

from ds_vpipe.schedules.one_f_one_b import Progress
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.rounds import waits_for_loss


def delay_of_losses(pipeline: Pipeline, rank: int) -> int:
    """How far behind the newest micro-batch is whose gradient arrives in the forward portion of a round."""
    here, after = pipeline.depths[rank], pipeline.depths[rank + 1]
    return here + (0 if here > after else 1)


def loss_known(pipeline: Pipeline, rank: int, progress: Progress) -> int:
    """The newest micro-batch whose loss ``rank`` knows at the end of the forward portion, without any other wait.

    ``progress`` is where it stood before. Beyond the losses that it has waited for, it knows those of micro-batches
    whose gradients have arrived.
    """
    handed = progress.forwarded
    if rank == pipeline.num_stages - 1 or waits_for_loss(pipeline, rank, progress):
        return handed
    delay = delay_of_losses(pipeline, rank)
    return max(progress.filled_from + delay - 1, handed - delay)
