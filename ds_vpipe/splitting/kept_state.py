"""What a model keeps from call to call in attributes outside its blocks, and which piece reads it in the next call.

A stage ends the forward behind its last piece, so that it never keeps what a later piece writes. That does no harm
where nothing earlier reads it: a counter at the end for a log, a state of the last piece alone. A recurrent state, or a
number that the next call begins with, would be an old one without a word. What is read is not seen, but what follows
from it: the call is tried out again, once from all that the first one has left, and once from what it leaves where it
is ended early. What is computed before that place has to be the same.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ds_vpipe.splitting import guards
from ds_vpipe.splitting.dry_run import CallsSeen
from ds_vpipe.splitting.meta_tensor import SplitError
from ds_vpipe.splitting.output_specs import RetryError

_MOST_PLACES = 16  # where it is ended


def refuse_kept(
    model: nn.Module,
    kept: dict[int, guards.Held],
    held: Callable[[], guards.Held],
    remove_hooks: Callable[[], None],
    rerun: Callable[[int | None], CallsSeen],
) -> None:
    """Refuse a call whose pieces depend on what a later piece of the call before it has kept.

    Args:
        model: of the user.
        kept: what it kept before each piece of a call, the first one included.
        held: says what it keeps now, which is something else afterwards.
        remove_hooks: those that the call has registered, and later ones.
        rerun: runs the call again from what is kept, to its end or to the beginning of a piece.

    Raises:
        SplitError: names attributes and the piece.
    """
    differences, known, places = guards.PythonState.differences, [held()], list[int]()
    for piece, before in reversed(kept.items()):
        if piece and all(differences(before, other) for other in known):
            places.append(piece)
            known.append(before)
    places = places[:: -(-len(places) // _MOST_PLACES) or 1]

    def begin() -> None:
        guards.hold(kept[0])
        remove_hooks()

    try:
        found = _dependence(places, begin, held, rerun) if places else None
    except (Exception, RetryError):
        return  # a call that fails the second time has been seen as far as it goes
    if found is not None:
        attributes, piece = found
        names = {id(part): name for name, part in model.named_modules()}
        paths = (filter(None, (type(model).__name__, names.get(id(owner), ""), name)) for owner, name in attributes[:3])
        raise SplitError(
            f"{', '.join(map('.'.join, paths))}: is kept in piece {piece} or later and read in an earlier one in the "
            f"next call, whose stage does not have it; allowed is what one block keeps and reads, or the first lines "
            f"of forward do; keep it in a block, or pass it as an argument of the call"
        )


def _dependence(
    places: list[int], begin: Callable[[], None], held: Callable[[], guards.Held],
    rerun: Callable[[int | None], CallsSeen],
) -> tuple[list[tuple[nn.Module, str]], int] | None:  # fmt: skip
    """Attributes that earlier pieces depend on, and the piece behind whose beginning they are kept; or None."""
    final, first = held(), rerun(None)
    guards.hold(final)
    again = rerun(None)
    for piece in places:
        if any(again[earlier] != first[earlier] for earlier in range(piece)):
            continue  # something else changes from call to call, such as a number of the script's
        begin()
        rerun(piece)
        attributes = guards.PythonState.differences(final, held())
        if attributes:
            found = rerun(None)
            if any(found[earlier] != first[earlier] for earlier in range(piece)):
                return attributes, piece
    return None
