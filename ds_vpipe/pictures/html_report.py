"""Everything about some timelines on one HTML page that needs nothing else: no network, no other file."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from ds_vpipe.pictures.charts import loss_chart, memory_chart, share_chart, staleness_chart
from ds_vpipe.pictures.svg import svg
from ds_vpipe.pictures.time_axis import unit_for, write_number
from ds_vpipe.pictures.timeline_layout import default_width, timeline_picture
from ds_vpipe.planning.plan import show_bytes
from ds_vpipe.timelines.timeline import Timeline
from ds_vpipe.timelines.timeline_summary import RankSummary, TimelineSummary, steady_window, summarize

_WIDEST = 6000.0
_MOST_BARS = 40_000  # what browsers zoom without delay
_ZOOM = (
    '<div class="buttons"><button data-zoom="in" title="zoom in">+</button> '
    '<button data-zoom="out" title="zoom out">&minus;</button> <button data-zoom="fit">fit</button> '
    "or the wheel with Ctrl; point at a bar to read it</div>"
)


def html_report(
    timelines: Sequence[Timeline], title: str = "Pipeline report", window: tuple[float, float] | None = None
) -> str:
    """Return the page for ``timelines``: first a table that compares them, then each of them, then their losses.

    Timelines in the same unit of time are drawn to the same scale and zoom together.

    Args:
        timelines: What to show.
        title: Heading of the page.
        window: First and last second to draw; if not given as much from the start as browsers can show. Numbers are
            those of all of each timeline.

    Raises:
        ValueError: there is no timeline.
    """
    if not timelines:
        raise ValueError("timelines: got none; allowed: at least one")
    summaries = [summarize(timeline) for timeline in timelines]
    windows = [window or _drawable(timeline) for timeline in timelines]
    widths = _widths(timelines, windows)
    body = [f"<h1>{escape(title)}</h1>", _comparison(timelines, summaries)]
    longest = max(end - start for start, end in windows)
    for timeline, summary, width, shown in zip(timelines, summaries, widths, windows, strict=True):
        body += _section(timeline, summary, width, shown, unit_for(timeline, longest))
    if any(timeline.losses for timeline in timelines):
        body += ["<h2>Loss</h2>", svg(loss_chart(timelines), standalone=False)]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            f"<title>{escape(title)}</title>",
            f"<style>\n{_resource('report.css')}</style></head><body>",
            *body,
            f"<script>\n{_resource('report.js')}</script>",
            "</body></html>",
        ]
    )


def save_html_report(
    timelines: Sequence[Timeline],
    path: str | os.PathLike[str],
    title: str = "Pipeline report",
    window: tuple[float, float] | None = None,
) -> None:
    """Write :func:`html_report` to the file ``path``."""
    Path(path).write_text(html_report(timelines, title, window) + "\n", encoding="utf-8")


def _resource(name: str) -> str:
    return resources.files("ds_vpipe.pictures").joinpath(name).read_text(encoding="utf-8")


def _scale_key(timeline: Timeline) -> str:
    return str(timeline.meta.get("time_unit", "s"))


def _drawable(timeline: Timeline) -> tuple[float, float]:
    """As much of the timeline, from its start, as has at most ``_MOST_BARS`` spans."""
    if len(timeline.spans) <= _MOST_BARS:
        return 0.0, timeline.duration
    return 0.0, sorted(span.start for span in timeline.spans)[_MOST_BARS]


def _widths(timelines: Sequence[Timeline], windows: Sequence[tuple[float, float]]) -> list[float]:
    """Pixels of each time axis, with as many seconds per pixel in all timelines of the same unit."""
    lengths = [end - start or 1.0 for start, end in windows]
    keys = [_scale_key(timeline) for timeline in timelines]
    scale: dict[str, float] = {}
    for timeline, key, length in zip(timelines, keys, lengths, strict=True):
        scale[key] = max(scale.get(key, 0.0), default_width(timeline, (0.0, length)) / length)
    for key, length in zip(keys, lengths, strict=True):
        scale[key] = min(scale[key], _WIDEST / length)
    return [scale[key] * length for key, length in zip(keys, lengths, strict=True)]


def _section(
    timeline: Timeline,
    summary: TimelineSummary,
    width: float,
    window: tuple[float, float],
    unit: tuple[float, str],
) -> list[str]:
    pane = f'<div class="pane" data-scale="{escape(_scale_key(timeline))}">'
    lines = [f"<h2>{escape(timeline.source)}: {escape(timeline.title)}</h2>"]
    if window != (0.0, timeline.duration):
        start, end, all_of_it = (write_number(seconds / unit[0]) for seconds in (*window, timeline.duration))
        note = f"Drawn: {start} to {end} of {all_of_it} {unit[1]}. Numbers are of all of it."
        lines.append(f'<p class="note">{escape(note)}</p>')
    lines += [_ZOOM, pane]
    lines.append(svg(timeline_picture(timeline, width, window, heading=False, unit=unit), standalone=False))
    if timeline.memory:
        lines.append(svg(memory_chart(timeline, width, unit, window), standalone=False))
    lines += ["</div>", '<div class="beside"><div><h3>Use of time</h3>']
    lines += [svg(share_chart(timeline, summary), standalone=False), "</div>"]
    if timeline.staleness:
        lines += ["<div><h3>Staleness, in updates</h3>", svg(staleness_chart(timeline), standalone=False), "</div>"]
    return [*lines, "</div>", _rank_table(timeline, summary)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return "\n".join(["<table>", line(head, "th"), *(line(row, "td") for row in rows), "</table>"])


def _comparison(timelines: Sequence[Timeline], summaries: Sequence[TimelineSummary]) -> str:
    pairs = list(zip(timelines, summaries, strict=True))

    def row(name: str, value: Callable[[Timeline, TimelineSummary], str]) -> list[str]:
        return [name, *(value(timeline, summary) for timeline, summary in pairs)]

    def throughput(timeline: Timeline, summary: TimelineSummary) -> str:
        return f"{write_number(summary.throughput)} per {_second(timeline)}"

    rows = [
        row("ranks", lambda timeline, _: str(timeline.num_ranks)),
        row("micro-batches per batch", lambda timeline, _: str(timeline.micro_batches)),
        row("duration", lambda timeline, _: _time(timeline, timeline.duration)),
        row("micro-batches trained", lambda _, summary: str(summary.micro_batches)),
        row("throughput, micro-batches", throughput),
        row("bubble, all of it", lambda _, summary: f"{summary.bubble:.1%}"),
        row("bubble, without filling and draining", lambda timeline, _: _steady_bubble(timeline)),
        row("most memory of a rank", lambda _, summary: _most_memory(summary)),
        row("largest staleness", lambda timeline, _: str(max((m for _, m in timeline.staleness), default="not known"))),
    ]
    return _table(["", *(f"{timeline.source}: {timeline.title}" for timeline in timelines)], rows)


def _second(timeline: Timeline) -> str:
    unit = timeline.meta.get("time_unit")
    return "s" if unit is None else f"unit of time ({unit})"


def _time(timeline: Timeline, seconds: float) -> str:
    length, unit = unit_for(timeline, seconds)
    return f"{write_number(seconds / length)} {unit}"


def _steady_bubble(timeline: Timeline) -> str:
    window = steady_window(timeline)
    return "never full" if window is None else f"{summarize(timeline, window).bubble:.1%}"


def _most_memory(summary: TimelineSummary) -> str:
    peaks = [rank.peak_bytes for rank in summary.ranks if rank.peak_bytes is not None]
    return show_bytes(max(peaks)) if peaks else "not known"


def _rank_table(timeline: Timeline, summary: TimelineSummary) -> str:
    def cells(rank: RankSummary) -> list[str]:
        waits = ", ".join(f"{kind} {_time(timeline, seconds)}" for kind, seconds in rank.wait_s.items())
        peak = "not known" if rank.peak_bytes is None else show_bytes(rank.peak_bytes)
        return [f"{timeline.rank_word} {rank.rank}", f"{rank.busy:.1%}", f"{rank.bubble:.1%}", waits or "-", peak]

    return _table(["", "busy", "bubble", "waited for", "peak memory"], [cells(rank) for rank in summary.ranks])
