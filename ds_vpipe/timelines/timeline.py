"""Timelines: when every rank of a pipeline runs which action, for plans, simulations and recordings alike.

Pictures, traces, reports and summaries are made from a :class:`Timeline` alone, so that a plan, its simulation and the
recording of the run can be laid side by side. There is one file format, a JSON object. Spans are arrays, because a run
has hundreds of thousands of them::

    {"format": "ds_vpipe.timelines.timeline", "version": 2, "title": "bert, 4 stages", "source": "simulation",
     "num_ranks": 4, "micro_batches": 2, "spans": [[rank, action, start, end, version], ...],
     "memory": [[rank, time, bytes], ...], "losses": [[batch, loss], ...], "staleness": [[mean, most], ...],
     "meta": {}}

A recorder writes the same with the spans of its own rank and five further keys, those of :class:`Recording`.
:mod:`.merge` makes one timeline of the recordings of all ranks.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from ds_vpipe.errors import Refusal, VPipeConfigError
from ds_vpipe.schedules.actions import Action, Category, Kind

FORMAT: Final = "ds_vpipe.timelines.timeline"
VERSION: Final = 2
SOURCES: Final = ("plan", "simulation", "recording")
_MAKE_ANEW = "write the file anew with this version of ds_vpipe"


class Span(NamedTuple):
    """One action of one rank, with its start and end.

    Attributes:
        rank: Device of the pipeline, from 0.
        action: The action. A receive lasts as long as its rank waits for the message.
        start: Seconds from the timeline's start.
        end: Seconds from the timeline's start, not before ``start``.
        version: Version of the weights that a pass uses, where known.
    """

    rank: int
    action: Action
    start: float
    end: float
    version: int | None = None

    @property
    def kind(self) -> Kind:
        """Kind of the action."""
        return self.action.kind

    @property
    def category(self) -> Category:
        """Category of the action."""
        return self.action.kind.category

    @property
    def part(self) -> int:
        """Part of the model, 0..P-1; the rank if each rank holds one part."""
        return self.rank if self.action.part is None else self.action.part

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return self.end - self.start


class MemorySample(NamedTuple):
    """Bytes that ``rank`` has allocated from ``time`` (seconds from the timeline's start) to its next sample."""

    rank: int
    time: float
    bytes: int


@dataclass(frozen=True)
class Timeline:
    """Actions of all ranks of one pipeline over time.

    Attributes:
        title: One line for users.
        source: ``"plan"``, ``"simulation"`` or ``"recording"``.
        num_ranks: Devices of the pipeline, K.
        micro_batches: Micro-batches per batch, M.
        spans: In any order. Spans of one rank may overlap (a transfer beside a pass).
        memory: Samples of allocated bytes, in any order.
        losses: Pairs of batch and its mean loss.
        staleness: Per rank the mean and the largest number of updates applied between a micro-batch's forward
            pass and the update with its gradient; empty if not known.
        meta: Further facts, as JSON types. ``"time_unit"`` names, for users, the unit that one second stands for in
            a timeline that is not in seconds, such as ``"forward passes"``.
    """

    title: str
    source: str
    num_ranks: int
    micro_batches: int
    spans: Sequence[Span]
    memory: Sequence[MemorySample] = ()
    losses: Sequence[tuple[int, float]] = ()
    staleness: Sequence[tuple[float, int]] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> range:
        """The ranks whose spans it holds."""
        return range(self.num_ranks)

    @cached_property
    def duration(self) -> float:
        """Seconds from the timeline's start to the end of its last span."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def holds_parts(self) -> bool:
        """Whether ranks hold several parts of the model, which then have to be named."""
        return any(span.part != span.rank for span in self.spans)

    @property
    def rank_word(self) -> str:
        """Word for a rank: ``"stage"`` if it holds the part of its own number, else ``"rank"``."""
        return "rank" if self.holds_parts else "stage"

    def by_rank(self) -> list[list[Span]]:
        """Spans of each rank, sorted by start."""
        rows: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            rows[span.rank].append(span)
        return [sorted(row, key=lambda span: (span.start, span.end)) for row in rows]

    def to_json(self) -> dict[str, Any]:
        """Return the object that a file holds."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        values["spans"] = [(s.rank, str(s.action), s.start, s.end, s.version) for s in self.spans]
        return {"format": FORMAT, "version": VERSION, **values}

    @staticmethod
    def from_json(data: object) -> Timeline:
        """The inverse of :meth:`to_json`; a :class:`Recording` if ``data`` is of one rank.

        Raises:
            VPipeConfigError: ``data`` is not a timeline. One line names the first fault.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            what = data.get("format") if isinstance(data, dict) else data
            raise Refusal("timeline.format", what, f'an object with "format": "{FORMAT}"', _MAKE_ANEW).error()
        if data.get("version") != VERSION:
            raise Refusal("timeline.version", data.get("version"), str(VERSION), _MAKE_ANEW).error()
        of = Recording if "rank" in data else Timeline
        values = {entry.name: data[entry.name] for entry in fields(of) if entry.name in data}
        parse = cache(Action.parse)  # ranks share most texts
        try:
            values["spans"] = tuple(Span(row[0], parse(row[1]), *row[2:]) for row in data["spans"])
            values["memory"] = tuple(MemorySample(*row) for row in data.get("memory", ()))
            values["losses"] = tuple((int(batch), float(loss)) for batch, loss in data.get("losses", ()))
            values["staleness"] = tuple((float(mean), int(most)) for mean, most in data.get("staleness", ()))
            timeline = of(**values)
            timeline.check()
        except VPipeConfigError:
            raise
        except (IndexError, KeyError, TypeError, ValueError) as error:
            wrong = f"{type(error).__name__}: {error}"
            raise Refusal("timeline", wrong, f"what {__name__} describes", _MAKE_ANEW).error() from None
        return timeline

    def check(self) -> None:
        """Check the ranges of all fields.

        Raises:
            VPipeConfigError: A rank, time, action, source or number of bytes is outside its range.
        """

        def expect(holds: bool, key: str, value: object, allowed: str) -> None:
            if not holds:
                raise Refusal(f"timeline.{key}", value, allowed, "correct it").error()

        expect(self.source in SOURCES, "source", self.source, ", ".join(SOURCES))
        for key in ("num_ranks", "micro_batches"):
            expect(getattr(self, key) >= 1, key, getattr(self, key), "an int >= 1")
        ranks = self.ranks
        few = len(self.staleness) in (0, len(ranks))
        expect(few, "staleness", self.staleness, f"one pair per rank, {len(ranks)}, or none")
        for index, span in enumerate(self.spans):
            if not (span.rank in ranks and 0 <= span.start <= span.end < math.inf):
                row = [span.rank, str(span.action), span.start, span.end, span.version]
                allowed = f"a rank below {self.num_ranks} and 0 <= start <= end, in seconds"
                expect(False, f"spans[{index}]", row, allowed)
        for index, sample in enumerate(self.memory):
            holds = sample.rank in ranks and 0 <= sample.time < math.inf and sample.bytes >= 0
            allowed = f"a rank below {self.num_ranks}, a time >= 0 and bytes >= 0"
            expect(holds, f"memory[{index}]", list(sample), allowed)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to the file ``path``, replacing what was there."""
        Path(path).write_text(json.dumps(self.to_json(), separators=(",", ":")) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Timeline:
        """Read a file that :meth:`save` wrote.

        Raises:
            VPipeConfigError: The file cannot be read or is not a timeline.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            reason = error.strerror or str(error)
            raise Refusal(
                "timeline", str(path), "a file that can be read", "correct the path", reason
            ).error() from None
        except ValueError as error:
            raise Refusal("timeline", str(path), "a JSON file", _MAKE_ANEW, str(error)).error() from None
        return Timeline.from_json(data)


@dataclass(frozen=True)
class Recording(Timeline):
    """Timeline of one rank on its own clock, as a recorder writes it.

    Times are seconds from ``origin_ns`` on the clock that ``clock`` names. Ranks that name the same clock share it, as
    processes of one machine share ``time.monotonic_ns()``. A receive has to end when the message is there, and a send
    must not start after its message is on its way.

    Attributes:
        rank: Rank in the pipeline.
        clock: Name of the clock, such as the host's.
        origin_ns: Instant on that clock at which times begin, nanoseconds.
        replica: Data-parallel replica of the pipeline.
        dropped: Number of spans that a full ring buffer has lost, the oldest ones.
    """

    rank: int = 0
    clock: str = ""
    origin_ns: int = 0
    replica: int = 0
    dropped: int = 0

    @property
    def ranks(self) -> range:
        """The one rank."""
        return range(self.rank, self.rank + 1)
