"""Report of timelines as one HTML page that needs nothing else: no network, no other file.

Tables are written here; the timelines and their memory are data, which the script of ``report.html`` draws and zooms.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from ds_vpipe.schedules.actions import Category
from ds_vpipe.tables import show_bytes
from ds_vpipe.timelines.figure import COLOURS, IDLE, colour_of, default_width, ink_on, label_of, loss_svg, unit_for
from ds_vpipe.timelines.summary import RankSummary, Summary, steady_window, summarize
from ds_vpipe.timelines.timeline import Timeline


def html_report(
    timelines: Sequence[Timeline], title: str = "Pipeline report", window: tuple[float, float] | None = None
) -> str:
    """Return the page for ``timelines``: first a table that compares them, then each of them, then their losses.

    Timelines in the same unit of time are drawn to the same scale and zoom together.

    Args:
        timelines: The timelines, at least one.
        title: Heading of the page.
        window: First and last second to begin with; if not given as much from the start as can be read. Numbers are
            those of all of each timeline.

    Raises:
        ValueError: there is no timeline.
    """
    if not timelines:
        raise ValueError("timelines: got none; allowed: at least one")
    summaries = [summarize(timeline) for timeline in timelines]
    longest = max(timeline.duration for timeline in timelines)
    body = [_comparison(timelines, summaries)]
    for number, (timeline, summary) in enumerate(zip(timelines, summaries, strict=True)):
        body += [
            f"<h2>{escape(timeline.source)}: {escape(timeline.title)}</h2>",
            f'<figure data-timeline="{number}"></figure>',
            _legend(timeline),
            _ranks(timeline, summary),
        ]
    if any(timeline.losses for timeline in timelines):
        body += ["<h2>Loss</h2>", loss_svg(timelines)]
    data = {"idle": IDLE, "window": window, "timelines": [_data(timeline, longest) for timeline in timelines]}
    page = resources.files("ds_vpipe.timelines").joinpath("report.html").read_text(encoding="utf-8")
    # A "<" in a title could end the script that the data stand in; a title that names a key is not one.
    values = {
        "title": escape(title),
        "body": "\n".join(body),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], page)


def save_html_report(
    timelines: Sequence[Timeline],
    path: str | os.PathLike[str],
    title: str = "Pipeline report",
    window: tuple[float, float] | None = None,
) -> None:
    """Write :func:`html_report` to the file ``path``."""
    Path(path).write_text(html_report(timelines, title, window), encoding="utf-8")


def _data(timeline: Timeline, longest: float) -> dict[str, Any]:
    """Bars and memory of a timeline for the script, by rank; a bar is start, end, text, label, colour and version."""
    rows = []
    for rank, spans in enumerate(timeline.by_rank()):
        later = {part: index for index, part in enumerate(sorted({span.part for span in spans}))}
        bars: dict[bool, list[tuple[object, ...]]] = {False: [], True: []}
        for span in spans:
            if span.end > span.start:
                text = f"{'waits in ' if span.category is Category.WAIT else ''}{span.action}"
                look = label_of(span), colour_of(span, later[span.part])
                bar = span.start, span.end, text, *look, span.version
                bars[span.category is Category.TRANSFER].append(bar)
        samples = sorted((sample.time, sample.bytes) for sample in timeline.memory if sample.rank == rank)
        peak = max((size for _, size in samples), default=0)
        rows.append(
            {
                "name": f"{timeline.rank_word} {rank}",
                "spans": bars[False],
                "transfers": bars[True],
                "memory": samples if peak else [],
                "peak": show_bytes(peak),
            }
        )
    return {
        "ranks": rows,
        "duration": timeline.duration,
        "unit": unit_for(timeline, longest),
        "width": default_width(timeline, timeline.duration),
        "peak": max((sample.bytes for sample in timeline.memory), default=0),
        "memory_colour": COLOURS[Category.TRANSFER],
    }


def _legend(timeline: Timeline) -> str:
    found = {span.category for span in timeline.spans}
    entries = [(COLOURS[category], category.value) for category in Category if category in found]
    squares = [f'<i style="background:{colour}"></i> {word}' for colour, word in [*entries, (IDLE, "idle")]]
    notes = ["numbers: micro-batches; of updates: batches"]
    if timeline.holds_parts:
        notes.append("paler: later parts of the model on the same rank")
    if any(sample.bytes for sample in timeline.memory):
        notes.append("below: allocated memory, with its peak")
    return f'<p class="legend">{"".join(squares)}<br><small>{"; ".join(notes)}</small></p>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; cells that begin with a tag are taken as they are."""

    def line(cells: Sequence[str], tag: str) -> str:
        texts = (cell if cell.startswith("<div") else escape(cell) for cell in cells)
        return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"

    return "\n".join(["<table>", line(head, "th"), *(line(row, "td") for row in rows), "</table>"])


