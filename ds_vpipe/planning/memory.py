"""Bytes that a stage needs, split into what they are for.

The model: a stage holds its weights, the stashed versions of them, gradients and optimizer state all the time; for
every micro-batch in flight its input, its output, and what its layers keep for the backward pass; and for a moment the
activations of the recomputed segment, once, and the workspace of the layer that runs. The last k layers of a
stage form the recomputed segment and keep only the segment's input. Tensors between two layers are counted once,
however many layers keep them.

A stage's peak is the largest of three moments: a backward pass inside the segment, one before it, and
the update. All sums are over prefix sums, so that a planner can look at all splits of a model
(:class:`ActivationSums`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_vpipe.planning.optimizer_bytes import NO_OPTIMIZER, OptimizerBytes
from ds_vpipe.planning.residency import Residency
from ds_vpipe.profiles.layer_profile import ModelProfile

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage at its peak.

    Attributes:
        weights: newest weights.
        versions: stashed versions of them.
        gradients: gradients of the weights.
        optimizer: optimizer state and master weights.
        activations: what all micro-batches in flight keep, stage inputs and outputs included.
        recompute: activations of the recomputed segment, which exist once during its backward pass.
        buffers: messages being sent and received.
        workspace: what exists beyond that for a moment, in a pass or in the update.
    """

    weights: int = 0
    versions: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    recompute: int = 0
    buffers: int = 0
    workspace: int = 0

    @property
    def static(self) -> int:
        """What is there all the time."""
        return self.weights + self.versions + self.gradients + self.optimizer + self.buffers

    @property
    def total(self) -> int:
        """The peak."""
        return self.static + self.activations + self.recompute + self.workspace

    def to_json(self) -> dict[str, int]:
        """By name, and the total."""
        return {name: int(getattr(self, name)) for name in self.__dataclass_fields__} | {"total": self.total}

    def __add__(self, other: StageMemory) -> StageMemory:
        """Of a device that holds both; an upper bound, as if both had their peaks at once."""
        return StageMemory(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Activations:
    """Bytes of activations, each a number or an array over alternatives.

    Attributes:
        kept: by each micro-batch in flight.
        recomputed: by the recomputed segment, once.
        peak: most that a pass needs beyond ``kept`` of all in flight; at least ``recomputed``.
    """

    kept: Any
    recomputed: Any
    peak: Any


class ActivationSums:
    """Activations of any stage of a model, in constant time per alternative.

    Args:
        profile: the model's layers.
    """

    def __init__(self, profile: ModelProfile) -> None:
        def column(name: str) -> Ints:
            return np.array([getattr(layer, name) for layer in profile.layers], dtype=np.int64)

        activation, output_kept = column("activation_bytes"), column("output_kept_bytes")
        boundary, workspace = column("boundary_bytes"), column("workspace_bytes")
        next_keeps = np.append(column("input_kept_bytes")[1:], 0)
        own = activation - output_kept
        zero = np.zeros(1, dtype=np.int64)
        self.inputs: Ints = np.concatenate([[profile.input_bytes], boundary])
        """Bytes at each cut: input of the stage that begins there, output of the one that ends there."""
        self._sums: Ints = np.concatenate([zero, np.cumsum(own + np.maximum(output_kept, next_keeps))])
        self._closed: Ints = np.concatenate([zero, self._sums[:-1] + own + np.maximum(output_kept, boundary)])
        self._with_own: Ints = self._sums[:-1] + activation
        self._highest: Ints = self._with_own + workspace

    def alternatives(self, starts: Ints, stop: int) -> Activations:
        """Stages that begin at each of ``starts`` and end before ``stop``, by where their segment begins.

        Returns:
            Arrays ``[stage, cut]``: entry ``[i, j]`` is for a segment that begins at layer ``starts.min() + j``; the
            last one, at ``stop``, for none. Entries whose segment would begin before the stage are meaningless.
        """
        low = int(starts.min())
        cuts = np.arange(low, stop + 1)
        # A layer's workspace has the gradient of its own output; that of the stage's output is there until the end.
        highest = self._highest[low:stop] + self.inputs[stop]
        highest[-1] -= self.inputs[stop]
        # Highest of layers [cut, stop): one suffix maximum for all stages. Of [start, cut): a prefix maximum per stage.
        least = np.iinfo(np.int64).min // 4
        in_segment = np.append(np.maximum.accumulate(highest[::-1])[::-1], least)
        reachable = np.where(np.arange(low, stop) >= starts[:, None], highest, least)
        before = np.concatenate(
            [np.full((len(starts), 1), least), np.maximum.accumulate(reachable, axis=1)], axis=1, dtype=np.int64
        )
        begin = self.inputs[starts] - self._sums[starts]
        output = self.inputs[stop]
        some = cuts < stop
        kept = np.where(cuts > starts[:, None], begin[:, None] + self._closed[cuts], self.inputs[starts][:, None])
        kept = kept + np.where(some, output, 0)
        segment = self.inputs[cuts] - self._sums[np.minimum(cuts, stop)]
        recomputed = np.where(some, segment + self._with_own[stop - 1], 0)
        peak = np.maximum(segment + in_segment, begin[:, None] + before + output - kept)
        return Activations(kept, np.broadcast_to(recomputed, kept.shape), np.maximum(peak, recomputed))

    def of_stage(self, start: int, stop: int, recomputed: int) -> Activations:
        """Layers ``start`` to ``stop - 1``, the last ``recomputed`` of which are recomputed."""
        table = self.alternatives(np.array([start]), stop)
        cut = stop - recomputed - start
        return Activations(int(table.kept[0, cut]), int(table.recomputed[0, cut]), int(table.peak[0, cut]))


def scaled(amount: int, ratio: Fraction) -> int:
    """``amount * ratio`` bytes, rounded up."""
    return -(-amount * ratio.numerator // ratio.denominator)


def stage_memory(
    profile: ModelProfile,
    start: int,
    stop: int,
    residency: Residency,
    optimizer: OptimizerBytes = NO_OPTIMIZER,
    recomputed: int = 0,
    sums: ActivationSums | None = None,
) -> StageMemory:
    """Bytes of the stage with layers ``start`` to ``stop - 1``.

    Args:
        profile: the model's layers.
        start: first layer.
        stop: layer after the last.
        residency: what the schedule keeps there, see :func:`ds_vpipe.planning.residency.residency`.
        optimizer: what training needs per byte of weights.
        recomputed: how many of its last layers are recomputed.
        sums: ``ActivationSums(profile)``, if it is at hand.

    Raises:
        ValueError: there are no such layers.
    """
    if not 0 <= start < stop <= len(profile) or not 0 <= recomputed <= stop - start:
        raise ValueError(
            f"stage: got layers {start} to {stop} with {recomputed} recomputed; allowed: within 0 to {len(profile)}"
        )
    sums = sums or ActivationSums(profile)
    layers = profile.layers[start:stop]
    weights = sum(layer.parameter_bytes for layer in layers)
    trained = weights - sum(layer.frozen_bytes for layer in layers)
    found = sums.of_stage(start, stop, recomputed)
    update = scaled(trained, optimizer.update) + optimizer.bucket_bytes
    update -= (residency.in_flight - residency.at_update) * found.kept
    return StageMemory(
        weights=weights,
        versions=(residency.versions - 1) * trained,
        gradients=scaled(trained, optimizer.gradient),
        optimizer=scaled(trained, optimizer.held),
        activations=residency.in_flight * found.kept,
        recompute=found.recomputed,
        buffers=int(residency.input_buffers * sums.inputs[start] + residency.output_buffers * sums.inputs[stop]),
        workspace=max(found.peak, update) - found.recomputed,
    )


def model_memory(
    profile: ModelProfile,
    partition: Sequence[int],
    residencies: Sequence[Residency],
    optimizer: OptimizerBytes = NO_OPTIMIZER,
    recomputed: Sequence[int] | None = None,
) -> tuple[StageMemory, ...]:
    """:func:`stage_memory` of every stage of a partition."""
    sums, start, result = ActivationSums(profile), 0, []
    for stage, count in enumerate(partition):
        again = 0 if recomputed is None else recomputed[stage]
        result.append(stage_memory(profile, start, start + count, residencies[stage], optimizer, again, sums))
        start += count
    return tuple(result)
