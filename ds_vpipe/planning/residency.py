"""What stays on a stage while a schedule runs: micro-batches in flight, weight versions, transfer buffers.

With depth W_s a stage of the asynchronous schedule holds W_s + 1 micro-batches between their forward and their
backward pass; synchronous 1F1B is the same with W_s = K-1-s, but never more than a batch has; gpipe holds the whole
batch. Interleaved schedules are counted, from the order of Megatron-LM (Narayanan et al., Efficient Large-Scale
Language Model Training on GPU Clusters, SC 2021, section 2.2).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ds_vpipe.refusal import Refusal
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.rendezvous import ACTIVATIONS, Link, posted_receives
from ds_vpipe.schedules.schedule import default_depths, versions_alive

Schedule = Literal["asp", "1f1b", "gpipe", "interleaved"]
SCHEDULES = ("asp", "1f1b", "gpipe", "interleaved")
_PASS = re.compile(r"([0-9]*)([FB])([0-9]+)")


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
    _check(schedule, num_stages, micro_batches, depths, virtual_stages)
    pipeline = Pipeline(schedule, num_stages, micro_batches, None if depths is None else tuple(depths), virtual_stages)
    parts = num_stages * virtual_stages
    if schedule == "asp":
        ahead = tuple(depths) if depths is not None else default_depths(num_stages)
        in_flight = [depth + 1 for depth in ahead]
        if weight_sync == "none":
            versions = [1] * parts
        else:
            used = [ahead[0]] * parts if weight_sync == "vertical" else ahead
            versions = [versions_alive(depth, micro_batches) for depth in used]
    elif schedule == "interleaved":
        counts = [interleaved_in_flight(num_stages, micro_batches, virtual_stages, rank) for rank in range(num_stages)]
        in_flight = [counts[part % num_stages][part // num_stages] for part in range(parts)]
        versions = [1] * parts
    else:
        most = range(num_stages, 0, -1) if schedule == "1f1b" else [micro_batches] * num_stages
        in_flight = [min(micro_batches, count) for count in most]
        versions = [1] * parts

    buffers = _transfer_buffers(pipeline, in_flight) if host_transfers else [(0, 0)] * parts
    result = []
    for part, (inputs, outputs) in enumerate(buffers):
        at_update, with_gradients = 0, in_flight[part]
        if schedule == "asp":
            at_update = in_flight[part] - 1
        elif schedule != "interleaved" and in_flight[part] == micro_batches:
            with_gradients -= 1  # the whole batch is there only before its first backward pass
        if micro_batches == 1 and schedule != "interleaved":
            with_gradients = 0
        result.append(Residency(in_flight[part], versions[part], inputs, outputs, at_update, with_gradients))
    return tuple(result)


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


def count_in_flight(program: Iterable[object]) -> dict[int, int]:
    """Most micro-batches that each part of a rank holds at once, from the text forms of what the rank does.

    Args:
        program: actions or their text forms, such as ``F7`` and ``2B7``; others than passes do not count.
    """
    now: Counter[int] = Counter()
    most: dict[int, int] = {}
    for action in program:
        match = _PASS.fullmatch(str(action))
        if match:
            part = int(match.group(1) or 0)
            now[part] += 1 if match.group(2) == "F" else -1
            most[part] = max(most.get(part, 0), now[part])
    return most


def interleaved_in_flight(num_stages: int, micro_batches: int, virtual_stages: int, rank: int) -> tuple[int, ...]:
    """Most micro-batches that each of a rank's parts holds at once in Megatron-LM's interleaved 1F1B.

    Parts have their peaks at different times, see :func:`interleaved_moments`.
    """
    most = count_in_flight(_interleaved_passes(num_stages, micro_batches, virtual_stages, rank))
    return tuple(most[part] for part in range(virtual_stages))


def interleaved_moments(num_stages: int, micro_batches: int, virtual_stages: int, rank: int) -> set[tuple[int, ...]]:
    """Micro-batches that each of a rank's parts holds at the same time, for all times before a backward pass."""
    now, moments = [0] * virtual_stages, set()
    for text in _interleaved_passes(num_stages, micro_batches, virtual_stages, rank):
        part, _, _ = text.partition("F") if "F" in text else text.partition("B")
        if "F" in text:
            now[int(part)] += 1
        else:
            moments.add(tuple(now))
            now[int(part)] -= 1
    return moments


def _interleaved_passes(num_stages: int, micro_batches: int, virtual_stages: int, rank: int) -> Iterator[str]:
    """A rank's passes, with the part's number among the rank's own.

    Micro-batches go in groups of K through the rank's first part, then its second, and so on; backward passes
    through its last part first. (K - rank - 1) * 2 + (v - 1) * K forward passes come before the first backward pass.
    """
    total = micro_batches * virtual_stages
    warm_up = min(total, (num_stages - rank - 1) * 2 + (virtual_stages - 1) * num_stages)

    def text(kind: str, position: int) -> str:
        group, within = divmod(position, num_stages * virtual_stages)
        size = min(num_stages, micro_batches - group * num_stages)  # the last group may be smaller
        part, micro_batch = divmod(within, size)
        part = part if kind == "F" else virtual_stages - 1 - part
        return f"{part}{kind}{group * num_stages + micro_batch}"

    for position in range(warm_up):
        yield text("F", position)
    for position in range(total):
        if warm_up + position < total:
            yield text("F", warm_up + position)
        yield text("B", position)


def _check(
    schedule: str, num_stages: int, micro_batches: int, depths: Sequence[int] | None, virtual_stages: int
) -> None:
    if schedule not in SCHEDULES:
        raise Refusal("schedule", schedule, ", ".join(SCHEDULES), "use one of these").error()
    for name, value in (("num_stages", num_stages), ("micro_batches", micro_batches)):
        if value < 1:
            raise Refusal(name, value, "an int >= 1", "correct the number").error()
    least = 2 if schedule == "interleaved" else 1
    if virtual_stages < least or (schedule != "interleaved" and virtual_stages > 1):
        allowed = "an int >= 2" if schedule == "interleaved" else "1"
        raise Refusal("virtual_stages", virtual_stages, allowed, "correct it", f"schedule is {schedule}").error()
    if depths is not None:
        if schedule != "asp":
            raise Refusal("depths", list(depths), "none", "leave them out", f"schedule is {schedule}").error()
        falls = all(one >= other for one, other in pairwise(depths))
        if len(depths) != num_stages or not falls or depths[-1] != 0:
            allowed = f"{num_stages} ints that never rise and end in 0"
            raise Refusal("depths", list(depths), allowed, "correct them, as in [3, 2, 1, 0]").error()
