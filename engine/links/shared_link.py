"""Links through shared memory, for two processes of one host that compute on the CPU.

A link is a Unix socket, which carries a few words per message and wakes the receiver, and blocks of shared memory, each
for one message at a time. Small messages go through the socket whole. A larger one is written into a free block once,
and the receiver's tensors are views of it: nothing is copied on arrival.

A block is the receiver's until the last tensor in it is gone, also one that a layer or a script has kept; then its
number goes back over the socket. What is received is acknowledged there too. The number of blocks is that of messages
in use at a time. Where none is free and large enough, a new one takes the number of a free one, which it replaces.

Blocks have no names: their descriptors travel over the socket, so that the kernel frees them with the last process
that has them, however that ends, and so does a socket end a wait for a process that is lost.
"""

from __future__ import annotations

import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from ds_vpipe.engine.links.failure_watch import FailureWatch
from ds_vpipe.engine.links.groups import Peer, failed_wait
from ds_vpipe.engine.links.link import ABORT_GRACE_S, Receiver, Sender
from ds_vpipe.engine.links.message import LAYOUTS, Layout, Message, Packed, Received, Tree, unpack, words_of
from ds_vpipe.errors import PipelinePeerError

INLINE_BYTES = 2048
"""Size of the longest message that goes through the socket."""

_REFERENCE = struct.Struct("qq")  # number of a block and bytes of the message in it; or the latter alone: all follows
_WHOLE, _RECEIVED = -1, -1
_ANSWER = struct.Struct("q")  # the number of a block that is free again, or _RECEIVED
_PAGES = 16 * mmap.PAGESIZE


class Connection:
    """Socket between two stages, with named waits.

    Args:
        end: of packets, connected.
        me: this stage.
        peer: the stage at the other end.
        timeout_s: limit of every wait, in seconds.
        failures: the failures of other ranks, which end all waits.
    """

    def __init__(self, end: socket.socket, me: Peer, peer: Peer, timeout_s: float, failures: FailureWatch) -> None:
        self.end, self.me, self.peer = end, me, peer
        self._timeout_s, self._failures = timeout_s, failures
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(end, select.POLLIN)
        self._writable.register(end, select.POLLOUT)
        end.setblocking(False)
        failures.breaks(end)
        weakref.finalize(self, end.close)

    def failed(self, what: str, error: OSError) -> PipelinePeerError:
        """The error of a wait for ``what`` that has ended with ``error``."""
        return failed_wait(self.me, self._failures, what, error, self._timeout_s)

    def read(self, size: int) -> tuple[bytes, list[int]]:
        """The next packet of at most ``size`` bytes, and the descriptor in it, if there is one.

        Raises:
            OSError: the time limit passed, or the other end is closed.
        """
        while True:
            try:
                data, descriptors, *_ = socket.recv_fds(self.end, size, 1)
            except BlockingIOError:
                self._wait(self._readable, self._timeout_s)
            except ConnectionResetError:
                continue  # the other end is closed and has not read everything; what it has sent comes all the same
            else:
                if not data:
                    raise ConnectionError("connection closed")
                return data, descriptors

    def write(self, parts: list[Any], descriptors: list[int], limit_s: float | None = None) -> None:
        """Send a packet; waits only while the socket is full.

        Raises:
            OSError: the time limit passed, or the other end is closed.
        """
        while True:
            try:
                socket.send_fds(self.end, parts, descriptors)
                return
            except BlockingIOError:
                self._wait(self._writable, limit_s or self._timeout_s)

    @staticmethod
    def _wait(poll: select.poll, limit_s: float) -> None:
        if not poll.poll(1000 * limit_s):
            raise TimeoutError("Timed out")