def _comparison(timelines: Sequence[Timeline], summaries: Sequence[Summary]) -> str:
    pairs = list(zip(timelines, summaries, strict=True))

    def row(name: str, value: Callable[[Timeline, Summary], str]) -> list[str]:
        return [name, *(value(timeline, summary) for timeline, summary in pairs)]

    def throughput(timeline: Timeline, summary: Summary) -> str:
        unit = timeline.meta.get("time_unit")
        return f"{summary.throughput:.4g} per {'s' if unit is None else f'unit of time ({unit})'}"

    def steady_bubble(timeline: Timeline, _: Summary) -> str:
        window = steady_window(timeline)
        return "never full" if window is None else f"{summarize(timeline, window).bubble:.1%}"

    def most_memory(_: Timeline, summary: Summary) -> str:
        return _bytes(max((rank.peak_bytes for rank in summary.ranks if rank.peak_bytes is not None), default=None))

    rows = [
        row("ranks", lambda timeline, _: str(timeline.num_ranks)),
        row("micro-batches per batch", lambda timeline, _: str(timeline.micro_batches)),
        row("duration", lambda timeline, _: _time(timeline, timeline.duration)),
        row("micro-batches trained", lambda _, summary: str(summary.micro_batches)),
        row("throughput, micro-batches", throughput),
        row("bubble, all of it", lambda _, summary: f"{summary.bubble:.1%}"),
        row("bubble, without filling and draining", steady_bubble),
        row("most memory of a rank", most_memory),
        row("largest staleness", lambda timeline, _: str(max((m for _, m in timeline.staleness), default="not known"))),
    ]
    return _table(["", *(f"{timeline.source}: {timeline.title}" for timeline in timelines)], rows)


def _ranks(timeline: Timeline, summary: Summary) -> str:
    def use(rank: RankSummary) -> str:
        pieces = []
        for category in Category:
            share = rank.seconds.get(category.value, 0.0) / ((summary.end_s - summary.start_s) or 1.0)
            fill = COLOURS[category]
            style = f"width:{share:.2%};background:{fill};color:{ink_on(fill)}"
            text = f"{share:.0%}" if share >= 0.08 else ""
            pieces.append(f'<i style="{style}" title="{category.value} {share:.1%} of the time">{text}</i>')
        return f'<div class="use">{"".join(pieces)}</div>'

    def cells(rank: RankSummary) -> list[str]:
        waits = ", ".join(f"{kind} {_time(timeline, seconds)}" for kind, seconds in rank.wait_s.items())
        mean, most = (f"{value:.3g}" for value in rank.staleness) if rank.staleness else ("not known", "not known")
        shares = [use(rank), f"{rank.busy:.1%}", f"{rank.bubble:.1%}"]
        return [f"{timeline.rank_word} {rank.rank}", *shares, waits or "-", mean, most, _bytes(rank.peak_bytes)]

    head = ["", "use of time", "busy", "bubble", "waited for", "mean staleness", "largest", "peak memory"]
    return _table(head, [cells(rank) for rank in summary.ranks])


def _time(timeline: Timeline, seconds: float) -> str:
    length, unit = unit_for(timeline, seconds)
    return f"{seconds / length:.4g} {unit}"


def _bytes(size: int | None) -> str:
    return show_bytes(size) if size else "not known"
