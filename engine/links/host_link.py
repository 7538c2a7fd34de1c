"""Links over gloo, for stages that share no memory.

Each direction between two stages has a process group of its own, so that the two never queue behind
each other and a wait that fails cannot poison the links to other stages. Sends never block: gloo keeps
them until the receiver is ready. Receives are posted ``prefetch`` messages ahead, because a gloo
send is a rendezvous: it moves only once its receive is posted.

A posted receive must be at least as long as its message. Both ends therefore follow one rule: the
buffer for message ``n`` is as long as the longest of messages ``0 .. n - prefetch``, which are those
that the receiver has seen when it posts it. A longer message is announced in its place by a small one
and follows on its own; this happens only when messages grow.
"""

from __future__ import annotations

import enum
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import takewhile

import torch
import torch.distributed as dist

from ds_vpipe.engine.links.device import DeviceCopies
from ds_vpipe.engine.links.failure_watch import break_off
from ds_vpipe.engine.links.groups import Group, Peer, failed_wait
from ds_vpipe.engine.links.link import Receiver, Sender
from ds_vpipe.engine.links.message import (
    HEADER_BYTES,
    MOST_BYTES,
    MalformedMessageError,
    Message,
    Packed,
    Packer,
    Received,
    Tree,
    announcement,
    cleared,
    described,
    host_memory,
    leaves,
    unpack,
)
from ds_vpipe.engine.links.send_thread import COPYING, Immediate, Runner


class Channel(enum.IntEnum):
    """Links of one process group, by their tags."""

    TRAINING = 0
    EVALUATION = 2  # odd tags are those of announced messages

    @property
    def own_tag(self) -> int:
        """Tag of messages that were announced; ordinary ones use the channel's value."""
        return self + 1


class _Capacity:
    """Length of the receive buffers, the same on both ends."""

    def __init__(self, prefetch: int) -> None:
        self._recent: deque[int] = deque()
        self.prefetch = prefetch
        self.longest = HEADER_BYTES  # at the sender: the buffer that is posted for the next message

    def sent(self, size: int) -> None:
        self._recent.append(size)
        if len(self._recent) >= self.prefetch:
            self.received(self._recent.popleft())

    def received(self, size: int) -> int:
        """Buffer length after a message of ``size`` bytes."""
        self.longest = max(self.longest, size)
        return self.longest


@dataclass(slots=True)
class _Outgoing:
    """Message between ``send()`` and its receipt.

    ``content`` keeps the tensors until :meth:`HostSender.wait_until_copied`. The runner sets ``uncopied`` while it
    copies them, so that it stays True after a failed copy, and ``started`` once gloo has the buffer or has refused it.
    """

    micro_batch: int
    packer: Packer
    packed: Packed
    content: tuple[Message, int, list[torch.Tensor], int] | None
    leaving: torch.Event | None = None  # end of its copy from an accelerator
    works: list[dist.Work] = field(default_factory=list)
    announced: torch.Tensor | None = None
    error: Exception | None = None
    uncopied: bool = False
    started: bool = False


