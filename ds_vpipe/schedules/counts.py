"""Counts of a rank over its program: micro-batches in flight, weight versions, transfer buffers.

Planner and pictures need these numbers for schedules of every kind, so that they are counted over the actions that the
engine carries out and not computed beside them.
"""

from collections.abc import Set
from dataclasses import dataclass, field, replace
from functools import lru_cache

from ds_vpipe.schedules.actions import Kind
from ds_vpipe.schedules.dry_run import ACTIVATIONS, Link, posted_receives
from ds_vpipe.schedules.one_f_one_b import Progress, peer_delay, version_used
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import after_batch, rank_actions


@dataclass(frozen=True)
class StageLoad:
    """Peak counts of a virtual stage: micro-batches, versions, buffers."""

    in_flight: int  # micro-batches between their forward and backward pass
    versions: int = 1  # weight versions, the newest included
    input_buffers: int = 0  # transfer buffers as large as its input
    output_buffers: int = 0  # transfer buffers as large as its output
    at_update: int = 0  # micro-batches in flight during an update; none if the pipeline drains before it
    # Micro-batches in flight during a backward pass that finds gradients of an earlier one of its batch; none if a
    # batch is one micro-batch.
    with_gradients: int = field(kw_only=True)
    # Micro-batches with swapped activations on the device: that of the pass, and on an accelerator one that leaves.
    in_transit: int = 1


@dataclass(frozen=True)
class RankCounts:
    """Peak counts of one rank, for each of its virtual stages."""

    in_flight: tuple[int, ...]
    at_update: tuple[int, ...]  # in flight, during an update
    with_gradients: tuple[int, ...]  # in flight, during a backward pass that finds gradients of its batch
    unconfirmed: tuple[int, ...]  # gradients sent and not known to have arrived
    versions: int  # of the rank
    moments: frozenset[tuple[int, ...]]  # micro-batches in flight at the same time, before a backward pass


