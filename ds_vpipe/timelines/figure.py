"""Figures of timelines, drawn by matplotlib. The suffix of the file says whether SVG or PNG.

A row per rank. Its bar has passes, updates and waiting; transfers, which run beside them, are a strip below. Bars carry
the number of their micro-batch where it fits. matplotlib is imported where it draws and without pyplot, so that
commands without pictures start at once and no window is opened.

Source of the hues: Okabe and Ito, "Color Universal Design" (2008): eight colours that colour-blind people tell apart.
"""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ds_vpipe.schedules.actions import Category
from ds_vpipe.tables import counted
from ds_vpipe.timelines.timeline import Span, Timeline, Window

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS: Final = {
    Category.FORWARD: "#0072b2",
    Category.BACKWARD: "#e69f00",
    Category.UPDATE: "#009e73",
    Category.LOAD: "#f0e442",
    Category.TRANSFER: "#56b4e9",
    Category.WAIT: "#d4d4d4",
}
IDLE: Final = "#f4f4f4"
_INK, _FAINT_INK, _LINES = "#222222", "#666666", "#dddddd"
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "ds_vpipe",
    "font.size": 9.0,
    "axes.edgecolor": _LINES,
    "text.parse_math": False,  # names of folders may have two dollars
}
_PIXEL = 0.01  # inches, at the 100 dots per inch of the layout
_POINT = 0.72  # of a pixel
_SHARPNESS = 2  # dots of a PNG per pixel of the layout
_LEFT, _RIGHT, _HEAD, _FOOT = 80.0, 16.0, 52.0, 90.0
_LEGEND = 560.0  # pixels, about
_BAR, _STRIP, _PITCH = 20.0, 5.0, 32.0
_PASS_WIDTH = 20.0  # a median forward pass: two digits fit
_DIGIT_WIDTH = 6.6
_NARROWEST, _WIDEST = 640.0, 6000.0
_TICK_DISTANCE = 80.0
_TINY = 0.5  # pixels; below that, a row gets at most one bar of a category per pixel
_LABELLED = (Category.FORWARD, Category.BACKWARD, Category.UPDATE)
_EDGED = 3.0  # pixels; narrower bars would vanish behind a white outline


def unit_for(timeline: Timeline, seconds: float) -> tuple[float, str]:
    """Unit for times of about ``seconds``: its length in seconds and its name."""
    given = timeline.meta.get("time_unit")
    if isinstance(given, str):
        return 1.0, given
    return next((unit for unit in _UNITS if seconds >= 2 * unit[0]), _UNITS[-1])


def default_width(timeline: Timeline, seconds: float) -> float:
    """Width in pixels at which numbers fit into most passes, within limits."""
    lengths = [span.duration for span in timeline.spans if span.category is Category.FORWARD and span.duration > 0]
    return min(_WIDEST, max(_NARROWEST, seconds / statistics.median(lengths) * _PASS_WIDTH)) if lengths else _NARROWEST


def save_figure(timeline: Timeline, path: Path | str, width: float | None = None, window: Window | None = None) -> None:
    """Draw :func:`timeline_figure` into a file whose name ends in ``.svg`` or ``.png``."""
    import matplotlib

    with matplotlib.rc_context(_STYLE):
        _save(timeline_figure(timeline, width, window), path)


