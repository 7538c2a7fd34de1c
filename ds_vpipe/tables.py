"""Numbers for people: bytes with a unit, things that are counted, rows in columns."""

from collections.abc import Mapping, Sequence

_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def show_bytes(size: float) -> str:
    """Bytes with three digits and a unit of a thousand, such as ``1.35 GB``."""
    for scale, unit in _UNITS:
        if abs(size) >= scale * 0.9995:
            return f"{size / scale:.3g} {unit}" if abs(size) < 999.5 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} B"


def counted(number: int, noun: str) -> str:
    """A number of things, such as ``1 stage`` or ``2 batches``."""
    return f"{number} {noun}{'' if number == 1 else 'es' if noun.endswith('ch') else 's'}"


def aligned(rows: Sequence[Mapping[str, object]]) -> str:
    """A table for a terminal: a line of keys, and one for each row, the cells of a column flush right."""
    lines = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)
