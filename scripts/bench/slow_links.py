"""Slow links between ranks of one machine: every point-to-point message takes the time that its bytes would take.

Whoever sends or receives through ``torch.distributed`` or our links over gloo gets works whose ``wait()``
returns when the message would be there: after both ends have asked for it, and after the messages before it on the same
link. So a transfer goes on while both ends compute, and a blocking send blocks. Each direction between two ranks is a
link of its own; collectives are left alone.
"""

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from ds_vpipe.engine.links.groups import Group

_MESSAGES = 256  # whose moments are kept; more than are ever on their way
_SENT, _POSTED = 0, 1


class EmulatedLinks:
    """Makes the links of this process slow. Every rank makes one of the same folder.

    Args:
        folder: which all ranks share; when each message was sent and asked for is written to files there.
        rank: of this process.

    Attributes:
        bytes_per_s: of every link in each direction, infinite at first.
    """

    def __init__(self, folder: str, rank: int) -> None:
        self.bytes_per_s = float("inf")
        self._folder = Path(folder)
        self._moments: dict[str, np.memmap[Any, np.dtype[np.float64]]] = {}
        self._counts: dict[tuple[str, int], int] = {}
        self._free: dict[tuple[int, int], float] = {}

        def theirs(group: Any, other: int) -> tuple[int, str]:
            return dist.get_global_rank(group, other), group.group_name

        def ours(group: Group, other: int) -> tuple[int, str]:
            return other, group.name

        def slow(do: Callable[..., Any], end: int, peer_of: Callable[[Any, int], tuple[int, str]]) -> Any:
            def slowed(group: Any, data: Any, other: int, tag: int = 0) -> Any:
                peer, name = peer_of(group, other)
                link = (rank, peer) if end == _SENT else (peer, rank)
                tensors = data if isinstance(data, list) else [data]
                return _Slow(do(group, data, other, tag), self._begin(end, link, name, tag, tensors))

            return slowed

        for kind, peer_of in ((dist.ProcessGroup, theirs), (Group, ours)):
            kind.send, kind.recv = slow(kind.send, _SENT, peer_of), slow(kind.recv, _POSTED, peer_of)

    @property
    def messages(self) -> int:
        """How many have been sent or asked for."""
        return sum(self._counts.values())

    def _begin(self, end: int, link: tuple[int, int], name: str, tag: int, tensors: list[Any]) -> Callable[[], None]:
        """Write down that an end has asked for its next message. Returns a wait until it would be there."""
        stream = f"{name}-{link[0]}-{link[1]}-{tag}".replace("/", "-")
        if stream not in self._moments:
            path = self._folder / stream
            with path.open("ab") as file:  # whichever end comes first makes the file
                file.truncate(8 * _MESSAGES * 2)
            self._moments[stream] = np.memmap(path, np.float64, "r+", shape=(_MESSAGES, 2))
        number = self._counts.get((stream, end), 0)
        self._counts[stream, end] = number + 1
        moments = self._moments[stream][number % _MESSAGES]
        moments[end] = time.monotonic()
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)

        def arrive() -> None:
            self._free[link] = max(*moments, self._free.get(link, 0.0)) + size / self.bytes_per_s
            rest = self._free[link] - time.monotonic()
            if rest > 0:  # a sleep of no time takes some
                time.sleep(rest)

        return arrive


class _Slow:
    """A work that is done when its message would have arrived."""

    def __init__(self, work: Any, arrive: Callable[[], None]) -> None:
        self._work, self._arrive = work, cache(arrive)  # waits once

    def wait(self, *limit: Any, **named: Any) -> Any:
        done = self._work.wait(*limit, **named)
        self._arrive()
        return done

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
