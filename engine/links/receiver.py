"""The receiving end of a link between two stages; :mod:`ds_vpipe.engine.links.link` has the rules of both ends."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from ds_vpipe.engine.links.groups import Group
from ds_vpipe.engine.links.link import Capacity, Channel, Peer
from ds_vpipe.engine.links.message import HEADER_BYTES, Expected, Message, Received, unpack
from ds_vpipe.engine.links.send_thread import Immediate, Runner
from ds_vpipe.errors import PipelinePeerError


@dataclass(slots=True)
class _Posted:
    data: torch.Tensor
    work: dist.Work | RuntimeError
    expected: Expected | None


class Receiver:
    """The receiving end of a link; arguments as for :class:`~ds_vpipe.engine.links.sender.Sender`.

    Attributes:
        bytes_received: bytes of all messages received so far.
        waited_s: seconds spent waiting for them.
    """

    def __init__(
        self,
        group: Group,
        source: Peer,
        prefetch: int,
        channel: Channel = Channel.TRAINING,
        pin: bool = False,
        runner: Runner | None = None,
    ) -> None:
        self._group, self._source = group, source
        self._channel = channel
        self._capacity = Capacity(prefetch)
        self._pin = pin
        self._runner = runner or Immediate()
        self._posted: deque[_Posted] = deque()
        self.bytes_received = 0
        self.waited_s = 0.0
        for _ in range(prefetch):
            self._post(self._buffer(HEADER_BYTES), None)

    def receive(self, what: str) -> Received:
        """Wait for the next message.

        Args:
            what: name of what is expected, such as ``RECV_GRAD7``, for the message of a failure.

        Raises:
            PipelinePeerError: the time limit passed, the peer is lost, or it says that it has failed.
        """
        self._runner.check()
        if not self._posted:
            self._runner.settle()
        posted = self._posted.popleft()
        self._wait(posted.work, what)
        message = posted.expected.message() if posted.expected is not None else None
        if message is None:
            message = unpack(posted.data)
        if message.kind is Message.OVERSIZE:
            data = self._buffer(message.size)
            self._wait(self._start(data, self._channel.own_tag), what)
            message = unpack(data)
        self.bytes_received += message.size
        self._runner.submit(partial(self._post, self._buffer(self._capacity.received(message.size)), message.words))
        if message.kind is Message.ABORT:
            reason = bytes(message.tree.tolist()).decode(errors="replace")
            waited = f"{self._group.me} stopped waiting for {what} from {self._source}"
            raise PipelinePeerError(f"{waited}: {reason}", reason)
        return message

    def _buffer(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)

    def _post(self, data: torch.Tensor, words: list[int] | None) -> None:
        work = self._start(data, self._channel)
        self._posted.append(_Posted(data, work, None if words is None else Expected(data, words)))

    def _start(self, data: torch.Tensor, tag: int) -> dist.Work | RuntimeError:
        try:
            return self._group.recv(data, self._source.rank, tag)
        except RuntimeError as error:
            return error  # matters only if somebody waits for it

    def _wait(self, work: dist.Work | RuntimeError, what: str) -> None:
        begin = time.perf_counter()
        self._group.wait(work, f"{what} from {self._source}")
        self.waited_s += time.perf_counter() - begin
