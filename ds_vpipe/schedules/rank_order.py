"""What one rank may do next: the order of passes, transfers and updates, and the weight versions that follow from it.

:class:`RankOrder` knows the rules and no schedule. It follows a program action by action and says what is wrong
with the first that breaks one.
"""

from __future__ import annotations

from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.one_f_one_b import Exchanges, version_used
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload

_GATHERED = {Kind.LOAD: "input or labels", Kind.RECV_ACT: "input", Kind.RECV_GRAD: "gradient"}
_ADMITTING = frozenset({Kind.LOAD, Kind.RECV_ACT, Kind.FORWARD})
_PER_BATCH = frozenset(Kind) - {
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.SEND_ACT,
    Kind.SEND_GRAD,
    Kind.DROP_GRAD,
    *_GATHERED,
}


def _batch_end(rank: int, num_ranks: int, exchanges: Exchanges) -> list[Kind]:
    """What ``rank`` does after a batch's backward passes, in order.

    Its copies' gradients leave before it waits for those of its own weights, the reduction is of their sum, and what is
    sent of an update comes after it.
    """
    news = exchanges.news
    due = {
        Kind.SEND_TIED_GRAD: exchanges.has_copies,
        Kind.RECV_TIED_GRAD: exchanges.owns_tied,
        Kind.REDUCE: True,
        Kind.RECV_TIED: exchanges.has_copies,
        Kind.RECV_NEWS: news and rank < num_ranks - 1,
        Kind.STEP: True,
        Kind.SEND_TIED: exchanges.owns_tied,
        Kind.SEND_NEWS: news and rank > 0,
    }
    return [kind for kind, wanted in due.items() if wanted]


