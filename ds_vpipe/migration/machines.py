"""The machines of a run: vPipe's ``HOST:GPU`` per rank, as DeepSpeed's hostfile and list of devices."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LOCAL = ("localhost", "127.0.0.1")
# A host's name goes to ssh and, in the launcher's command, through the shells of other hosts: nothing that they read.
_MACHINE = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.-]*):([0-9]{1,4})")


@dataclass(frozen=True)
class Machine:
    """One device: its host, and its number on that host."""

    host: str
    gpu: int

    def __str__(self) -> str:
        return f"{self.host}:{self.gpu}"


def machine(text: object) -> Machine:
    """Read ``HOST:GPU``.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(text, str):
        raise ValueError(text)
    match = _MACHINE.fullmatch(text)
    if match is None:
        raise ValueError(text)
    return Machine(match[1], int(match[2]))


@dataclass(frozen=True)
class Hosts:
    """The devices of every host, hosts in the order of their first rank, devices in the order of their numbers.

    This is the order in which DeepSpeed's launcher numbers ranks; vPipe's driver did the same.
    """

    gpus: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, machines: Iterable[Machine]) -> Hosts:
        """Collect ``machines`` by host."""
        found: dict[str, list[int]] = {}
        for item in machines:
            found.setdefault(item.host, []).append(item.gpu)
        return cls({host: tuple(sorted(gpus)) for host, gpus in found.items()})

    @property
    def count(self) -> int:
        """Number of devices."""
        return sum(len(gpus) for gpus in self.gpus.values())

    @property
    def first_devices(self) -> bool:
        """Whether every host's devices are numbered from 0 without a gap."""
        return all(gpus == tuple(range(len(gpus))) for gpus in self.gpus.values())

    def hostfile(self) -> str:
        """DeepSpeed's hostfile: a line ``HOST slots=N`` per host, N large enough for the highest device."""
        return "".join(f"{host} slots={max(gpus) + 1}\n" for host, gpus in self.gpus.items())

    def include(self) -> str:
        """The value of the launcher's ``--include``: ``HOST:GPU,GPU@HOST:GPU``."""
        return "@".join(f"{host}:{','.join(str(gpu) for gpu in gpus)}" for host, gpus in self.gpus.items())
