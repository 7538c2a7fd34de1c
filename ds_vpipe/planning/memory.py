"""Memory of a stage, split by its use.

The model: a stage holds its weights, the stashed versions of them and optimizer state all the time; gradients from the
first backward pass of a batch, which makes them layer by layer from the last to the first, to the update; for every
micro-batch in flight its input, its output, and what its layers keep for the backward pass; and for a moment the
activations of the recomputed segment, once, and the workspace of the layer that runs. The last k layers of a
stage form the recomputed segment and keep only the segment's input. Tensors between two layers are counted once,
however many layers keep them.

A stage's peak is the largest of these moments: a backward pass at any of its layers, inside the segment or before it,
with the gradients of an earlier micro-batch or, in the first of a batch, without; and the update. All sums are over
prefix sums, so that a planner can look at all splits of a model (:class:`MemoryModel`).
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from operator import add
from typing import Any

import numpy as np
import numpy.typing as npt

from ds_vpipe.planning.devices import NO_OPTIMIZER, OptimizerBytes
from ds_vpipe.planning.layer_profile import ModelProfile
from ds_vpipe.schedules.counts import StageLoad

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class StageMemory:
    """Memory of one stage at its peak, in bytes; arrays for alternatives of a stage.

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

    weights: Any = 0
    versions: Any = 0
    gradients: Any = 0
    optimizer: Any = 0
    activations: Any = 0
    recompute: Any = 0
    buffers: Any = 0
    workspace: Any = 0

    @property
    def static(self) -> Any:
        """Bytes held all the time."""
        return self.weights + self.versions + self.gradients + self.optimizer + self.buffers

    @property
    def total(self) -> Any:
        """Peak bytes."""
        return self.static + self.activations + self.recompute + self.workspace

    def to_json(self) -> dict[str, int]:
        """Bytes by use, and the total."""
        return {**vars(self), "total": self.total}

    def __add__(self, other: StageMemory) -> StageMemory:
        """Memory of a device that holds both: an upper bound, as if both had their peaks at once."""
        return StageMemory(*map(add, vars(self).values(), vars(other).values()))


@dataclass(frozen=True)
class Alternatives:
    """Stages that end at one layer, by their first layer and by where the recomputed segment begins.

    Arrays ``[start, cut]``, the second dimension being 1 where the segment does not matter. Entries whose segment would
    begin before the stage are meaningless.

    Attributes:
        weights: bytes of weights.
        trained: those of them that are trained.
        gradients: all gradients.
        held: optimizer state and master weights.
        update: what exists only during an update.
        inputs: the stage's input.
        outputs: the stage's output.
        kept: activations of each micro-batch in flight.
        recomputed: activations of the recomputed segment, once.
        peak: most that a pass needs beyond ``kept`` of all in flight, if all gradients exist; at least ``recomputed``.
        first_peak: the same for the first backward pass of a batch, less the gradients that do not exist yet.
    """

    weights: Ints
    trained: Ints
    gradients: Ints
    held: Ints
    update: Ints
    inputs: Ints
    outputs: Ints
    kept: Ints
    recomputed: Ints
    peak: Ints
    first_peak: Ints

    def memory(self, load: StageLoad) -> StageMemory:
        """Memory under the most that a schedule holds."""
        # Beyond what all in flight keep and all gradients; negative if those never meet.
        beyond = np.maximum(self.first_peak, self.update - (load.in_flight - load.at_update) * self.kept)
        if load.with_gradients:
            beyond = np.maximum(beyond, self.peak - (load.in_flight - load.with_gradients) * self.kept)
        beyond = beyond - self.recomputed
        return StageMemory(
            weights=self.weights,
            versions=(load.versions - 1) * self.trained,
            gradients=self.gradients + np.minimum(0, beyond),
            optimizer=self.held,
            activations=load.in_flight * self.kept,
            recompute=self.recomputed,
            buffers=load.input_buffers * self.inputs + load.output_buffers * self.outputs,
            workspace=np.maximum(0, beyond),
        )


