"""Numbers of a timeline: how busy each rank is, which receives it waits in, and how fast the pipeline is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ds_vpipe.schedules.actions import Category
from ds_vpipe.timelines.timeline import Span, Timeline

_FIRST = (*(category for category in Category if category.busy), Category.WAIT, Category.TRANSFER)
"""Precedence among several spans at one instant."""


@dataclass(frozen=True)
class RankSummary:
    """Numbers of one rank between two instants.

    Attributes:
        rank: Device of the pipeline.
        busy: Share of the window with passes, updates or reading, 0 to 1.
        bubble: ``1 - busy``.
        seconds: Seconds per category in which the rank did that and nothing before it in importance (passes and
            updates, then waiting, then transfers beside nothing else). The rest of the window is idle.
        idle_s: Seconds without any span.
        wait_s: Seconds waited or receiving, by the kind of action waited for, such as ``RECV_ACT``; longest first.
        peak_bytes: Most bytes allocated, or None if memory is not known.
        staleness: Mean and largest staleness in updates, or None if not known.
    """

    rank: int
    busy: float
    bubble: float
    seconds: Mapping[str, float]
    idle_s: float
    wait_s: Mapping[str, float]
    peak_bytes: int | None
    staleness: tuple[float, int] | None


@dataclass(frozen=True)
class Summary:
    """Numbers of all ranks between two instants.

    Attributes:
        start_s: Begin of the window.
        end_s: End of the window.
        micro_batches: Micro-batches whose last backward pass, the first part's, ended in the window.
        throughput: Micro-batches per second, 0 for an empty window.
        bubble: Mean of the ranks' bubble shares.
        ranks: One summary per rank.
    """

    start_s: float
    end_s: float
    micro_batches: int
    throughput: float
    bubble: float
    ranks: tuple[RankSummary, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the summary as JSON types, for scripts."""
        return asdict(self)


def summarize(timeline: Timeline, window: tuple[float, float] | None = None) -> Summary:
    """Return the numbers of ``timeline`` between the two instants of ``window``, or of all of it.

    Peak memory and staleness are always those of the whole timeline. O(n log n) for n spans.

    Raises:
        ValueError: ``window`` ends before it begins.
    """
    start, end = window if window is not None else (0.0, timeline.duration)
    if end < start:
        raise ValueError(f"window: got {start} to {end}; allowed: an end not before the start")
    length = end - start
    ranks = []
    for rank, spans in enumerate(timeline.by_rank()):
        seconds = _seconds(spans, start, end)
        busy = sum(seconds.get(category, 0.0) for category in Category if category.busy) / length if length else 0.0
        ranks.append(
            RankSummary(
                rank=rank,
                busy=busy,
                bubble=1 - busy,
                seconds={category.value: seconds[category] for category in Category if category in seconds},
                idle_s=max(0.0, length - sum(seconds.values())),
                wait_s=_waits(spans, start, end),
                peak_bytes=max((sample.bytes for sample in timeline.memory if sample.rank == rank), default=None),
                staleness=timeline.staleness[rank] if timeline.staleness else None,
            )
        )
    done = _completed(timeline, start, end)
    bubble = sum(rank.bubble for rank in ranks) / len(ranks)
    return Summary(start, end, done, done / length if length else 0.0, bubble, tuple(ranks))


def steady_window(timeline: Timeline) -> tuple[float, float] | None:
    """Return the time in which the pipeline neither fills nor drains, or None if there is no such time.

    It begins when every rank has ended its first backward pass and ends when some rank starts its last forward
    pass. In a synchronous pipeline it still holds the drains between batches, as it should.
    """
    first_backward: list[float] = []
    last_forward: list[float] = []
    for spans in timeline.by_rank():
        ends = [span.end for span in spans if span.category is Category.BACKWARD]
        starts = [span.start for span in spans if span.category is Category.FORWARD]
        if not ends or not starts:
            return None
        first_backward.append(min(ends))
        last_forward.append(max(starts))
    start, end = max(first_backward), min(last_forward)
    return (start, end) if start < end else None


def _completed(timeline: Timeline, start: float, end: float) -> int:
    backward = [span for span in timeline.spans if span.category is Category.BACKWARD]
    first_part = min((span.part for span in backward), default=0)
    after = start if start > 0 else -1.0
    return len({span.action for span in backward if span.part == first_part and after < span.end <= end})


def _waits(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    waits: dict[str, float] = {}
    for span in spans:
        overlap = min(span.end, end) - max(span.start, start)
        if span.category is Category.WAIT and overlap > 0:
            waits[span.kind.value] = waits.get(span.kind.value, 0.0) + overlap
    return dict(sorted(waits.items(), key=lambda item: -item[1]))


def _seconds(spans: Sequence[Span], start: float, end: float) -> dict[Category, float]:
    """Sweep over the instants at which something begins or ends, and give each piece to one category."""
    changes: list[tuple[float, int, Category]] = []
    for span in spans:
        begin, stop = max(span.start, start), min(span.end, end)
        if begin < stop:
            changes += [(begin, 1, span.category), (stop, -1, span.category)]
    changes.sort(key=lambda change: change[0])
    active = dict.fromkeys(_FIRST, 0)
    seconds: dict[Category, float] = {}
    before = start
    for time, step, category in changes:
        if time > before:
            current = next((c for c in _FIRST if active[c]), None)
            if current is not None:
                seconds[current] = seconds.get(current, 0.0) + time - before
            before = time
        active[category] += step
    return seconds
