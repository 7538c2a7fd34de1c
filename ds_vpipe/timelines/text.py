"""A timeline in the terminal: a row per rank, a column per unit of time.

::

    stage 0 |F0 F1 .  .  B0 -- .  B1 -- |
    stage 1 |.  F0 B0 -- F1 B1 -- .  .  |

``F`` is a forward and ``B`` a backward pass, ``S`` an update (reduction included), each with its micro-batch or batch
and, if ranks hold several parts, the part before it; ``--`` continues the action before, a dot is time in which the
rank does none of these. A cell shows the action that fills most of its column, if that is at least half of it.
"""

import math
import statistics
from collections.abc import Sequence
from typing import Final

from ds_vpipe.errors import Refusal
from ds_vpipe.schedules.actions import Category
from ds_vpipe.timelines.timeline import Span, Timeline, Window

_LETTERS: Final = {Category.FORWARD: "F", Category.BACKWARD: "B", Category.UPDATE: "S"}
_MOST_COLUMNS: Final = 2000
_PASSES = (Category.FORWARD, Category.BACKWARD)
_REGULAR = 0.01  # of a column
_ROUNDING = 1e-6  # of a column: sums of seconds are not exact


def default_unit(timeline: Timeline) -> float:
    """Seconds per column: the median forward pass, if all passes begin and end at whole columns then.

    Otherwise a column is two thirds of that: a pass of one and a half columns fills at least half of some column
    alone, wherever it begins, and so cannot vanish.

    Raises:
        VPipeConfigError: The timeline has no forward pass of some length.
    """
    lengths = [span.duration for span in timeline.spans if span.category is Category.FORWARD and span.duration > 0]
    if not lengths:
        raise Refusal("unit", None, "seconds per column", "give it: there is no forward pass to take it from").error()
    unit = statistics.median(lengths)
    times = (time / unit for span in timeline.spans if span.category in _PASSES for time in (span.start, span.end))
    return unit if all(abs(time - round(time)) < _REGULAR for time in times) else unit / 1.5


def text_grid(
    timeline: Timeline, unit: float | None = None, window: Window | None = None, line_width: int | None = None
) -> str:
    """Draw ``timeline`` as text, without a newline at the end.

    ``unit`` are the seconds per column, :func:`default_unit` if not given, and ``line_width`` the characters of the
    longest line; what is longer goes on in further blocks of rows. Without ``unit`` and ``window`` a longer timeline is
    cut after 2000 columns, and a last line says so.

    Raises:
        VPipeConfigError: there would be more than 2000 columns of that unit, or in that window.
    """
    asked = unit is not None or window is not None
    unit = default_unit(timeline) if unit is None else unit
    start, end = window if window is not None else (0.0, timeline.duration)
    columns = max(1, math.ceil((end - start) / unit - _ROUNDING))
    cut = columns > _MOST_COLUMNS
    if cut and asked:
        reason = f"{end - start:.6g} s take {columns} columns"
        fix = "give a larger unit or a smaller window"
        raise Refusal("unit", unit, f"at most {_MOST_COLUMNS} columns", fix, reason).error()
    columns, with_part = min(columns, _MOST_COLUMNS), timeline.holds_parts
    rows = [_cells(spans, unit, start, columns, with_part) for spans in timeline.by_rank()]
    width = max(2, max(len(cell) for row in rows for cell in row))
    name, digits = timeline.rank_word, len(str(timeline.num_ranks - 1))
    per_block = columns if line_width is None else max(1, (line_width - len(name) - digits - 4) // (width + 1))

    def line(rank: int, begin: int) -> str:
        cells = "".join(f"{cell:<{width}} " for cell in rows[rank][begin : begin + per_block])
        return f"{name} {rank:<{digits}} |{cells}|"

    blocks = ["\n".join(line(rank, begin) for rank in range(len(rows))) for begin in range(0, columns, per_block)]
    if cut:
        blocks.append(f"until {columns * unit:.6g} s of {end:.6g} s; --window A:B draws other seconds")
    return "\n\n".join(blocks)


def _cells(spans: Sequence[Span], unit: float, start: float, columns: int, with_part: bool) -> list[str]:
    """The texts of one row. ``best`` holds, per column, how much of it is filled by the span that fills most."""
    best: list[tuple[float, Span | None]] = [(0.0, None)] * columns
    for span in spans:
        if span.category not in _LETTERS:
            continue
        first, last = (span.start - start) / unit, (span.end - start) / unit
        for column in range(max(0, math.floor(first)), min(columns, math.ceil(last))):
            share = min(last, column + 1) - max(first, column)
            if share > best[column][0] + _ROUNDING:
                best[column] = (share, span)
    cells = []
    before: Span | None = None
    for share, filling in best:
        most = None if share < 0.5 - _ROUNDING else filling
        if most is None:
            cells.append(".")
        elif most is before:
            cells.append("--")
        else:
            cells.append(f"{most.part if with_part else ''}{_LETTERS[most.category]}{most.action.index}")
        before = most
    return cells
