"""Moves of a layer to a neighbouring stage while training runs, as pure data.

A layer moves from stage ``a`` to ``b`` at a cut-over micro-batch ``J``: earlier ones run it at ``a``, forward and
backward, later ones at ``b``. Nothing drains. Weights and optimizer state travel once, as they are after some updates,
and then the gradient of each batch that ``a`` still computes; ``b`` applies these in order. Everything travels on the
link that goes from ``a`` to ``b`` anyway. With three stages, ``M = 1``, and ``J = 6``, what the two ranks do around
their passes (``L`` is the layer, ``g3`` its gradient of batch 3, ``S`` an update of the stage and ``s`` one of the
layer alone)::

    to the previous stage, from 1 to 0    rank 1   B3 L3 g3 S3   B4 g4 S4   B5 g5 S5   B6 S6 ...
    (depths 1 and 2)                      rank 0   B3 L3 g3 S3   F6 B4 g4 S4   F7 B5 g5 S5   F8 B6 S6 ...

    to the next stage, from 0 to 1        rank 0   B3 S3 L4   F6 B4 g4 S4   F7 B5 g5 S5   F8 B6 S6 ...
    (depths 2 and 1)                      rank 1   B4 S4   L4 F6 B5 S5   g4 s4 F7 B6 S6   g5 s5 s6 F8 B7 S7 ...

The previous stage gets the gradient of a batch with its last backward pass and applies it in the same update. The next
stage gets it with a later activation: it then updates the layer apart from its other layers, holds back the gradients
that it computes itself, and has caught up when the activation of micro-batch ``J + W`` has come, ``W`` being the depth
of ``a``. Until then :func:`layer_version` is ``a``'s.

A drain at micro-batch ``L`` completes a move that has begun, as if ``J`` had been no later than ``L``. One that has not
begun stays as it was.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ds_vpipe.errors import Refusal
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.one_f_one_b import Progress, version_used
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.tables import counted


@dataclass(frozen=True, slots=True)
class Move:
    """A move of one layer to a neighbouring stage. All ranks are given the same at the same update."""

    layer: int  # in the order of the model
    source: int  # stage that runs it for earlier micro-batches
    target: int  # stage that runs it from ``micro_batch`` on
    micro_batch: int  # the cut-over, a multiple of M

    def __str__(self) -> str:
        return f"layer {self.layer} from stage {self.source} to {self.target} at micro-batch {self.micro_batch}"

    @property
    def down(self) -> bool:
        """Whether the layer goes to the next stage."""
        return self.target > self.source

    def first_version(self, pipeline: Pipeline) -> int:
        """Updates of the layer before its first forward pass at the target. This version is made there or sent."""
        return (self.micro_batch - _lag(pipeline, self)) // pipeline.micro_batches

    def first_batch(self, pipeline: Pipeline) -> int:
        """The batch in which the move begins on both stages. It must not have begun anywhere when the move is given."""
        return self.first_version(pipeline) - 1

    def settled_batch(self, pipeline: Pipeline) -> int:
        """The first batch without actions of the move, in an undisturbed run."""
        ahead = _ahead(pipeline, self.source) - _ahead(pipeline, self.target) if self.down else 0
        return -(-(self.micro_batch + ahead) // pipeline.micro_batches)

    def has_begun(self, pipeline: Pipeline, limit: int) -> bool:
        """Whether the layer has been sent before a drain at micro-batch ``limit``."""
        return self.first_version(pipeline) * pipeline.micro_batches <= limit


def earliest_cut_over(pipeline: Pipeline, source: int, target: int, updates: int) -> int:
    """The first possible cut-over after ``updates`` updates."""
    size = pipeline.micro_batches
    return -(-((updates + 1) * size + _lag(pipeline, Move(0, source, target, 0))) // size) * size


def check_move(
    pipeline: Pipeline, partition: Sequence[int] | None, move: Move, updates: int, earlier: Move | None = None
) -> None:
    """Refuse a move that is impossible after ``updates`` updates.

    ``partition`` are the layers of every stage before the move, None if they are not known here, ``earlier`` the move
    before it.
    """
    source, target, size = move.source, move.target, pipeline.micro_batches
    if pipeline.schedule == "interleaved" or pipeline.weight_sync == "none":
        given = f'schedule "{pipeline.schedule}", weight_sync "{pipeline.weight_sync}"'
        allowed = 'schedules "asp", "1f1b" and "gpipe" with weight_sync "stash" or "vertical"'
        raise Refusal("move", given, allowed, "leave the partition as it is").error()
    stages = range(pipeline.num_stages)
    if source not in stages or target not in stages or abs(target - source) != 1:
        allowed = f"two neighbours among the stages 0 to {pipeline.num_stages - 1}"
        raise Refusal("move", f"from stage {source} to stage {target}", allowed, "move it stage by stage").error()
    if partition is not None:
        start = sum(partition[:source])
        boundary = start + partition[source] - 1 if move.down else start
        if partition[source] < 2 or move.layer != boundary:
            allowed = f"layer {boundary}, the {'last' if move.down else 'first'} of two or more on stage {source}"
            given = f"layer {move.layer} from stage {source} to stage {target}"
            raise Refusal("move", given, allowed, "move that one", f"partition is {list(partition)}").error()
    begins = max(updates, earlier.settled_batch(pipeline) if earlier is not None else 0)
    first = earliest_cut_over(pipeline, source, target, begins)
    if move.micro_batch % size or move.micro_batch < first:
        allowed = f"multiples of {size} from {first} on, after {counted(updates, 'update')}"
        raise Refusal("move", f"at micro-batch {move.micro_batch}", allowed, "move it later").error()


def moved(partition: Sequence[int], move: Move) -> tuple[int, ...]:
    """Layers of every stage after ``move``."""
    counts = list(partition)
    counts[move.source] -= 1
    counts[move.target] += 1
    return tuple(counts)


def layer_version(pipeline: Pipeline, stage: int, moves: Iterable[Move], micro_batch: int, start: int = 0) -> int:
    """Version of a layer that a micro-batch uses in its forward and backward pass.

    ``stage`` has the layer before its ``moves``, which are given in order. ``start`` is the first micro-batch that was
    admitted after the pipeline last drained; cut-overs after a begun move's drain are :func:`completed` before.
    """
    depth = pipeline.depths[stage]
    for move in moves:
        if micro_batch < move.micro_batch:
            break
        ahead = pipeline.depths[move.source]
        # The next stage has the last gradient of the source with activation J + W; a drain has brought all of them.
        late = move.down and micro_batch < move.micro_batch + ahead and move.micro_batch > start
        depth = ahead if late else pipeline.depths[move.target]
    if pipeline.synchronous:
        return micro_batch // pipeline.micro_batches
    return version_used(micro_batch, pipeline.depths[0] if pipeline.vertical else depth, pipeline.micro_batches, start)


def completed(pipeline: Pipeline, moves: Iterable[Move], limit: int) -> tuple[Move, ...]:
    """``moves`` after a drain at micro-batch ``limit``: those that have begun are completed there at the latest."""
    return tuple(
        replace(move, micro_batch=min(move.micro_batch, limit)) if move.has_begun(pipeline, limit) else move
        for move in moves
    )


def with_moves(
    actions: Iterable[Action], pipeline: Pipeline, rank: int, progress: Progress, moves: Sequence[Move]
) -> Iterator[Action]:
    """Actions of ``rank`` to the end of the batch, moves included.

    A move belongs to the filling in which it begins. What a drain leaves on the way comes when ``rank`` has nothing
    else to do before the pipeline is filled again.
    """
    size = pipeline.micro_batches
    after: dict[Action, list[Action]] = defaultdict(list)
    at_end: dict[int, list[Action]] = defaultdict(list)  # of a batch
    left_over: list[Action] = []
    for move in moves:
        if rank not in (move.source, move.target) or move.first_batch(pipeline) * size < progress.filled_from:
            continue
        if move.down and rank == move.target:
            for micro_batch, received in _received(pipeline, move):
                batch, rest = divmod(micro_batch + 1, size)
                (after[Action(Kind.SEND_GRAD, micro_batch)] if rest else at_end[batch - 1]).extend(received)
            left_over += _left_over(pipeline, move, progress)
        else:
            _add_at_updates(after, pipeline, rank, move)
    ended: list[Action] = []
    for action in actions:
        yield action
        yield from after.get(action, ())
        if action.kind is Kind.STEP:
            ended = at_end[action.index]
    yield from ended  # after everything that the other stages wait for
    if progress.completed == progress.limit:
        yield from left_over


def _add_at_updates(after: dict[Action, list[Action]], pipeline: Pipeline, rank: int, move: Move) -> None:
    """Actions around updates: of both ends of a move up, of the source of one down."""
    if move.down:
        layer, gradient = Kind.SEND_LAYER_DOWN, Kind.SEND_LAYER_GRAD_DOWN
    elif rank == move.source:
        layer, gradient = Kind.SEND_LAYER_UP, Kind.SEND_LAYER_GRAD_UP
    else:
        layer, gradient = Kind.RECV_LAYER_UP, Kind.RECV_LAYER_GRAD_UP
    version, cut_over = move.first_version(pipeline), move.micro_batch // pipeline.micro_batches
    if move.down:
        after[Action(Kind.STEP, version - 1)].append(Action(layer, version))
    else:
        # The target needs the version in its next pass, which the source has not made yet when its message leaves.
        version -= 1
        after[Action(Kind.REDUCE, version)].append(Action(layer, version))
    for batch in range(version, cut_over):
        after[Action(Kind.REDUCE, batch)].append(Action(gradient, batch))


def _received(pipeline: Pipeline, move: Move) -> Iterator[tuple[int, list[Action]]]:
    """Actions of the next stage for a move, each with the micro-batch that they follow.

    It comes before an activation, which the next stage would wait for then. The order is that of backward passes
    because these go on at a drain: what is sent must not wait until it is over.
    """
    size, ahead = pipeline.micro_batches, _ahead(pipeline, move.source) - _ahead(pipeline, move.target)
    version, cut_over = move.first_version(pipeline), move.micro_batch // size
    yield version * size + ahead - 1, [Action(Kind.RECV_LAYER_DOWN, version)]
    for batch in range(version, cut_over):
        received = [Action(Kind.RECV_LAYER_GRAD_DOWN, batch), Action(Kind.STEP_LAYER, batch)]
        yield (batch + 1) * size + ahead - 1, received
    held = range(cut_over, (move.micro_batch + ahead) // size)
    yield move.micro_batch + ahead - 1, [Action(Kind.STEP_LAYER, batch) for batch in held]


def _left_over(pipeline: Pipeline, move: Move, progress: Progress) -> Iterator[Action]:
    """Actions of the next stage after a drain: late messages, held-back updates."""
    limit = progress.limit
    if limit is None or not move.has_begun(pipeline, limit):
        return
    # Backward passes that it has run, those of an incomplete batch included.
    done = limit if progress.end is None else max(limit, progress.end - _ahead(pipeline, move.target))
    batches = limit // pipeline.micro_batches
    waiting = [actions for micro_batch, actions in _received(pipeline, move) if micro_batch >= done]
    for actions in waiting[:-1]:
        yield from (action for action in actions if action.kind is Kind.RECV_LAYER_DOWN or action.index < batches)
    if waiting:
        cut_over = move.micro_batch // pipeline.micro_batches
        yield from (Action(Kind.STEP_LAYER, batch) for batch in range(cut_over, batches))


def _ahead(pipeline: Pipeline, stage: int) -> int:
    """Depth of ``stage`` at an update; 0 if it drains before."""
    return 0 if pipeline.synchronous else pipeline.depths[stage]


def _lag(pipeline: Pipeline, move: Move) -> int:
    """Micro-batches by which the target's first version is older than the cut-over."""
    if pipeline.vertical:
        return pipeline.depths[0]
    return _ahead(pipeline, move.source if move.down else move.target)
