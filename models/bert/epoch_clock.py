"""How long epochs take, and the progress line that users of PipeDream and vPipe read it from."""

import math

_SECONDS_PER_HOUR = 3600.0
_BYTES_PER_GB = 1e9


class EpochClock:
    """Seconds and losses of the updates of this run, by epoch.

    Args:
        steps_per_epoch: updates in an epoch, not necessarily a whole number.
    """

    def __init__(self, steps_per_epoch: float) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._epoch = -1
        self._epoch_seconds = 0.0
        self._epoch_losses: list[float] = []
        self._seconds = 0.0
        self._steps = 0

    def add(self, epoch: int, steps: int, seconds: float, losses: list[float]) -> None:
        """Note some updates that took so many seconds in all, the last of them in `epoch`."""
        if epoch != self._epoch:
            self._epoch, self._epoch_seconds, self._epoch_losses = epoch, 0.0, []
        self._epoch_seconds += seconds
        self._epoch_losses += losses
        self._seconds += seconds
        self._steps += steps

    @property
    def epoch_hours(self) -> float:
        """Estimated hours of training in a whole epoch."""
        return self._seconds / self._steps * self._steps_per_epoch / _SECONDS_PER_HOUR

    def line(self, stage: int, step: int, seconds: float, loss: float, memory: tuple[int, int] | None = None) -> str:
        """The progress line.

        Args:
            stage: whose memory it tells.
            step: updates of the whole run, this one counted.
            seconds: of an update, lately.
            loss: lately.
            memory: bytes, the most of this stage and the most of any stage.
        """
        first = int(self._epoch * self._steps_per_epoch)
        parts = [
            f"Stage: [{stage}] Epoch: [{self._epoch}][{step - first}/{math.ceil(self._steps_per_epoch)}]",
            f"Time: {seconds:.3f} ({self._seconds / self._steps:.3f})",
            f"Epoch time [hr]: {self._epoch_seconds / _SECONDS_PER_HOUR:.3f} ({self.epoch_hours:.3f})",
        ]
        if memory is not None:
            parts.append(f"Memory: {memory[0] / _BYTES_PER_GB:.3f} ({memory[1] / _BYTES_PER_GB:.3f})")
        parts.append(f"Loss: {loss:.4f} ({sum(self._epoch_losses) / len(self._epoch_losses):.4f})")
        return "\t".join(parts)
