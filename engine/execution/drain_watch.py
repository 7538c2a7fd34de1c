"""A warning about a pipeline that is emptied in batch after batch, which makes it as slow as a synchronous one."""

from deepspeed.utils import logger

_IN_A_ROW = 3


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
