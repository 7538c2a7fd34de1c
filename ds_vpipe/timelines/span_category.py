"""What kind of work a span of a timeline is; summaries count by it and pictures are coloured by it."""

from __future__ import annotations

import enum
from typing import Final

from ds_vpipe.timelines.action_name import action_name
from ds_vpipe.timelines.timeline import Span


class Category(enum.Enum):
    """Kinds of work, in the order of legends and tables; the value is the word for people."""

    FORWARD = "forward"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    UPDATE = "update"
    LOAD = "reading"
    OTHER = "other"
    TRANSFER = "transfer"
    WAIT = "wait"


BUSY: Final = tuple(c for c in Category if c not in (Category.TRANSFER, Category.WAIT))
"""What occupies the device; the rest of the time it could do something else."""

_OF_KIND: Final = {
    "F": Category.FORWARD,
    "B": Category.BACKWARD,
    "RECOMPUTE": Category.RECOMPUTE,
    "REDUCE": Category.UPDATE,
    "STEP": Category.UPDATE,
    "LOAD": Category.LOAD,
}


def category_of(span: Span) -> Category:
    """Return what kind of work ``span`` is; ``OTHER`` for kinds of action that this version does not know."""
    name = action_name(span.action)
    if name.waiting or name.kind.startswith(("RECV_", "DROP_")):  # a rank that receives does nothing else: it waits
        return Category.WAIT
    if name.kind.startswith("SEND_"):
        return Category.TRANSFER
    return _OF_KIND.get(name.kind, Category.OTHER)
