"""Events that befall a training run: plain data, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

PHASES = ("start", "load", "fill", "train", "update", "evaluation", "save", "move", "drain", "end")
"""What a run does, by the script's calls; an update is a part of a batch."""
KINDS = {
    "kill": 6, "raise": 2, "interrupt": 1, "stop": 2, "hang": 1, "delay": 1, "full": 1, "removed": 1,
    "cut": 1, "flip": 1, "clock": 1,
}  # fmt: skip
"""How often each comes."""
OF_SAVES, OF_FILES, OF_RANKS = ("full", "removed"), ("cut", "flip"), ("kill", "raise", "interrupt")
PEER_TIMEOUT_S = 5.0
SECONDS = {"stop": (1.0, 2.0), "hang": (8.0, 8.0), "delay": (0.02, 0.05)}
"""How long an event lasts: from, to."""

Counts = Mapping[str, Mapping[str, int]]
"""Calls of functions by rank and phase."""


@dataclass(frozen=True)
class Event:
    """One thing that happens to a rank.

    After an event that ends ranks the run is started once more by the driver, or, ``restarted``, by
    ``ds_vpipe.run --restarts 1``; a rank that hangs then does so until it is ended.

    ==========  ========================================================================================
    kill        SIGKILL
    raise       a RuntimeError in the function that is called, as if memory had run out
    interrupt   SIGINT, as by Ctrl-C
    stop, hang  SIGSTOP, and SIGCONT after some seconds: fewer or more than ``peer_timeout_s``
    clock       the time of day jumps by up to six days, back or forth
    delay       up to so many seconds before each transfer of the rank
    full        no file may be longer than some bytes from then on, as on a full disk; the script saves again
    removed     the unfinished checkpoint is removed; the script saves again
    cut, flip   a file of the checkpoint that is loaded has been cut off, or one bit in it changed
    ==========  ========================================================================================
    """

    kind: str
    rank: int
    phase: str
    call: int  # when the rank makes this call of a function of ds_vpipe or DeepSpeed in this phase, from 0
    seconds: float = 0.0
    draw: float = 0.0  # from 0 to 1: of the file and the place in it
    restarted: bool = False

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        then = ", with --restarts 1" if self.restarted else ""
        return f"{self.kind} rank {self.rank} in {self.phase} at call {self.call}{lasts}{then}"


FEW = (
    # the name of a run, kind, rank, phase, how far in it, and True with --restarts
    ("moves", "kill", 2, "update", 0.5),
    ("moves", "stop", 0, "move", 0.5),
    ("moves", "full", 2, "save", 0.1),
    ("moves", "flip", 0, "load", 0),
    ("replicas", "kill", 3, "save", 0.61),
    ("replicas", "hang", 2, "evaluation", 0.2),
    ("moves", "raise", 2, "train", 0.5, True),
    ("recovery", "kill", 1, "train", 0.7, True),
)
"""Those that are part of the tests."""


def few(shapes: Mapping[str, Counts]) -> Iterator[tuple[str, Event]]:
    """The events of :data:`FEW`."""
    for shape, kind, rank, phase, share, *restarted in FEW:
        call = int(share * shapes[shape][str(rank)][phase])
        yield shape, Event(kind, rank, phase, call, SECONDS.get(kind, (0.0,))[0], 0.5, any(restarted))


def drawn(
    seed: int, shapes: Mapping[str, Counts], recovering: Collection[str], restarted: float, kinds: Sequence[str]
) -> Iterator[tuple[str, Event]]:
    """Events without end, each with the name of the run that it is for; the same ones for the same seed and counts.

    Args:
        recovering: runs that go on from states in memory, which only ``--restarts`` keeps; no file is damaged for them.
        restarted: the share of those that end ranks after which ``--restarts`` starts them.
        kinds: of events.
    """
    draw = random.Random(seed)
    while True:
        shape = draw.choice(sorted(shapes))
        rank = draw.choice(sorted(shapes[shape]))
        counts = shapes[shape][rank]
        fit = [kind for kind in kinds if shape not in recovering or kind not in OF_FILES]
        kind = draw.choices(fit, [KINDS[kind] for kind in fit])[0]
        phase = draw.choice([phase for phase in PHASES if counts.get(phase)])
        phase = "save" if kind in OF_SAVES else "load" if kind in OF_FILES else phase
        seconds = round(draw.uniform(*SECONDS.get(kind, (0.0, 0.0))), 2)
        call = 0 if kind == "delay" else draw.randrange(counts[phase])
        phase = "start" if kind == "delay" else phase
        for_good = kind == "hang" and phase in ("fill", "train", "update")  # elsewhere that is noticed after 30 minutes
        restarts = (draw.random() < restarted or shape in recovering) and (kind in OF_RANKS or for_good)
        yield shape, Event(kind, int(rank), phase, call, seconds, draw.random(), restarts)


def recorded(record: Mapping[str, Any]) -> Event:
    """The event of a line of the log."""
    return Event(**{field.name: record[field.name] for field in fields(Event)})
