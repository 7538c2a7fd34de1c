"""What each part of a pipeline costs, read off a recording: record one schedule, simulate the others.

A profile knows passes alone. A recording also has what the engine, the host and the links take, so that a simulation
with its costs says how fast another schedule, depth or number of micro-batches would be on the same machines. Seconds
are means, which add up to a run's, without the tenth at either end, which leaves out first passes and interruptions.
What a script does between batches, such as evaluating, counts with the update if more than a tenth of them have it.
Receiving tied weights and norms of other stages is not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import ceil
from statistics import fmean

from ds_vpipe.errors import Refusal
from ds_vpipe.simulation.stage_cost import StageCost
from ds_vpipe.timelines.messages import messages
from ds_vpipe.timelines.timeline import Span, Timeline

_SENDS = ("SEND_ACT", "SEND_GRAD")
_PER_BATCH = ("REDUCE", "STEP", "SEND_TIED_GRAD", "SEND_TIED", "SEND_NEWS")


def recorded_costs(timeline: Timeline, num_parts: int) -> tuple[StageCost, ...]:
    """Seconds of every part's passes, transfers and updates; bytes are not known.

    The time between two actions of a rank is the engine's own and counts with the action before. How long a transfer
    takes is seen where its receiver is waiting already; it is 0 if that never happens. It is one number for all links.

    Args:
        timeline: of a recording, by :func:`ds_vpipe.timelines.merged_recording.read_timeline`.
        num_parts: parts of the model, K * v.

    Raises:
        VPipeConfigError: the timeline is no recording, is of another number of parts, or a rank has no update in it.
    """
    if timeline.source != "recording":
        remedy = "record a run with vpipe.timeline.enabled"
        raise Refusal("recording", f"a {timeline.source}", "the recording of a run", remedy).error()
    passes: dict[tuple[int, str], list[float]] = defaultdict(list)
    update_s: list[float] = []
    host_s: list[float] = []
    for row in timeline.by_rank():
        taken = list(_with_gap(row))
        for span, seconds in taken:
            passes[span.part, span.name.kind].append(seconds)
        update_s.append(_typical(_updates(taken)))
        host_s.append(_typical([seconds for span, seconds in taken if span.name.kind in _SENDS]))
    recorded = sorted({part for part, kind in passes if kind == "B"})
    if recorded != list(range(num_parts)):
        allowed = f"backward passes of the parts 0 to {num_parts - 1}"
        raise Refusal("recording", f"those of parts {recorded}", allowed, "record this number of parts").error()
    if not all(update_s):
        rank = update_s.index(0.0)
        raise Refusal("recording", f"no update of rank {rank}", "whole batches", "record more batches").error()
    send_s = {kind: _transfer(timeline, kind) for kind in _SENDS}
    costs = []
    for part in range(num_parts):
        rank = part % timeline.num_ranks
        costs.append(
            StageCost(
                forward_s=_typical(passes[part, "F"]) + _typical(passes[part, "LOAD"]),
                backward_s=_typical(passes[part, "B"]),
                send_activation_s=max(0.0, send_s["SEND_ACT"] - host_s[rank]),
                send_gradient_s=max(0.0, send_s["SEND_GRAD"] - host_s[rank]),
                update_s=update_s[rank] * timeline.num_ranks / num_parts,
                host_s=host_s[rank],
            )
        )
    return tuple(costs)


def _with_gap(row: Sequence[Span]) -> Iterator[tuple[Span, float]]:
    """Each action of a rank but the last, and the seconds until the next one begins."""
    return ((span, after.start - span.start) for span, after in pairwise(row))


def _updates(taken: Sequence[tuple[Span, float]]) -> list[float]:
    """Seconds of each batch's reduction, update and messages about it together."""
    batches: dict[int, float] = defaultdict(float)
    for span, seconds in taken:
        if span.name.kind in _PER_BATCH:
            batches[span.name.index] += seconds
    return list(batches.values())


def _transfer(timeline: Timeline, kind: str) -> float:
    """Seconds from the end of a send to the end of a receive that has waited for it."""
    return _typical(
        [
            message.receive.end - message.send.end
            for message in messages(timeline.spans)
            if message.send.name.kind == kind and message.exact and message.receive.start <= message.send.start
        ]
    )


def _typical(values: Sequence[float]) -> float:
    """Mean without the smallest and the largest tenth; 0 if there is nothing."""
    cut = ceil(len(values) / 10) if len(values) > 2 else 0
    return fmean(sorted(values)[cut : len(values) - cut]) if values else 0.0
