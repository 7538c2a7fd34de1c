"""What a model keeps from call to call in attributes outside its blocks, and which piece reads it in the next call.

A stage ends the forward behind its last piece, so that it never keeps what a later piece writes. That does no harm
where nothing earlier reads it: a counter at the end for a log, a state of the last piece alone. A recurrent state, or a
number that the next call begins with, would be an old one without a word. What is read is not seen, but what follows
from it: the call is tried out again, once from all that the first one has left, and once from what it leaves where it
is ended early. What is computed before that place has to be the same, and if it fails, it has to fail in the same way.

The code around the blocks may have effects outside the model, and runs each time: of places behind which the same
attributes change only the first and the last one are tried.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from torch import nn

from ds_vpipe.splitting.dry_run import CallsSeen
from ds_vpipe.splitting.meta_tensor import SplitError
from ds_vpipe.splitting.python_state import Held, PythonState, put_back

_MOST_ENDS = 16


def refuse_kept(
    model: nn.Module,
    kept: dict[int, Held],
    held: Callable[[], Held],
    remove_hooks: Callable[[], None],
    rerun: Callable[[int | None], CallsSeen],
) -> None:
    """Refuse a call whose pieces depend on what a later piece of the call before it has kept.

    Args:
        model: of the user.
        kept: what it kept before each piece of a call, the first one included.
        held: says what it keeps now, which is something else afterwards.
        remove_hooks: those that the call has registered, and later ones.
        rerun: runs the call again from what is kept, to its end or to the beginning of a piece, and says what it
            calls, and where it fails.

    Raises:
        SplitError: names attributes and the piece.
    """
    ends = _ends(kept, held())

    def begin() -> None:
        put_back(kept[0])
        remove_hooks()

    found = _dependence(ends, begin, held, rerun) if ends else None
    if found is not None:
        attributes, piece = found
        names = {id(part): name for name, part in model.named_modules()}
        paths = (filter(None, (type(model).__name__, names.get(id(owner), ""), name)) for owner, name in attributes[:3])
        raise SplitError(
            f"{', '.join(map('.'.join, paths))}: is kept in piece {piece} or later and read in an earlier one in the "
            f"next call, whose stage does not have it; allowed is what one block keeps and reads, or the first lines "
            f"of forward do; keep it in a block, or pass it as an argument of the call"
        )


def _ends(kept: dict[int, Held], end: Held) -> list[int]:
    """Pieces before which a repeated call is ended, last first.

    Of pieces behind which the same attributes change, the last one, and the first if they change in between; at most
    ``_MOST_ENDS``.
    """
    by_attributes = defaultdict[frozenset[tuple[nn.Module, str]], list[int]](list)
    for piece, before in kept.items():
        attributes = frozenset(PythonState.differences(before, end))
        if piece and attributes:
            by_attributes[attributes].append(piece)
    found = set[int]()
    for pieces in by_attributes.values():
        found.add(pieces[-1])
        if PythonState.differences(kept[pieces[0]], kept[pieces[-1]]):
            found.add(pieces[0])
    ends = sorted(found, reverse=True)
    return ends[:: -(-len(ends) // _MOST_ENDS) or 1]


def _dependence(
    ends: list[int], begin: Callable[[], None], held: Callable[[], Held],
    rerun: Callable[[int | None], CallsSeen],
) -> tuple[list[tuple[nn.Module, str]], int] | None:  # fmt: skip
    """Attributes that earlier pieces depend on, and the piece behind whose beginning they are kept; or None."""
    final, first = held(), rerun(None)

    def differs(piece: int) -> bool:
        """Whether the next call from what is kept now is another one before ``piece``."""
        found = rerun(piece)
        return any(found[earlier] != first[earlier] for earlier in range(piece))

    for piece in ends:
        begin()
        rerun(piece)
        attributes = PythonState.differences(final, held())
        if attributes and differs(piece):
            begin()
            rerun(None)
            if not differs(piece):  # else something else changes from call to call, such as a number of the script's
                return attributes, piece
    return None
