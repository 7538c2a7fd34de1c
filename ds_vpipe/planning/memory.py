"""Memory of a stage, split by its use.

The model: a stage holds its weights, the stashed versions of them and optimizer state all the time; gradients from the
first backward pass of a batch, which makes them layer by layer from the last to the first, to the update; for every
micro-batch in flight its input, its output, and what its layers keep for the backward pass; and for a moment the
activations of the recomputed segment, once, and the workspace of the layer that runs. The last k layers of a
stage form the recomputed segment and keep only the segment's input. Tensors between two layers are counted once,
however many layers keep them.

A stage's peak is the largest of these moments: a backward pass at any of its layers, inside the segment or before it,
with the gradients of an earlier micro-batch or, in the first of a batch, without; and the update. All sums are over
prefix sums, so that a planner can look at all splits of a model (:class:`ActivationSums`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_vpipe.planning.layer_profile import ModelProfile
from ds_vpipe.planning.optimizer_bytes import NO_OPTIMIZER, OptimizerBytes
from ds_vpipe.schedules.counts import StageLoad

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StageMemory:
    """Memory of one stage at its peak, in bytes.

    Attributes:
        weights: newest weights.
        versions: stashed versions of them.
        gradients: gradients of the weights, as far as they exist then.
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
        """Bytes held all the time."""
        return self.weights + self.versions + self.gradients + self.optimizer + self.buffers

    @property
    def total(self) -> int:
        """Peak bytes."""
        return self.static + self.activations + self.recompute + self.workspace

    def to_json(self) -> dict[str, int]:
        """Bytes by use, and the total."""
        return {name: int(getattr(self, name)) for name in self.__dataclass_fields__} | {"total": self.total}

    def __add__(self, other: StageMemory) -> StageMemory:
        """Memory of a device that holds both: an upper bound, as if both had their peaks at once."""
        return StageMemory(*(getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class Activations:
    """Bytes of activations, each a number or an array over alternatives.

    Attributes:
        kept: by each micro-batch in flight.
        recomputed: by the recomputed segment, once.
        peak: most that a pass needs beyond ``kept`` of all in flight, if all gradients exist; at least ``recomputed``.
        first_peak: the same for the first backward pass of a batch, less the gradients that do not exist yet.
    """

    kept: Any
    recomputed: Any
    peak: Any
    first_peak: Any

    def beyond(self, load: StageLoad, update: Any) -> Any:
        """Peak bytes beyond ``kept`` of all in flight and all gradients; negative if those never meet.

        Args:
            load: of the stage.
            update: bytes that exist only during an update.
        """
        most = np.maximum(self.first_peak, update - (load.in_flight - load.at_update) * self.kept)
        if load.with_gradients:
            most = np.maximum(most, self.peak - (load.in_flight - load.with_gradients) * self.kept)
        return most


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
        self._workspace = workspace
        trained = column("parameter_bytes") - column("frozen_bytes")
        self._trained: Ints = np.concatenate([zero, np.cumsum(trained)])

    def alternatives(self, starts: Ints, stop: int, gradient: Fraction = Fraction(1)) -> Activations:
        """Stages that begin at each of ``starts`` and end before ``stop``, by where their segment begins.

        Args:
            starts: first layers.
            stop: layer after the last.
            gradient: bytes of gradients per byte of trained weights.

        Returns:
            Arrays ``[stage, cut]``: entry ``[i, j]`` is for a segment that begins at layer ``starts.min() + j``; the
            last one, at ``stop``, for none. Entries whose segment would begin before the stage are meaningless.
        """
        low = int(starts.min())
        cuts = np.arange(low, stop + 1)
        begin = self.inputs[starts] - self._sums[starts]
        output = self.inputs[stop]
        some = cuts < stop
        kept = np.where(cuts > starts[:, None], begin[:, None] + self._closed[cuts], self.inputs[starts][:, None])
        kept = kept + np.where(some, output, 0)
        segment = self.inputs[cuts] - self._sums[np.minimum(cuts, stop)]
        recomputed = np.broadcast_to(np.where(some, segment + self._with_own[stop - 1], 0), kept.shape)
        # Highest of layers [cut, stop): one suffix maximum for all stages. Of [start, cut): a prefix maximum per stage.
        least = np.iinfo(np.int64).min // 4

        def peak(workspace: Ints) -> Ints:
            highest = self._with_own[low:stop] + workspace
            # A layer's workspace has the gradient of its own output; that of the stage's output is there to the end.
            highest[:-1] += output
            in_segment = np.append(np.maximum.accumulate(highest[::-1])[::-1], least)
            reachable = np.where(np.arange(low, stop) >= starts[:, None], highest, least)
            before = np.concatenate(
                [np.full((len(starts), 1), least), np.maximum.accumulate(reachable, axis=1)], axis=1, dtype=np.int64
            )
            found: Ints = np.maximum(segment + in_segment, begin[:, None] + before + output - kept)
            return found

        gradients = self._trained * gradient.numerator // gradient.denominator
        missing = (gradients[stop] - gradients[starts])[:, None]
        # At a layer's highest moment its own gradients are being made: they are in its workspace, or exist at its end.
        workspace = np.maximum(self._workspace[low:stop], np.diff(gradients)[low:stop]) - gradients[low + 1 : stop + 1]
        first = np.maximum(peak(workspace) + gradients[starts][:, None], recomputed - missing)
        return Activations(kept, recomputed, np.maximum(peak(self._workspace[low:stop]), recomputed), first)

    def of_stage(self, start: int, stop: int, recomputed: int, gradient: Fraction = Fraction(1)) -> Activations:
        """Layers ``start`` to ``stop - 1``, the last ``recomputed`` of which are recomputed."""
        table = self.alternatives(np.array([start]), stop, gradient)
        cut = stop - recomputed - start
        return Activations(*(int(column[0, cut]) for column in vars(table).values()))


def scaled(amount: int, ratio: Fraction) -> int:
    """``amount * ratio`` bytes, rounded up."""
    return -(-amount * ratio.numerator // ratio.denominator)


def stage_memory(
    profile: ModelProfile,
    start: int,
    stop: int,
    load: StageLoad,
    optimizer: OptimizerBytes = NO_OPTIMIZER,
    recomputed: int = 0,
    sums: ActivationSums | None = None,
) -> StageMemory:
    """Bytes of the stage with layers ``start`` to ``stop - 1``.

    Args:
        profile: the model's layers.
        start: first layer.
        stop: layer after the last.
        load: most that the schedule holds there.
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
    found = sums.of_stage(start, stop, recomputed, optimizer.gradient)
    largest = max(layer.largest_weight_bytes for layer in layers)
    update = scaled(trained, optimizer.update) + scaled(largest, optimizer.temporary) + optimizer.bucket_bytes
    beyond = int(found.beyond(load, update)) - found.recomputed
    return StageMemory(
        weights=weights,
        versions=(load.versions - 1) * trained,
        gradients=scaled(trained, optimizer.gradient) + min(0, beyond),
        optimizer=scaled(trained, optimizer.held),
        activations=load.in_flight * found.kept,
        recompute=found.recomputed,
        buffers=int(load.input_buffers * sums.inputs[start] + load.output_buffers * sums.inputs[stop]),
        workspace=max(0, beyond),
    )
