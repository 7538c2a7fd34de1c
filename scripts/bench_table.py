"""Tables of what :mod:`bench_schedule` has measured: a row per case, a column per pipeline."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bench_arms import ARMS

Row = dict[str, Any]


def table(rows: list[Row]) -> list[str]:
    """Markdown: efficiency of every arm, and how many times as fast as stock the case's fastest other one is.

    Args:
        rows: of :mod:`bench_schedule`; of several of one arm in one case the last counts.
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


def write(rows_path: str, page: str) -> None:
    """Write the table of JSON lines to a Markdown file."""
    rows = [json.loads(line) for line in Path(rows_path).read_text(encoding="utf-8").splitlines()]
    Path(page).write_text("\n".join(table(rows)) + "\n", encoding="utf-8")
