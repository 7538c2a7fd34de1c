"""Rules for the program of one rank: the order of passes, transfers and updates, and the weight versions they use.

:class:`RankOrder` knows the rules and no schedule. It follows a program action by action and says what is wrong
with the first that breaks one.
"""

from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.one_f_one_b import Exchanges, version_used
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload

_ADMITTING = frozenset({Kind.LOAD, Kind.RECV_ACT, Kind.FORWARD})
_RECEIVING = frozenset({Kind.LOAD, Kind.RECV_ACT, Kind.RECV_GRAD, Kind.DROP_GRAD})
_SENT_AS = {Kind.FORWARD: Kind.SEND_ACT, Kind.BACKWARD: Kind.SEND_GRAD}

Step = tuple[Kind, int]  # a kind of action, and the part of the model that it is for


def _needs(pipeline: Pipeline, rank: int) -> dict[Step, list[Step]]:
    """Steps that ``rank`` takes with every micro-batch, and those that each of them needs."""
    needs: dict[Step, list[Step]] = {}
    last = pipeline.num_parts - 1
    for part in pipeline.parts_of(rank):
        reads = part in (0, last)
        inputs: list[Step] = [(Kind.LOAD, part)] if reads else []
        gradients: list[Step] = [(Kind.FORWARD, part)]
        if part > 0:
            inputs.append((Kind.RECV_ACT, part))
        if part < last:
            gradients.append((Kind.RECV_GRAD, part))
        needs |= {step: [] for step in (*inputs, *gradients) if step[0] in _RECEIVING}
        needs |= {(Kind.FORWARD, part): inputs, (Kind.BACKWARD, part): gradients}
        if part < last:
            needs |= {(Kind.SEND_ACT, part): [(Kind.FORWARD, part)], (Kind.DROP_GRAD, part): []}
        if part > 0:
            needs[Kind.SEND_GRAD, part] = [(Kind.BACKWARD, part)]
    return needs


def _batch_end(rank: int, num_ranks: int, exchanges: Exchanges) -> list[Kind]:
    """What ``rank`` does after a batch's backward passes, in order.

    Its copies' gradients leave before it waits for those of its own weights, the reduction is of their sum, and what is
    sent of an update comes after it.
    """
    peers = exchanges.peers
    due = {
        Kind.SEND_TIED_GRAD: exchanges.has_copies,
        Kind.RECV_TIED_GRAD: exchanges.owns_tied,
        Kind.REDUCE: True,
        Kind.RECV_TIED: exchanges.has_copies,
        Kind.RECV_PEERS: peers and rank < num_ranks - 1,
        Kind.STEP: True,
        Kind.SEND_TIED: exchanges.owns_tied,
        Kind.SEND_PEERS: peers and rank > 0,
    }
    return [kind for kind, wanted in due.items() if wanted]


