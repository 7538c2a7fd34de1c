"""The sending end of a link between two stages; :mod:`ds_vpipe.engine.links.link` has the rules of both ends."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from ds_vpipe.engine.links.groups import Group
from ds_vpipe.engine.links.link import Capacity, Channel, Peer
from ds_vpipe.engine.links.message import HEADER_BYTES, Message, Packed, Packer, Tree, announcement
from ds_vpipe.engine.links.send_thread import Immediate, Runner

_ABORT_GRACE_S = 5.0  # how long a failing stage tries to tell its neighbours why


@dataclass(slots=True)
class _Outgoing:
    micro_batch: int
    packer: Packer
    packed: Packed
    content: tuple[Message, int, Tree, int] | None  # until it has been copied
    works: list[dist.Work] = field(default_factory=list)
    announced: torch.Tensor | None = None
    error: Exception | None = None
    uncopied: bool = False
    handed_over: bool = False


class Sender:
    """The sending end of a link.

    Args:
        group: of the two ranks.
        to: the stage at the other end.
        prefetch: receives that the other end keeps posted.
        channel: which of the group's links this is.
        pin: the tensors come from an accelerator and are staged through page-locked memory.
        runner: copies and sends; default: at once. With a courier tensors that are sent must not be changed before
            :meth:`copied`.

    Attributes:
        bytes_sent: bytes of all messages handed over so far.
        waited_s: seconds spent in :meth:`copied`.
    """

    def __init__(
        self,
        group: Group,
        to: Peer,
        prefetch: int,
        channel: Channel = Channel.TRAINING,
        pin: bool = False,
        runner: Runner | None = None,
    ) -> None:
        self._group, self._to = group, to
        self._channel = channel
        self._stream = torch.cuda.Stream() if pin else None
        self._packer, self._host_packer = Packer(pin), Packer()
        self._runner = runner or Immediate()
        self._capacity = Capacity(prefetch)
        self._outgoing: deque[_Outgoing] = deque()
        self.bytes_sent = 0
        self.waited_s = 0.0

    def send(self, kind: Message, micro_batch: int, tree: Tree, note: int = 0) -> int:
        """Start sending ``tree`` and return its size in bytes.

        Raises:
            TypeError: the tree holds something that cannot be sent.
        """
        packer = self._host_packer if kind.on_host else self._packer
        packed = packer.reserve(tree)
        outgoing = _Outgoing(micro_batch, packer, packed, (kind, micro_batch, tree, note))
        # What is on the host needs no device, which may be what has failed.
        computed = None if self._stream is None or kind.on_host else torch.cuda.current_stream().record_event()
        self._outgoing.append(outgoing)
        self.bytes_sent += packed.size
        self._runner.submit(partial(self._hand_over, outgoing, computed))
        if isinstance(self._runner, Immediate):
            outgoing.content = None
        return packed.size

    def _hand_over(self, outgoing: _Outgoing, computed: torch.Event | None) -> None:
        packed = outgoing.packed
        outgoing.uncopied = True
        try:
            assert outgoing.content is not None
            if self._stream is None or computed is None:
                outgoing.packer.fill(packed, *outgoing.content)
            else:
                with torch.cuda.stream(self._stream):
                    self._stream.wait_event(computed)
                    outgoing.packer.fill(packed, *outgoing.content)
                    self._stream.synchronize()
            outgoing.uncopied = False
            if packed.size > self._capacity.sender():
                outgoing.announced = announcement(packed.size)
                outgoing.works.append(self._start(outgoing.announced, self._channel))
                outgoing.works.append(self._start(packed.data, self._channel.own_tag))
            else:
                outgoing.works.append(self._start(packed.data, self._channel))
        except Exception as error:
            # Mostly the peer has gone. That is no failure of this send: a stage whose script ends before its
            # neighbour's does not need what the neighbour computed ahead. Whoever waits for the peer
            # will find out.
            outgoing.error = error
            if outgoing.uncopied:
                raise
        finally:
            self._capacity.sent(packed.size)
            outgoing.handed_over = True

    def copied(self) -> None:
        """Wait until everything sent so far has been copied, so that its tensors may be changed; mostly it has been.

        Raises:
            RuntimeError: what was sent last could not be copied.
        """
        if not self._outgoing:
            return
        latest = self._outgoing[-1]
        if not latest.handed_over:
            begin = time.perf_counter()
            self._runner.settle()
            self.waited_s += time.perf_counter() - begin
        if latest.uncopied and latest.error is not None:
            raise latest.error
        for outgoing in reversed(self._outgoing):
            if outgoing.content is None:
                break
            outgoing.content = None  # tensors are let go of by the thread that made them

    def release(self, micro_batch: int) -> None:
        """Recycle the buffers of messages up to ``micro_batch``, which the other end is known to have received."""
        while self._outgoing and self._outgoing[0].micro_batch <= micro_batch:
            self._finish(self._outgoing.popleft())

    def release_through(self, number: int) -> None:
        """Recycle the buffers of message ``number`` and of those sent before it, which have been received."""
        if any(outgoing.micro_batch == number for outgoing in self._outgoing):
            while self._outgoing:
                outgoing = self._outgoing.popleft()
                self._finish(outgoing)
                if outgoing.micro_batch == number:
                    return

    def keep_latest(self, count: int) -> None:
        """Wait until all but the latest ``count`` messages have been received, and recycle their buffers."""
        while len(self._outgoing) > count:
            self._finish(self._outgoing.popleft())

    def flush(self) -> None:
        """Wait until everything sent so far has been received.

        Raises:
            PipelinePeerError: the time limit passed or the peer is lost.
        """
        while self._outgoing:
            self._finish(self._outgoing.popleft())

    def wait_for_all(self, deadline: float) -> None:
        """Like :meth:`flush`, but until ``deadline`` (``time.monotonic()``) at most and without an error."""
        with suppress(Exception):  # what a task has raised comes after all are done
            self._runner.settle()
        with suppress(RuntimeError):
            while self._outgoing:
                for work in self._outgoing.popleft().works:  # gloo reports a completion once: wait only once
                    work.wait(timedelta(seconds=max(0.01, deadline - time.monotonic())))

    def _start(self, data: torch.Tensor, tag: int) -> dist.Work:
        return self._group.send(data, self._to.rank, tag)

    def _finish(self, outgoing: _Outgoing) -> None:
        if not outgoing.handed_over:
            self._runner.settle()
        if outgoing.error is not None and not isinstance(outgoing.error, RuntimeError):
            raise outgoing.error
        for work in outgoing.works if outgoing.error is None else [outgoing.error]:
            self._group.wait(work, f"{self._to} to receive message {outgoing.micro_batch}")
        outgoing.packer.release(outgoing.packed)


def abort_all(senders: Sequence[Sender], reason: str) -> None:
    """Send ``reason`` over every link in place of what its other end waits for; give up after a short while."""
    text = torch.frombuffer(bytearray(reason.encode()[: HEADER_BYTES // 2]), dtype=torch.uint8)
    for sender in senders:
        sender.send(Message.ABORT, 0, text)
    deadline = time.monotonic() + _ABORT_GRACE_S
    for sender in senders:
        sender.wait_for_all(deadline)
