"""Timelines: when every rank of a pipeline runs which action, for plans, simulations and recordings alike.

Pictures, traces, reports and summaries are made from a :class:`Timeline` alone, so that a plan, its simulation and the
recording of the run can be laid side by side. There is one file format, a JSON object with the fields of the class.
Spans are arrays, because a run has hundreds of thousands of them::

    {"format": "ds_vpipe.timelines.timeline", "version": 2, "title": "bert, 4 stages", "source": "simulation",
     "num_ranks": 4, "micro_batches": 2, "spans": [[rank, action, start, end, version], ...],
     "memory": [[rank, time, bytes], ...], "losses": [[batch, loss], ...], "staleness": [[mean, most], ...],
     "meta": {}}

A recorder writes a :class:`Recording`, with the spans of its own rank; :mod:`.merge` makes one timeline of all ranks'.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ds_vpipe.errors import Refusal, VPipeConfigError, read_json
from ds_vpipe.schedules.actions import Action, Category, Kind

FORMAT: Final = "ds_vpipe.timelines.timeline"
_VERSION: Final = 2
_SOURCES: Final = ("plan", "simulation", "recording")
Window = tuple[float, float]  # first and last second
_MOST: Final = {"num_ranks": 100_000, "micro_batches": 1_000_000_000}
_LAST_SECOND: Final = 1e12  # beyond, a sum of seconds has no milliseconds any more
_MAKE_ANEW = "write the file anew with this version of ds_vpipe"


class Span(NamedTuple):
    """One action of one rank between two instants, in seconds from the timeline's start.

    A receive lasts as long as its rank waits for the message. ``version`` is that of a pass's weights, where known.
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
        """Part of the model, 0..P-1. The rank if each rank holds one part."""
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
    """Actions of all ranks of one pipeline over time."""

    title: str  # one line for users
    source: str  # "plan", "simulation" or "recording"
    num_ranks: int  # devices of the pipeline, K
    micro_batches: int  # micro-batches per batch, M
    spans: Sequence[Span]  # in any order. Spans of one rank may overlap (a transfer beside a pass).
    memory: Sequence[MemorySample] = ()  # samples of allocated bytes, in any order
    losses: Sequence[tuple[int, float]] = ()  # pairs of batch and its mean loss
    # Per rank the mean and the largest number of updates between a micro-batch's forward pass and the update with its
    # gradient; empty if not known.
    staleness: Sequence[tuple[float, int]] = ()
    # Further facts, as JSON types. "time_unit" names the unit that one second stands for in a timeline that is not in
    # seconds, such as "forward passes".
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
        """The object that a file holds."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {"format": FORMAT, "version": _VERSION, **values, "spans": [_row(span) for span in self.spans]}

    @staticmethod
    def from_json(content: Mapping[str, Any], name: str = "timeline") -> Timeline:
        """The inverse of :meth:`to_json`. A :class:`Recording` if ``content``, called ``name``, is of one rank.

        Raises:
            VPipeConfigError: ``content`` is not a timeline. One line names the first fault.
        """
        if content.get("format") != FORMAT:
            allowed = f'an object with "format": "{FORMAT}"'
            raise Refusal(f"{name}.format", content.get("format"), allowed, _MAKE_ANEW).error()
        if content.get("version") != _VERSION:
            raise Refusal(f"{name}.version", content.get("version"), str(_VERSION), _MAKE_ANEW).error()
        of = Recording if "rank" in content else Timeline
        values = {entry.name: content[entry.name] for entry in fields(of) if entry.name in content}
        parse = cache(Action.parse)  # ranks share most texts
        try:
            values["spans"] = tuple(Span(row[0], parse(row[1]), *row[2:]) for row in values["spans"])
            values["memory"] = tuple(MemorySample(*row) for row in values.get("memory", ()))
            values["losses"] = tuple((int(batch), float(loss)) for batch, loss in values.get("losses", ()))
            values["staleness"] = tuple((float(mean), int(most)) for mean, most in values.get("staleness", ()))
            for field_name, kind in _types(of).items():
                if field_name in values:
                    kind.validate_python(values[field_name], strict=True)
            timeline = of(**values)
            timeline.check(name)
        except VPipeConfigError:
            raise
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            key = ".".join([name, field_name, *map(str, first["loc"])])
            raise Refusal(key, first["input"], first["msg"], _MAKE_ANEW).error() from None
        except (IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
            wrong = f"{type(error).__name__}: {error}"
            raise Refusal(name, wrong, f"what {__name__} describes", _MAKE_ANEW).error() from None
        return timeline

    def check(self, name: str = "timeline") -> None:
        """Refuse a rank, time, action, source or number of bytes outside its range."""
        for key, value, allowed in self._faults():
            raise Refusal(f"{name}.{key}", value, allowed, "correct it").error()

    def _faults(self) -> Iterator[tuple[str, object, str]]:
        if self.source not in _SOURCES:
            yield "source", self.source, ", ".join(_SOURCES)
        for key in ("num_ranks", "micro_batches"):
            if not 1 <= getattr(self, key) <= _MOST[key]:
                yield key, getattr(self, key), f"an int from 1 to {_MOST[key]}"
        if len(self.staleness) not in (0, len(self.ranks)):
            yield "staleness", self.staleness, f"one pair per rank, {len(self.ranks)}, or none"
        for index, span in enumerate(self.spans):
            if not (span.rank in self.ranks and 0 <= span.start <= span.end <= _LAST_SECOND):
                allowed = f"a rank below {self.num_ranks} and 0 <= start <= end <= {_LAST_SECOND:g}, in seconds"
                yield f"spans[{index}]", _row(span), allowed
        for index, sample in enumerate(self.memory):
            if not (sample.rank in self.ranks and 0 <= sample.time <= _LAST_SECOND and 0 <= sample.bytes < 2**63):
                yield f"memory[{index}]", sample, f"a rank below {self.num_ranks}, a time >= 0 and bytes >= 0"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to the file ``path``, replacing what was there."""
        Path(path).write_text(json.dumps(self.to_json(), separators=(",", ":")) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Timeline:
        """Read a file that :meth:`save` wrote.

        Raises:
            VPipeConfigError: the file cannot be read or is not a timeline.
        """
        content = read_json(path, "timeline", "a JSON file of a timeline", f"correct it, or {_MAKE_ANEW}")
        return Timeline.from_json(content, f"{path}: timeline")


@dataclass(frozen=True)
class Recording(Timeline):
    """Timeline of one rank on its own clock, as a recorder writes it.

    Times are seconds from ``origin_ns`` on the clock that ``clock`` names. Ranks that name the same clock share it, as
    processes of one machine share ``time.monotonic_ns()``. A receive has to end when the message is there, and a send
    must not start after its message is on its way.
    """

    rank: int = 0  # rank in the pipeline
    clock: str = ""  # name of the clock, such as the host's
    origin_ns: int = 0  # instant on that clock at which times begin, nanoseconds
    replica: int = 0  # data-parallel replica of the pipeline
    dropped: int = 0  # number of spans that a full ring buffer has lost, the oldest ones

    def _faults(self) -> Iterator[tuple[str, object, str]]:
        yield from super()._faults()
        if not -(2**63) <= self.origin_ns < 2**63:
            yield "origin_ns", self.origin_ns, "an int of 64 bits"

    @property
    def ranks(self) -> range:
        """The one rank."""
        return range(self.rank, self.rank + 1)


@cache
def _types(of: type[Timeline]) -> dict[str, TypeAdapter[Any]]:
    return {name: TypeAdapter(kind) for name, kind in get_type_hints(of).items()}


def _row(span: Span) -> tuple[int, str, float, float, int | None]:
    return span.rank, str(span.action), span.start, span.end, span.version
