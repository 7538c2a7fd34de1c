"""Memory of a stage, split by its use.

The model: a stage holds its weights, the stashed versions of them and optimizer state all the time; gradients from the
first backward pass of a batch, which makes them layer by layer from the last to the first, to the update; for every
micro-batch in flight its input, its output, and what its layers keep for the backward pass; and for a moment the
activations of the recomputed segment, once, and the workspace of the layer that runs. The last k layers of a
stage form the recomputed segment and keep only the segment's input. What the first ones keep may be swapped: then it is
on the host unless one of the micro-batch's passes runs. It leaves out their input and output, which stay. Tensors
between two layers are counted once, however many layers keep them.

A stage's peak is the largest of these moments: a backward pass at any of its layers, inside the segment or before it,
with the gradients of an earlier micro-batch or, in the first of a batch, without; and the update. All sums are over
prefix sums, so that a planner can look at all splits of a model (:class:`MemoryModel`).
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Memory of one stage at its peak, in bytes. Arrays for alternatives of a stage."""

    weights: Any = 0  # newest weights
    versions: Any = 0  # stashed versions of them
    gradients: Any = 0  # gradients of the weights, as far as they exist then
    optimizer: Any = 0  # optimizer state and master weights
    activations: Any = 0  # what all micro-batches in flight keep, stage inputs and outputs included
    recompute: Any = 0  # activations of the recomputed segment, which exist once during its backward pass
    buffers: Any = 0  # messages being sent and received
    workspace: Any = 0  # what exists beyond that for a moment, in a pass or in the update

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


class MemoryModel:
    """Memory of any stage of a model, in constant time per alternative."""

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
        # [i]: the tensor between layers i-1 and i
        self._at_cut: Ints = np.concatenate([[profile.input_bytes], boundary])
        # [i]: kept by the layers before i, each tensor between two of them once
        self._kept = sums(own + np.maximum(output_kept, next_keeps))
        # [i]: the same if a recomputed segment begins at i, whose input is kept whole
        self._closed: Ints = np.concatenate([[0], self._kept[:-1] + own + np.maximum(output_kept, boundary)])
        # [i]: kept once layer i has run
        self._with_own: Ints = self._kept[:-1] + activation
        # [i]: kept by the layers before i, without the output of layer i-1, which is not swapped
        self._inner: Ints = np.concatenate([[0], self._kept[:-1] + own])
        self._workspace = column("workspace_bytes")
        self._weights = sums(column("parameter_bytes"))
        self._trained = sums(column("parameter_bytes") - column("frozen_bytes"))
        self._largest = column("largest_weight_bytes")

    def swapped(self, starts: Any, ends: Any) -> Any:
        """Bytes of a micro-batch that leave the device if layers ``starts`` to ``ends - 1`` are swapped."""
        return np.where(ends > starts, self._inner[ends] - self._kept[starts], 0)

    def alternatives(self, starts: Ints, stop: int) -> Callable[[StageLoad, Any], StageMemory]:
        """Memory of stages from each of ``starts`` to before ``stop``, by a schedule's load.

        Arrays ``[start, cut]``: column ``j`` is for a recomputed segment that begins at layer ``starts.min() + j``, the
        last one, at ``stop``, for none. Entries whose segment would begin before the stage are meaningless.
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

        optimizer, trained = self._optimizer, (self._trained[stop] - self._trained[starts])[:, None]
        made = self._trained  # gradients, as large as the weights
        # At a layer's highest moment its own gradients are being made: they are in its workspace, or exist at its end.
        workspace = np.maximum(self._workspace[low:stop], np.diff(made)[low:stop]) - made[low + 1 : stop + 1]
        # Most that a pass needs beyond what is kept of all in flight: in the first backward pass of a batch, less the
        # gradients that do not exist yet, and in others, where all exist; and what exists only during an update.
        first = np.maximum(peak(workspace) + made[starts][:, None], recomputed - trained)
        others = np.maximum(peak(self._workspace[low:stop]), recomputed)
        largest = np.maximum.accumulate(self._largest[low:stop][::-1])[::-1][starts - low, None]
        # A second bucket. As far as gradients do not fit in one, those reduced are there beside others not reduced yet.
        reduced = _scaled(trained, optimizer.reduced)
        reduction = np.maximum(optimizer.bucket_bytes, reduced)
        normed = reduced + np.minimum(_scaled(largest, optimizer.norm), _scaled(reduced, optimizer.norm))
        step = np.maximum(normed, _scaled(trained, optimizer.update)) - trained - optimizer.bucket_bytes
        update = np.maximum(reduction, step) + _scaled(largest, optimizer.temporary)

        def memory(load: StageLoad, swapped: Any) -> StageMemory:
            # Beyond what all in flight keep on the device and all gradients; negative if those never meet. Of the
            # swapped activations in transit those of the pass itself are not there during an update.
            stay, transit = kept - swapped, load.in_transit
            gone = transit - min(transit - 1, load.at_update)
            beyond = np.maximum(first, update - (load.in_flight - load.at_update) * stay - gone * swapped)
            if load.with_gradients:
                gone = transit - min(transit, load.with_gradients)
                found = others - (load.in_flight - load.with_gradients) * stay - gone * swapped
                beyond = np.maximum(beyond, found)
            beyond = beyond - recomputed
            return StageMemory(
                weights=(self._weights[stop] - self._weights[starts])[:, None],
                versions=(load.versions - 1) * trained,
                gradients=trained + np.minimum(0, beyond) + _scaled(trained, optimizer.sums),
                optimizer=_scaled(trained, optimizer.held)
                + _scaled(largest, optimizer.buffers)
                + optimizer.bucket_bytes,
                activations=load.in_flight * stay + transit * swapped,
                recompute=recomputed,
                buffers=load.input_buffers * self._at_cut[starts][:, None] + load.output_buffers * output,
                workspace=np.maximum(0, beyond),
            )

        return memory


def stage_memory(
    profile: ModelProfile,
    start: int,
    stop: int,
    load: StageLoad,
    optimizer: OptimizerBytes = NO_OPTIMIZER,
    recomputed: int = 0,
    swapped: int = 0,
) -> StageMemory:
    """Bytes of the stage with layers ``start`` to ``stop - 1``, the last recomputed and the first swapped."""
    model = MemoryModel(profile, optimizer)
    table = model.alternatives(np.array([start]), stop)(load, model.swapped(start, start + swapped))
    columns = np.broadcast_arrays(*vars(table).values())
    return StageMemory(*(int(column[0, stop - recomputed - start]) for column in columns))


def _scaled(amounts: Ints, ratio: Fraction) -> Ints:
    """``amounts * ratio`` bytes, rounded up."""
    return -(-amounts * ratio.numerator // ratio.denominator)
