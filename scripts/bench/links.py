#!/usr/bin/env python
"""One-way time of messages between two processes, by payload and size.

``python scripts/bench/links.py`` sends a tensor to and fro over every payload in turns; half of the time that it takes
is printed, medians of the repetitions. Nobody computes beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from common import Say, parser_of, run

from ds_vpipe.engine.links.groups import Groups, Peer
from ds_vpipe.engine.links.message import Message
from ds_vpipe.engine.links.wiring import Payload, Wiring

PAYLOADS: tuple[Payload, ...] = ("host", "shared")
TIMEOUT_S = 60.0


class Round:
    """Links to and from the other rank, over one payload."""

    def __init__(self, rank: int, payload: Payload) -> None:
        me, peer = Peer(rank, rank), Peer(1 - rank, 1 - rank)
        wiring = Wiring(Groups(me, TIMEOUT_S), None, payload)
        self._asks = rank == 0
        if self._asks:
            self._out, self._into = wiring.sender("there", peer, 2), wiring.receiver("back", peer, 2)
        else:
            self._into, self._out = wiring.receiver("there", peer, 2), wiring.sender("back", peer, 2)

    def seconds(self, tensor: torch.Tensor, count: int) -> float:
        """One-way time of ``tensor``."""
        begin = time.perf_counter()
        for number in range(count):
            if self._asks:
                self._out.send(Message.ACTIVATION, number, tensor)
                self._into.receive("the answer")
                self._out.release(number)
            else:
                self._into.receive("the question")
                self._out.release(number - 1)
                self._out.send(Message.ACTIVATION, number, tensor)
        return (time.perf_counter() - begin) / count / 2


def work(rank: int, say: Say, options: argparse.Namespace) -> None:
    """One end of every link."""
    rounds = {payload: Round(rank, payload) for payload in PAYLOADS}
    for size in options.bytes:
        tensor, count = torch.zeros(size, dtype=torch.uint8), max(10, min(300, 100_000_000 // size))
        times: dict[str, list[float]] = {payload: [] for payload in PAYLOADS}
        for _ in range(options.repetitions):
            for payload, found in times.items():
                found.append(rounds[payload].seconds(tensor, count))
        shown = ", ".join(f"{payload} {1e6 * statistics.median(found):.0f} us" for payload, found in times.items())
        say(f"{size} bytes: {shown}")
    dist.barrier()


parser = parser_of(__doc__)
parser.add_argument("--bytes", type=int, nargs="+", default=[64, 1_000_000, 16_000_000], help="of a message")
parser.add_argument("--repetitions", type=int, default=7)
parse = parser.parse_args

if __name__ == "__main__":
    run(work, 2, parse())
