"""Where every bar of a timeline's picture goes.

A row per rank. Its bar has passes, updates and waiting; transfers, which run beside them, are a strip below. Bars carry
the number of their micro-batch where it fits, and say all that is known of them in a tooltip.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Final

from ds_vpipe.pictures.palette import COLOURS, FAINT_INK, IDLE, PAPER, ink_on, paler
from ds_vpipe.pictures.picture import Box, Label, Picture, Shape, text_width
from ds_vpipe.pictures.time_axis import TimeAxis
from ds_vpipe.timelines.span_category import Category, category_of
from ds_vpipe.timelines.timeline import Span, Timeline

_MARGIN = 16.0
_HEADER = 52.0
_PASS_WIDTH = 20.0  # a median forward pass: two digits fit
_NARROWEST, _WIDEST = 640.0, 6000.0
_TINY = 0.5  # pixels; below that, a row gets at most one bar of a colour per pixel
_EDGED = 3.0  # pixels; narrower bars would vanish behind a white outline
_PASSES = (Category.FORWARD, Category.BACKWARD, Category.RECOMPUTE)
_WORDS: Final = {"F": "forward pass", "B": "backward pass", "STEP": "update", "REDUCE": "reduction", "LOAD": "reading"}


def left_margin(timeline: Timeline) -> float:
    """Pixels that the names of the rows take."""
    return _MARGIN + text_width(f"{timeline.rank_word} {timeline.num_ranks - 1}", 12) + 8


def default_width(timeline: Timeline, window: tuple[float, float]) -> float:
    """Pixels of the time axis with which numbers fit into most passes, within what can be looked at."""
    lengths = [span.duration for span in timeline.spans if category_of(span) is Category.FORWARD and span.duration > 0]
    if not lengths:
        return _NARROWEST
    return min(_WIDEST, max(_NARROWEST, (window[1] - window[0]) / statistics.median(lengths) * _PASS_WIDTH))


def timeline_picture(
    timeline: Timeline,
    width: float | None = None,
    window: tuple[float, float] | None = None,
    heading: bool = True,
    unit: tuple[float, str] | None = None,
) -> Picture:
    """Lay out ``timeline``.

    Args:
        timeline: What to draw.
        width: Pixels of the time axis; :func:`default_width` if not given.
        window: First and last second; everything if not given.
        heading: Draw the title.
        unit: Length in seconds and name of the unit of the time axis; one that suits if not given.
    """
    window = window if window is not None else (0.0, timeline.duration)
    left, top = left_margin(timeline), _HEADER if heading else 6.0
    axis = TimeAxis.of(timeline, window, left, width if width is not None else default_width(timeline, window), unit)
    bar = 20.0 if timeline.num_ranks <= 32 else 10.0
    transfers = any(category_of(span) is Category.TRANSFER for span in timeline.spans)
    strip, gap = round(bar / 4) if transfers else 0, round(bar / 3)
    pitch = bar + strip + gap
    bottom = top + pitch * timeline.num_ranks

    shapes: list[Shape] = []
    if heading:
        shapes.append(Label(_MARGIN, 18, timeline.title, 15, bold=True))
        shapes.append(Label(_MARGIN, 37, subtitle(timeline, axis), 12, colour=FAINT_INK))
    shapes += axis.draw(top, bottom)
    rows = timeline.by_rank()
    for rank, spans in enumerate(rows):
        y = top + rank * pitch
        shapes.append(Box(left, y, axis.width, bar, IDLE, role="row"))
        shapes += _bars(timeline, axis, spans, y, bar, strip)
    shapes.append(Box(0, top - 4, left - 2, bottom - top + 4, PAPER, role="side"))
    for rank in range(timeline.num_ranks):
        y = top + rank * pitch + bar / 2
        shapes.append(Label(left - 8, y, f"{timeline.rank_word} {rank}", 12, "end", role="side"))
    total = left + axis.width + _MARGIN
    legend, height = _legend(timeline, bottom + 44, total)
    shapes += legend
    return Picture(max(total, _header_width(shapes)), height, tuple(shapes), timeline.title, axis.data())


def subtitle(timeline: Timeline, axis: TimeAxis) -> str:
    """One line with where the timeline comes from and its size."""
    ranks = f"{timeline.num_ranks} {timeline.rank_word}{'s' if timeline.num_ranks > 1 else ''}"
    return (
        f"{timeline.source}: {ranks}, {timeline.micro_batches} micro-batch"
        f"{'es' if timeline.micro_batches > 1 else ''} per batch, {axis.write(timeline.duration)} {axis.unit}"
    )


def describe(timeline: Timeline, axis: TimeAxis, span: Span) -> str:
    """All that is known of a span, in one line."""
    name = span.name
    what = _WORDS.get(name.kind, "")
    part = f" of part {span.part}" if timeline.holds_parts else ""
    version = "" if span.version is None else f", weights of version {span.version}"
    start, end = (axis.write_instant(time, span.duration) for time in (span.start, span.end))
    times = f"{start} to {end} {axis.unit} ({axis.write(span.duration)})"
    text = f"waits for {span.action.removeprefix('WAIT')}" if name.waiting else f"{span.action} {what}".strip()
    return f"{timeline.rank_word} {span.rank}: {text}{part}, {times}{version}"


def _header_width(shapes: Sequence[Shape]) -> float:
    headers = [s for s in shapes if isinstance(s, Label) and s.anchor == "start"]
    return max((s.x + text_width(s.text, s.size) + _MARGIN for s in headers), default=0.0)


def _visible(spans: Sequence[Span]) -> Iterator[tuple[Span, float]]:
    """Spans and where they begin to be seen: a backward pass after the recomputation that it begins with."""
    recomputed = {span.start: span.end for span in spans if category_of(span) is Category.RECOMPUTE}
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):  # what lies inside comes after what holds it
        inside = category_of(span) is Category.BACKWARD and recomputed.get(span.start, span.end) < span.end
        yield span, recomputed[span.start] if inside else span.start


def _bars(
    timeline: Timeline, axis: TimeAxis, spans: Sequence[Span], y: float, bar: float, strip: float
) -> Iterator[Box]:
    chunks = {part: index for index, part in enumerate(sorted({span.part for span in spans}))}
    drawn: dict[tuple[Category, int], int] = {}
    for span, begin in _visible(spans):
        start, end = max(begin, axis.start), min(span.end, axis.end)
        if end <= start:
            continue
        category = category_of(span)
        x, width = axis.x(start), axis.x(end) - axis.x(start)
        if width < _TINY:
            key = (category, chunks[span.part])
            if drawn.get(key) == int(x):
                continue
            drawn[key] = int(x)
        beside = category is Category.TRANSFER
        fill = paler(COLOURS[category], chunks[span.part]) if category in _PASSES else COLOURS[category]
        label = str(span.name.index) if category in _PASSES or category is Category.UPDATE else ""
        yield Box(
            x,
            y + bar + 1 if beside else y,
            max(width, _TINY),
            strip - 1 if beside else bar,
            fill,
            label,
            ink_on(fill),
            describe(timeline, axis, span),
            role="bar",
            edge=PAPER if width >= _EDGED and not beside else "",
        )


def _legend(timeline: Timeline, y: float, width: float) -> tuple[list[Shape], float]:
    """The shapes of the legend, in as many lines as it needs, and where it ends."""
    found = {category_of(span) for span in timeline.spans}
    entries = [(COLOURS[category], category.value) for category in Category if category in found]
    entries.append((IDLE, "idle"))
    shapes: list[Shape] = []
    x = _MARGIN
    for colour, word in entries:
        size = 18 + text_width(word, 12) + 16
        if x + size > width and x > _MARGIN:
            x, y = _MARGIN, y + 20
        shapes.append(Box(x, y - 6, 12, 12, colour, role="side"))
        shapes.append(Label(x + 18, y, word, 12, role="side"))
        x += size
    notes = ["numbers: micro-batches; of updates: batches"]
    if any(len({s.part for s in row}) > 1 for row in timeline.by_rank()):
        notes.append("paler: later parts of the model on the same rank")
    for note in notes:
        y += 18
        shapes.append(Label(_MARGIN, y, note, 11, colour=FAINT_INK, role="side"))
    return shapes, y + 16
