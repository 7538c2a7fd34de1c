"""Numbers of a timeline: how busy each rank is, which receives it waits in, and how fast the pipeline is."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from ds_vpipe.schedules.actions import Category, Kind
from ds_vpipe.timelines.timeline import Span, Timeline, Window

_FIRST = (*(category for category in Category if category.busy), Category.WAIT, Category.TRANSFER)
"""Precedence among several spans at one instant."""


@dataclass(frozen=True)
class RankSummary:
    """Numbers of one rank between two instants."""

    rank: int  # device of the pipeline
    busy: float  # share of the window with passes, updates or reading, 0 to 1
    bubble: float  # 1 - busy
    # Of each category, where nothing of more importance goes on: passes and updates, then waiting, then transfers.
    seconds: Mapping[str, float]
    idle_s: float  # seconds without any span
    wait_s: Mapping[str, float]  # seconds waited or receiving, by the kind of action, such as RECV_ACT; longest first
    peak_bytes: int | None  # most bytes allocated, or None if memory is not known
    staleness: tuple[float, int] | None  # mean and largest in updates, or None if not known


@dataclass(frozen=True)
class Summary:
    """Numbers of all ranks between two instants.

    A micro-batch counts where its last backward pass, the first part's, ends, if an update has followed, as it does not
    where the data end inside a batch. ``throughput`` is in micro-batches per second, 0 for an empty window, and
    ``bubble`` the mean of the ranks'.
    """

    start_s: float
    end_s: float
    micro_batches: int
    throughput: float
    bubble: float
    ranks: tuple[RankSummary, ...]


def summarize(timeline: Timeline, window: Window | None = None) -> Summary:
    """Numbers of ``timeline`` between the two instants of ``window``, or of all of it.

    Peak memory and staleness are always those of the whole timeline. O(n log n) for n spans.
    """
    start, end = window if window is not None else (0.0, timeline.duration)
    length = end - start
    ranks = []
    for rank, spans in enumerate(timeline.by_rank()):
        seconds = _seconds(spans, start, end)
        busy = sum(spent for category, spent in seconds.items() if category.busy) / (length or 1.0)
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
    after = start if start > 0 else -1.0
    done = sum(after < trained <= end for trained in _trained(timeline))
    bubble = fmean(rank.bubble for rank in ranks)
    return Summary(start, end, done, done / length if length else 0.0, bubble, tuple(ranks))


def steady_window(timeline: Timeline) -> tuple[float, float] | None:
    """Time in which the pipeline neither fills nor drains, if any.

    It begins when every rank has ended its first backward pass and ends when some rank starts its last forward
    pass. In a synchronous pipeline it still holds the drains between batches, as it should.
    """
    start, end = 0.0, math.inf
    for spans in timeline.by_rank():
        backward = (span.end for span in spans if span.category is Category.BACKWARD)
        forward = (span.start for span in spans if span.category is Category.FORWARD)
        start, end = max(start, min(backward, default=math.inf)), min(end, max(forward, default=0.0))
    return (start, end) if start < end else None


def _trained(timeline: Timeline) -> list[float]:
    """Ends of the last backward passes of all micro-batches that have been trained.

    Numbers may be given again: after the end of the data, and with other micro-batches per batch.
    """
    backward = [span for span in timeline.spans if span.category is Category.BACKWARD]
    first = min(backward, key=lambda span: span.part, default=None)
    if first is None:
        return []
    spans = timeline.by_rank()[first.rank]
    if not any(span.kind is Kind.STEP for span in spans):  # updates that take no time are not simulated
        return list({span.action: span.end for span in backward if span.part == first.part}.values())
    trained, batch = list[float](), dict[int, float]()
    for span in spans:
        index = span.action.index
        if span.kind is Kind.STEP:
            trained += batch.values()
            batch = {}
        elif span.category is Category.BACKWARD and span.part == first.part:
            if index in batch or index - 1 not in batch:
                batch = {}
            batch[index] = span.end
    return trained


def _waits(spans: Sequence[Span], start: float, end: float) -> dict[str, float]:
    waits: Counter[str] = Counter()
    for span in spans:
        overlap = min(span.end, end) - max(span.start, start)
        if span.category is Category.WAIT and overlap > 0:
            waits[span.kind.value] += overlap  # type: ignore[assignment]
    return dict(waits.most_common())


def _seconds(spans: Sequence[Span], start: float, end: float) -> dict[Category, float]:
    """Seconds of each category. A sweep gives each instant to one."""
    changes: list[tuple[float, int, Category]] = []
    for span in spans:
        begin, stop = max(span.start, start), min(span.end, end)
        if begin < stop:
            changes += [(begin, 1, span.category), (stop, -1, span.category)]
    changes.sort(key=lambda change: change[0])
    active = dict.fromkeys(_FIRST, 0)
    seconds: dict[Category, float] = defaultdict(float)
    before = start
    for time, step, category in changes:
        current = next((c for c in _FIRST if active[c]), None)
        if time > before and current is not None:
            seconds[current] += time - before
        before = time
        active[category] += step
    return seconds
