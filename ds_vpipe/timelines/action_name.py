"""The text of a timeline's action taken apart: ``F7``, ``2SEND_ACT7``, ``WAITRECV_ACT7``.

More is understood than ``Action`` knows, so that timelines of other versions can be drawn.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

_ACTION = re.compile(r"(?P<wait>WAIT)?(?P<part>\d+)?(?P<kind>[A-Z_]+?)(?P<index>\d+)")


@dataclass(frozen=True, slots=True)
class ActionName:
    """The pieces of a span's action.

    Attributes:
        waiting: The rank waited before the action.
        part: The part it names, or None.
        kind: Value of :class:`ds_vpipe.schedules.actions.Kind`, such as ``"F"`` or ``"SEND_ACT"``.
        index: Micro-batch, or batch for actions that are done once per batch.
    """

    waiting: bool
    part: int | None
    kind: str
    index: int


@lru_cache(maxsize=65536)
def action_name(text: str) -> ActionName:
    """Take the text of a span's action apart.

    Raises:
        ValueError: ``text`` is not of the form ``[WAIT][part]KIND index``.
    """
    match = _ACTION.fullmatch(text)
    if match is None:
        raise ValueError(
            f"action {text!r}: expected the text of an action such as F7 or 2SEND_ACT7, or WAIT before one"
        )
    part = match["part"]
    return ActionName(
        match["wait"] is not None, None if part is None else int(part), match["kind"], int(match["index"])
    )


def is_action(text: object) -> bool:
    """True for what :func:`action_name` understands."""
    return isinstance(text, str) and _ACTION.fullmatch(text) is not None
