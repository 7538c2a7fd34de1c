"""When the pipeline drains at the beginning of a training, so that gradients become late little by little.

A pipeline that has just been filled with the newest weights has no late gradients; its n-th batch after that is late
by n - 1 updates, up to the delay that its depth gives. So whoever lets it drain now and then bounds the delay. Here
every batch of the first N is followed by a drain (technique 3 of PipeMare, Yang et al., MLSys 2021), and over the next
R updates there are ever more batches between two drains: the filling that begins r updates into those has
2 + floor(r D / R) batches, D the largest delay of all stages, which bounds the delay by one less. The pipeline is not
drained any more after that.

Why a step from no delay to all of it may hurt: with gradients in time the curvature grows to what the learning rate
is just stable for (Cohen et al., Gradient Descent on Neural Networks Typically Occurs at the Edge of Stability, ICLR
2021), and late gradients are stable for less. docs/convergence.md has what was measured.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from ds_vpipe.staleness.settings import Staleness


@dataclass(frozen=True)
class Beginning:
    """The fillings of a pipeline, as batches from one drain to the next; made by :func:`beginning`.

    Attributes:
        synchronous: so many fillings of one batch at first, N.
        starts: first batch of each filling after those; the last one has no end.
    """

    synchronous: int
    starts: tuple[int, ...]

    def filling(self, batch: int) -> tuple[int, int | None]:
        """First batch of the filling that a batch belongs to, and of the next one, None if the pipeline is not drained.

        Args:
            batch: from 0 since the start of training.
        """
        if batch < self.synchronous:
            return batch, batch + 1
        after = bisect_right(self.starts, batch)
        return self.starts[after - 1], self.starts[after] if after < len(self.starts) else None

    def delay(self, batch: int, largest: int) -> int:
        """Updates by which gradients are late at most in the filling that a batch belongs to.

        Args:
            batch: from 0 since the start of training.
            largest: delay of a stage if the pipeline is not drained.
        """
        start, end = self.filling(batch)
        return largest if end is None else min(largest, end - start - 1)


ALWAYS_FULL = Beginning(0, (0,))
"""A pipeline that is never drained."""


def beginning(settings: Staleness | None, delay: int) -> Beginning:
    """What ``synchronous_updates`` and ``delay_warmup_updates`` ask for.

    Args:
        settings: the ``"staleness"`` object, if there is one.
        delay: largest one of all stages in updates, D.
    """
    if settings is None:
        return ALWAYS_FULL
    first, warmup = settings.synchronous_updates, settings.delay_warmup_updates
    starts = [first]
    while delay > 0 and starts[-1] < first + warmup:
        starts.append(starts[-1] + 2 + (starts[-1] - first) * delay // warmup)
    return Beginning(first, tuple(starts))