class MemoryModel:
    """Memory of any stage of a model, in constant time per alternative.

    Args:
        profile: the model's layers.
        optimizer: what training needs per byte of weights.
    """

    def __init__(self, profile: ModelProfile, optimizer: OptimizerBytes = NO_OPTIMIZER) -> None:
        def column(name: str) -> Ints:
            return np.array([getattr(layer, name) for layer in profile.layers], dtype=np.int64)

        def sums(values: Ints) -> Ints:
            return np.concatenate([[0], np.cumsum(values)])

        activation, output_kept = column("activation_bytes"), column("output_kept_bytes")
        boundary = column("boundary_bytes")
        next_keeps = np.append(column("input_kept_bytes")[1:], 0)
        own = activation - output_kept
        self._optimizer = optimizer
        self._at_cut: Ints = np.concatenate([[profile.input_bytes], boundary])
        self._kept = sums(own + np.maximum(output_kept, next_keeps))
        self._closed: Ints = np.concatenate([[0], self._kept[:-1] + own + np.maximum(output_kept, boundary)])
        self._with_own: Ints = self._kept[:-1] + activation
        self._workspace = column("workspace_bytes")
        self._weights = sums(column("parameter_bytes"))
        self._trained = sums(column("parameter_bytes") - column("frozen_bytes"))
        self._largest = column("largest_weight_bytes")

    def alternatives(self, starts: Ints, stop: int) -> Alternatives:
        """Stages that begin at each of ``starts`` and end before layer ``stop``.

        Column ``j`` is for a segment that begins at layer ``starts.min() + j``; the last one, at ``stop``, for none.
        """
        low = int(starts.min())
        cuts = np.arange(low, stop + 1)
        begin = self._at_cut[starts] - self._kept[starts]
        output = self._at_cut[stop]
        some = cuts < stop
        kept = np.where(cuts > starts[:, None], begin[:, None] + self._closed[cuts], self._at_cut[starts][:, None])
        kept = kept + np.where(some, output, 0)
        segment = self._at_cut[cuts] - self._kept[np.minimum(cuts, stop)]
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

        ratio, trained = self._optimizer.gradient, (self._trained[stop] - self._trained[starts])[:, None]
        gradients = self._trained * ratio.numerator // ratio.denominator
        missing = (gradients[stop] - gradients[starts])[:, None]
        # At a layer's highest moment its own gradients are being made: they are in its workspace, or exist at its end.
        workspace = np.maximum(self._workspace[low:stop], np.diff(gradients)[low:stop]) - gradients[low + 1 : stop + 1]
        first = np.maximum(peak(workspace) + gradients[starts][:, None], recomputed - missing)
        largest = np.maximum.accumulate(self._largest[low:stop][::-1])[::-1][starts - low, None]
        update = _scaled(trained, self._optimizer.update) + _scaled(largest, self._optimizer.temporary)
        return Alternatives(
            weights=(self._weights[stop] - self._weights[starts])[:, None],
            trained=trained,
            gradients=_scaled(trained, ratio),
            held=_scaled(trained, self._optimizer.held),
            update=update + self._optimizer.bucket_bytes,
            inputs=self._at_cut[starts][:, None],
            outputs=output,
            kept=kept,
            recomputed=recomputed,
            peak=np.maximum(peak(self._workspace[low:stop]), recomputed),
            first_peak=first,
        )


def stage_memory(
    profile: ModelProfile,
    start: int,
    stop: int,
    load: StageLoad,
    optimizer: OptimizerBytes = NO_OPTIMIZER,
    recomputed: int = 0,
) -> StageMemory:
    """Bytes of the stage with layers ``start`` to ``stop - 1``, the last ``recomputed`` of which are recomputed.

    Raises:
        ValueError: there are no such layers.
    """
    if not 0 <= start < stop <= len(profile) or not 0 <= recomputed <= stop - start:
        raise ValueError(
            f"stage: got layers {start} to {stop} with {recomputed} recomputed; allowed: within 0 to {len(profile)}"
        )
    table = MemoryModel(profile, optimizer).alternatives(np.array([start]), stop).memory(load)
    columns = np.broadcast_arrays(*vars(table).values())
    return StageMemory(*(int(column[0, stop - recomputed - start]) for column in columns))


def _scaled(amounts: Ints, ratio: Fraction) -> Ints:
    """``amounts * ratio`` bytes, rounded up."""
    return -(-amounts * ratio.numerator // ratio.denominator)
