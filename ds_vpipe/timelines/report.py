"""Report of timelines as one HTML page that needs nothing else: no network, no other file.

Tables are written here; the timelines and their memory are data, which the script of ``report.html`` draws and zooms.
"""

import json
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from typing import Any

from ds_vpipe.schedules.actions import Category
from ds_vpipe.tables import show_bytes
from ds_vpipe.timelines.figure import COLOURS, IDLE, bars, default_width, ink_on, legend, loss_svg, unit_for
from ds_vpipe.timelines.summary import RankSummary, Summary, steady_window, summarize
from ds_vpipe.timelines.timeline import Timeline, Window


def html_report(timelines: Sequence[Timeline], title: str = "Pipeline report", window: Window | None = None) -> str:
    """Page for ``timelines``: a table that compares them, then each of them, then their losses.

    Events of a recording, such as layers that move, have a table of their own.
    Timelines in the same unit of time are drawn to the same scale and zoom together, from the first to the last second
    of ``window``, or as much from the start as can be read. Numbers are those of all of each timeline.
    """
    summaries = [summarize(timeline) for timeline in timelines]
    longest = max((timeline.duration for timeline in timelines if "time_unit" not in timeline.meta), default=0.0)
    body = [_comparison(timelines, summaries)]
    for number, (timeline, summary) in enumerate(zip(timelines, summaries, strict=True)):
        body += [
            f"<h2>{escape(timeline.source)}: {escape(timeline.title)}</h2>",
            f'<figure data-timeline="{number}"></figure>',
            _legend(timeline),
            _ranks(timeline, summary),
        ]
        if timeline.meta.get("events"):
            rows = [(_time(timeline, at), event) for at, event in timeline.meta["events"]]
            body.append(_table(["at", "event"], rows))
    if any(timeline.losses for timeline in timelines):
        body += ["<h2>Loss</h2>", loss_svg(timelines)]
    colours = {"idle": IDLE, "dark": COLOURS[Category.FORWARD]}
    data = {**colours, "window": window, "timelines": [_data(timeline, longest) for timeline in timelines]}
    page = resources.files("ds_vpipe.timelines").joinpath("report.html").read_text(encoding="utf-8")
    # A "<" in a title could end the script that the data stand in; a title that names a key is not one.
    values = {
        "title": escape(title),
        "body": "\n".join(body),
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: values[match[1]], page)


def _data(timeline: Timeline, longest: float) -> dict[str, Any]:
    """Bars and memory of a timeline for the script, by rank. A bar is start, end, text, label, colour and version."""
    ranks: list[dict[str, Any]] = []
    for rank in range(timeline.num_ranks):
        samples = sorted((sample.time, sample.bytes) for sample in timeline.memory if sample.rank == rank)
        peak = max((size for _, size in samples), default=0)
        memory = {"memory": samples if peak else [], "peak": show_bytes(peak)}
        ranks.append({"name": f"{timeline.rank_word} {rank}", "spans": [], "transfers": [], **memory})
    for rank, span, fill, label in bars(timeline):
        if span.end > span.start:
            text = f"{'waits in ' if span.category is Category.WAIT else ''}{span.action}"
            drawn = ranks[rank]["transfers" if span.category is Category.TRANSFER else "spans"]
            if not drawn or span.end > drawn[-1][1]:  # else the one before covers it: ends ascend, for the search
                drawn.append((span.start, span.end, text, label, fill, span.version))
    return {
        "ranks": ranks,
        "duration": timeline.duration,
        "unit": unit_for(timeline, longest),
        "width": default_width(timeline, timeline.duration),
        "peak": max((sample.bytes for sample in timeline.memory), default=0),
        "memory_colour": COLOURS[Category.TRANSFER],
    }


def _legend(timeline: Timeline) -> str:
    entries, note = legend(timeline)
    squares = "".join(f'<i style="background:{colour}"></i> {word}' for colour, word in entries)
    if any(sample.bytes for sample in timeline.memory):
        note += "; below: allocated memory, with its peak"
    return f'<p class="legend">{squares}<br><small>{note}</small></p>'


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table. Cells that begin with a tag are taken as they are."""

    def line(cells: Sequence[str], tag: str) -> str:
        texts = (cell if cell.startswith("<div") else escape(cell) for cell in cells)
        return "<tr>" + "".join(f"<{tag}>{text}</{tag}>" for text in texts) + "</tr>"

    return "\n".join(["<table>", line(head, "th"), *(line(row, "td") for row in rows), "</table>"])


def _comparison(timelines: Sequence[Timeline], summaries: Sequence[Summary]) -> str:
    columns = []
    for timeline, summary in zip(timelines, summaries, strict=True):
        unit, steady = timeline.meta.get("time_unit"), steady_window(timeline)
        bubble = f"{summarize(timeline, steady).bubble:.1%}" if steady else "never full"
        column = {
            "": f"{timeline.source}: {timeline.title}",
            "ranks": str(timeline.num_ranks),
            "micro-batches per batch": str(timeline.micro_batches),
            "duration": _time(timeline, timeline.duration),
            "micro-batches trained": str(summary.micro_batches),
            "throughput, micro-batches": f"{summary.throughput:.4g} per {f'unit of time ({unit})' if unit else 's'}",
            "bubble, all of it": f"{summary.bubble:.1%}",
            "bubble, without filling and draining": bubble,
            "most memory of a rank": _bytes(max(rank.peak_bytes or 0 for rank in summary.ranks)),
            "largest staleness": str(max((most for _, most in timeline.staleness), default="not known")),
        }
        columns.append(column)
    head, *rows = ([name, *(column[name] for column in columns)] for name in columns[0])
    return _table(head, rows)


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
