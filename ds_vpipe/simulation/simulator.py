"""When everything happens: programs carried out with given times for passes, updates and transfers.

A rank does one thing after the other. A transfer occupies its link while both ranks compute: it starts when the
message has been sent, the one before it on the link has arrived, and its receive is posted. Links of opposite
directions, and of activations and gradients, do not share anything.

This is a discrete-event simulation without an event queue. A rank's program has no choices and a message's arrival
depends on earlier events of its two ends alone, so that events may be worked through rank by rank, as far as messages
are there, and come out with the same times as in order of time (see ``rendezvous``). Time is linear in the
number of actions; programs are generated while they run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ds_vpipe.errors import PipelineProtocolError, Refusal
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.programs import Workload, rank_program
from ds_vpipe.schedules.rendezvous import Link, link_ends, posted_receives, receive_link, send_link
from ds_vpipe.schedules.schedule import version_used
from ds_vpipe.simulation.simulation import RankRecord, Simulation
from ds_vpipe.simulation.stage_cost import StageCost


def simulate(pipeline: Pipeline, costs: Sequence[StageCost], workload: Workload) -> Simulation:
    """Train ``workload`` on paper.

    Args:
        pipeline: the schedule and its sizes.
        costs: of each of the ``K * v`` parts, in the order of the model.
        workload: what is trained. Ten batches or more beyond the depth show the steady state well.

    Raises:
        VPipeConfigError: there is not one cost per part, or nothing takes any time.
        PipelineProtocolError: a rank waits for ever; :mod:`ds_vpipe.schedules.checks` says why.
    """
    if len(costs) != pipeline.num_parts:
        allowed = f"one entry per part, {pipeline.num_parts}"
        raise Refusal("costs", f"{len(costs)} entries", allowed, "give the cost of every part once").error()
    records = tuple(RankRecord(rank) for rank in range(pipeline.num_stages))
    links: dict[Link, _Transfers] = {}
    for rank in range(pipeline.num_stages) if pipeline.num_stages > 1 else ():
        for link in link_ends(send_link, rank, pipeline.num_stages).values():
            links[link] = _Transfers(posted_receives(pipeline, link), records[rank])
    ranks = [_Rank(pipeline, record, costs, workload, links) for record in records]
    runnable = list(reversed(ranks))
    while runnable:
        for target in runnable.pop().run():
            if ranks[target] not in runnable:
                runnable.append(ranks[target])
    for stopped in ranks:
        if stopped.waiting_for is not None:
            raise PipelineProtocolError(f"simulated rank {stopped.number} waits for ever for {stopped.waiting_for}")
    simulation = Simulation(pipeline, workload, records)
    if not simulation.makespan_s:
        raise Refusal("costs", 0.0, "seconds that are not all 0", "give some pass some time").error()
    return simulation


class _Transfers:
    """Messages of one link.

    Attributes:
        posted: receives that the other end keeps posted.
        sent: of each message when it was sent, the seconds it takes, and the text of the action.
        taken: when the other end received each.
        free: when the latest of those arrived.
        record: what the sender did.
    """

    __slots__ = ("free", "posted", "record", "sent", "taken")

    def __init__(self, posted: int, record: RankRecord) -> None:
        self.posted = posted
        self.record = record
        self.sent: list[tuple[float, float, str]] = []
        self.taken: list[float] = []
        self.free = 0.0


class _Rank:
    """One rank, as far as it has come.

    Attributes:
        number: the rank.
        waiting_for: the receive whose message has not been sent yet, or None if the program is done.
        record: what it did.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        record: RankRecord,
        costs: Sequence[StageCost],
        workload: Workload,
        links: dict[Link, _Transfers],
    ) -> None:
        self.number = number = record.rank
        self.waiting_for: Action | None = None
        self.record = record
        self._pipeline, self._costs = pipeline, costs
        self._fillings = list(workload.fillings(pipeline))
        self._filling = self._fillings.pop(0)
        self._forwarded = self._completed = 0
        self._program: Iterator[Action] = rank_program(pipeline, number, workload)
        mine = [costs[part] for part in pipeline.parts_of(number)]
        self._update_s = sum(cost.update_s for cost in mine)
        self._version_bytes = sum(cost.version_bytes for cost in mine)
        self._bytes = sum(cost.static_bytes for cost in mine)
        self._clock = self._busy = 0.0
        self._updates = self._next_version = 0
        self._versions: dict[int, int] = {}  # how many micro-batches in flight use each version
        self._version_of: dict[tuple[int, int], int] = {}
        self._held = 1
        out = link_ends(send_link, number, pipeline.num_stages)
        into = link_ends(receive_link, number, pipeline.num_stages)
        self._out = {kind: (links[link], link.target) for kind, link in out.items() if link in links}
        self._in = {kind: links[link] for kind, link in into.items() if link in links}
        self.record.sample(0.0, self._bytes)

    def run(self) -> set[int]:
        """Go on to the first receive whose message has not been sent; return the ranks that were sent something."""
        woken: set[int] = set()
        while True:
            action = self.waiting_for or next(self._program, None)
            self.waiting_for = None
            if action is None:
                self._forget_incomplete()
                return woken
            kind = action.kind
            if kind is Kind.FORWARD:
                self._forward(action)
            elif kind is Kind.BACKWARD:
                self._backward(action)
            elif kind is Kind.STEP:
                self._update(action)
            elif kind in self._in:
                if not self._receive(action, self._in[kind]):
                    self.waiting_for = action
                    return woken
            elif kind in self._out:
                cost = self._costs[self.number if action.part is None else action.part]
                seconds = cost.send_activation_s if kind is Kind.SEND_ACT else cost.send_gradient_s
                self._clock += cost.host_s
                link, target = self._out[kind]
                link.sent.append((self._clock, seconds, str(action)))
                woken.add(target)

    def _receive(self, action: Action, link: _Transfers) -> bool:
        number = len(link.taken)
        if number == len(link.sent):
            return False
        sent, seconds, text = link.sent[number]
        posted = link.taken[number - link.posted] if number >= link.posted else 0.0
        start = max(sent, link.free, posted)
        link.free = start + seconds
        if seconds:
            link.record.transfers.append((text, start, link.free))
        if link.free > self._clock:
            self.record.waits.append((str(action), self._clock, link.free))
            self._clock = link.free
        self._clock += self._costs[self.number if action.part is None else action.part].host_s
        link.taken.append(self._clock)
        return True

    def _forward(self, action: Action) -> None:
        part = self.number if action.part is None else action.part
        if part == self.number:
            self._forget_incomplete()
            while self._forwarded == self._filling.end and self._fillings:
                self._filling = self._fillings.pop(0)
                self._forwarded = self._completed = self._filling.start
            self._forwarded = action.index + 1
        cost, start = self._costs[part], self._clock
        version = self._version(action.index)
        self._next_version = self._version(action.index + 1)
        self._version_of[part, action.index] = version
        self._versions[version] = self._versions.get(version, 0) + 1
        self._bytes += cost.activation_bytes
        self._clock += cost.forward_s
        self._busy += cost.forward_s
        self.record.sample(start, self._bytes)
        self.record.in_flight = max(self.record.in_flight, len(self._version_of))
        self.record.passes.append((str(action), start, self._clock, version))

    def _backward(self, action: Action) -> None:
        self._forget_incomplete()
        part = self.number if action.part is None else action.part
        cost, start = self._costs[part], self._clock
        version = self._let_go(part, action.index)
        if part == self.number:
            self._completed = action.index + 1
        self._clock += cost.backward_s
        self._busy += cost.backward_s
        if cost.recompute_bytes:
            self.record.sample(start, self._bytes + cost.recompute_bytes)
        self._bytes -= cost.activation_bytes
        self._hold()
        self.record.sample(self._clock, self._bytes)
        self.record.staleness.append(self._updates - version)
        self.record.passes.append((str(action), start, self._clock, version))

    def _update(self, action: Action) -> None:
        start = self._clock
        self._clock += self._update_s
        self._busy += self._update_s
        self._updates += 1
        self._hold()
        self.record.sample(self._clock, self._bytes)
        self.record.updates.append((str(action), start, self._clock, self._busy))

    def _let_go(self, part: int, index: int) -> int:
        """Micro-batch ``index`` is no longer in flight; return the version that it used."""
        version = self._version_of.pop((part, index))
        self._versions[version] -= 1
        if not self._versions[version]:
            del self._versions[version]
        return version

    def _forget_incomplete(self) -> None:
        """Let go of what belongs to no complete batch, as soon as the rank knows where the data end."""
        _, end, limit = self._filling
        if self._forwarded != end or self._completed < end - self._pipeline.depths[self.number]:
            return
        incomplete = [(part, index) for part, index in self._version_of if index >= limit]
        for part, index in incomplete:
            self._let_go(part, index)
            self._bytes -= self._costs[part].activation_bytes
        if incomplete:
            self._hold()
            self.record.sample(self._clock, self._bytes)

    def _hold(self) -> None:
        """Count the versions held: the newest, and those that micro-batches in flight use.

        With vertical sync the next forward passes use versions that nothing in flight may use here yet.
        """
        used = self._versions.keys() | {self._updates}
        held = self._updates - min(min(used), self._next_version) + 1 if self._pipeline.vertical else len(used)
        self._bytes += (held - self._held) * self._version_bytes
        self._held = held
        self.record.versions = max(self.record.versions, held)

    def _version(self, index: int) -> int:
        """The version of the weights that the forward pass of micro-batch ``index`` uses."""
        if not self._pipeline.vertical:
            return self._updates
        start, end, limit = self._filling
        refill = limit if index == end else start
        return version_used(index, self._pipeline.depths[0], self._pipeline.micro_batches, refill)
