"""Timelines as a trace for chrome://tracing and https://ui.perfetto.dev, one process per timeline.

Passes, updates and waiting of a rank are the thread of its number. Transfers run beside them and beside each other, and
slices of one thread may only nest, so that they get threads of their own: lane n of rank r is thread n K + r.

Source of the form: "Trace Event Format", Google, with complete (X), flow (s, f), counter (C) and metadata (M) events.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ds_vpipe.schedules.actions import Category
from ds_vpipe.timelines.merge import messages
from ds_vpipe.timelines.timeline import Span, Timeline

Event = dict[str, Any]
_MICROSECONDS = 1e6


def chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return the JSON object of a trace of ``timelines``; times become microseconds."""
    events: list[Event] = []
    for process, timeline in enumerate(timelines):
        events += _events(process, timeline)
    other = {"titles": [timeline.title for timeline in timelines]}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def save_chrome_trace(timelines: Sequence[Timeline], path: str | os.PathLike[str]) -> None:
    """Write the trace of ``timelines`` to the file ``path``."""
    Path(path).write_text(json.dumps(chrome_trace(timelines), separators=(",", ":")) + "\n", encoding="utf-8")


def _events(process: int, timeline: Timeline) -> Iterator[Event]:
    def about(what: str, thread: int, **values: object) -> Event:
        return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": values}

    yield about("process_name", 0, name=f"{timeline.source}: {timeline.title}")
    yield about("process_sort_index", 0, sort_index=process)
    threads: dict[Span, int] = {}
    for rank, spans in enumerate(timeline.by_rank()):
        lanes = _lanes(spans)
        for lane, members in enumerate(lanes):
            thread = lane * timeline.num_ranks + rank
            suffix = "" if lane == 0 else " transfers" if len(lanes) == 2 else f" transfers {lane}"
            yield about("thread_name", thread, name=f"{timeline.rank_word} {rank}{suffix}")
            yield about("thread_sort_index", thread, sort_index=rank * 1000 + lane)
            for span in members:
                threads[span] = thread
                yield _slice(process, thread, span)
    for number, (send, receive) in enumerate(messages(timeline.spans)):
        common = {"name": str(send.action), "cat": "message", "id": f"{process}.{number}", "pid": process}
        yield {**common, "ph": "s", "tid": threads[send], "ts": send.start * _MICROSECONDS}
        arrival = max(receive.start * _MICROSECONDS, receive.end * _MICROSECONDS - 1e-3)  # inside the slice
        yield {**common, "ph": "f", "bp": "e", "tid": threads[receive], "ts": arrival}
    for sample in timeline.memory:
        name = f"memory, {timeline.rank_word} {sample.rank}"
        place = {"pid": process, "tid": sample.rank, "ts": sample.time * _MICROSECONDS}
        yield {"ph": "C", "name": name, **place, "args": {"bytes": sample.bytes}}


def _slice(process: int, thread: int, span: Span) -> Event:
    counts = "batch" if span.kind.per_batch else "micro_batch"
    values = {"part": span.part, counts: span.action.index}
    if span.version is not None:
        values["version"] = span.version
    place = {"pid": process, "tid": thread, "ts": span.start * _MICROSECONDS, "dur": span.duration * _MICROSECONDS}
    return {"ph": "X", "name": str(span.action), "cat": span.category.value, **place, "args": values}


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Passes and waiting in lane 0; transfers in the first further lane in which nothing overlaps them."""
    lanes: list[list[Span]] = [[]]
    for span in spans:
        if span.category is not Category.TRANSFER:
            lanes[0].append(span)
            continue
        free = next((lane for lane in lanes[1:] if lane[-1].end <= span.start), None)
        if free is None:
            free = []
            lanes.append(free)
        free.append(span)
    return lanes
