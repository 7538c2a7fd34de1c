"""Pictures of what :mod:`bench_schedule` has measured: efficiency of every arm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def draw(rows_path: str, picture: str) -> None:
    """Draw efficiency over M, a panel per number of stages and one per number of stages with slow links.

    Args:
        rows_path: JSON lines of :mod:`bench_schedule`.
        picture: a PNG or SVG file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = Path(rows_path).read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["work"] == "emulated"]
    panels: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: (row["link"], row["stages"], row["micro_batches"])):
        title = f"K = {row['stages']}" + (f", transfers of {row['link']:.0%} of compute" if row["link"] else "")
        panels.setdefault(title, []).append(row)
    columns = min(3, len(panels))
    height = -(-len(panels) // columns)
    figure = Figure(figsize=(4.5 * columns, 3.2 * height + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = list(figure.subplots(height, columns, sharey=True, squeeze=False).flat)
    arms = list(dict.fromkeys(row["arm"] for row in rows))
    for axes, (title, members) in zip(grid, panels.items(), strict=False):
        counts = sorted({row["micro_batches"] for row in members})
        for arm in arms:
            points = {row["micro_batches"]: row["efficiency"] for row in members if row["arm"] == arm}
            places = [counts.index(count) for count in points]
            style = {"color": f"C{arms.index(arm)}", "marker": "o", "linewidth": 2.5 if arm.startswith("asp") else 1.2}
            axes.plot(places, list(points.values()), label=arm, **style)
        axes.set_title(title)
        axes.set_xticks(range(len(counts)), [str(count) for count in counts])
        axes.set_xlabel("M, micro-batches per batch")
        axes.set_ylim(0, 1.05)
        axes.axhline(1, color="grey", linewidth=0.8)
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    figure.axes[0].set_ylabel("efficiency")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(picture, dpi=110)
