"""Costs of every part of a pipeline for the simulator: given, from a plan, or from the recording of a run.

A plan's closed forms say how fast the steady state is; its simulation shows filling, draining and waiting, and when
how much memory is held. A profile knows passes alone. A recording also has the time of the engine, the host and the
links, so that a simulation with its costs says how fast another schedule, depth or number of micro-batches would be on
the same machines: record one schedule, simulate the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING

from ds_vpipe.errors import Refusal
from ds_vpipe.schedules.actions import Category, Kind
from ds_vpipe.timelines.merge import messages
from ds_vpipe.timelines.timeline import Span, Timeline

if TYPE_CHECKING:
    from ds_vpipe.planning.devices import Devices
    from ds_vpipe.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class StageCost:
    """Cost of one part of the model per micro-batch, in seconds and bytes."""

    forward_s: float
    backward_s: float  # recomputation included
    send_activation_s: float = 0.0  # transfer of its output to the next part
    send_gradient_s: float = 0.0  # transfer of its input's gradient to the previous part
    update_s: float = 0.0  # reduction and update, once per batch
    host_s: float = 0.0  # the rank's own time for sending a message of this part, and for receiving one
    activation_bytes: int = 0  # kept from the forward to the backward pass of a micro-batch
    static_bytes: int = 0  # always held: weights, gradients, optimizer states, buffers
    version_bytes: int = 0  # one more version of the weights, held while a micro-batch in flight uses it
    recompute_bytes: int = 0  # held in addition during a backward pass


def planned_costs(plan: Plan, devices: Devices, update_s: float = 0.0) -> tuple[StageCost, ...]:
    """Costs of every part of ``plan``. A transfer is half of its round trip.

    ``update_s`` are the seconds of an update of all parts of a rank together, which plans do not count but for the
    reduction over replicas.
    """
    loads, received = devices.loads(plan.pipeline), (0.0, *(stage.transfer_s / 2 for stage in plan.stages))
    copies = [
        stage.memory.versions // max(1, load.versions - 1) for stage, load in zip(plan.stages, loads, strict=True)
    ]
    return tuple(
        StageCost(
            forward_s=stage.forward_s,
            backward_s=stage.compute_s - stage.forward_s,
            send_activation_s=stage.transfer_s / 2,
            send_gradient_s=gradient_s,
            update_s=update_s / plan.pipeline.virtual_stages + stage.reduction_s * plan.pipeline.micro_batches,
            activation_bytes=stage.memory.activations // load.in_flight,
            static_bytes=stage.memory.static - (load.versions - 1) * copy_bytes,
            version_bytes=copy_bytes,
            recompute_bytes=stage.memory.recompute + stage.memory.workspace,
        )
        for stage, load, copy_bytes, gradient_s in zip(plan.stages, loads, copies, received, strict=False)
    )


def recorded_costs(timeline: Timeline, num_parts: int) -> tuple[StageCost, ...]:
    """Seconds of every part's passes, transfers and updates. Bytes are not known.

    Seconds are means, which add up to a run's, without the tenth at either end, which leaves out first passes and
    interruptions. The time between two actions of a rank is the engine's own and counts with the action before; time
    that a script takes between batches, such as evaluating, counts with the update if more than a tenth of the batches
    have it. The length of a transfer is seen where its receiver is waiting already; it is 0 if that never happens, and
    one number for all links. Receiving tied weights and norms of other stages is not counted.

    Raises:
        VPipeConfigError: the timeline is no recording, is of another number of parts, or a rank has no update in it.
    """
    if timeline.source != "recording":
        remedy = "record a run with vpipe.timeline.enabled"
        raise Refusal("recording", f"a {timeline.source}", "the recording of a run", remedy).error()
    passes: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    update_s: list[float] = []
    host_s: list[float] = []
    for row in timeline.by_rank():
        sends: list[float] = []
        batches: dict[int, float] = defaultdict(float)  # reduction, update and messages about it together
        for span, after in pairwise(row):
            seconds = after.start - span.start
            passes[span.part, span.kind].append(seconds)
            if span.kind in (Kind.SEND_ACT, Kind.SEND_GRAD):
                sends.append(seconds)
            elif span.kind.per_batch and span.category is not Category.WAIT:
                batches[span.action.index] += seconds
        update_s.append(_typical(list(batches.values())))
        host_s.append(_typical(sends))
    recorded = sorted({part for part, kind in passes if kind is Kind.BACKWARD})
    if recorded != list(range(num_parts)):
        allowed = f"backward passes of the parts 0 to {num_parts - 1}"
        raise Refusal("recording", f"those of parts {recorded}", allowed, "record this number of parts").error()
    if not all(update_s):
        rank = update_s.index(0.0)
        raise Refusal("recording", f"no update of rank {rank}", "whole batches", "record more batches").error()
    activation_s, gradient_s = (_transfer(timeline.spans, kind) for kind in (Kind.SEND_ACT, Kind.SEND_GRAD))
    by_part = ((part, part % timeline.num_ranks) for part in range(num_parts))
    return tuple(
        StageCost(
            forward_s=_typical(passes[part, Kind.FORWARD]) + _typical(passes[part, Kind.LOAD]),
            backward_s=_typical(passes[part, Kind.BACKWARD]),
            send_activation_s=max(0.0, activation_s - host_s[rank]),
            send_gradient_s=max(0.0, gradient_s - host_s[rank]),
            update_s=update_s[rank] * timeline.num_ranks / num_parts,
            host_s=host_s[rank],
        )
        for part, rank in by_part
    )


def _transfer(spans: Sequence[Span], kind: Kind) -> float:
    """Seconds from a send to the end of its waiting receive."""
    waited = (pair for pair in messages(spans) if pair.send.kind is kind and pair.receive.start <= pair.send.start)
    return _typical([receive.end - send.end for send, receive in waited])


def _typical(values: Sequence[float]) -> float:
    """Mean without the smallest and the largest tenth. 0 if there is nothing."""
    cut = ceil(len(values) / 10) if len(values) > 2 else 0
    return fmean(sorted(values)[cut : len(values) - cut]) if values else 0.0