class _Block:
    """Shared memory of a sender for one message at a time."""

    def __init__(self, number: int, size: int) -> None:
        step = max(_PAGES, 1 << max(0, size.bit_length() - 4))
        self.number, self.capacity = number, -(-size // step) * step
        self.descriptor = os.memfd_create("ds_vpipe")  # until the receiver has got it
        try:
            os.ftruncate(self.descriptor, self.capacity)
            self._data = torch.frombuffer(mmap.mmap(self.descriptor, self.capacity), dtype=torch.uint8)
        except OSError:
            os.close(self.descriptor)
            raise
        self._packed: Packed | None = None

    def packed(self, layout: Layout) -> Packed:
        """A send buffer in the block."""
        if self._packed is None or self._packed.words != layout.words:
            self._packed = layout.over(self._data)
        return self._packed


class SharedSender(Sender):
    """Sending end of a link through shared memory.

    Tensors are copied at once. A send waits only where the socket is full of messages that nobody has received.
    """

    payload = "shared"

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.peer)
        self._connection = connection
        self._blocks: list[_Block] = []
        self._free: list[_Block] = []
        self._layouts: dict[tuple[int, ...], tuple[Layout, Packed | None]] = {}
        self._unreceived: deque[int] = deque()
        self._error: OSError | None = None  # mostly the peer has gone, which matters only to one who waits for it

    def send(self, kind: Message, micro_batch: int, tree: Tree, note: int = 0) -> int:
        self._read_answers()
        layout, packed = self._layout(tree)
        self.bytes_sent += layout.size
        if self._error is not None:
            return layout.size
        new: list[int] = []
        if packed is None:
            block = self._block(layout.size, new)
            packed = block.packed(layout)
            parts: list[Any] = [_REFERENCE.pack(block.number, layout.size)]
        else:
            parts = [_REFERENCE.pack(_WHOLE, layout.size), packed.data.numpy()]
        try:
            packed.fill(kind, micro_batch, tree, note)
            self._unreceived.append(micro_batch)
            self._connection.write(parts, new, ABORT_GRACE_S if kind is Message.ABORT else None)
        except TimeoutError as error:
            raise self._connection.failed(self._receipt(), error) from error
        except OSError as error:
            self._error = error
        finally:
            for descriptor in new:
                os.close(descriptor)
        return layout.size

    def _layout(self, tree: Tree) -> tuple[Layout, Packed | None]:
        """Layout of ``tree``, and a buffer if it goes through the socket."""
        words = words_of(tree)
        if words not in self._layouts:
            if len(self._layouts) == LAYOUTS:
                del self._layouts[next(iter(self._layouts))]
            layout = Layout.of(words, tree)
            buffer = torch.empty(layout.size, dtype=torch.uint8) if layout.size <= INLINE_BYTES else None
            self._layouts[words] = layout, None if buffer is None else layout.over(buffer)
        return self._layouts[words]

    def _block(self, size: int, new: list[int]) -> _Block:
        """A block that is free; the descriptor of a new one is added to ``new``."""
        for at, block in enumerate(self._free):
            if block.capacity >= size:
                return self._free.pop(at)
        number = self._free.pop().number if self._free else len(self._blocks)
        block = _Block(number, size)
        new.append(block.descriptor)
        self._blocks[number : number + 1] = [block]
        return block

    def _read_answers(self) -> None:
        """Note what has been received and which blocks are free again, without waiting."""
        with suppress(OSError):
            while data := self._connection.end.recv(_ANSWER.size):
                self._answered(data)

    def _answered(self, data: bytes) -> None:
        (number,) = _ANSWER.unpack(data)
        if number == _RECEIVED:
            self._unreceived.popleft()
        else:
            self._free.append(self._blocks[number])

    def copied(self) -> None:
        """Nothing to wait for: they have been copied."""

    def release(self, micro_batch: int) -> None:
        """Nothing to recycle: the receiver gives blocks back."""

    def release_through(self, number: int) -> None:
        """Nothing to recycle: the receiver gives blocks back."""

    def flush(self) -> None:
        """Nothing to wait for: what is in the socket stays there if this process ends."""

    def wait_for_all(self, deadline: float) -> None:
        """Nothing to wait for, as in :meth:`flush`."""

    def throttle(self, under_way: int) -> None:
        self._read_answers()
        while len(self._unreceived) > under_way:
            try:
                if self._error is not None:
                    raise self._error
                self._answered(self._connection.read(_ANSWER.size)[0])
            except OSError as error:
                raise self._connection.failed(self._receipt(), error) from error

    def _receipt(self) -> str:
        return f"{self.peer} to receive message {self._unreceived[0]}"


class _Answers:
    """Answers of a receiver, given without waiting; those that find no room go with a later one.

    A process that the receiver's has forked has its tensors too, but must not give blocks back.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end, self._process = end, os.getpid()
        self._due: deque[int] = deque()

    def give(self, number: int) -> None:
        """Answer with ``number``; called by any thread, and wherever a tensor may be freed."""
        if os.getpid() != self._process:
            return
        self._due.append(number)
        with suppress(IndexError, OSError):  # somebody else has given the last, or nobody is there to know
            while self._due:
                first = self._due.popleft()
                try:
                    self._end.send(_ANSWER.pack(first))
                except BlockingIOError:
                    self._due.appendleft(first)
                    raise


class SharedReceiver(Receiver):
    """Receiving end of a link through shared memory."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection.me, connection.peer)
        self._connection = connection
        self._answers = _Answers(connection.end)
        self._blocks: dict[int, mmap.mmap] = {}

    def _next(self, what: str) -> Received:
        begin = time.perf_counter()
        try:
            packet, descriptors = self._connection.read(_REFERENCE.size + INLINE_BYTES)
        except OSError as error:
            raise self._connection.failed(f"{what} from {self.peer}", error) from error
        finally:
            self.waited_s += time.perf_counter() - begin
        number, size = _REFERENCE.unpack_from(packet)
        for descriptor in descriptors:  # the block is new
            self._blocks[number] = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
            os.close(descriptor)
        if number == _WHOLE:
            data = torch.empty(size, dtype=torch.uint8)
            data.numpy()[:] = np.frombuffer(packet, dtype=np.uint8, offset=_REFERENCE.size)
        else:
            memory = np.frombuffer(self._blocks[number], dtype=np.uint8, count=size)
            weakref.finalize(memory, self._answers.give, number).atexit = False
            data = torch.from_numpy(memory)
        self._answers.give(_RECEIVED)
        return unpack(data)
