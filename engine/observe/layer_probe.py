"""Seconds of each layer of a running stage, in some micro-batches.

Layers are timed where the stage runs them one by one; nothing waits. The backward pass of a layer lasts from the moment
at which the gradient of its output is there to that of its input: the first of the boundary's tensors counts, since
others may be passed on by many layers. Layers that are run again in a backward pass are left out: what that takes is
known from their forward passes. What the last layer of the model has before its gradient comes is the loss.

On CUDA instants are events in the stream, read when the device has passed them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ds_vpipe.engine.modules.piece_module import TIMED, Timed
from ds_vpipe.planning.profiler import tensors_of, tree_bytes

Mark = Any  # an instant: seconds, or an event of the device


@dataclass
class Sample:
    """One micro-batch: instants of its passes, by position of the layer in the stage."""

    mark: Callable[[], Mark]
    forward: dict[int, tuple[Mark, Mark]] = field(default_factory=dict)
    output_bytes: dict[int, int] = field(default_factory=dict)
    inputs: Any = None  # of the first layer, as meta tensors
    labels: Any = None  # likewise, on the last stage
    backward: list[tuple[int | None, Mark, Mark]] = field(default_factory=list)  # None: layers that are run again
    ends: list[Mark] = field(default_factory=list)  # of the forward pass and of the backward pass, begin and end

    def run(self, position: int, layer: Callable[[Any], Any], value: Any) -> Any:
        """Run a layer in the forward pass."""
        if not self.forward:
            self.inputs = tree_map_only(torch.Tensor, _shape, value)
        begin = self.mark()
        output = layer(value)
        self._ended(position, begin, output)
        return output

    def run_pieces(self, position: int, run: Callable[..., Any], value: Any) -> Any:
        """Run the pieces of a plain module from ``position`` on in the forward pass."""
        if not self.forward:
            self.inputs = tree_map_only(torch.Tensor, _shape, value)
        begin = self.mark()

        def watch(count: int, value: Any) -> None:
            nonlocal begin
            if count:  # else what is before the first one has gone without values
                self._ended(position + count - 1, begin, value)
            begin = self.mark()

        return run(value, watch=watch)

    def _ended(self, position: int, begin: Mark, output: Any) -> None:
        """A layer has ended, whose output's gradient ends the backward passes behind it."""
        self.forward[position] = begin, self.mark()
        self.output_bytes[position] = tree_bytes(output)
        for tensor in tensors_of(output):
            if tensor.requires_grad and not tensor.is_leaf:  # a hook on a leaf stays there
                tensor.register_hook(partial(self._arrived, position))

    def run_again(self, position: int, layer: Callable[[Any], Any], value: Any) -> Any:
        """Run a layer in the backward pass."""
        begin = self.mark()
        try:
            return layer(value)
        finally:
            self.backward.append((None, begin, self.mark()))

    def _arrived(self, position: int, _: torch.Tensor) -> None:
        now = self.mark()
        self.backward.append((position, now, now))

    def backward_marks(self) -> Mapping[int, list[tuple[Mark, Mark]]]:
        """Intervals of each layer's backward pass."""
        last = current = max(self.forward)
        found: dict[int, list[tuple[Mark, Mark]]] = {position: [] for position in self.forward}
        since = self.ends[2]
        for position, begin, end in [*self.backward, (-1, self.ends[3], self.ends[3])]:
            if position is None or position < current or position == last:
                found[current].append((since, begin))
                since = end
                current = current if position is None else position
        return found


class LayerProbe:
    """Probe of one stage's layers; what it has measured is in :attr:`samples`."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._open: dict[int, Sample] = {}
        self.samples: list[Sample] = []

    def forget(self) -> None:
        """Drop everything; only while nothing is in flight."""
        self._open, self.samples = {}, []

    def begin(self, module: torch.nn.Module, index: int, forward: bool, labels: Any) -> None:
        """A pass of micro-batch ``index`` begins; it is sampled in both passes or in none."""
        if forward:
            self._open[index] = Sample(self._mark, labels=tree_map_only(torch.Tensor, _shape, labels))
        if (sample := self._open.get(index)) is not None:
            again = Timed(sample.run_again, sample.run_again)
            vars(module)[TIMED] = Timed(sample.run, sample.run_pieces) if forward else again
            sample.ends.append(self._mark())

    def end(self, module: torch.nn.Module, index: int, forward: bool) -> None:
        """The pass has ended."""
        if (sample := self._open.get(index)) is not None:
            vars(module).pop(TIMED, None)
            sample.ends.append(self._mark())
            if not forward:
                del self._open[index]
                if len(sample.ends) == 4 and sample.forward:
                    self.samples.append(sample)

    def seconds(self, sample: Sample, position: int, is_last: bool) -> tuple[float, float]:
        """Seconds of a layer's forward and backward pass; ``is_last``: what follows in the stage is the loss."""
        forward = [sample.forward[position]]
        if is_last:
            forward.append((sample.forward[position][1], sample.ends[1]))
        backward = sample.backward_marks()[position]
        return sum(map(self._between, forward)), sum(map(self._between, backward))

    def passes(self, sample: Sample) -> tuple[float, float]:
        """Seconds of the stage's forward and backward pass."""
        return self._between((sample.ends[0], sample.ends[1])), self._between((sample.ends[2], sample.ends[3]))

    def is_done(self, sample: Sample) -> bool:
        """Whether the device has passed all instants of a sample."""
        return not self._on_gpu or bool(sample.ends[3].query())

    def _mark(self) -> Mark:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, marks: tuple[Mark, Mark]) -> float:
        begin, end = marks
        return max(0.0, begin.elapsed_time(end) / 1e3 if self._on_gpu else end - begin)


def _shape(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor.detach(), device="meta").requires_grad_(tensor.requires_grad)
