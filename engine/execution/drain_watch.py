"""Warnings about scripts that empty the pipeline, or wait for all ranks, in every batch: it is slow then."""

from deepspeed.utils import logger

_IN_A_ROW = 3
_PAUSES_IN_A_ROW = 20
_LONG_PAUSE = 0.25  # as a share of the time from one call's end to the next one's


class DrainWatch:
    """Count of batches in a row after each of which the pipeline was emptied."""

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks  # this rank is the one that warns
        self._latest, self._row = -2, 0
        self.warned = False

    def emptied(self, cause: str, remedy: str, batches: int, again: int) -> None:
        """The pipeline is emptied before or in batch ``batches``, though more is to come.

        Args:
            cause: the call that needs it, or what has ended.
            remedy: what the user can do.
            batches: number of the batch, from 0.
            again: forward passes of all stages that are thrown away for it.
        """
        if batches != self._latest:
            self._row = self._row + 1 if batches == self._latest + 1 else 1
            self._latest = batches
        if self._row < _IN_A_ROW or self.warned:
            return
        self.warned = True
        cost = f"{again} forward passes are thrown away and run again" if again else "it fills and drains"
        if self._speaks:
            logger.warning(
                f"ds_vpipe: {cause} has emptied the pipeline in {_IN_A_ROW} batches in a row: {cost} in every such "
                f"batch, in which stages wait for each other as in a synchronous pipeline; {remedy}"
            )


class PauseWatch:
    """Count of batches in a row before which the script took long on the last stage.

    That stage is the first to return from ``train_batch()``, so that it waits longest where a script lets ranks wait
    for each other. Stages are then no longer ahead of each other, as an asynchronous pipeline needs it.
    """

    def __init__(self, speaks: bool) -> None:
        self._speaks = speaks
        self._end: float | None = None
        self._pauses: list[float] = []

    def after_batch(self, begin: float, end: float) -> None:
        """A call of ``train_batch()`` has lasted from ``begin`` to ``end``, in seconds."""
        if not self._speaks:
            return
        share = 0.0 if self._end is None else (begin - self._end) / max(end - self._end, 1e-9)
        self._end = end
        self._pauses = [*self._pauses, share] if share > _LONG_PAUSE else []
        if len(self._pauses) < _PAUSES_IN_A_ROW:
            return
        self._speaks = False
        taken = sum(self._pauses) / len(self._pauses)
        logger.warning(
            f"ds_vpipe: in {_PAUSES_IN_A_ROW} batches in a row the script took {taken:.0%} of the time on "
            f"the last stage: if it waits for other ranks there, by a barrier or a collective, stages wait as in a "
            f"synchronous pipeline; do that every 50 batches, such as with --log-interval 50"
        )