def timeline_figure(timeline: Timeline, width: float | None = None, window: Window | None = None) -> Figure:
    """Figure of a timeline, of all of it or of a window between two seconds.

    ``width`` are the pixels of the time axis; :func:`default_width` if not given.
    """
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    start, end = window or (0.0, timeline.duration or 1.0)
    unit_s, unit = unit_for(timeline, end - start)
    width = default_width(timeline, end - start) if width is None else width
    across, high = max(_LEGEND, _LEFT + width + _RIGHT), _HEAD + _PITCH * timeline.num_ranks + _FOOT
    figure = Figure(figsize=(across * _PIXEL, high * _PIXEL), dpi=1 / _PIXEL)
    axes = figure.add_axes((_LEFT / across, _FOOT / high, width / across, 1 - (_HEAD + _FOOT) / high))
    axes.set_xlim(start / unit_s, end / unit_s)
    axes.set_ylim(_PITCH * timeline.num_ranks, 0)
    axes.set_xlabel(f"time in {unit}", loc="left", color=_FAINT_INK)
    axes.set_yticks(
        [_PITCH * rank + _BAR / 2 for rank in range(timeline.num_ranks)],
        [f"{timeline.rank_word} {rank}" for rank in range(timeline.num_ranks)],
    )
    axes.xaxis.set_major_locator(MaxNLocator(nbins=max(2, int(width / _TICK_DISTANCE)), steps=(1, 2, 5, 10)))
    axes.tick_params(length=0)
    axes.tick_params(axis="x", labelcolor=_FAINT_INK)
    axes.grid(axis="x", color=_LINES, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)

    for rank in range(timeline.num_ranks):
        axes.axhspan(_PITCH * rank, _PITCH * rank + _BAR, color=IDLE, linewidth=0)
    corners, fills, edges = [], [], []
    scale = width / (end - start)
    drawn: dict[tuple[int, Category], int] = {}
    for rank, span, fill, label in bars(timeline):
        first, last = (min(max(time, start), end) for time in (span.start, span.end))
        pixel, pixels = int((first - start) * scale), (last - first) * scale
        if not pixels or (pixels < _TINY and drawn.get((rank, span.category)) == pixel):
            continue
        drawn[rank, span.category] = pixel
        beside, top = span.category is Category.TRANSFER, _PITCH * rank
        top, bottom = (top + _BAR + 1, top + _BAR + _STRIP) if beside else (top, top + _BAR)
        x, right = first / unit_s, max(last, first + _TINY / scale) / unit_s
        corners.append([(x, top), (right, top), (right, bottom), (x, bottom)])
        fills.append(fill)
        edges.append("white" if pixels >= _EDGED and not beside else "none")
        if label and len(label) * _DIGIT_WIDTH < pixels:
            middle = (x + right) / 2, (top + bottom) / 2 + 0.5
            axes.text(*middle, label, ha="center", va="center_baseline", fontsize=11 * _POINT, color=ink_on(fill))
    axes.add_collection(PolyCollection(corners, facecolors=fills, edgecolors=edges, linewidths=0.5))

    left = 16 / across
    figure.text(left, 1 - 18 / high, timeline.title, fontsize=11, weight="bold", va="center", parse_math=False)
    figure.text(left, 1 - 37 / high, _subtitle(timeline), color=_FAINT_INK, va="center", parse_math=False)
    entries, note = legend(timeline)
    patches = [Patch(color=colour, label=word) for colour, word in entries]
    place = {"loc": "upper left", "bbox_to_anchor": (left, 46 / high), "borderaxespad": 0.0, "borderpad": 0.0}
    figure.legend(handles=patches, ncols=len(patches), frameon=False, handlelength=1.1, columnspacing=1.2, **place)
    figure.text(left, 14 / high, note, fontsize=8, color=_FAINT_INK, va="center")
    return figure


@dataclass(frozen=True)
class Curve:
    """One line of a picture, by its points. ``bold`` ones are ours, ``dashed`` ones a reference."""

    label: str
    points: Sequence[tuple[float, float]]
    bold: bool = False
    dashed: bool = False


