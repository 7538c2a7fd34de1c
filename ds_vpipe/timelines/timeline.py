"""What every rank of a pipeline did, or will do, and when: one form for plans, simulations and recordings.

Pictures, reports and summaries are made from a :class:`Timeline` alone, so that a plan, its simulation and what
really happened can be laid side by side. A span's ``action`` is the text of a ``Action``
(``F7``, ``2SEND_ACT7``), or ``WAIT`` before such a text (``WAITRECV_ACT7``) for the time a rank waited before it.

A file holds one JSON object; spans are arrays, because a run has hundreds of thousands of them::

    {"format": "ds_vpipe.timelines.timeline", "version": 1, "title": "bert, 4 stages", "source": "simulation",
     "num_ranks": 4, "micro_batches": 2, "spans": [[rank, action, start, end, part, version], ...],
     "memory": [[rank, time, bytes], ...], "losses": [[batch, loss], ...], "staleness": [[mean, most], ...],
     "meta": {}}
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ds_vpipe.errors import Refusal
from ds_vpipe.timelines.action_name import ActionName, action_name, is_action

__all__ = ["FORMAT", "SOURCES", "VERSION", "WAIT", "ActionName", "MemorySample", "Span", "Timeline", "action_name"]

FORMAT: Final = "ds_vpipe.timelines.timeline"
VERSION: Final = 1
SOURCES: Final = ("plan", "simulation", "recording")
WAIT: Final = "WAIT"

_MAKE_ANEW = "write the file anew with Timeline.save"


def _is_number(*values: object) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that one rank does from ``start`` to ``end``.

    Attributes:
        rank: Device of the pipeline, from 0.
        action: Text of the action, or ``WAIT`` and the text for the time waited before it.
        start: Seconds from the timeline's start.
        end: Seconds from the timeline's start, not before ``start``.
        part: Part of the model, 0..P-1; the rank if each rank holds one part.
        version: Version of the part's weights that a pass uses, where known.
    """

    rank: int
    action: str
    start: float
    end: float
    part: int
    version: int | None = None

    @property
    def duration(self) -> float:
        """Length in seconds."""
        return self.end - self.start

    @property
    def name(self) -> ActionName:
        """The pieces of ``action``."""
        return action_name(self.action)


@dataclass(frozen=True, slots=True)
class MemorySample:
    """Bytes that ``rank`` has allocated from ``time`` (seconds from the timeline's start) to its next sample."""

    rank: int
    time: float
    bytes: int


