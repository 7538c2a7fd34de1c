"""A picture as PNG, drawn by matplotlib from the same shapes as the SVG."""

from __future__ import annotations

import os
from itertools import groupby
from typing import Any

from ds_vpipe.pictures.palette import PAPER
from ds_vpipe.pictures.picture import BAR_FONT, EDGE_WIDTH, Box, Curve, Label, Picture, Rule

_PER_INCH = 100.0
_POINTS = 72.0 / _PER_INCH  # of a pixel
_HORIZONTAL = {"start": "left", "middle": "center", "end": "right"}


def save_png(picture: Picture, path: str | os.PathLike[str], scale: float = 2.0) -> None:
    """Write ``picture`` to the file ``path`` with ``scale`` dots per pixel of the layout.

    matplotlib is imported here and without pyplot, so that no state of the process is touched.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.collections import LineCollection, PolyCollection
    from matplotlib.figure import Figure

    size = (picture.width / _PER_INCH, picture.height / _PER_INCH)
    figure = Figure(figsize=size, dpi=_PER_INCH * scale, facecolor=PAPER)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, picture.width)
    axes.set_ylim(picture.height, 0)
    axes.axis("off")

    def write(x: float, y: float, text: str, size: float, **style: Any) -> None:
        axes.text(x, y, text, va="center", fontsize=size * _POINTS, zorder=order, parse_math=False, **style)

    # Shapes of one class that follow each other become one collection: thousands of bars are drawn at once.
    for order, (shape_type, run) in enumerate(groupby(picture.shapes, key=type)):
        shapes: list[Any] = list(run)
        if shape_type is Box:
            corners = [_corners(box) for box in shapes]
            fills = [box.fill for box in shapes]
            style: dict[str, Any] = {"edgecolors": [box.edge or box.fill for box in shapes], "facecolors": fills}
            style["linewidths"] = [EDGE_WIDTH * _POINTS if box.edge else 0.0 for box in shapes]
            axes.add_collection(PolyCollection(corners, **style, zorder=order))
            for box in shapes:
                if box.shows_label:
                    x, y = box.x + box.width / 2, box.y + box.height / 2
                    write(x, y, box.label, BAR_FONT, ha="center", color=box.label_colour)
        elif shape_type is Label:
            for label in shapes:
                weight = "bold" if label.bold else "normal"
                place = {"ha": _HORIZONTAL[label.anchor], "color": label.colour, "fontweight": weight}
                write(label.x, label.y, label.text, label.size, **place)
        elif shape_type is Rule:
            ends = [[(rule.x1, rule.y1), (rule.x2, rule.y2)] for rule in shapes]
            widths = [rule.width * _POINTS for rule in shapes]
            colours = [rule.colour for rule in shapes]
            axes.add_collection(LineCollection(ends, colors=colours, linewidths=widths, zorder=order))
        elif shape_type is Curve:
            for curve in shapes:
                _draw_curve(axes, curve, order)
    figure.savefig(path, format="png")


def _corners(box: Box) -> list[tuple[float, float]]:
    right, below = box.x + box.width, box.y + box.height
    return [(box.x, box.y), (right, box.y), (right, below), (box.x, below)]


def _draw_curve(axes: Any, curve: Curve, order: int) -> None:
    xs, ys = zip(*curve.points, strict=True)
    if curve.filled:
        axes.fill(xs, ys, facecolor=curve.colour, edgecolor="none", zorder=order)
    else:
        axes.plot(xs, ys, color=curve.colour, linewidth=curve.width * _POINTS, zorder=order)