def kept_states(pipeline: Pipeline, stage: int, every: int) -> tuple[int, int]:
    """Peak numbers of a stage's recovery states and of weight versions for them.

    A state is taken every ``every`` updates and needs the versions of passes in flight at that update.
    """
    old, apart = pipeline.delays[stage], updates_apart(pipeline)
    states = -(-apart // every) + 2
    return states, min(states * (old + 1), apart + 2 * every) + old


def updates_apart(pipeline: Pipeline) -> int:
    """Most updates by which stages of a pipeline are apart."""
    # When the last stage is done with an update, the first one is behind by its depth. A batch that drains goes through
    # all stages before any of them begins the next one.
    return 1 if pipeline.synchronous else peer_delay(0, pipeline.depths[0], pipeline.micro_batches)


def stage_loads(
    pipeline: Pipeline, host_transfers: bool = False, packed_on_device: bool = False
) -> tuple[StageLoad, ...]:
    """Loads of all virtual stages, in the order of the model.

    With ``host_transfers`` messages are packed and received in the memory that is planned, as on the CPU. On an
    accelerator they pass through host memory, or with ``packed_on_device`` from one device's memory to the other's.
    """
    loads, ranks = [], pipeline.num_stages
    for part in range(pipeline.num_parts):
        counts, own = rank_counts(pipeline, pipeline.rank_of(part)), part // ranks
        # With several virtual stages on a rank the gradients of another one may be there.
        found = counts.in_flight if pipeline.virtual_stages > 1 else counts.with_gradients
        most = counts.in_flight[own]
        transit = 1 if host_transfers else min(2, most)
        inputs = outputs = 0
        if host_transfers or packed_on_device:
            inputs, outputs = _buffers(pipeline, part, counts, packed_on_device=not host_transfers)
        load = StageLoad(
            in_flight=most,
            versions=counts.versions,
            input_buffers=inputs,
            output_buffers=outputs,
            at_update=counts.at_update[own],
            with_gradients=found[own],
            in_transit=transit,
        )
        loads.append(load)
    return tuple(loads)


def rank_counts(pipeline: Pipeline, rank: int) -> RankCounts:
    """Counts of ``rank`` from the start to the steady state."""
    return _rank_counts(replace(pipeline, partition=None, recompute_ratio=None, swap_ratio=None), rank)


@lru_cache(maxsize=1024)  # a search for a plan asks again and again
def _rank_counts(pipeline: Pipeline, rank: int) -> RankCounts:
    parts, depths = pipeline.parts_of(rank), pipeline.depths
    now, in_flight, at_update, with_gradients, sent, confirmed, unconfirmed = ([0] * len(parts) for _ in range(7))
    moments, versions, update, forwarded = set(), 1, 0, 0
    version_of: dict[tuple[int, int], int] = {}
    progress = Progress()
    for _ in range(1 if pipeline.synchronous else depths[0] // pipeline.micro_batches + 2):
        begun = set()
        for action in rank_actions(pipeline, rank, progress):
            kind, index = action.kind, action.index
            own = 0 if action.part is None else parts.index(action.part)
            if kind is Kind.RECV_ACT and pipeline.virtual_stages == 1:
                # The previous stage runs F(index) after B(index - W - 1), for which it has had the gradient.
                confirmed[0] = max(confirmed[0], index - depths[rank - 1])
            elif kind is Kind.FORWARD:
                now[own] += 1
                in_flight[own] = max(in_flight[own], now[own])
                used = version_used(index, depths[0], pipeline.micro_batches) if pipeline.vertical else update
                version_of[own, index], forwarded = used, index + 1
            elif kind is Kind.BACKWARD:
                moments.add(tuple(now))
                if own in begun:
                    with_gradients[own] = max(with_gradients[own], now[own])
                begun.add(own)
                now[own] -= 1
                del version_of[own, index]
            elif kind is Kind.SEND_GRAD:
                sent[own] += 1
                unconfirmed[own] = max(unconfirmed[own], sent[own] - confirmed[own])
            elif kind is Kind.STEP:
                update += 1
                at_update = [max(pair) for pair in zip(at_update, now, strict=True)]
                following = version_used(forwarded, depths[0], pipeline.micro_batches)
                versions = max(versions, versions_held(pipeline, update, set(version_of.values()), following))
                if pipeline.synchronous:
                    confirmed = list(sent)
        progress = after_batch(pipeline, rank, progress)
    most = tuple(in_flight), tuple(at_update), tuple(with_gradients), tuple(unconfirmed)
    return RankCounts(*most, versions, frozenset(moments))


def versions_held(pipeline: Pipeline, newest: int, used: Set[int], following: int) -> int:
    """Weight versions that a rank holds: the newest and, unless none are stashed, those that are used in flight.

    With vertical sync the next forward pass uses version ``following``, which nothing in flight may use here yet.
    """
    if pipeline.weight_sync == "none":
        return 1
    return newest - min(used | {newest, following}) + 1 if pipeline.vertical else len(used | {newest})


def _buffers(pipeline: Pipeline, part: int, counts: RankCounts, *, packed_on_device: bool) -> tuple[int, int]:
    """Transfer buffers for inputs and for outputs, as the engine's links use them.

    A rank keeps receives posted for activations and for gradients. A sent message keeps its buffer until something that
    comes back says that it has arrived, and a buffer once used is kept for the next message: for activations that is
    their gradient; for gradients an activation that the previous stage computes later, or the end of the batch.

    Args:
        packed_on_device: only messages count that a device has packed and the other one has not received yet, or those
            that it has received before the stage has asked for them; tensors of others lie in their buffers.
    """
    ranks, parts = pipeline.num_stages, pipeline.num_parts
    rank, own = pipeline.rank_of(part), part // ranks
    inputs, outputs = counts.unconfirmed[own], 0
    # A rank has one link to each side, whatever the number of its virtual stages.
    if part and part + ranks >= parts:
        inputs += posted_receives(pipeline, Link(ACTIVATIONS, (rank - 1) % ranks, rank))
    if part + 1 < parts:
        posted = posted_receives(pipeline, Link(ACTIVATIONS, rank, (rank + 1) % ranks))
        outputs = posted if packed_on_device else counts.in_flight[own] + posted * (part < ranks)
    return inputs, outputs