class HostSender(Sender):
    """Sending end of a link over gloo.

    Arguments are as of :meth:`.Wiring.sender`. Tensors of an accelerator are staged through page-locked memory by
    ``copies``. The ``runner`` copies and sends, and waits for copies from an accelerator.
    """

    payload = "host"

    def __init__(
        self, group: Group, peer: Peer, prefetch: int, channel: Channel = Channel.TRAINING,
        copies: DeviceCopies | None = None, runner: Runner | None = None, threaded: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(peer, runner)
        self._group, self._channel, self._threaded = group, channel, threaded
        self._capacity = _Capacity(prefetch)
        self._copies, self._host_packer = copies, Packer()
        self._packer = Packer() if copies is None else Packer(copies.accelerator.host_memory)
        self._outgoing: deque[_Outgoing] = deque()

    def send(self, kind: Message, micro_batch: int, tree: Tree, note: int = 0) -> int:
        if self._copies is not None and not kind.on_host:
            self._copies.accelerator.refuse_others(leaves(tree))
        packer = self._host_packer if kind.on_host else self._packer
        form, tensors = described(tree)
        packed, content = packer.reserve(form), (kind, micro_batch, tensors, note)
        outgoing = _Outgoing(micro_batch, packer, packed, content)
        if self._copies is not None:
            if kind.on_host:  # it needs no device, which may be what has failed
                packed.fill(*content)
            else:
                outgoing.leaving = self._copies.leaving(partial(packed.fill, *content, self._copies.accelerator.holds))
        self._outgoing.append(outgoing)
        self.bytes_sent += packed.size
        self._runner.submit(partial(self._copy_and_start, outgoing))
        if not self._threaded and (self._copies is None or not kind.on_host):
            self.wait_until_copied()
        return packed.size

    def _copy_and_start(self, outgoing: _Outgoing) -> None:
        packed = outgoing.packed
        outgoing.uncopied = True
        try:
            if outgoing.leaving is not None:
                outgoing.leaving.synchronize()
            elif self._copies is None:
                assert outgoing.content is not None
                packed.fill(*outgoing.content)
            outgoing.uncopied = False
            tag = self._channel.value
            if packed.size > self._capacity.longest:
                outgoing.announced = announcement(packed.size)
                outgoing.works.append(self._start(outgoing.announced, tag))
                tag = self._channel.own_tag
            outgoing.works.append(self._start(packed.data, tag))
        except Exception as error:
            # Mostly the peer has gone. That is no failure of this send: a stage whose script ends before its
            # neighbour's does not need what the neighbour computed ahead. A wait for the peer finds out.
            outgoing.error = error
            if outgoing.uncopied:
                raise
        finally:
            self._capacity.sent(packed.size)
            outgoing.started = True

    def wait_until_copied(self) -> None:
        """Wait until tensors sent so far may be changed; mostly they have been copied. An accelerator waits itself.

        Raises:
            RuntimeError: what was sent last could not be copied.
        """
        if not self._outgoing:
            return
        latest = self._outgoing[-1]
        if self._copies is None and not latest.started:
            begin = time.perf_counter()
            self._runner.settle()
            self.waited_s += time.perf_counter() - begin
        if latest.uncopied and latest.error is not None:
            raise latest.error
        kept = list(takewhile(lambda outgoing: outgoing.content is not None, reversed(self._outgoing)))
        leaving = next((outgoing.leaving for outgoing in kept if outgoing.leaving is not None), None)
        if self._copies is not None and leaving is not None:
            self._copies.wait(leaving)
        for outgoing in kept:
            outgoing.content = None  # tensors are let go of by the thread that made them

    def release(self, number: int) -> None:
        numbers = [outgoing.micro_batch for outgoing in self._outgoing]
        if number in numbers:
            self.throttle(len(numbers) - 1 - numbers.index(number))

    def throttle(self, under_way: int) -> None:
        while len(self._outgoing) > under_way:
            self._finish(self._outgoing.popleft())

    def wait_for_all(self, deadline: float) -> None:
        super().wait_for_all(deadline)
        with suppress(RuntimeError):
            while self._outgoing:
                for work in self._outgoing.popleft().works:  # gloo reports a completion once: wait only once
                    work.wait(timedelta(seconds=max(0.01, deadline - time.monotonic())))

    def keep_posted(self, prefetch: int) -> None:
        # Of the buffers that are posted from now on it counts on no more than the other end has seen before.
        self._capacity.prefetch = max(self._capacity.prefetch, prefetch)

    def _start(self, data: torch.Tensor, tag: int) -> dist.Work:
        return self._group.send(data, self.peer.rank, tag)

    def _finish(self, outgoing: _Outgoing) -> None:
        if not outgoing.started:
            try:
                self._runner.settle(self._group.timeout_s)
            except TimeoutError as error:
                me, limit_s = self._group.me, self._group.timeout_s
                raise failed_wait(me, self._group.failures, COPYING, error, limit_s) from error
        if outgoing.error is not None and not isinstance(outgoing.error, RuntimeError):
            raise outgoing.error
        for work in outgoing.works if outgoing.error is None else [outgoing.error]:
            self._group.wait(work, f"{self.peer} to receive message {outgoing.micro_batch}")
        outgoing.packer.release(outgoing.packed)


class HostReceiver(Receiver):
    """Receiving end of a link over gloo; arguments as of :class:`HostSender`."""

    def __init__(
        self, group: Group, peer: Peer, prefetch: int, channel: Channel = Channel.TRAINING,
        copies: DeviceCopies | None = None, runner: Runner | None = None,
    ) -> None:  # fmt: skip
        super().__init__(group.me, peer)
        self._group, self._channel, self._runner = group, channel, runner or Immediate()
        self._memory = host_memory if copies is None else copies.accelerator.host_memory
        # A send thread that waits for a device would post receives too late.
        self._poster = self._runner if copies is None else Immediate()
        self._capacity = _Capacity(prefetch)
        self._posted: deque[tuple[torch.Tensor, dist.Work | RuntimeError]] = deque()
        for _ in range(prefetch):
            self._post(self._memory(HEADER_BYTES))

    def _next(self, what: object) -> Received:
        self._runner.check()
        if not self._posted:
            self._poster.settle()
        data, work = self._posted.popleft()
        self._wait(work, what)
        message = unpack(data, self._memory)
        if message.kind is Message.OVERSIZE:
            if message.size > MOST_BYTES:
                raise MalformedMessageError(f"it announces {message.size} bytes, this host has {MOST_BYTES}")
            data = self._memory(message.size)
            self._wait(self._start(data, self._channel.own_tag), what)
            message = unpack(data, self._memory)
        self._poster.submit(partial(self._post, self._memory(self._capacity.received(message.size))))
        return message

    def keep_posted(self, prefetch: int) -> None:
        for _ in range(self._capacity.prefetch, prefetch):
            self._poster.submit(partial(self._post, self._memory(self._capacity.longest)))
        self._capacity.prefetch = max(self._capacity.prefetch, prefetch)

    def leave(self) -> None:
        break_off(self._group.backend)

    def _post(self, data: torch.Tensor) -> None:
        self._posted.append((data, self._start(cleared(data), self._channel)))

    def _start(self, data: torch.Tensor, tag: int) -> dist.Work | RuntimeError:
        try:
            return self._group.recv(data, self.peer.rank, tag)
        except RuntimeError as error:
            return error  # matters only if somebody waits for it

    def _wait(self, work: dist.Work | RuntimeError, what: object) -> None:
        begin = time.perf_counter()
        self._group.wait(work, f"{what} from {self.peer}")
        self.waited_s += time.perf_counter() - begin