@dataclass(frozen=True)
class Timeline:
    """What all ranks of one pipeline do when.

    Attributes:
        title: One line for people.
        source: ``"plan"``, ``"simulation"`` or ``"recording"``.
        num_ranks: Devices of the pipeline, K.
        micro_batches: Micro-batches per batch, M.
        spans: In any order. Spans of one rank may overlap (a transfer beside a pass).
        memory: Samples of allocated bytes, in any order.
        losses: Pairs of batch and its mean loss.
        staleness: Per rank the mean and the largest number of updates applied between a micro-batch's forward
            pass and the update with its gradient; empty if not known.
        meta: Whatever else is known, as JSON types. ``"time_unit"`` says, for people, what one second stands for in
            a timeline that is not in seconds, such as ``"forward passes"``.
    """

    title: str
    source: str
    num_ranks: int
    micro_batches: int
    spans: tuple[Span, ...]
    memory: tuple[MemorySample, ...] = ()
    losses: tuple[tuple[int, float], ...] = ()
    staleness: tuple[tuple[float, int], ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def duration(self) -> float:
        """Seconds from the timeline's start to the end of its last span."""
        return max((span.end for span in self.spans), default=0.0)

    @cached_property
    def holds_parts(self) -> bool:
        """True if parts are not just the ranks by another name, so that people need to be told them."""
        return any(span.part != span.rank for span in self.spans)

    @property
    def rank_word(self) -> str:
        """What a rank is called: ``"stage"`` if it holds the part of its own number, else ``"rank"``."""
        return "rank" if self.holds_parts else "stage"

    def by_rank(self) -> tuple[tuple[Span, ...], ...]:
        """Spans of each rank, sorted by start."""
        rows: list[list[Span]] = [[] for _ in range(self.num_ranks)]
        for span in self.spans:
            rows[span.rank].append(span)
        return tuple(tuple(sorted(row, key=lambda span: (span.start, span.end))) for row in rows)

    def to_json(self) -> dict[str, Any]:
        """Return the object that a file holds."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "title": self.title,
            "source": self.source,
            "num_ranks": self.num_ranks,
            "micro_batches": self.micro_batches,
            "spans": [[s.rank, s.action, s.start, s.end, s.part, s.version] for s in self.spans],
            "memory": [[m.rank, m.time, m.bytes] for m in self.memory],
            "losses": [list(pair) for pair in self.losses],
            "staleness": [list(pair) for pair in self.staleness],
            "meta": dict(self.meta),
        }

    @classmethod
    def from_json(cls, data: object) -> Timeline:
        """The inverse of :meth:`to_json`.

        Raises:
            VPipeConfigError: ``data`` is not a timeline. One line names the first thing that is wrong.
        """
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            what = data.get("format") if isinstance(data, dict) else data
            raise Refusal("timeline.format", what, f'an object with "format": "{FORMAT}"', _MAKE_ANEW).error()
        if data.get("version") != VERSION:
            raise Refusal("timeline.version", data.get("version"), str(VERSION), _MAKE_ANEW).error()
        try:
            timeline = cls(
                title=str(data["title"]),
                source=data["source"],
                num_ranks=int(data["num_ranks"]),
                micro_batches=int(data["micro_batches"]),
                spans=tuple(Span(*row) for row in data["spans"]),
                memory=tuple(MemorySample(*row) for row in data.get("memory", ())),
                losses=tuple((int(batch), float(loss)) for batch, loss in data.get("losses", ())),
                staleness=tuple((float(mean), int(most)) for mean, most in data.get("staleness", ())),
                meta=dict(data.get("meta", {})),
            )
        except (KeyError, TypeError, ValueError) as error:
            wrong = f"{type(error).__name__}: {error}"
            raise Refusal("timeline", wrong, f"what {__name__} describes", _MAKE_ANEW).error() from None
        timeline.check()
        return timeline

    def check(self) -> None:
        """Check the ranges of all fields.

        Raises:
            VPipeConfigError: A rank, time, action, source or number of bytes is outside its range.
        """

        def refuse(key: str, value: object, allowed: str) -> None:
            raise Refusal(f"timeline.{key}", value, allowed, "correct it").error()

        if self.source not in SOURCES:
            refuse("source", self.source, ", ".join(SOURCES))
        if self.num_ranks < 1:
            refuse("num_ranks", self.num_ranks, "an int >= 1")
        if self.micro_batches < 1:
            refuse("micro_batches", self.micro_batches, "an int >= 1")
        if self.staleness and len(self.staleness) != self.num_ranks:
            refuse("staleness", self.staleness, f"one pair per rank, {self.num_ranks}, or none")
        ranks = range(self.num_ranks)
        for index, span in enumerate(self.spans):
            row = [span.rank, span.action, span.start, span.end, span.part, span.version]
            if not (span.rank in ranks and _is_number(span.start, span.end) and 0 <= span.start <= span.end < math.inf):
                refuse(f"spans[{index}]", row, f"a rank below {self.num_ranks} and 0 <= start <= end, in seconds")
            if not is_action(span.action):
                refuse(f"spans[{index}]", row, "the text of an action, such as F7 or WAITRECV_ACT7")
        for index, sample in enumerate(self.memory):
            values = [sample.rank, sample.time, sample.bytes]
            if not (_is_number(*values) and sample.rank in ranks and 0 <= sample.time < math.inf and sample.bytes >= 0):
                refuse(f"memory[{index}]", values, f"a rank below {self.num_ranks}, a time >= 0 and bytes >= 0")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline to the file ``path``, replacing what was there."""
        Path(path).write_text(json.dumps(self.to_json(), separators=(",", ":")) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
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
        return cls.from_json(data)
