"""Delay warm-up: early drains of the pipeline, so that gradients become late little by little.

Just after it was filled with the newest weights, a pipeline has no late gradients; its n-th batch after that is late by
n - 1 updates, up to the delay that its depth gives. Draining now and then therefore bounds the delay. Here every batch
of the first N is followed by a drain (technique 3 of PipeMare, Yang et al., MLSys 2021). Over the next R updates drains
become rarer: the interval that begins r updates into those has 2 + floor(r D / R) batches, D the largest delay of all
stages, which bounds the delay by one less. After that the pipeline is not drained any more.

Why a step from no delay to all of it may hurt: with gradients in time the curvature grows to what the learning rate
is just stable for (Cohen et al., Gradient Descent on Neural Networks Typically Occurs at the Edge of Stability, ICLR
2021), and late gradients are stable for less. docs/convergence.md has what was measured.
"""

from bisect import bisect_right
from dataclasses import dataclass

from typing_extensions import Self

from ds_vpipe.config.staleness import Staleness


@dataclass(frozen=True)
class DelayWarmup:
    """Drain intervals: the batches between two drains. Batches count from 0 since the start of training."""

    synchronous: int  # one-batch intervals at the start, N
    starts: tuple[int, ...]  # first batch of each later interval; the last interval has no end

    @classmethod
    def of(cls, settings: Staleness | None, delay: int) -> Self:
        """Intervals for the ``"staleness"`` object, if there is one, and the largest delay of all stages, D."""
        first, warmup = (0, 0) if settings is None else (settings.synchronous_updates, settings.delay_warmup_updates)
        starts = [first]
        while delay > 0 and starts[-1] < first + warmup:
            starts.append(starts[-1] + 2 + (starts[-1] - first) * delay // warmup)
        return cls(first, tuple(starts))

    def drain_interval(self, batch: int) -> tuple[int, int | None]:
        """First batches of the interval around a batch and of the next one, None without a next drain."""
        if batch < self.synchronous:
            return batch, batch + 1
        after = bisect_right(self.starts, batch)
        return self.starts[after - 1], self.starts[after] if after < len(self.starts) else None


NO_WARMUP = DelayWarmup(0, (0,))  # a pipeline that is never drained
