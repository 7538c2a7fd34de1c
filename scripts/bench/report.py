"""Table and picture of the rows that :mod:`schedule` has measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pipelines import ARMS

Row = dict[str, Any]


def table(rows: list[Row]) -> list[str]:
    """Markdown: efficiency of every arm, and how many times as fast as stock the case's fastest other one is.

    Args:
        rows: of :mod:`schedule`; of several of one arm in one case the last counts.
    """
    measured = {row["arm"] for row in rows}
    arms = [arm for arm in ARMS if arm in measured]
    cases: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        key = (row["work"] != "emulated", row["link"], row["stages"], row["micro_batches"])
        cases.setdefault(key, {})[row["arm"]] = row
    lines = [f"| work | K | M | stage, ms | {' | '.join(arms)} | fastest, x stock |", "|---" * (len(arms) + 5) + "|"]
    for (real, link, stages, micro_batches), found in sorted(cases.items()):
        work = "real" if real else f"link {link:.0%}" if link else "emulated"
        cells = [f"{found[arm]['efficiency']:.3f}" if arm in found else "" for arm in arms]
        fastest = max(found.values(), key=lambda row: row["rate"])
        ratio = ""
        if "stock" in found:
            ratio = f"{fastest['arm']} {fastest['rate'] / found['stock']['rate']:.2f}"
        length = next(iter(found.values()))["stage_ms"]
        lines.append(f"| {work} | {stages} | {micro_batches} | {length:.1f} | {' | '.join(cells)} | {ratio} |")
    return lines


def write_table(rows_path: str, page: str) -> None:
    """Write the table of JSON lines to a Markdown file."""
    rows = [json.loads(line) for line in Path(rows_path).read_text(encoding="utf-8").splitlines()]
    Path(page).write_text("\n".join(table(rows)) + "\n", encoding="utf-8")


def draw(rows_path: str, picture: str) -> None:
    """Draw efficiency over M, a panel per number of stages and one per number of stages with slow links.

    Args:
        rows_path: JSON lines of :mod:`schedule`.
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