class RankOrder:
    """The state of one rank between two actions.

    The rules: each step is taken with the micro-batches in order, each once; it has what it needs, and what a pass
    makes is sent before the next pass; a batch is reduced and stepped once, after all its backward passes, with the
    exchanges of tied weights and of what updates told in their places around it; a forward pass runs when the version
    that is due is the newest; no more micro-batches are in flight than
    :meth:`~ds_vpipe.schedules.pipeline.Pipeline.in_flight` allows. Where the data end, complete batches are trained,
    gradients beyond them are dropped, and numbers go on from the last complete batch.

    It follows that a backward pass is at most ``ceil(W / M)`` versions behind, none if the pipeline is synchronous, and
    that with vertical sync the version that rank 0 used is there: its depth is the largest.
    """

    def __init__(self, pipeline: Pipeline, rank: int, workload: Workload, exchanges: Exchanges) -> None:
        self._pipeline, self._rank = pipeline, rank
        self._fillings = list(workload.fillings(pipeline))
        self._needs = _needs(pipeline, rank)
        self._batch_end = _batch_end(rank, pipeline.num_stages, exchanges)
        self._at = 0  # how far it has come in that order
        self._updates = 0
        self._most_in_flight = pipeline.in_flight(rank)
        self._refill()

    def _refill(self) -> None:
        """Begin the next filling: what is in flight belongs to no complete batch."""
        pipeline, rank = self._pipeline, self._rank
        self._filling = self._fillings.pop(0)
        start, end, limit = self._filling
        depths = pipeline.depths
        following = depths[min(rank + 1, pipeline.num_stages - 1)]
        backwards, gradients = max(limit, end - depths[rank]), max(limit, end - following)
        admitted = dict.fromkeys((*_ADMITTING, Kind.SEND_ACT), end)
        ends = {kind: gradients if kind is Kind.DROP_GRAD else admitted.get(kind, backwards) for kind, _ in self._needs}
        self._ends = {step: ends[step[0]] for step in self._needs}
        self._next = {step: backwards if step[0] is Kind.DROP_GRAD else start for step in self._needs}
        self._in_flight = 0
        self._unsent: Action | None = None

    def step(self, action: Action) -> str | None:
        """Do ``action``. Say what is wrong if it is not allowed now."""
        kind, index = action.kind, action.index
        if self._unsent and action != self._unsent and kind not in _RECEIVING:
            return f"{self._unsent} has to come before it"
        if kind.per_batch:
            return self._end_batch(kind, index)
        if self._at:
            return f"{self._next_of_batch()} has to come before it"
        step = kind, self._rank if action.part is None else action.part
        if step not in self._needs or (action.part is None) != (self._pipeline.virtual_stages == 1):
            return f"rank {self._rank} does nothing of that kind with that part"
        if kind in _ADMITTING and self._fillings and self._forwards_done():
            unfinished = self._end_of_filling()
            if unfinished:
                return unfinished
            self._refill()
        if index != self._next[step]:
            return f"{self._name(step)} is next"
        if index >= self._ends[step]:
            return f"the data end before it, at {self._ends[step]}"
        missing = next((need for need in self._needs[step] if self._next[need] <= index), None)
        reason = f"{self._name(missing)} has to come before it" if missing else self._too_early(kind, index)
        if reason is None:
            self._next[step] = index + 1
            self._in_flight += (kind is Kind.FORWARD) - (kind is Kind.BACKWARD)
            if kind in _SENT_AS:
                sent = Action(_SENT_AS[kind], index, action.part)
                self._unsent = sent if (sent.kind, step[1]) in self._needs else None
            elif action == self._unsent:
                self._unsent = None
        return reason

    def end(self) -> str | None:
        """Say what the end of the program leaves undone."""
        reason = self._end_of_filling()
        if reason is None and self._fillings:
            return f"F{self._fillings[0].start} is missing, after the data have ended at {self._filling.end}"
        return reason

    def _too_early(self, kind: Kind, index: int) -> str | None:
        """Say what an action that has all it needs still has to wait for."""
        size = self._pipeline.micro_batches
        if kind is Kind.FORWARD:
            if self._in_flight == self._most_in_flight:
                return f"{self._in_flight} micro-batches are in flight, which is the most for rank {self._rank}"
            depth = self._pipeline.depths[self._rank]
            synchronous = self._pipeline.synchronous
            due = index // size if synchronous else version_used(index, depth, size, self._filling.start)
            if due != self._updates:
                return f"it would run under version {self._updates} of the weights, {due} is due"
        if kind is Kind.BACKWARD and index // size != self._updates:
            return f"STEP{self._updates} has to come before it"
        if kind is Kind.DROP_GRAD:
            if not self._forwards_done():
                return "the data have not ended"
            if self._updates * size != self._filling.limit:
                return f"STEP{self._updates} has to come before it"
        return None

    def _forwards_done(self) -> bool:
        """Whether all parts have run all forward passes up to where the data end."""
        return all(count == self._ends[step] for step, count in self._next.items() if step[0] is Kind.FORWARD)

    def _end_of_filling(self) -> str | None:
        """Say what the end of the data leaves undone."""
        short = next((step for step, count in self._next.items() if count != self._ends[step]), None)
        if short:
            return f"{self._name(short)} is missing"
        if self._updates * self._pipeline.micro_batches != self._filling.limit or self._at:
            return f"{self._next_of_batch()} is missing"
        return None

    def _end_batch(self, kind: Kind, index: int) -> str | None:
        if kind not in self._batch_end:
            return f"rank {self._rank} has nothing of that kind to exchange"
        due = self._next_of_batch()
        if (kind, index) != (due.kind, due.index):
            return f"{due} is next"
        end = (index + 1) * self._pipeline.micro_batches
        short = next((s for s, count in self._next.items() if s[0] is Kind.BACKWARD and count != end), None)
        if short:
            return f"{self._name(short)} has to come before it"
        self._updates += kind is Kind.STEP
        self._at = (self._at + 1) % len(self._batch_end)
        return None

    def _next_of_batch(self) -> Action:
        """What is due at the end of the batch."""
        kind = self._batch_end[self._at]
        return Action(kind, self._updates - (self._at > self._batch_end.index(Kind.STEP)))

    def _name(self, step: Step) -> Action:
        """The action that is next of a step."""
        return Action(step[0], self._next[step], None if self._pipeline.virtual_stages == 1 else step[1])
