"""Micro-batches that a rank holds between their passes, counted over its program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ds_vpipe.schedules.actions import Kind
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.programs import after_batch, batch_actions
from ds_vpipe.schedules.schedule import Progress


@dataclass(frozen=True)
class InFlight:
    """Counts of one rank, of each of its parts in order.

    Attributes:
        most: at most.
        at_update: during an update.
        with_gradients: at most during a backward pass that finds the part's gradients of an earlier one of its batch.
        moments: of all parts at the same time, for all times before a backward pass.
    """

    most: tuple[int, ...]
    at_update: tuple[int, ...]
    with_gradients: tuple[int, ...]
    moments: frozenset[tuple[int, ...]]


@lru_cache(maxsize=1024)  # a search for a plan asks again and again
def in_flight(pipeline: Pipeline, rank: int) -> InFlight:
    """Count what ``rank`` holds from the start to the steady state."""
    parts = pipeline.parts_of(rank)
    now, most, at_update, with_gradients = ([0] * len(parts) for _ in range(4))
    moments = set()
    progress = Progress()
    for _ in range(1 if pipeline.synchronous else pipeline.depths[rank] // pipeline.micro_batches + 2):
        begun = set()
        for action in batch_actions(pipeline, rank, progress):
            own = 0 if action.part is None else parts.index(action.part)
            if action.kind is Kind.FORWARD:
                now[own] += 1
                most[own] = max(most[own], now[own])
            elif action.kind is Kind.BACKWARD:
                moments.add(tuple(now))
                if own in begun:
                    with_gradients[own] = max(with_gradients[own], now[own])
                begun.add(own)
                now[own] -= 1
            elif action.kind is Kind.STEP:
                at_update = [max(pair) for pair in zip(at_update, now, strict=True)]
        progress = after_batch(pipeline, rank, progress)
    return InFlight(tuple(most), tuple(at_update), tuple(with_gradients), frozenset(moments))
