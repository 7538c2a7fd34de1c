"""Values that cross cuts between pieces, as plain data: where each is made, in a dry run and in every later pass.

A value is found again by its place: an argument of the first block, a result of a block's call, a result of the n-th
call of a torch function that returns tensors, in a piece outside the blocks or in a block, or a parameter. The form of
the place has to be the same: of functions the names of all that were called there until then, of blocks the nesting.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

OUTSIDE = -1


class Place(NamedTuple):
    """Place in a forward where values are seen.

    Attributes:
        piece: that is running.
        kind: "argument", "result", "function" or "parameter".
        number: of the block's call, or of the function's within its block or outside.
        block: call of the block that a function is called in, or :data:`OUTSIDE`.
    """

    piece: int
    kind: str
    number: int
    block: int = OUTSIDE


class Source(NamedTuple):
    """Origin of one value: its place, and its index there; for a parameter, its name."""

    place: Place
    leaf: int | str


@dataclass
class Crossings:
    """Values that cross each cut in calls of one form and mode.

    Attributes:
        arriving: for every piece the values that it gets from the piece before, in the order in which they travel.
        forms: of the places where those are made.
        drawn: function calls outside the blocks that draw random numbers.
        names: of the functions called outside the blocks, by piece.
        compared: first and last piece of runs whose function calls have been compared with ``names``.
    """

    arriving: list[tuple[Source, ...]]
    forms: dict[Place, Any]
    drawn: frozenset[Place]
    names: dict[tuple[int, int], list[str]]
    compared: set[tuple[int, int]] = field(default_factory=set)
    _wanted: dict[tuple[int, int], Wanted] = field(default_factory=dict)

    def mark(self, piece: int) -> torch.Tensor:
        """An empty tensor whose shape says which values arrive, for ranks whose dry run has found others."""
        sources = [(*source.place, source.leaf) for source in self.arriving[piece]]
        digest = hashlib.sha256(repr(sources).encode()).digest()
        return torch.empty(1, 0, int.from_bytes(digest[:7], "big"), dtype=torch.uint8)

    def wanted(self, start: int, stop: int) -> Wanted:
        """Values to be found while pieces ``start`` to ``stop - 1`` run."""
        if (start, stop) not in self._wanted:
            sources: dict[Place, list[Source]] = defaultdict(list)
            for source in {*self.arriving[start], *self.arriving[stop]}:
                sources[source.place].append(source)
            places = (*sources, *(place for place in self.drawn if place.piece < start))
            scopes = {(place.piece, place.block) for place in places if place.kind == "function"}
            self._wanted[start, stop] = Wanted(dict(sources), scopes)
        return self._wanted[start, stop]


class Wanted(NamedTuple):
    """Values to be found in one run, by place, and the pieces and blocks in which function calls are counted."""

    sources: dict[Place, list[Source]]
    scopes: set[tuple[int, int]]

    def parameters(self) -> list[Source]:
        """Those that are parameters themselves."""
        return [source for place, found in self.sources.items() if place.kind == "parameter" for source in found]
