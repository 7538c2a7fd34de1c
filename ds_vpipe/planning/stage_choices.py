"""What every stage that a planner may choose costs: seconds and bytes, with the least recomputation that fits.

For each stage, stop and length: the smallest number k of last layers to recompute for which the stage fits its budget,
the seconds of its passes and of that recomputation, and, if nothing fits, by how many bytes the best k fails.
Recomputing fewer layers is never slower, so the smallest k that fits is the best one. O(n w^2 K) vector elements for n
layers, K stages and stages of up to w layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ds_vpipe.planning.memory import Activations, ActivationSums, Ints
from ds_vpipe.planning.optimizer_bytes import OptimizerBytes
from ds_vpipe.planning.residency import Residency
from ds_vpipe.profiles.layer_profile import ModelProfile

UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Choices:
    """Tables ``[stage, stop, length - 1]`` for layers ``stop - length`` to ``stop - 1``.

    Attributes:
        seconds: forward and backward pass and recomputation; infinite where it does not fit or was not looked at.
        recomputed: layers to recompute.
        excess: bytes over the budget at the best number of layers; negative if it fits, infinite if not looked at.
    """

    seconds: npt.NDArray[np.float64]
    recomputed: Ints
    excess: npt.NDArray[np.float64]


class StageCosts:
    """Seconds and bytes of stages of one model on given devices.

    Args:
        profile: the model's layers.
        residencies: what the schedule keeps on each stage.
        budgets: bytes of each stage's device.
        optimizer: what training needs per byte of weights.
        ratios: recompute ratio of each stage, or None to find the smallest that fits.
        partition: layer counts, or None for any.
    """

    def __init__(
        self,
        profile: ModelProfile,
        residencies: Sequence[Residency],
        budgets: Sequence[int],
        optimizer: OptimizerBytes,
        ratios: Sequence[float] | None = None,
        partition: Sequence[int] | None = None,
    ) -> None:
        self.profile = profile
        self._residencies, self._budgets, self._optimizer = residencies, budgets, optimizer
        self._ratios = ratios
        self._stops = None if partition is None else np.cumsum(partition)
        self._counts = partition
        self._sums = ActivationSums(profile)
        self.forward = _prefix([layer.forward_s for layer in profile.layers])
        self.passes = _prefix([layer.forward_s + layer.backward_s for layer in profile.layers])
        weights = [layer.parameter_bytes for layer in profile.layers]
        self._weights = np.concatenate([[0], np.cumsum(weights, dtype=np.int64)])
        trained = [layer.parameter_bytes - layer.frozen_bytes for layer in profile.layers]
        self._trained = np.concatenate([[0], np.cumsum(trained, dtype=np.int64)])
        self._largest = np.array([layer.largest_weight_bytes for layer in profile.layers], dtype=np.int64)

    def choices(self, longest_s: float) -> Choices:
        """All stages whose passes take at most ``longest_s`` seconds.

        With a partition given, just its stages, however long they take.
        """
        n, num_stages = len(self.profile), len(self._residencies)
        lows = np.searchsorted(self.passes, self.passes - longest_s * (1 + 1e-9), side="left")
        if self._counts is not None:
            lows = np.zeros(n + 1, dtype=np.int64)
        lows = np.minimum(lows, np.maximum(0, np.arange(n + 1) - 1))
        width = max(1, int((np.arange(n + 1) - lows).max()))
        shape = (num_stages, n + 1, width)
        seconds, excess = np.full(shape, np.inf), np.full(shape, np.inf)
        recomputed = np.zeros(shape, dtype=np.int64)
        for stop in range(1, n + 1):
            if self._stops is not None and stop not in self._stops:
                continue
            starts = np.arange(int(lows[stop]), stop)
            table = self._sums.alternatives(starts, stop, self._optimizer.gradient)
            cuts = np.arange(starts[0], stop + 1)
            inside = cuts >= starts[:, None]
            weights = self._weights[stop] - self._weights[starts]
            trained = self._trained[stop] - self._trained[starts]
            lengths = stop - starts
            # Every stage before and after has at least one layer.
            for stage in range(max(0, stop + num_stages - 1 - n), min(stop, num_stages)):
                if self._counts is not None and self._stops is not None and self._stops[stage] != stop:
                    continue
                over = self._over(stage, starts, stop, weights, trained, table)
                if self._ratios is None:
                    fits = inside & (over <= 0)
                    again = fits[:, ::-1].argmax(axis=1)  # from no segment on
                    found = fits.any(axis=1)
                    best = np.where(inside, over, UNLIMITED).min(axis=1)
                else:
                    again = np.array([int(self._ratios[stage] * length) for length in lengths])
                    best = over[np.arange(len(starts)), stop - again - starts[0]]
                    found = best <= 0
                if self._counts is not None:
                    found &= lengths == self._counts[stage]
                    best = np.where(lengths == self._counts[stage], best, np.inf)
                cost = self.passes[stop] - self.passes[starts] + self.forward[stop] - self.forward[stop - again]
                seconds[stage, stop, lengths - 1] = np.where(found, cost, np.inf)
                recomputed[stage, stop, lengths - 1] = again
                excess[stage, stop, lengths - 1] = best
        return Choices(seconds, recomputed, excess)

    def _over(self, stage: int, starts: Ints, stop: int, weights: Ints, trained: Ints, table: Activations) -> Ints:
        """Bytes over the budget, ``[start, cut]``; the same sum as :func:`ds_vpipe.planning.memory.stage_memory`."""
        there, optimizer, inputs = self._residencies[stage], self._optimizer, self._sums.inputs
        static = weights + (there.versions - 1) * trained
        static = static + _scaled(trained, optimizer.gradient) + _scaled(trained, optimizer.held)
        static = static + there.input_buffers * inputs[starts] + there.output_buffers * inputs[stop]
        largest = np.maximum.accumulate(self._largest[starts[0] : stop][::-1])[::-1]
        update = _scaled(trained, optimizer.update) + _scaled(largest, optimizer.temporary) + optimizer.bucket_bytes
        over: Ints = (static - self._budgets[stage])[:, None] + there.in_flight * table.kept
        return np.asarray(over + table.beyond(there, update[:, None]))


def _scaled(amounts: Ints, ratio: Fraction) -> Ints:
    result: Ints = -(-amounts * ratio.numerator // ratio.denominator)
    return result


def _prefix(values: Sequence[float]) -> npt.NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
