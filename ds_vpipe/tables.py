"""Numbers for people: bytes with a unit, rows in columns."""

from __future__ import annotations

from collections.abc import Sequence

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def show_bytes(size: float) -> str:
    """Bytes with three digits and a unit of a thousand, such as ``1.35 GB``."""
    for scale, unit in _UNITS:
        if abs(size) >= scale * 0.9995:
            return f"{size / scale:.3g} {unit}" if abs(size) < 999.5 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} B"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table for a terminal, the cells of each column flush right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
