"""Is a program right? Found out without processes, in milliseconds, before anything is trained.

Three checks, each of which makes sense only if the one before found nothing: the order, versions and buffers of
each rank by itself (:mod:`.rank_order`); every receive on a link against the send that it meets; and a dry run
of all ranks for dead-locks (:mod:`.rendezvous`). They know the rules and not the schedules, so that they
check those too.

Transfers of tied weights have their places in the order of a rank. Over links they are not followed: they never make
anybody wait, by the delays of :func:`ds_vpipe.schedules.one_f_one_b.news_delay`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest

from ds_vpipe.errors import PipelineProtocolError
from ds_vpipe.schedules.actions import Action
from ds_vpipe.schedules.dry_run import (
    Link,
    dry_run,
    link_ends,
    meets,
    posted_receives,
    receive_link,
    send_link,
)
from ds_vpipe.schedules.one_f_one_b import Exchanges
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Programs, Workload, programs
from ds_vpipe.schedules.rank_order import RankOrder


@dataclass(frozen=True, slots=True)
class Fault:
    """One action that is wrong.

    Attributes:
        rank: the rank whose program it is in.
        position: position in the program, from 0; the program's length if something is missing at its end.
        action: the action there, or None at the end.
        reason: what is wrong, in one line.
    """

    rank: int
    position: int
    action: Action | None
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank}, position {self.position}, {self.action or 'end'}: {self.reason}"


def check_programs(
    pipeline: Pipeline, programs: Programs, workload: Workload, exchanges: Sequence[Exchanges] | None = None
) -> list[Fault]:
    """Everything that is wrong with ``programs`` as a way to train ``workload``; at most one fault per rank or link."""
    return (
        _order_faults(pipeline, programs, workload, exchanges or (Exchanges(),) * pipeline.num_stages)
        or _link_faults(pipeline, programs, workload)
        or dead_locks(programs, pipeline)
    )


def check_pipeline(pipeline: Pipeline, exchanges: Sequence[Exchanges] | None = None) -> None:
    """Check what the engine is about to carry out: enough batches to reach the steady state, a data end, a refill.

    Args:
        pipeline: the schedule and its sizes.
        exchanges: what every rank exchanges around its updates, if anything.

    Raises:
        PipelineProtocolError: something is wrong; one line names the first fault.
    """
    shape = _shortened(pipeline)
    workload = typical_workload(shape)
    faults = check_programs(shape, programs(shape, workload, exchanges), workload, exchanges)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise PipelineProtocolError(f"schedule {shape}: {faults[0]}{more}; this is a defect in ds_vpipe, report it")


def typical_workload(pipeline: Pipeline) -> Workload:
    """As few batches as show everything that ``pipeline`` does: filling, steady state, data ends, refill.

    The data end where a batch does, and after the first, in the middle and before the last micro-batch of one.
    """
    if pipeline.synchronous:
        return Workload(2, (pipeline.micro_batches + pipeline.micro_batches // 2,))
    size = pipeline.micro_batches
    fill = pipeline.depths[0] // size + 2
    left_over = sorted({0, 1 % size, size // 2, size - 1})
    ends = tuple(number * fill * size + left for number, left in enumerate(left_over, 1))
    return Workload(len(ends) * fill + 1, ends)


def dead_locks(programs: Programs, pipeline: Pipeline | None = None) -> list[Fault]:
    """The actions at which ranks stand for ever; with ``pipeline`` None no receives are posted ahead."""
    posted = partial(posted_receives, pipeline) if pipeline is not None else lambda link: 0
    run = dry_run(programs, posted)
    num_ranks = len(programs)
    faults = []
    for rank, position in enumerate(run.positions):
        if position == len(programs[rank]):
            continue
        action = programs[rank][position]
        sends, receives = send_link(action.kind, rank, num_ranks), receive_link(action.kind, rank, num_ranks)
        if sends is not None:
            other, what = sends.target, "to receive it"
        else:
            assert receives is not None  # nothing else waits
            other, what = receives.source, "to send it"
        there = programs[other][run.positions[other] :]
        where = f"stands at {there[0]}" if there else "is done"
        faults.append(Fault(rank, position, action, f"it waits for ever for rank {other} {what}, which {where}"))
    return faults


def _order_faults(
    pipeline: Pipeline, programs: Programs, workload: Workload, exchanges: Sequence[Exchanges]
) -> list[Fault]:
    faults = []
    for rank, program in enumerate(programs):
        order = RankOrder(pipeline, rank, workload, exchanges[rank])
        for position, action in enumerate(program):
            reason = order.step(action)
            if reason is not None:
                faults.append(Fault(rank, position, action, reason))
                break
        else:
            reason = order.end()
            if reason is not None:
                faults.append(Fault(rank, len(program), None, reason))
    return faults


def _link_faults(pipeline: Pipeline, programs: Programs, workload: Workload) -> list[Fault]:
    sent: dict[Link, list[tuple[int, Action]]] = defaultdict(list)
    received: dict[Link, list[tuple[int, Action]]] = defaultdict(list)
    num_ranks = len(programs)
    for rank, program in enumerate(programs if num_ranks > 1 else ()):
        sends = {kind: sent[link] for kind, link in link_ends(send_link, rank, num_ranks).items()}
        receives = {kind: received[link] for kind, link in link_ends(receive_link, rank, num_ranks).items()}
        ends = sends | receives
        for position, action in enumerate(program):
            messages = ends.get(action.kind)
            if messages is not None:
                messages.append((position, action))
    last = list(workload.fillings(pipeline))[-1]
    faults = []
    for link in sorted({*sent, *received}):
        for out, into in zip_longest(sent[link], received[link]):
            if out is None:
                faults.append(Fault(link.target, into[0], into[1], f"nothing is left to receive of {link}"))
            elif into is None:
                if out[1].index >= last.limit and last.end is None:
                    continue  # the next rank has not come to that batch yet
                faults.append(Fault(link.source, out[0], out[1], f"rank {link.target} never receives it"))
            elif not meets(out[1], into[1]):
                reason = f"what comes next of {link} is {out[1]}, at position {out[0]} there"
                faults.append(Fault(link.target, into[0], into[1], reason))
            else:
                continue
            break
    return faults


def _shortened(pipeline: Pipeline) -> Pipeline:
    """A pipeline with a smaller batch that has the same faults, if any.

    In the middle of a long batch one micro-batch is like the other, once all ranks are past their warm-up: an order
    of the 1F1B kind repeats with every micro-batch, an interleaved one with every group.
    """
    if pipeline.schedule == "interleaved":
        if pipeline.micro_batches % pipeline.num_stages:
            return pipeline
        enough = 2 * pipeline.num_stages
    elif pipeline.schedule == "gpipe":
        enough = pipeline.num_stages + 2
    else:
        enough = pipeline.depths[0] + 2
    return replace(pipeline, micro_batches=min(pipeline.micro_batches, enough))