class RankOrder:
    """The state of one rank between two actions.

    The rules: passes through a part follow the order of micro-batches, each once; a pass has what it needs, and what
    it makes is sent before the next pass; a batch is reduced and stepped once, after all its backward passes, with the
    exchanges of tied weights and of what updates told in their places around it; a
    forward pass runs when the version that is due is the newest; no more micro-batches are in flight than
    :meth:`~ds_vpipe.schedules.pipeline.Pipeline.in_flight` allows. Where the data end, complete batches are trained,
    gradients beyond them are dropped in order, and numbers go on from the last complete batch.

    It follows that a backward pass is at most ``ceil(W / M)`` versions behind, none if the pipeline is synchronous, and
    that with vertical sync the version that rank 0 used is there: its depth is the largest.

    Args:
        pipeline: the schedule and its sizes.
        rank: the rank within the pipeline.
        workload: what is trained.
        exchanges: what the rank exchanges around its updates.
    """

    def __init__(self, pipeline: Pipeline, rank: int, workload: Workload, exchanges: Exchanges) -> None:
        self._pipeline, self._rank = pipeline, rank
        self._fillings = list(workload.fillings(pipeline))
        self._filling = self._fillings.pop(0)
        self._parts = pipeline.parts_of(rank)
        self._one_part = pipeline.virtual_stages == 1
        self._transfers = pipeline.num_stages > 1
        self._last_part = pipeline.num_parts - 1
        self._forwarded = dict.fromkeys(self._parts, 0)
        self._completed = dict.fromkeys(self._parts, 0)
        self._gathered = {kind: dict.fromkeys(self._parts, 0) for kind in _GATHERED}
        self._dropped = 0
        self._unsent: Action | None = None
        self._in_flight = 0
        self._most_in_flight = pipeline.in_flight(rank)
        self._depth = pipeline.depths[rank]
        self._batch_end = _batch_end(rank, pipeline.num_stages, exchanges)
        self._at = 0  # how far it has come in that order
        self._updates = 0

    def step(self, action: Action) -> str | None:
        """Do ``action``; say what is wrong if it is not allowed now."""
        kind, index = action.kind, action.index
        if kind in _PER_BATCH:
            return self._end_batch(kind, index)
        if self._at:
            return f"{self._next_of_batch()} has to come before it"
        part = self._rank if action.part is None else action.part
        if part not in self._forwarded or (action.part is None) != self._one_part:
            names = "none" if self._one_part else ", ".join(map(str, self._parts))
            return f"rank {self._rank} names no such part; its parts: {names}"
        while kind in _ADMITTING and self._fillings and self._read():
            unfinished = self._end_of_filling()
            if unfinished:
                return unfinished
            self._refill()
        if kind is Kind.FORWARD:
            return self._forward(part, index, action.part)
        if kind is Kind.BACKWARD:
            return self._backward(part, index, action.part)
        if kind is Kind.SEND_ACT or kind is Kind.SEND_GRAD:
            if action != self._unsent:
                return (
                    f"there is nothing to send; {self._unsent} is next" if self._unsent else "there is nothing to send"
                )
            self._unsent = None
            return None
        if kind is Kind.DROP_GRAD:
            return self._drop(part, index)
        return self._gather(kind, part, index)

    def end(self) -> str | None:
        """Say what the end of the program leaves undone."""
        reason = self._end_of_filling()
        if reason is None and self._fillings:
            return f"F{self._fillings[0].start} is missing, after the data have ended at {self._filling.end}"
        return reason

    def _read(self) -> bool:
        """Whether all parts have run all forward passes up to where the data end."""
        return all(forwarded == self._filling.end for forwarded in self._forwarded.values())

    def _end_of_filling(self) -> str | None:
        """Say what the end of the data leaves undone."""
        _, end, limit = self._filling
        size = self._pipeline.micro_batches
        forwards = end
        if forwards is None:
            forwards = limit if self._pipeline.synchronous else limit + self._depth
        backwards = limit if end is None else max(limit, end - self._depth)
        for part in self._parts:
            name = "" if self._one_part else str(part)
            if self._forwarded[part] != forwards:
                return f"{name}F{self._forwarded[part]} is missing"
            if self._completed[part] < backwards:
                return f"{name}B{self._completed[part]} is missing"
            if self._completed[part] > backwards:
                return f"{name}B{backwards} is of an incomplete batch"
            for kind in _GATHERED:
                used = self._completed[part] + self._dropped if kind is Kind.RECV_GRAD else forwards
                if self._gathered[kind][part] > used:
                    return f"{name}{kind.value}{self._gathered[kind][part] - 1} is for no pass"
        if self._updates * size != limit:
            return f"STEP{self._updates} is missing"
        if self._at:
            return f"{self._next_of_batch()} is missing"
        if end is not None and self._one_part and self._rank < self._last_part:
            due = self._gathered[Kind.RECV_GRAD][self._rank]
            if due < max(limit, end - self._pipeline.depths[self._rank + 1]):
                return f"DROP_GRAD{due} is missing"
        return f"{self._unsent} is missing" if self._unsent else None

    def _refill(self) -> None:
        """Begin the next filling: what is in flight belongs to no complete batch."""
        self._filling = self._fillings.pop(0)
        counts = (self._forwarded, self._completed, *self._gathered.values())
        for count in counts:
            count.update(dict.fromkeys(self._parts, self._filling.start))
        self._in_flight = self._dropped = 0

    def _drop(self, part: int, index: int) -> str | None:
        if part == self._last_part or not self._transfers:
            return f"part {part} has no gradient to receive"
        due = self._gathered[Kind.RECV_GRAD][part]
        if index != due:
            return f"DROP_GRAD{due} is next for part {part}"
        if index < self._filling.limit or not self._read():
            return f"the data do not leave micro-batch {index} in an incomplete batch"
        if self._updates * self._pipeline.micro_batches != self._filling.limit:
            return f"STEP{self._updates} has to come before it"
        self._gathered[Kind.RECV_GRAD][part] = due + 1
        self._dropped += 1
        return None

    def _gather(self, kind: Kind, part: int, index: int) -> str | None:
        first, last = part == 0, part == self._last_part
        if kind is Kind.LOAD:
            wanted = first or last
        else:
            wanted = self._transfers and not (first if kind is Kind.RECV_ACT else last)
        if not wanted:
            return f"part {part} has no {_GATHERED[kind]} to {'read' if kind is Kind.LOAD else 'receive'}"
        due = self._gathered[kind][part]
        if index != due:
            return f"{kind.value}{due} is next for part {part}"
        self._gathered[kind][part] = due + 1
        return None

    def _forward(self, part: int, index: int, named: int | None) -> str | None:
        if self._unsent is not None:
            return f"{self._unsent} has to come before it"
        if index != self._forwarded[part]:
            return f"F{self._forwarded[part]} is next for part {part}"
        if part > 0 and self._transfers and self._gathered[Kind.RECV_ACT][part] <= index:
            return "its input has not been received"
        if (part == 0 or part == self._last_part) and self._gathered[Kind.LOAD][part] <= index:
            return f"its {_GATHERED[Kind.LOAD]} have not been read"
        if part > 0 and not self._transfers and self._forwarded[part - 1] <= index:
            return f"part {part - 1} has not run it"
        if self._in_flight == self._most_in_flight:
            return f"{self._in_flight} micro-batches are in flight, which is the most for rank {self._rank}"
        due = self._version_due(index)
        if due != self._updates:
            return f"it would run under version {self._updates} of the weights, {due} is due"
        self._forwarded[part] = index + 1
        self._in_flight += 1
        if self._transfers and part < self._last_part:
            self._unsent = Action(Kind.SEND_ACT, index, named)
        return None

    def _backward(self, part: int, index: int, named: int | None) -> str | None:
        if self._unsent is not None:
            return f"{self._unsent} has to come before it"
        if index != self._completed[part]:
            return f"B{self._completed[part]} is next for part {part}"
        if index >= self._forwarded[part]:
            return f"F{index} has not run"
        if part < self._last_part and self._transfers and self._gathered[Kind.RECV_GRAD][part] <= index:
            return "its gradient has not been received"
        if part < self._last_part and not self._transfers and self._completed[part + 1] <= index:
            return f"part {part + 1} has not run it"
        batch = index // self._pipeline.micro_batches
        if batch != self._updates:
            return f"STEP{self._updates} has to come before it"
        self._completed[part] = index + 1
        self._in_flight -= 1
        if self._transfers and part > 0:
            self._unsent = Action(Kind.SEND_GRAD, index, named)
        return None

    def _version_due(self, index: int) -> int:
        """The version of the weights that is the newest when ``F(index)`` runs."""
        micro_batches = self._pipeline.micro_batches
        if self._pipeline.synchronous:
            return index // micro_batches
        return version_used(index, self._depth, micro_batches, self._filling.start)

    def _end_batch(self, kind: Kind, index: int) -> str | None:
        if self._unsent is not None:
            return f"{self._unsent} has to come before it"
        if kind not in self._batch_end:
            return f"rank {self._rank} has nothing of that kind to exchange"
        due = self._next_of_batch()
        if (kind, index) != (due.kind, due.index):
            return f"{due} is next"
        end = (index + 1) * self._pipeline.micro_batches
        short = [part for part in self._parts if self._completed[part] != end]
        if short:
            return f"B{self._completed[short[0]]} of the batch has not run for part {short[0]}"
        self._updates += kind is Kind.STEP
        self._at = (self._at + 1) % len(self._batch_end)
        return None

    def _next_of_batch(self) -> Action:
        """What is due at the end of the batch."""
        kind = self._batch_end[self._at]
        return Action(kind, self._updates - (self._at > self._batch_end.index(Kind.STEP)))
