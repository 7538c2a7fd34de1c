"""What one rank recorded of itself, as a file of JSON lines that can be appended to.

The first line is an object about the rank, every further line an array whose first entry says what it is::

    {"format": "ds_vpipe.timelines.recording", "version": 1, "rank": 0, "num_ranks": 4, "micro_batches": 2,
     "clock": "node7", "origin_ns": 81234567890, "clock_offset_s": null, "replica": 0, "dropped": 0,
     "title": "bert_large", "meta": {}}
    ["span", "F7", 1200, 45300, 0, 3]        action, start, end, part, version of the weights or null
    ["memory", 45300, 1048576]               time, bytes
    ["loss", 0, 6.93]                        batch, mean loss
    ["staleness", 1.5, 2]                    mean, largest, in updates

Times are whole nanoseconds from ``origin_ns`` on the clock that ``clock`` names. Ranks that name the same clock share
it, as processes of one machine share ``time.monotonic_ns()``; others' clocks are related by
:mod:`.clock_offsets`. ``clock_offset_s`` is for recorders that know better: the seconds to add to this rank's
times. ``dropped`` counts spans that a full ring buffer has lost; they are the oldest. A ``RECV_...`` span has to end
when the message is there, and a ``SEND_...`` span must not start after its message is on its way.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ds_vpipe.errors import Refusal, VPipeConfigError
from ds_vpipe.timelines.timeline import MemorySample, Span

FORMAT: Final = "ds_vpipe.timelines.recording"
VERSION: Final = 1
_NANO = 1e-9


@dataclass(frozen=True)
class RankRecording:
    """One rank's recording. Times of spans and samples are seconds from ``origin_ns``.

    Attributes:
        rank: Rank in the pipeline.
        num_ranks: Ranks of the pipeline, K.
        micro_batches: Micro-batches per batch, M.
        clock: Name of the clock, such as the host's.
        origin_ns: Where on that clock times begin, nanoseconds.
        spans: What the rank did.
        memory: Bytes it had allocated.
        losses: Pairs of batch and mean loss, on ranks that know them.
        staleness: Mean and largest staleness in updates, if known.
        clock_offset_s: Seconds to add to this rank's times to have them on a clock common to all, if known.
        replica: Which of the data-parallel replicas of the pipeline.
        dropped: Spans lost, the oldest ones.
        title: One line for people.
        meta: Whatever else is known, as JSON types.
    """

    rank: int
    num_ranks: int
    micro_batches: int
    clock: str
    origin_ns: int
    spans: tuple[Span, ...]
    memory: tuple[MemorySample, ...] = ()
    losses: tuple[tuple[int, float], ...] = ()
    staleness: tuple[float, int] | None = None
    clock_offset_s: float | None = None
    replica: int = 0
    dropped: int = 0
    title: str = ""
    meta: Mapping[str, Any] = field(default_factory=dict)

    def header(self) -> dict[str, Any]:
        """The first line of the file, as an object."""
        names = (
            "rank",
            "num_ranks",
            "micro_batches",
            "clock",
            "origin_ns",
            "clock_offset_s",
            "replica",
            "dropped",
            "title",
        )
        values = {name: getattr(self, name) for name in names}
        return {"format": FORMAT, "version": VERSION, **values, "meta": dict(self.meta)}

    def lines(self) -> Iterator[str]:
        """The lines of the file, without newlines."""
        yield _compact(self.header())
        for span in self.spans:
            start, end = round(span.start / _NANO), round(span.end / _NANO)
            yield _compact(["span", span.action, start, end, span.part, span.version])
        for sample in self.memory:
            yield _compact(["memory", round(sample.time / _NANO), sample.bytes])
        for batch, loss in self.losses:
            yield _compact(["loss", batch, loss])
        if self.staleness is not None:
            yield _compact(["staleness", *self.staleness])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the recording to the file ``path``, replacing what was there."""
        with Path(path).open("w", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in self.lines())


def read_recording(path: str | os.PathLike[str]) -> RankRecording:
    """Read one rank's file. A last line that is cut short, by a rank that was killed, is left out.

    Raises:
        VPipeConfigError: The file cannot be read or is not a recording; the message names the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise Refusal("recording", str(path), "a file that can be read", "correct the path", reason).error() from None
    number = 0
    try:
        header = json.loads(lines[0]) if lines else None
        if not isinstance(header, dict) or header.get("format") != FORMAT or header.get("version") != VERSION:
            raise ValueError(f'expected an object with "format": "{FORMAT}" and "version": {VERSION}')
        entries = []
        for number, line in enumerate(lines[1:], 1):
            try:
                entries.append(json.loads(line))
            except ValueError:
                if number < len(lines) - 1:
                    raise
        number = 0
        return _parsed(header, entries)
    except VPipeConfigError:
        raise
    except (KeyError, TypeError, ValueError, IndexError) as error:
        reason = f"line {number + 1}: {type(error).__name__}: {error}" if number else f"{type(error).__name__}: {error}"
        allowed, remedy = "lines as ds_vpipe.timelines.recording describes them", "record anew, or leave the file out"
        raise Refusal("recording", str(path), allowed, remedy, reason).error() from None


def recording_files(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """The files that ``paths`` name: files as they are, and of folders all ``*.jsonl`` in them, sorted.

    Raises:
        VPipeConfigError: There is none.
    """
    files: list[Path] = []
    for path in map(Path, paths):
        found = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
        if not found:
            raise Refusal("recording", str(path), "a folder with *.jsonl files", "correct the path").error()
        files += found
    return files


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _parsed(header: dict[str, Any], entries: Iterable[list[Any]]) -> RankRecording:
    rank = int(header["rank"])
    spans: list[Span] = []
    memory: list[MemorySample] = []
    losses: list[tuple[int, float]] = []
    staleness: tuple[float, int] | None = None
    for kind, *values in entries:
        if kind == "span":
            action, start, end, part, version = values
            spans.append(Span(rank, action, start * _NANO, end * _NANO, part, version))
        elif kind == "memory":
            time, size = values
            memory.append(MemorySample(rank, time * _NANO, size))
        elif kind == "loss":
            batch, loss = values
            losses.append((int(batch), float(loss)))
        elif kind == "staleness":
            mean, most = values
            staleness = (float(mean), int(most))
        else:
            raise ValueError(f'an entry begins with {kind!r}; expected "span", "memory", "loss" or "staleness"')
    offset = header.get("clock_offset_s")
    return RankRecording(
        rank=rank,
        num_ranks=int(header["num_ranks"]),
        micro_batches=int(header["micro_batches"]),
        clock=str(header["clock"]),
        origin_ns=int(header["origin_ns"]),
        spans=tuple(spans),
        memory=tuple(memory),
        losses=tuple(losses),
        staleness=staleness,
        clock_offset_s=None if offset is None else float(offset),
        replica=int(header.get("replica", 0)),
        dropped=int(header.get("dropped", 0)),
        title=str(header.get("title", "")),
        meta=dict(header.get("meta", {})),
    )
