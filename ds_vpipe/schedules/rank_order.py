"""What one rank may do next: the order of passes, transfers and updates, and the weight versions that follow from it.

:class:`RankOrder` knows the rules and no schedule. It follows a program action by action and says what is wrong
with the first that breaks one.
"""

from __future__ import annotations

from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.programs import Workload
from ds_vpipe.schedules.schedule import version_used

_GATHERED = {Kind.LOAD: "input or labels", Kind.RECV_ACT: "input", Kind.RECV_GRAD: "gradient"}
_PER_BATCH = frozenset(Kind) - {Kind.FORWARD, Kind.BACKWARD, Kind.SEND_ACT, Kind.SEND_GRAD, *_GATHERED}


class RankOrder:
    """The state of one rank between two actions.

    The rules: passes through a part follow the order of micro-batches, each once; a pass has what it needs, and what
    it makes is sent before the next pass; a batch is reduced and stepped once, after all its backward passes; a
    forward pass runs when the version that is due is the newest; no more micro-batches are in flight than
    :meth:`~ds_vpipe.schedules.pipeline.Pipeline.in_flight` allows.

    It follows that a backward pass is at most ``ceil(W / M)`` versions behind, none if the pipeline is synchronous, and
    that with vertical sync the version that rank 0 used is there: its depth is the largest.

    Args:
        pipeline: the schedule and its sizes.
        rank: the rank within the pipeline.
        workload: what is trained.
    """

    def __init__(self, pipeline: Pipeline, rank: int, workload: Workload) -> None:
        self._pipeline, self._rank, self._workload = pipeline, rank, workload
        self._parts = pipeline.parts_of(rank)
        self._one_part = pipeline.virtual_stages == 1
        self._transfers = pipeline.num_stages > 1
        self._last_part = pipeline.num_parts - 1
        self._forwarded = dict.fromkeys(self._parts, 0)
        self._completed = dict.fromkeys(self._parts, 0)
        self._gathered = {kind: dict.fromkeys(self._parts, 0) for kind in _GATHERED}
        self._unsent: Action | None = None
        self._in_flight = 0
        self._most_in_flight = pipeline.in_flight(rank)
        self._depth = pipeline.depths[rank]
        self._reduced = 0
        self._updates = 0

    def step(self, action: Action) -> str | None:
        """Do ``action``; say what is wrong if it is not allowed now."""
        kind, index = action.kind, action.index
        if kind in _PER_BATCH:
            return self._update(kind, index) if kind is Kind.REDUCE or kind is Kind.STEP else None
        part = self._rank if action.part is None else action.part
        if part not in self._forwarded or (action.part is None) != self._one_part:
            names = "none" if self._one_part else ", ".join(map(str, self._parts))
            return f"rank {self._rank} names no such part; its parts: {names}"
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
        return self._gather(kind, part, index)

    def end(self) -> str | None:
        """Say what the end of the program leaves undone."""
        total = self._workload.batches * self._pipeline.micro_batches
        ahead = 0 if self._workload.drain or self._pipeline.synchronous else self._depth
        for part in self._parts:
            name = "" if self._one_part else str(part)
            if self._forwarded[part] != total + ahead:
                return f"{name}F{self._forwarded[part]} is missing"
            if self._completed[part] != total:
                return f"{name}B{self._completed[part]} is missing"
            for kind in _GATHERED:
                if self._gathered[kind][part] > (total if kind is Kind.RECV_GRAD else total + ahead):
                    return f"{name}{kind.value}{self._gathered[kind][part] - 1} is for no pass"
        if self._updates != self._workload.batches:
            return f"STEP{self._updates} is missing"
        return f"{self._unsent} is missing" if self._unsent else None

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
        batch = index // micro_batches
        if self._pipeline.synchronous:
            return batch
        return version_used(index, self._depth, micro_batches, self._workload.refill(batch) * micro_batches)

    def _update(self, kind: Kind, index: int) -> str | None:
        if self._unsent is not None:
            return f"{self._unsent} has to come before it"
        end = (index + 1) * self._pipeline.micro_batches
        short = [part for part in self._parts if self._completed[part] != end]
        due = self._reduced if kind is Kind.REDUCE else self._updates
        if index != due:
            return f"{kind.value}{due} is next"
        if short:
            return f"B{self._completed[short[0]]} of the batch has not run for part {short[0]}"
        if kind is Kind.REDUCE:
            self._reduced += 1
        elif self._reduced != index + 1:
            return f"REDUCE{index} has to come before it"
        else:
            self._updates += 1
        return None
