"""What stays on a stage while a schedule runs: micro-batches in flight, weight versions, transfer buffers.

Micro-batches in flight are counted over the programs that the engine carries out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_vpipe.schedules.in_flight import in_flight
from ds_vpipe.schedules.pipeline import Pipeline, Schedule
from ds_vpipe.schedules.rendezvous import ACTIVATIONS, Link, posted_receives
from ds_vpipe.schedules.schedule import versions_alive


@dataclass(frozen=True)
class Residency:
    """What stays on one part of the model.

    Attributes:
        in_flight: micro-batches that it holds at most between their forward and backward pass.
        versions: weight versions alive, the newest included.
        input_buffers: transfer buffers as large as the part's input.
        output_buffers: transfer buffers as large as the part's output.
        at_update: micro-batches in flight during an update; none if the pipeline drains before it.
        with_gradients: most of them in flight during a backward pass that finds the gradients of an earlier one of its
            batch; none if a batch is one micro-batch. Default: as many as at other times.
    """

    in_flight: int
    versions: int = 1
    input_buffers: int = 0
    output_buffers: int = 0
    at_update: int = 0
    with_gradients: int = -1

    def __post_init__(self) -> None:
        if self.with_gradients < 0:
            object.__setattr__(self, "with_gradients", self.in_flight)


def residency(
    schedule: Schedule,
    num_stages: int,
    micro_batches: int,
    depths: Sequence[int] | None = None,
    weight_sync: str = "stash",
    virtual_stages: int = 1,
    host_transfers: bool = False,
) -> tuple[Residency, ...]:
    """What stays on every part of the model, in the order of the model.

    Args:
        schedule: ``asp``, ``1f1b``, ``gpipe`` or ``interleaved``.
        num_stages: K, ranks of the pipeline.
        micro_batches: M, micro-batches per batch.
        depths: W_s of every stage, for ``asp``; default K-1-s.
        weight_sync: ``stash``, ``vertical`` or ``none``, for ``asp``.
        virtual_stages: v, parts per rank, for ``interleaved``.
        host_transfers: messages are packed and received in the memory that is planned, as on the CPU. On an
            accelerator they pass through host memory.

    Raises:
        VPipeConfigError: a setting is out of range, or does not fit the schedule.
    """
    pipeline = Pipeline(schedule, num_stages, micro_batches, None if depths is None else tuple(depths), virtual_stages)
    counts = [in_flight(pipeline, rank) for rank in range(num_stages)]
    of_parts = [(counts[part % num_stages], part // num_stages) for part in range(pipeline.num_parts)]
    # With several parts on a rank the gradients of another one may be there.
    finding = [count.most if virtual_stages > 1 else count.with_gradients for count, _ in of_parts]
    versions = [1] * pipeline.num_parts
    if schedule == "asp" and weight_sync != "none":
        used = [pipeline.depths[0]] * num_stages if weight_sync == "vertical" else pipeline.depths
        versions = [versions_alive(depth, micro_batches) for depth in used]
    buffers = [(0, 0)] * pipeline.num_parts
    if host_transfers:
        buffers = _transfer_buffers(pipeline, [count.most[own] for count, own in of_parts])
    return tuple(
        Residency(count.most[own], alive, *held, count.at_update[own], begun[own])
        for (count, own), begun, alive, held in zip(of_parts, finding, versions, buffers, strict=True)
    )


def _transfer_buffers(pipeline: Pipeline, in_flight: Sequence[int]) -> list[tuple[int, int]]:
    """For each part, buffers as large as its input and as large as its output, as the engine's links use them.

    A rank keeps receives posted for activations and for gradients. A sent message keeps its buffer until something that
    comes back says that it has arrived, and a buffer once used is kept for the next message: for activations that is
    their gradient; for gradients an activation that the previous stage computes later, or the end of the batch.
    """
    ranks, parts, depths = pipeline.num_stages, pipeline.num_parts, pipeline.depths
    result = []
    for part in range(parts):
        rank, inputs, outputs = pipeline.rank_of(part), 0, 0
        before, after = (rank - 1) % ranks, (rank + 1) % ranks
        if part:
            ahead = pipeline.micro_batches
            if pipeline.schedule == "asp":
                ahead = depths[before] - depths[rank] + 1
            elif pipeline.virtual_stages == 1:
                ahead = min(ahead, depths[before] + 1)
            inputs = ahead
        if part + 1 < parts:
            outputs = in_flight[part]
        # A rank has one link to each side, whatever the number of its parts.
        if part and part + ranks >= parts:
            inputs += posted_receives(pipeline, Link(ACTIVATIONS, before, rank))
        if part + 1 < parts and part < ranks:
            outputs += posted_receives(pipeline, Link(ACTIVATIONS, rank, after))
        result.append((inputs, outputs))
    return result
