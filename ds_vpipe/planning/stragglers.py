"""Stragglers: stages whose own passes take longer than they did, beside those of the other stages.

What is compared are medians of some batches without waiting. A stage's past is the least of them so far. Where all
stages take longer, as with longer sequences, none is a straggler; the stage in the middle says how much all do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_low

_RISEN = 1.25  # factor by which a stage is named
_BACK = 1.12  # factor below which it is none any more
_LEAST_S = 0.001  # a stage is not named for less


@dataclass(frozen=True)
class Straggler:
    """A stage that has become slow, or is no longer."""

    stage: int
    seconds: float  # of its passes per micro-batch, now
    before: float  # at their least
    factor: float  # by which it has become slower beside the others
    slow: bool  # False: it is as fast as the others again

    def line(self, update: int) -> str:
        """The event in one line."""
        what = "is a straggler" if self.slow else "is no straggler any more"
        took = f"{1e3 * self.seconds:.2f} ms per micro-batch, {1e3 * self.before:.2f} ms at best"
        return f"stage {self.stage} {what} at update {update}: its own passes take {took}"


class Stragglers:
    """Comparison of stages with their past."""

    def __init__(self) -> None:
        self._least: list[float] = []
        self._slow: set[int] = set()

    def add(self, seconds: Sequence[float]) -> Iterator[Straggler]:
        """Stages that have become stragglers, or ceased to be, by the seconds of every stage's passes."""
        if not self._least:
            self._least = list(seconds)
        changes = [now / then if then > 0 else 1.0 for now, then in zip(seconds, self._least, strict=True)]
        usual = max(1.0, median_low(changes))
        for stage, (now, change) in enumerate(zip(seconds, changes, strict=True)):
            was, factor = stage in self._slow, change / usual
            risen = factor > _RISEN and now - usual * self._least[stage] > _LEAST_S
            if factor < _BACK if was else risen:
                self._slow ^= {stage}
                yield Straggler(stage, now, self._least[stage], factor, not was)
        self._least = [min(now, then) for now, then in zip(seconds, self._least, strict=True)]
