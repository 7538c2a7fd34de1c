"""Rules for a rank's part in moves of layers: what is sent and received, and the versions of a layer it has.

:func:`check_moves` is :func:`ds_vpipe.schedules.check.check_programs` for programs with moves.

:class:`LayerOrder` knows the versions that are due (:func:`~ds_vpipe.schedules.moves.layer_version`) and not where the
actions of a move are placed. It counts what the rank has received and applied of a layer, action by action.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.check import ScheduleFault, link_faults
from ds_vpipe.schedules.dry_run import posted_receives
from ds_vpipe.schedules.moves import Move, completed, layer_version
from ds_vpipe.schedules.one_f_one_b import Exchanges
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Filling, Programs, Workload
from ds_vpipe.schedules.rank_order import RankOrder

_SENT = frozenset({Kind.SEND_LAYER_DOWN, Kind.SEND_LAYER_UP})
_SENT_GRADIENTS = frozenset({Kind.SEND_LAYER_GRAD_DOWN, Kind.SEND_LAYER_GRAD_UP})
_RECEIVED = frozenset({Kind.RECV_LAYER_DOWN, Kind.RECV_LAYER_UP})
_RECEIVED_GRADIENTS = frozenset({Kind.RECV_LAYER_GRAD_DOWN, Kind.RECV_LAYER_GRAD_UP})
_DOWN = frozenset(kind for kind in Kind if kind.name.endswith("_DOWN"))

LAYER_KINDS = frozenset({*_SENT, *_SENT_GRADIENTS, *_RECEIVED, *_RECEIVED_GRADIENTS, Kind.STEP_LAYER})
"""Kinds of action that moves add to programs."""


def check_moves(
    pipeline: Pipeline, programs: Programs, workload: Workload, exchanges: Sequence[Exchanges] | None = None
) -> list[ScheduleFault]:
    """Everything that is wrong with ``programs``; at most one fault per rank or link."""
    faults = []
    for rank, program in enumerate(programs):
        order = RankOrder(pipeline, rank, workload, exchanges[rank] if exchanges else Exchanges())
        layers = LayerOrder(pipeline, rank, workload.moves)
        for position, action in enumerate(program):
            reason = None if action.kind in LAYER_KINDS else order.step(action)
            if (reason := reason or layers.step(action, order._filling)) is not None:
                faults.append(ScheduleFault(rank, position, action, reason))
                break
        else:
            if (reason := order.end() or layers.end()) is not None:
                faults.append(ScheduleFault(rank, len(program), None, reason))
    return faults or link_faults(programs, partial(posted_receives, pipeline))


@dataclass(slots=True)
class _Received:
    """A layer that the rank has received."""

    oldest: int  # version received
    version: int  # updates by now
    cut_over: int  # first batch whose gradient the rank computes itself
    gradients: set[int] = field(default_factory=set)  # batches whose gradient is there and not applied
    expected: int = 0  # batch of the next gradient to be received


class LayerOrder:
    """The moved layers of one rank between two actions.

    The rules: the source sends a layer as it is after its updates so far, then the gradients of all batches from there
    on up to the cut-over or a drain, each once it is reduced and before its update; the target applies gradients in
    order, each once and none that it does not have; a forward pass finds the layer in the version that is due; at a
    drain the target has all updates.
    """

    def __init__(self, pipeline: Pipeline, rank: int, moves: tuple[Move, ...]) -> None:
        self._pipeline, self._rank, self._moves = pipeline, rank, moves
        self._filling: Filling | None = None
        self._reduced = -1
        self._updates = 0
        self._received: dict[int, _Received] = {}
        self._seen: set[Move] = set()  # moves to here that have begun
        self._sent: dict[Move, int] = {}  # of a move from here, the batch whose gradient is to be sent next

    def step(self, action: Action, filling: Filling) -> str | None:
        """Do ``action`` in ``filling``; say what is wrong if it is not allowed now."""
        if self._filling is None:
            self._filling = filling
        if filling != self._filling:
            unfinished = self.end()
            if unfinished:
                return unfinished
            limit = self._filling.limit
            self._moves = completed(self._pipeline, self._moves, limit)
            for layer in self._received.values():
                layer.cut_over = min(layer.cut_over, limit // self._pipeline.micro_batches)
            self._filling = filling
        kind, index = action.kind, action.index
        if kind is Kind.FORWARD:
            return self._forward(index)
        if kind is Kind.REDUCE:
            self._reduced = index
            for layer in self._received.values():
                if index >= layer.cut_over:
                    layer.gradients.add(index)
        if kind is Kind.STEP:
            self._updates = index + 1
            for layer in self._received.values():
                if layer.version == index and index in layer.gradients:
                    layer.version += 1
        return self._of_move(kind, index) if kind in LAYER_KINDS else None

    def end(self) -> str | None:
        """Say what the end of the data leaves undone."""
        assert self._filling is not None
        limit, size = self._filling.limit, self._pipeline.micro_batches
        for move in self._moves:
            if not self._begins(move) or not move.has_begun(self._pipeline, limit):
                continue
            last = min(move.micro_batch, limit) // size
            if move.source == self._rank and self._sent.get(move) != last:
                return f"layer {move.layer} or its gradients up to batch {last - 1} have not been sent"
        for layer, received in self._received.items():
            if received.version * size != limit:
                return f"layer {layer} has had {received.version} updates, {limit // size} are due"
        return None

    def _begins(self, move: Move) -> bool:
        """Whether ``move`` begins in this filling, unless the data end before."""
        assert self._filling is not None
        return move.first_batch(self._pipeline) * self._pipeline.micro_batches >= self._filling.start

    def _of_move(self, kind: Kind, index: int) -> str | None:
        down, size = kind in _DOWN, self._pipeline.micro_batches
        if kind in _SENT:
            found = [move for move in self._moves if (move.source, move.down) == (self._rank, down)]
            moves = [move for move in found if self._begins(move) and move not in self._sent]
            if not moves:
                return f"no layer moves from rank {self._rank} now"
            if index != self._updates:
                return f"layer {moves[0].layer} has had {self._updates} updates here"
            self._sent[moves[0]] = index
        elif kind in _SENT_GRADIENTS:
            sent = [move for move, batch in self._sent.items() if batch == index and index * size < move.micro_batch]
            if not sent or sent[0].down != down:
                return "no layer's gradient of that batch is next"
            if index != self._reduced or index != self._updates:
                return f"REDUCE{index} has to come before it, STEP{index} after it"
            self._sent[sent[0]] += 1
        elif kind in _RECEIVED:
            found = [move for move in self._moves if (move.target, move.down) == (self._rank, down)]
            moves = [move for move in found if self._begins(move) and move not in self._seen]
            if not moves:
                return f"no layer moves to rank {self._rank} now"
            self._seen.add(moves[0])
            self._received[moves[0].layer] = _Received(index, index, moves[0].micro_batch // size, expected=index)
        elif kind in _RECEIVED_GRADIENTS:
            expecting = [layer for layer in self._received.values() if layer.expected == index < layer.cut_over]
            if not expecting:
                return "no layer's gradient of that batch is next"
            expecting[0].gradients.add(index)
            expecting[0].expected += 1
        else:
            waiting = [layer for layer in self._received.values() if layer.version == index]
            if not waiting or index not in waiting[0].gradients:
                return f"no layer waits for update {index}, or its gradient is not there"
            waiting[0].version += 1
        return None

    def _forward(self, micro_batch: int) -> str | None:
        for layer in {move.layer for move in self._moves}:
            moves = [move for move in self._moves if move.layer == layer]
            past = [move for move in moves if move.micro_batch <= micro_batch]
            if not past or past[-1].target != self._rank:
                continue
            received = self._received.get(layer)
            if received is None:
                return f"layer {layer} is not there"
            assert self._filling is not None
            due = layer_version(self._pipeline, moves[0].source, moves, micro_batch, self._filling.start)
            oldest = received.oldest if self._pipeline.vertical else received.version
            if not oldest <= due <= received.version:
                return f"layer {layer} is there after {received.version} updates, {due} are due"
        return None
