"""Tables and pictures of what the benchmarks have measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


@dataclass(frozen=True)
class Curve:
    """One line of a picture, by its points; ``bold`` ones are ours, ``dashed`` ones a reference."""

    label: str
    points: list[tuple[float, float]]
    bold: bool = False
    dashed: bool = False


def read_rows(path: str | Path) -> list[Row]:
    """Rows of a file of JSON lines, none if there is no file."""
    return [json.loads(line) for line in Path(path).read_text("utf-8").splitlines()] if Path(path).exists() else []


def add_row(row: Row, path: str | Path | None) -> None:
    """Append a row to a file of JSON lines, if one is named."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a Markdown table."""
    lines = [f"| {' | '.join(map(str, cells))} |" for cells in (head, *rows)]
    return [lines[0], "|---" * len(head) + "|", *lines[1:]]


def draw(path: str | Path, panels: dict[str, list[Curve]], x: str, y: str, log: bool = False) -> None:
    """Draw curves, a panel per title, to a PNG or SVG file; ``log`` for an ``x`` of powers of two."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    labels = list(dict.fromkeys(curve.label for curves in panels.values() for curve in curves))
    common = all(len(curves) == len(labels) for curves in panels.values())
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(5 * columns, (3.5 if common else 6) * height), layout="constrained")
    FigureCanvasAgg(figure)
    grid = list(figure.subplots(height, columns, sharey=True, squeeze=False).flat)
    for axes, (title, curves) in zip(grid, panels.items(), strict=False):
        for curve in curves:
            place = labels.index(curve.label) if common else curves.index(curve)
            style = {"color": f"C{place}", "linewidth": 2.5 if curve.bold else 1.2}
            style |= {"linestyle": "--" if curve.dashed else "-", "marker": "o" if log else ""}
            axes.plot(*zip(*curve.points, strict=True), label=curve.label, **style)
        axes.set_title(title)
        axes.set_xlabel(x)
        if log:
            ticks = sorted({place for curve in curves for place, _ in curve.points})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set_ylim(0, 1.05)
        if not common:
            axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    grid[0].set_ylabel(y)
    if common:
        figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=110)
