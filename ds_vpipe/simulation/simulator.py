"""Simulation of a pipeline: programs carried out with given times for passes, updates and transfers.

A rank does one thing after the other. A transfer occupies its link while both ranks compute: it starts when the
message has been sent, the one before it on the link has arrived, and its receive is posted. Links of opposite
directions, and of activations and gradients, do not share anything.

This is a discrete-event simulation without an event queue. A rank's program has no choices and a message's arrival
depends on earlier events of its two ends alone, so that events may be worked through rank by rank, as far as messages
are there, and come out with the same times as in order of time (see
:mod:`ds_vpipe.schedules.dry_run`). Time is linear in the number of actions; programs are generated while they run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import NamedTuple

from ds_vpipe.errors import PipelineProtocolError, Refusal
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.counts import versions_held
from ds_vpipe.schedules.dry_run import ACTIVATIONS, Link, link_ends, posted_receives, receive_link, send_link
from ds_vpipe.schedules.one_f_one_b import version_used
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload, rank_program
from ds_vpipe.simulation.costs import StageCost
from ds_vpipe.timelines.timeline import MemorySample, Span, Timeline


class Phase(NamedTuple):
    """Costs of every part from a micro-batch on."""

    start: int  # the first micro-batch, a multiple of M
    costs: Sequence[StageCost]
    pause_s: float = 0.0  # of rank 0, before its first pass


def simulate(
    pipeline: Pipeline, costs: Sequence[StageCost], workload: Workload, later: Sequence[Phase] = ()
) -> Simulation:
    """Simulate the training of ``workload``.

    ``costs`` are those of each of the ``K * v`` parts, in the order of the model, until those of a ``later`` phase
    count. Ten batches or more beyond the depth show the steady state well.

    Raises:
        VPipeConfigError: nothing takes any time.
        PipelineProtocolError: a rank never gets a message; :mod:`ds_vpipe.schedules.check` says why.
    """
    phases = [Phase(0, costs), *later]
    links: dict[Link, _Transfers] = {}
    for rank in range(pipeline.num_stages):
        for link in link_ends(send_link, rank, pipeline.num_stages).values():
            links[link] = _Transfers(link.channel, posted_receives(pipeline, link))
    ranks = tuple(SimulatedRank(rank, pipeline, phases, workload, links) for rank in range(pipeline.num_stages))
    runnable = list(reversed(ranks))
    while runnable:
        for target in runnable.pop().run():
            runnable.append(ranks[target])
    for stopped in ranks:
        if stopped.waiting_for is not None:
            raise PipelineProtocolError(f"simulated rank {stopped.rank} never receives {stopped.waiting_for}")
    simulation = Simulation(pipeline, workload, ranks)
    if not simulation.makespan_s:
        raise Refusal("costs", 0.0, "seconds that are not all 0", "give some pass some time").error()
    return simulation


@dataclass(frozen=True)
class Simulation:
    """Outcome of :func:`simulate`. Times are seconds, rates micro-batches per second."""

    pipeline: Pipeline
    workload: Workload
    ranks: tuple[SimulatedRank, ...]

    @cached_property
    def makespan_s(self) -> float:
        """Seconds until the last rank is done."""
        return max(rank.end_s for rank in self.ranks)

    @property
    def overall_throughput(self) -> float:
        """Micro-batches per second over everything, filling and draining included."""
        return self.workload.batches * self.pipeline.micro_batches / self.makespan_s

    @property
    def throughput(self) -> float:
        """Micro-batches per second in the steady state. Overall if there are too few batches to see one."""
        if self.steady_batches is None:
            return self.overall_throughput
        first, last = self.steady_batches
        updates = self.ranks[0].updates
        return (last - first) * self.pipeline.micro_batches / (updates[last][0] - updates[first][0])

    @cached_property
    def steady_batches(self) -> tuple[int, int] | None:
        """The two batches between whose ends the steady state lies. None if there are too few.

        A synchronous pipeline is in it at the end of every batch. In an asynchronous one it is looked for in the
        second half of the longest stretch without an end of data, before the pipeline drains.
        """
        size = self.pipeline.micro_batches
        fillings = self.workload.fillings(self.pipeline)
        length, start = max(((limit - start) // size, start // size) for start, _, limit in fillings)
        first, last = start, start + length - 1
        if not self.pipeline.synchronous:
            ahead = self.pipeline.delays[0]
            last -= ahead
            first = max(start + ahead, (start + last) // 2)
            # Micro-batches go round in a convoy as long as rank 0 has in flight: take whole convoys.
            in_flight = self.pipeline.depths[0] + 1
            convoys = in_flight // gcd(in_flight, size)
            length = max(0, last - first)
            first = last - (length - length % convoys or length)
        return (first, last) if first < last else None

    @property
    def bubble(self) -> tuple[float, ...]:
        """Share of the whole time in which each rank neither passes nor updates."""
        return tuple(1 - rank.updates[-1][1] / self.makespan_s for rank in self.ranks)

    @property
    def steady_bubble(self) -> tuple[float, ...]:
        """The same for the steady state. For the whole time if there are too few batches to see one."""
        window = self.steady_batches
        if window is None:
            return self.bubble
        ends = ([rank.updates[batch] for batch in window] for rank in self.ranks)
        return tuple(1 - (after - before) / (end - start) for (start, before), (end, after) in ends)

    @property
    def staleness(self) -> tuple[tuple[float, int], ...]:
        """Mean and largest staleness of each rank, in updates."""
        return tuple((sum(rank.staleness) / len(rank.staleness), max(rank.staleness)) for rank in self.ranks)

    @cached_property
    def timeline(self) -> Timeline:
        """Passes, updates, receives, and transfers that take time."""
        sizes = f"{self.pipeline.schedule}, K = {self.pipeline.num_stages}, M = {self.pipeline.micro_batches}"
        return Timeline(
            title=", ".join([sizes, *map(str, self.workload.moves)]),
            source="simulation",
            num_ranks=self.pipeline.num_stages,
            micro_batches=self.pipeline.micro_batches,
            spans=tuple(span for rank in self.ranks for span in rank.spans),
            memory=tuple(sample for rank in self.ranks for sample in rank.memory),
            staleness=self.staleness,
        )


@dataclass(slots=True)
class _Transfers:
    """Messages of one link."""

    channel: str
    posted: int  # receives that the other end keeps posted
    sent: list[tuple[Action, float, float, SimulatedRank]] = field(default_factory=list)  # when, seconds, sender
    taken: list[float] = field(default_factory=list)  # when the other end received each
    free: float = 0.0  # when the latest of them arrived


class SimulatedRank:
    """One rank: its state on the way through its program, and its spans, updates and memory so far."""

    def __init__(
        self,
        rank: int,
        pipeline: Pipeline,
        phases: Sequence[Phase],
        workload: Workload,
        links: dict[Link, _Transfers],
    ) -> None:
        self.rank = rank
        self.waiting_for: Action | None = None  # receive whose message has not been sent yet; None once it is done
        self.spans: list[Span] = []  # passes, updates, receives, and transfers of its messages beside everything else
        self.updates: list[tuple[float, float]] = []  # end of each, and the seconds that the rank has been busy by then
        self.staleness: list[int] = []  # for each backward pass the updates since the version that it uses
        self.memory: list[MemorySample] = []  # bytes held from a time on
        self.in_flight = 0  # most micro-batches in flight, summed over the rank's parts
        self.versions = 1  # most versions of the weights held
        self.end_s = 0.0  # end of its last pass or update
        self._pipeline, self._phases, self._phase = pipeline, phases, 0
        self._starts = [phase.start for phase in phases]
        self._fillings = list(workload.fillings(pipeline))
        self._filling = self._fillings.pop(0)
        self._forwarded = self._completed = 0
        self._program: Iterator[Action] = rank_program(pipeline, rank, workload)
        mine = self._rank_costs(0)
        self._version_bytes = sum(cost.version_bytes for cost in mine)
        self._bytes = sum(cost.static_bytes for cost in mine)
        self._clock = self._busy = 0.0
        self._updates = self._next_version = 0
        self._versions: Counter[int] = Counter()  # how many micro-batches in flight use each version
        self._version_of: dict[tuple[int, int], int] = {}
        out = link_ends(send_link, rank, pipeline.num_stages)
        into = link_ends(receive_link, rank, pipeline.num_stages)
        self._out = {kind: (links[link], link.target) for kind, link in out.items() if link in links}
        self._in = {kind: links[link] for kind, link in into.items() if link in links}
        self._account()

    @property
    def peak_bytes(self) -> int:
        """Most bytes held."""
        return max(sample.bytes for sample in self.memory)

    def run(self) -> set[int]:
        """Go on to the first receive whose message has not been sent. Return the ranks that were sent something."""
        woken: set[int] = set()
        while (action := self.waiting_for or next(self._program, None)) is not None:
            self.waiting_for = None
            kind, part = action.kind, self.rank if action.part is None else action.part
            cost = self._cost(part, action.index * self._pipeline.micro_batches if kind.per_batch else action.index)
            if kind is Kind.FORWARD:
                self._forward(action, part, cost)
            elif kind is Kind.BACKWARD:
                self._backward(action, part, cost)
            elif kind is Kind.STEP:
                self._update(action)
            elif kind in self._in:
                if not self._receive(action, self._in[kind], cost):
                    self.waiting_for = action
                    return woken
            elif kind in self._out:
                self._clock += cost.host_s
                link, target = self._out[kind]
                # What moves of a layer is counted as one more message of its link: its size is not known here.
                down = link.channel == ACTIVATIONS
                seconds = cost.send_activation_s if down else cost.send_gradient_s
                link.sent.append((action, self._clock, seconds, self))
                woken.add(target)
        self._drop_incomplete()
        return woken

    def _cost(self, part: int, micro_batch: int) -> StageCost:
        return self._phases[bisect_right(self._starts, micro_batch) - 1].costs[part]

    def _rank_costs(self, phase: int) -> list[StageCost]:
        return [self._phases[phase].costs[part] for part in self._pipeline.parts_of(self.rank)]

    def _begin_phases(self, micro_batch: int) -> None:
        """Hold what is held from ``micro_batch`` on."""
        while self._phase + 1 < len(self._starts) and self._starts[self._phase + 1] <= micro_batch:
            before, self._phase = self._rank_costs(self._phase), self._phase + 1
            mine = self._rank_costs(self._phase)
            self._bytes += sum(new.static_bytes - old.static_bytes for new, old in zip(mine, before, strict=True))
            self._version_bytes = sum(cost.version_bytes for cost in mine)
            self._clock += self._phases[self._phase].pause_s if self.rank == 0 else 0.0

    def _receive(self, action: Action, link: _Transfers, cost: StageCost) -> bool:
        number, begin = len(link.taken), self._clock
        if number == len(link.sent):
            return False
        send, sent, seconds, sender = link.sent[number]
        posted = link.taken[number - link.posted] if number >= link.posted else 0.0
        start = max(sent, link.free, posted)
        link.free = start + seconds
        if seconds:
            sender.spans.append(Span(sender.rank, send, start, link.free))
        self._clock = max(begin, link.free) + cost.host_s
        self.spans.append(Span(self.rank, action, begin, self._clock))
        link.taken.append(self._clock)
        return True

    def _compute(self, action: Action, seconds: float, version: int | None = None) -> None:
        """Let a pass or an update take its time. One that takes none is not drawn."""
        start = self._clock
        self._clock = self.end_s = start + seconds
        self._busy += seconds
        if seconds or version is not None:
            self.spans.append(Span(self.rank, action, start, self._clock, version))

    def _forward(self, action: Action, part: int, cost: StageCost) -> None:
        if part == self.rank:
            self._drop_incomplete()
            while self._forwarded == self._filling.end and self._fillings:
                self._filling = self._fillings.pop(0)
                self._forwarded = self._completed = self._filling.start
            self._forwarded = action.index + 1
            self._begin_phases(action.index)
        version = self._version(action.index)
        self._next_version = self._version(action.index + 1)
        self._version_of[part, action.index] = version
        self._versions[version] += 1
        self._bytes += cost.activation_bytes
        self.in_flight = max(self.in_flight, len(self._version_of))
        self._account()
        self._compute(action, cost.forward_s, version)

    def _backward(self, action: Action, part: int, cost: StageCost) -> None:
        self._drop_incomplete()
        version = self._version_of[part, action.index]
        if part == self.rank:
            self._completed = action.index + 1
        if cost.recompute_bytes:
            self._account(cost.recompute_bytes)
        none = self._pipeline.weight_sync == "none"
        self._compute(action, cost.backward_s, self._updates if none else version)
        self._release(part, action.index)
        self._account()
        self.staleness.append(self._updates - version)

    def _update(self, action: Action) -> None:
        micro_batch = action.index * self._pipeline.micro_batches
        self._compute(
            action, sum(self._cost(part, micro_batch).update_s for part in self._pipeline.parts_of(self.rank))
        )
        self._updates += 1
        self._account()
        self.updates.append((self._clock, self._busy))

    def _release(self, part: int, index: int) -> None:
        """Micro-batch ``index`` is no longer in flight."""
        version = self._version_of.pop((part, index))
        self._versions[version] -= 1
        if not self._versions[version]:
            del self._versions[version]
        self._bytes -= self._cost(part, index).activation_bytes

    def _drop_incomplete(self) -> None:
        """Free what belongs to no complete batch, once the end of the data is known."""
        _, end, limit = self._filling
        if self._forwarded == end and self._completed >= end - self._pipeline.depths[self.rank]:
            for part, index in [(part, index) for part, index in self._version_of if index >= limit]:
                self._release(part, index)
            self._account()

    def _account(self, more: int = 0) -> None:
        """Count the versions and the bytes that are held."""
        held = versions_held(self._pipeline, self._updates, self._versions.keys(), self._next_version)
        self.versions = max(self.versions, held)
        size = self._bytes + (held - 1) * self._version_bytes + more
        if not self.memory or self.memory[-1].bytes != size:
            self.memory.append(MemorySample(self.rank, self._clock, size))

    def _version(self, index: int) -> int:
        """The version of the weights that the forward pass of micro-batch ``index`` uses."""
        if not self._pipeline.vertical:
            return self._updates
        start, end, limit = self._filling
        filled_from = limit if index == end else start
        return version_used(index, self._pipeline.depths[0], self._pipeline.micro_batches, filled_from)
