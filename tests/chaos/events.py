"""Events that befall a training run: plain data, drawn from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

PHASES = ("start", "load", "fill", "train", "update", "evaluation", "save", "move", "drain", "end")
"""What a run does, by the script's calls; an update is a part of a batch."""
KINDS = ("kill", "stop", "hang")
PEER_TIMEOUT_S = 5.0
SECONDS = {"kill": (0.0, 0.0), "stop": (1.0, 2.0), "hang": (8.0, 8.0)}
"""How long an event lasts: from, to."""

Counts = Mapping[str, Mapping[str, int]]
"""Calls of functions by rank and phase."""


@dataclass(frozen=True)
class Event:
    """One thing that happens to a rank.

    ``kill`` is SIGKILL, ``stop`` and ``hang`` are SIGSTOP with SIGCONT after some seconds, fewer or more than
    ``peer_timeout_s``.
    """

    kind: str
    rank: int
    phase: str
    call: int  # when the rank makes this call of a function of ds_vpipe or DeepSpeed in this phase, from 0
    seconds: float = 0.0

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"{self.kind} rank {self.rank} in {self.phase} at call {self.call}{lasts}"


FEW = (
    # the name of a run, kind, rank, phase, and how far in it
    ("moves", "kill", 0, "start", 0.9),
    ("moves", "kill", 2, "update", 0.5),
    ("moves", "kill", 1, "move", 0.6),
    ("moves", "stop", 0, "move", 0.5),
    ("replicas", "kill", 0, "save", 0.7),
    ("replicas", "kill", 3, "load", 0.5),
    ("replicas", "kill", 1, "drain", 0.2),
    ("replicas", "hang", 2, "evaluation", 0.2),
)
"""Those that are part of the tests."""


def few(shapes: Mapping[str, Counts]) -> Iterator[tuple[str, Event]]:
    """The events of :data:`FEW`."""
    for shape, kind, rank, phase, share in FEW:
        call = int(share * shapes[shape][str(rank)][phase])
        yield shape, Event(kind, rank, phase, call, SECONDS[kind][0])


def drawn(seed: int, shapes: Mapping[str, Counts]) -> Iterator[tuple[str, Event]]:
    """Events without end, each with the name of the run that it is for; the same ones for the same seed and counts."""
    draw = random.Random(seed)
    while True:
        shape = draw.choice(sorted(shapes))
        rank = draw.choice(sorted(shapes[shape]))
        counts = shapes[shape][rank]
        phase = draw.choice([phase for phase in PHASES if counts.get(phase)])
        kind = draw.choices(KINDS, (6, 2, 1))[0]
        seconds = round(draw.uniform(*SECONDS[kind]), 1)
        yield shape, Event(kind, int(rank), phase, draw.randrange(counts[phase]), seconds)


def recorded(record: Mapping[str, Any]) -> Event:
    """The event of a line of the log."""
    return Event(**{field.name: record[field.name] for field in fields(Event)})
