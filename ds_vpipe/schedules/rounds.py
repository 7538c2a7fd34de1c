"""A stage's program in portions, one for each call of a script.

Scripts that loop ``loss = engine(**batch); engine.backward(loss); engine.step()`` hand in one micro-batch per round.
In round ``n`` stage ``s`` runs ``F(n)``, then the backward passes that are due, which in an undisturbed asynchronous
pipeline is ``B(n - W)``, and its update if they have ended a batch. With three stages and ``M = 1``, a round per
column::

    stage 0   F0    F1    F2 B0 STEP0   F3 B1 STEP1   F4 B2 STEP2
    stage 1   F0    F1 B0 STEP0   F2 B1 STEP1   F3 B2 STEP2   ...
    stage 2   F0 B0 STEP0   F1 B1 STEP1   F2 B2 STEP2   ...

Put together, the portions are the stage's program of :mod:`ds_vpipe.schedules.program` and nothing else: there is no
second order of passes, only places where the script stands between them.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.one_f_one_b import Exchanges, Progress
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import rank_actions

_FORWARD = frozenset({Kind.RECV_ACT, Kind.LOAD, Kind.FORWARD, Kind.SEND_ACT})
_BACKWARD = frozenset({Kind.RECV_GRAD, Kind.BACKWARD, Kind.SEND_GRAD})
_NOTHING_ELSE = Exchanges()


@dataclass(frozen=True, slots=True)
class Round:
    """What a stage does with one micro-batch that it is handed."""

    # In engine(...): one forward pass, and the wait for the gradient that the next pass needs, if the next rank has
    # sent it in an earlier round: the loss of its micro-batch comes with it. What the next rank sends in the same round
    # is not waited for, so that ranks may wait for each other between any two calls, as in an all_reduce() of the loss.
    forward: tuple[Action, ...]
    backward: tuple[Action, ...]  # in backward(): those that are due, none while the pipeline is being filled
    step: tuple[Action, ...]  # in step(): the update, if they have ended a batch


def next_round(pipeline: Pipeline, rank: int, progress: Progress, exchanges: Exchanges = _NOTHING_ELSE) -> Round:
    """The round of micro-batch ``progress.forwarded`` on ``rank``."""
    forward, backward, step = list[Action](), list[Action](), list[Action]()
    for action in rank_actions(pipeline, rank, progress, exchanges):
        if action.kind in _FORWARD:
            if action.index > progress.forwarded:
                break
            forward.append(action)
        elif action.kind in _BACKWARD:
            backward.append(action)
        else:
            step.append(action)
    if _gradient_is_due(pipeline, rank) and not waits_for_loss(pipeline, rank, progress):
        forward.append(backward.pop(0))
    return Round(tuple(forward), tuple(backward), tuple(step))


def drain_actions(
    pipeline: Pipeline, rank: int, progress: Progress, exchanges: Exchanges = _NOTHING_ELSE
) -> Iterator[Action]:
    """What ``rank`` has still to do until nothing is in flight: a batch that is not complete stays without an update.

    All ranks have been handed the same micro-batches, ``progress.forwarded`` of them.
    """
    end, micro_batches = progress.forwarded, pipeline.micro_batches
    while progress.completed < end:
        progress = progress._replace(limit=end)
        yield from rank_actions(pipeline, rank, progress, exchanges)
        next_batch = (progress.completed // micro_batches + 1) * micro_batches
        progress = progress._replace(completed=min(next_batch, end))


def waits_for_loss(pipeline: Pipeline, rank: int, progress: Progress) -> bool:
    """Whether ``rank`` waits for the loss of micro-batch ``progress.forwarded``.

    It does while the pipeline is being filled: no gradient has arrived yet, with which the loss of an earlier
    micro-batch could come. In a synchronous pipeline it always does, so that what scripts log is what they log without
    one. The last rank has the loss itself.
    """
    ahead = progress.forwarded - progress.filled_from
    # How far behind the newest micro-batch is whose gradient arrives in the forward portion of a round.
    delay = pipeline.depths[rank] + (0 if _gradient_is_due(pipeline, rank) else 1)
    return rank != pipeline.num_stages - 1 and (pipeline.synchronous or ahead < delay)


def _gradient_is_due(pipeline: Pipeline, rank: int) -> bool:
    """Whether a gradient arrives a round before its backward pass, as depths fall to the next rank."""
    return rank < pipeline.num_stages - 1 and pipeline.depths[rank] > pipeline.depths[rank + 1]
