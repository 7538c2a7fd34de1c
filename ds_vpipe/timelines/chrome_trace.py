"""Timelines as a trace for chrome://tracing and https://ui.perfetto.dev, one process per timeline.

Passes, updates and waiting of a rank are the thread of its number. Transfers run beside them and beside each other, and
slices of one thread may only nest, so that they get threads of their own: lane n of rank r is thread n K + r.

Source of the form: "Trace Event Format", Google, with complete (X), flow (s, f), counter (C) and metadata (M) events.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from ds_vpipe.schedules.actions import Category
from ds_vpipe.timelines.merge import messages
from ds_vpipe.timelines.timeline import Span, Timeline

Event = dict[str, Any]
_MICROSECONDS = 1e6


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """JSON object of a trace of ``timelines``; times become microseconds."""
    events = [event for process, timeline in enumerate(timelines) for event in _events(process, timeline)]
    other = {"titles": [timeline.title for timeline in timelines]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _events(process: int, timeline: Timeline) -> Iterator[Event]:
    def event(phase: str, name: str, thread: int, time: float | None = None, **values: Any) -> Event:
        place = {} if time is None else {"ts": time * _MICROSECONDS}
        return {"ph": phase, "name": name, "pid": process, "tid": thread, **place, **values}

    yield event("M", "process_name", 0, args={"name": f"{timeline.source}: {timeline.title}"})
    yield event("M", "process_sort_index", 0, args={"sort_index": process})
    threads: dict[Span, int] = {}
    for rank, spans in enumerate(timeline.by_rank()):
        lanes = _lanes(spans)
        for lane, members in enumerate(lanes):
            thread = lane * timeline.num_ranks + rank
            suffix = "" if lane == 0 else " transfers" if len(lanes) == 2 else f" transfers {lane}"
            yield event("M", "thread_name", thread, args={"name": f"{timeline.rank_word} {rank}{suffix}"})
            yield event("M", "thread_sort_index", thread, args={"sort_index": rank * 1000 + lane})
            for span in members:
                threads[span] = thread
                counts = "batch" if span.kind.per_batch else "micro_batch"
                about = {"part": span.part, counts: span.action.index}
                if span.version is not None:
                    about["version"] = span.version
                look = {"cat": span.category.value, "dur": span.duration * _MICROSECONDS, "args": about}
                yield event("X", str(span.action), thread, span.start, **look)
    for number, (send, receive) in enumerate(messages(timeline.spans)):
        name, common = str(send.action), {"cat": "message", "id": f"{process}.{number}"}
        yield event("s", name, threads[send], send.start, **common)
        arrival = max(receive.start, receive.end - 1e-9)  # inside the slice
        yield event("f", name, threads[receive], arrival, bp="e", **common)
    for sample in timeline.memory:
        name = f"memory, {timeline.rank_word} {sample.rank}"
        yield event("C", name, sample.rank, sample.time, args={"bytes": sample.bytes})


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Passes and waiting in lane 0. Transfers in the first further lane in which nothing overlaps them."""
    lanes: list[list[Span]] = [[]]
    for span in spans:
        if span.category is not Category.TRANSFER:
            lanes[0].append(span)
        elif (free := next((lane for lane in lanes[1:] if lane[-1].end <= span.start), None)) is not None:
            free.append(span)
        else:
            lanes.append([span])
    return lanes
