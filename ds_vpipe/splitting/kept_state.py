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

_MOST_PLACES = 8  # where it is ended: the last ones


def refuse_kept(
    model: nn.Module,
    kept: dict[int, guards.Held],
    held: Callable[[], guards.Held],
    again: Callable[[int | None], CallsSeen],
) -> None:
    """Refuse a call whose pieces depend on what a later piece of the call before it has kept.

    Args:
        model: of the user.
        kept: what it kept before each piece of a call, the first one included.
        held: what it keeps now, which is something else afterwards.
        again: runs the call again from what they hold, to its end or to the beginning of a piece.

    Raises:
        SplitError: names an attribute and the piece.
    """
    places, known = list[int](), [held()]
    for piece, before in reversed(kept.items()):
        if piece and all(guards.PythonState.difference(before, other) is not None for other in known):
            places.append(piece)
            known.append(before)
    try:
        found = _dependence(places[:_MOST_PLACES], kept[0], held, again) if places else None
    except (Exception, RetryError):
        return  # a call that fails the second time has been seen as far as it goes
    if found is not None:
        (owner, attribute), piece = found
        names = {id(module): name for name, module in model.named_modules()}
        where = ".".join(filter(None, (type(model).__name__, names.get(id(owner), ""), attribute)))
        raise SplitError(
            f"{where}: is kept in piece {piece} or later and read in an earlier one in the next call, whose stage does "
            f"not have it; allowed is what one block keeps and reads, or the first lines of forward do; keep it in a "
            f"block, or pass it as an argument of the call"
        )


def _dependence(
    places: list[int], begin: guards.Held, held: Callable[[], guards.Held], again: Callable[[int | None], CallsSeen]
) -> tuple[tuple[object, str], int] | None:  # fmt: skip
    """An attribute, and the piece behind whose beginning it is kept, that earlier pieces depend on; or None."""
    final, first = held(), again(None)
    guards.hold(final)
    if again(None) != first:
        return None  # something else changes from call to call, such as a number of the script's
    for piece in places:
        guards.hold(begin)
        again(piece)
        attribute = guards.PythonState.difference(final, held())
        if attribute is not None:
            found = again(None)
            if any(found[earlier] != first[earlier] for earlier in range(piece)):
                return attribute, piece
    return None