def draw(to: Path | str | io.StringIO, panels: dict[str, list[Curve]], x: str, y: str, log: bool = False) -> None:
    """Draw curves, a panel per title, to a PNG or SVG file or a stream. ``log`` for an ``x`` of powers of two."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    labels = list(dict.fromkeys(curve.label for curves in panels.values() for curve in curves))
    common = all(len(curves) == len(labels) for curves in panels.values())
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    with matplotlib.rc_context({**_STYLE, "axes.edgecolor": _FAINT_INK}):
        figure = Figure(figsize=(5 * columns, (3.5 if common else 6) * height), layout="constrained")
        grid = list(figure.subplots(height, columns, sharey=True, squeeze=False).flat)
        for axes, (title, curves) in zip(grid, panels.items(), strict=False):
            for curve in curves:
                place = labels.index(curve.label) if len(labels) <= 10 else curves.index(curve)  # there are ten colours
                style = {"color": f"C{place}", "linewidth": 2.5 if curve.bold else 1.2}
                style |= {
                    "linestyle": "--" if curve.dashed else "-",
                    "marker": "o" if (log or len(curve.points) < 10) and not curve.dashed else "",
                }
                axes.plot(*zip(*curve.points, strict=True), label=curve.label, **style)
            axes.set(title=title, xlabel=x)
            axes.grid(color=_LINES, linewidth=0.8)
            if log:
                ticks = sorted({place for curve in curves for place, _ in curve.points})
                axes.set_xscale("log", base=2)
                axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
                axes.set_ylim(0, 1.05)
            else:
                axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            if not common:
                axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12))
        for axes in grid[len(panels) :]:
            axes.set_axis_off()
        grid[0].set_ylabel(y)
        if common:
            beside = max(1, int(5 * columns / (0.5 + 0.06 * max(map(len, labels), default=0))))  # that fit, by inches
            handles, names = grid[0].get_legend_handles_labels()
            figure.legend(handles, names, loc="outside lower center", ncols=min(5, beside), fontsize=8)
        _save(figure, to)


def loss_svg(timelines: Sequence[Timeline]) -> str:
    """SVG element with the losses of all timelines that have any, over their batches."""
    text, given = io.StringIO(), [timeline for timeline in timelines if timeline.losses]
    curves = [Curve(f"{timeline.source}: {timeline.title}", sorted(timeline.losses)) for timeline in given]
    draw(text, {"": curves}, "batch", "mean loss")
    return text.getvalue()[text.getvalue().index("<svg") :]


def _save(figure: Figure, to: Any) -> None:
    """Write the figure without dates: the same timeline gives the same file."""
    form = "png" if str(to).endswith(".png") else "svg"
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type")) if form == "svg" else {"Software": None}
    figure.savefig(to, format=form, dpi=_SHARPNESS / _PIXEL, metadata=metadata)


def _subtitle(timeline: Timeline) -> str:
    """One line with the source of the timeline and its size."""
    length, unit = unit_for(timeline, timeline.duration)
    ranks = counted(timeline.num_ranks, timeline.rank_word)
    batch = f"{counted(timeline.micro_batches, 'micro-batch')} per batch"
    return f"{timeline.source}: {ranks}, {batch}, {timeline.duration / length:.4g} {unit}"


def bars(timeline: Timeline) -> Iterator[tuple[int, Span, str, str]]:
    """Rank, span, fill and label of all bars: the number of the micro-batch, or of an update's batch."""
    for rank, spans in enumerate(timeline.by_rank()):
        later = {part: index for index, part in enumerate(sorted({span.part for span in spans}))}
        for span in spans:
            label = str(span.action.index) if span.category in _LABELLED else ""
            yield rank, span, colour_of(span, later[span.part]), label


def legend(timeline: Timeline) -> tuple[list[tuple[str, str]], str]:
    """Colours with their words, and a line about the rest."""
    found = {span.category for span in timeline.spans}
    entries = [(COLOURS[category], category.value) for category in Category if category in found]
    note = "numbers: micro-batches; of updates: batches"
    paler = "; paler: later parts of the model on the same rank" if timeline.holds_parts else ""
    return [*entries, (IDLE, "idle")], note + paler


def colour_of(span: Span, later: int) -> str:
    """Fill of a span. Passes of later parts of the model on the same rank are mixed with white."""
    colour = COLOURS[span.category]
    keep = 0.62**later if span.category in (Category.FORWARD, Category.BACKWARD) else 1.0
    channels = (round(255 - (255 - int(colour[at : at + 2], 16)) * keep) for at in (1, 3, 5))
    return "#" + "".join(f"{channel:02x}" for channel in channels)


def ink_on(fill: str) -> str:
    """Colour of text that is legible on ``fill``. Only a forward pass is dark."""
    return "#ffffff" if fill == COLOURS[Category.FORWARD] else _INK
