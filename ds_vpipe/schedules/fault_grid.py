"""A text picture of what the ranks come to do, with the faulty cells marked.

Columns are time slots in which a pass takes one, a row ends where its rank is wrong or stands for ever. A missing
``SEND_GRAD2`` of the last of three ranks::

    rank 0 |F0 F1 F2 .  .  B0 F3 B1 F4        .  .  B2 |
    rank 1 |.  F0 F1 .  B0 F2 B1 F3 .         .  B2 F4 |
    rank 2 |.  .  F0 B0 F1 B1 F2 B2 !REDUCE2! .  .  .  |
    rank 2, position 18, REDUCE2: SEND_GRAD2 has to come before it
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ds_vpipe.schedules.actions import Kind
from ds_vpipe.schedules.check import Fault
from ds_vpipe.schedules.dry_run import dry_run, posted_receives
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Programs

_BEFORE, _AFTER = 8, 3


def fault_grid(pipeline: Pipeline, programs: Programs, faults: Sequence[Fault]) -> str:
    """Draw ``programs`` around ``faults``, those that :func:`ds_vpipe.schedules.check.check_programs` found in them.

    Returns:
        One line per rank, and one per fault below.
    """
    run = dry_run(programs, partial(posted_receives, pipeline))
    rows: list[dict[int, str]] = []
    marked: list[int] = []
    for rank, program in enumerate(programs):
        wrong = [fault for fault in faults if fault.rank == rank]
        stop = min([run.positions[rank], *(fault.position for fault in wrong)])
        slots = run.slots[rank]
        row = {slots[i] - 1: str(program[i]) for i in range(stop) if program[i].kind in (Kind.FORWARD, Kind.BACKWARD)}
        for fault in wrong[:1]:
            column = slots[stop - 1] if stop else 0
            row[column] = f"!{fault.action or 'end'}!"
            marked.append(column)
        rows.append(row)
    first = max(0, min(marked, default=0) - _BEFORE)
    columns = range(first, max(marked, default=_BEFORE) + _AFTER + 1)
    widths = [max(2, *(len(row.get(column, "")) for row in rows)) for column in columns]
    lines = []
    for rank, row in enumerate(rows):
        cells = (row.get(column, ".").ljust(width) for column, width in zip(columns, widths, strict=True))
        lines.append(f"rank {rank:<{len(str(len(rows) - 1))}} |{' '.join(cells)} |")
    return "\n".join([*lines, *map(str, faults)])
