"""Checks of a pipeline's programs, without processes and in milliseconds, before anything is trained.

First the order, versions and buffers of each rank by itself (:mod:`.rank_order`), then a dry run of all ranks
(:mod:`.dry_run`): every receive gets the message that it is for, and nobody waits for ever. They know the rules and not
the schedules, so that they check those too. Programs with layers that move are checked by the tests, in the same way.

Transfers of tied weights have their places in the order of a rank. Over links they are not followed: they never make
anybody wait, by the delays of :func:`ds_vpipe.schedules.one_f_one_b.peer_delay`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ds_vpipe.errors import PipelineProtocolError
from ds_vpipe.schedules.actions import Action
from ds_vpipe.schedules.dry_run import Link, dry_run, posted_receives, receive_link, send_link
from ds_vpipe.schedules.one_f_one_b import Exchanges
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Programs, Workload, programs
from ds_vpipe.schedules.rank_order import RankOrder


@dataclass(frozen=True, slots=True)
class ScheduleFault:
    """Wrong action of a program."""

    rank: int  # whose program it is in
    position: int  # in the program, from 0; the program's length if something is missing at its end
    action: Action | None  # None at the end
    reason: str  # in one line

    def __str__(self) -> str:
        return f"rank {self.rank}, position {self.position}, {self.action or 'end'}: {self.reason}"


def check_programs(
    pipeline: Pipeline, programs: Programs, workload: Workload, exchanges: Sequence[Exchanges] | None = None
) -> list[ScheduleFault]:
    """Everything that is wrong with ``programs`` as a way to train ``workload``. At most one fault per rank or link."""
    exchanges = exchanges or (Exchanges(),) * pipeline.num_stages
    faults = _order_faults(pipeline, programs, workload, exchanges)
    return faults or link_faults(programs, partial(posted_receives, pipeline))


def check_pipeline(pipeline: Pipeline, exchanges: Sequence[Exchanges] | None = None) -> None:
    """Check what the engine is about to carry out: enough batches to reach the steady state, a data end, a refill.

    Raises:
        PipelineProtocolError: something is wrong; one line names the first fault.
    """
    shape = shortened(pipeline)
    workload = typical_workload(shape)
    faults = check_programs(shape, programs(shape, workload, exchanges), workload, exchanges)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise PipelineProtocolError(f"schedule {shape}: {faults[0]}{more}; this is a defect in ds_vpipe, report it")


def shortened(pipeline: Pipeline) -> Pipeline:
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


def link_faults(programs: Programs, posted: Callable[[Link], int]) -> list[ScheduleFault]:
    """Faults of links: mixed-up messages, else dead-locks, else lost messages.

    ``posted`` gives the receives kept posted on a link.
    """
    run = dry_run(programs, posted)
    mixed, standing = [], []
    num_ranks = len(programs)
    for rank, position in enumerate(run.positions):
        if position == len(programs[rank]):
            continue
        action = programs[rank][position]
        link = receive_link(action.kind, rank, num_ranks)
        other, what = link and link.source, "to send it"
        if link is None:
            sends = send_link(action.kind, rank, num_ranks)
            other, what = sends and sends.target, "to receive it"
        elif len(run.links[link].sent) > run.links[link].received:
            at, sent = run.links[link].sent[run.links[link].received]
            reason = f"what comes next of {link} is {sent}, at position {at} there"
            mixed.append(ScheduleFault(rank, position, action, reason))
            continue
        assert other is not None  # nothing else waits
        there = programs[other][run.positions[other] :]
        where = f"stands at {there[0]}" if there else "is done"
        standing.append(
            ScheduleFault(rank, position, action, f"it waits for ever for rank {other} {what}, which {where}")
        )
    left_over = [
        ScheduleFault(link.source, position, action, f"rank {link.target} never receives it")
        for link, messages in run.links.items()
        for position, action in messages.sent[messages.received : messages.received + 1]
    ]
    return mixed or standing or left_over


def _order_faults(
    pipeline: Pipeline, programs: Programs, workload: Workload, exchanges: Sequence[Exchanges]
) -> list[ScheduleFault]:
    faults = []
    for rank, program in enumerate(programs):
        order = RankOrder(pipeline, rank, workload, exchanges[rank])
        for position, action in enumerate(program):
            if (reason := order.step(action)) is not None:
                faults.append(ScheduleFault(rank, position, action, reason))
                break
        else:
            if (reason := order.end()) is not None:
                faults.append(ScheduleFault(rank, len(program), None, reason))
    return faults
