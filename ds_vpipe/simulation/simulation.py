"""What a simulated pipeline did, and what that means: throughput, bubble, staleness, bytes, and a timeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.programs import Workload
from ds_vpipe.timelines.timeline import WAIT, MemorySample, Span, Timeline, action_name


@dataclass(slots=True)
class RankRecord:
    """Everything one rank did, in order. Actions are in their text form, which costs the least to keep.

    Attributes:
        rank: the rank.
        passes: forward and backward passes: action, start and end in seconds, version of the weights.
        updates: action, start and end in seconds, seconds that the rank has been busy by then.
        waits: receives that were waited for: action, start and end in seconds.
        transfers: transfers of what it sent, which go on beside everything else.
        staleness: for each backward pass the updates since the version that it uses.
        memory: bytes held from a time on.
        peak_bytes: most bytes held.
        in_flight: most micro-batches in flight, summed over the rank's parts.
        versions: most versions of the weights held.
    """

    rank: int
    passes: list[tuple[str, float, float, int]] = field(default_factory=list)
    updates: list[tuple[str, float, float, float]] = field(default_factory=list)
    waits: list[tuple[str, float, float]] = field(default_factory=list)
    transfers: list[tuple[str, float, float]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    peak_bytes: int = 0
    in_flight: int = 0
    versions: int = 1

    def sample(self, time: float, size: int) -> None:
        """From ``time`` on ``size`` bytes are held."""
        self.peak_bytes = max(self.peak_bytes, size)
        if not self.memory or self.memory[-1][1] != size:
            self.memory.append((time, size))

    @property
    def end_s(self) -> float:
        """When the rank is done, in seconds."""
        return max(ends[-1][2] for ends in (self.passes, self.updates))


@dataclass(frozen=True)
class Simulation:
    """The outcome of :func:`ds_vpipe.simulation.simulator.simulate`. Times are seconds, rates micro-batches per second.

    Attributes:
        pipeline: what was simulated.
        workload: what it trained.
        records: what each rank did.
    """

    pipeline: Pipeline
    workload: Workload
    records: tuple[RankRecord, ...]

    @cached_property
    def makespan_s(self) -> float:
        """Seconds until the last rank is done."""
        return max(record.end_s for record in self.records)

    @property
    def overall_throughput(self) -> float:
        """Micro-batches per second over everything, filling and draining included."""
        return self.workload.batches * self.pipeline.micro_batches / self.makespan_s

    @property
    def throughput(self) -> float:
        """Micro-batches per second in the steady state; overall if there are too few batches to see one."""
        window = self.steady_batches
        if window is None:
            return self.overall_throughput
        updates = self.records[0].updates
        seconds = updates[window[1]][2] - updates[window[0]][2]
        return (window[1] - window[0]) * self.pipeline.micro_batches / seconds

    @cached_property
    def steady_batches(self) -> tuple[int, int] | None:
        """The steady state lies between the ends of these two batches; None if there are too few.

        A synchronous pipeline is in it at the end of every batch. In an asynchronous one it is looked for in the
        second half of the longest stretch without an end of data, before the pipeline drains.
        """
        size = self.pipeline.micro_batches
        length, start, drains = max(
            ((limit - start) // size, start // size, end is not None)
            for start, end, limit in self.workload.fillings(self.pipeline)
        )
        first, last = start, start + length - 1
        if not self.pipeline.synchronous:
            ahead = -(-self.pipeline.depths[0] // self.pipeline.micro_batches)
            last -= ahead if drains else 0
            first = max(start + ahead, (start + last) // 2)
            # Micro-batches go round in a convoy as long as rank 0 has in flight: take whole convoys.
            in_flight = self.pipeline.depths[0] + 1
            convoys = in_flight // gcd(in_flight, self.pipeline.micro_batches)
            length = max(0, last - first)
            first = last - (length - length % convoys or length)
        return (first, last) if first < last else None

    @property
    def bubble(self) -> tuple[float, ...]:
        """Share of the whole time in which each rank neither passes nor updates."""
        return tuple(1 - record.updates[-1][3] / self.makespan_s for record in self.records)

    @property
    def steady_bubble(self) -> tuple[float, ...]:
        """The same for the steady state; for the whole time if there are too few batches to see one."""
        window = self.steady_batches
        if window is None:
            return self.bubble
        shares = []
        for record in self.records:
            (_, _, start, before), (_, _, end, after) = (record.updates[batch] for batch in window)
            shares.append(1 - (after - before) / (end - start))
        return tuple(shares)

    @property
    def staleness(self) -> tuple[tuple[float, int], ...]:
        """Of each rank the mean and the most updates between a forward pass and the update with its gradient."""
        return tuple((sum(record.staleness) / len(record.staleness), max(record.staleness)) for record in self.records)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Most bytes that each rank holds."""
        return tuple(record.peak_bytes for record in self.records)

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Most micro-batches in flight on each rank, summed over its parts."""
        return tuple(record.in_flight for record in self.records)

    @property
    def versions(self) -> tuple[int, ...]:
        """Most versions of its weights that each rank holds."""
        return tuple(record.versions for record in self.records)

    @cached_property
    def timeline(self) -> Timeline:
        """Passes, updates, waits, and transfers that take time."""
        memory = (MemorySample(record.rank, time, size) for record in self.records for time, size in record.memory)
        return Timeline(
            title=f"{self.pipeline.schedule}, K = {self.pipeline.num_stages}, M = {self.pipeline.micro_batches}",
            source="simulation",
            num_ranks=self.pipeline.num_stages,
            micro_batches=self.pipeline.micro_batches,
            spans=tuple(span for record in self.records for span in _spans(record)),
            memory=tuple(memory),
            staleness=self.staleness,
        )


def _spans(record: RankRecord) -> Iterator[Span]:
    rank = record.rank

    def part(text: str) -> int:
        named = action_name(text).part
        return rank if named is None else named

    for action, start, end, version in record.passes:
        yield Span(rank, action, start, end, part(action), version)
    for action, start, end, _ in record.updates:
        if end > start:
            yield Span(rank, action, start, end, rank)
    for action, start, end in record.waits:
        yield Span(rank, f"{WAIT}{action}", start, end, part(action))
    for action, start, end in record.transfers:
        yield Span(rank, action, start, end, part(action))
