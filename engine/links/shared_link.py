"""Links through shared memory, for two processes of one host.

A link is a Unix socket, which carries a few words per message and wakes the receiver, and blocks of shared memory, each
for one message at a time. Small messages go through the socket whole. A larger one is written into a free block once,
and the receiver's tensors are views of it: nothing is copied on arrival.

Where a stage computes on an accelerator, its blocks are page-locked at its end. Copies to and from them are queued
beside the computation; a message leaves once it is in its block, for which a thread waits and the stage does not.

A block is the receiver's until the last tensor in it is gone, also one that a layer or a script has kept; a flag in
the block says so. Receipts go over the socket, one for each message and not larger, so that there is room for them
where there was for the messages. The number of blocks is that of messages in use at a time. Where none is free and
large enough, a new one takes the number of a free one, which it replaces.

Blocks have no names: their descriptors travel over the socket, so that the kernel frees them with the last process
that has them, however that ends, and so does a socket end a wait for a process that is lost.
"""

from __future__ import annotations

import errno
import mmap
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from ds_vpipe.engine.links.device import DeviceCopies
from ds_vpipe.engine.links.failure_watch import FailureWatch
from ds_vpipe.engine.links.groups import Peer, failed_wait
from ds_vpipe.engine.links.link import ABORT_GRACE_S, Receiver, Sender
from ds_vpipe.engine.links.message import (
    Form,
    MalformedMessageError,
    Message,
    Packed,
    Packer,
    Received,
    Tree,
    described,
    host_memory,
    leaves,
    unpack,
)
from ds_vpipe.engine.links.send_thread import COPYING, Immediate, Runner
from ds_vpipe.errors import PipelinePeerError, VPipeError

INLINE_BYTES = 2048
"""Size of the longest message that goes through the socket."""

_REFERENCE = struct.Struct("qq")  # number of a block and bytes of the message in it; or the latter alone: all follows
_WHOLE = -1
_RECEIPT = b"received"
_UNREAD = 16  # receipts that a sender leaves in the socket
_FLAG_BYTES = 64  # at the start of a block, so that the message is aligned; the first is 1 while the block is in use
_PAGES = 16 * mmap.PAGESIZE
_LONGEST_POLL_MS = 2**31 - 1
_TRUNCATED = int(socket.MSG_CTRUNC)  # an operator of the enum's takes longer than a small copy


def close_when_forked(end: socket.socket) -> None:
    """Let processes that this one forks, such as a DataLoader's workers, not keep a connection open.

    Its other end would not see that this process has ended before they have, too.
    """
    found = weakref.ref(end)

    def close() -> None:
        if (connected := found()) is not None:
            connected.close()

    os.register_at_fork(after_in_child=close)


class Connection:
    """Socket of packets between two stages, with named waits. Failures of other ranks end these."""

    def __init__(self, socket: socket.socket, me: Peer, peer: Peer, timeout_s: float, failures: FailureWatch) -> None:
        self.socket, self.me, self.peer, self.timeout_s = socket, me, peer, timeout_s
        self.failures = failures
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(socket, select.POLLIN)
        self._writable.register(socket, select.POLLOUT)
        socket.setblocking(False)
        failures.breaks(socket)
        close_when_forked(socket)
        weakref.finalize(self, socket.close)

    def failed(self, what: str, error: OSError) -> PipelinePeerError:
        """The error of a wait for ``what`` that has ended with ``error``."""
        return failed_wait(self.me, self.failures, what, error, self.timeout_s)

    def no_memory(self, size: int, error: OSError) -> VPipeError:
        """The error of a message of ``size`` bytes for which there is no memory."""
        return VPipeError(
            f"{self.me}: no shared memory for a message of {size} bytes to or from {self.peer} ({error}); raise the "
            f'limits of memory and of open files (ulimit -n), or set vpipe.link to "host"'
        )

    def read(self, size: int) -> tuple[bytes, list[int]]:
        """The next packet of at most ``size`` bytes, and the descriptor in it, if there is one.

        Raises:
            OSError: the time limit passed, the other end is closed, or this process has too many open files.
        """
        while True:
            try:
                data, descriptors, flags, _ = socket.recv_fds(self.socket, size, 1)
            except BlockingIOError:
                self._wait(self._readable, self.timeout_s)
            except ConnectionResetError:
                continue  # the other end is closed and has not read everything; what it has sent comes all the same
            else:
                if not data:
                    raise ConnectionError("connection closed")
                if flags & _TRUNCATED:
                    raise OSError(errno.EMFILE, "no descriptor left for a block; raise the limit (ulimit -n)")
                return data, descriptors

    def write(self, parts: list[Any], descriptors: list[int], limit_s: float | None = None) -> None:
        """Send a packet; waits only while the socket is full.

        Raises:
            OSError: the time limit passed, or the other end is closed.
        """
        while True:
            try:
                if descriptors:
                    socket.send_fds(self.socket, parts, descriptors)
                else:
                    self.socket.sendmsg(parts)
                return
            except BlockingIOError:
                self._wait(self._writable, limit_s or self.timeout_s)

    @staticmethod
    def _wait(poll: select.poll, limit_s: float) -> None:
        if not poll.poll(min(1000 * limit_s, _LONGEST_POLL_MS)):
            raise TimeoutError("Timed out")


def mapped(descriptor: int, size: int, copies: DeviceCopies | None = None) -> np.ndarray[Any, Any]:
    """Shared memory of a descriptor, which may be closed; ``mmap.mmap`` would keep another one open.

    Page-locked for an accelerator, until the last view of it is gone.
    """
    try:
        memory = torch.from_file(f"/proc/self/fd/{descriptor}", shared=True, size=size, dtype=torch.uint8)
        mapped = memory.numpy()
        if copies is not None:
            unlock = copies.accelerator.lock(memory)
            weakref.finalize(mapped, _in_process, os.getpid(), unlock).atexit = False
        return mapped
    except RuntimeError as error:
        raise OSError(errno.ENOMEM, " ".join(str(error).split())) from error


def _in_process(process: int, function: Callable[..., object], *arguments: Any) -> None:
    """Call a function, but not in a process that this one has forked, which has all tensors too."""
    if os.getpid() == process:
        function(*arguments)


def without_memory(copies: DeviceCopies | None = None) -> str | None:
    """Why no blocks can be had here, or None; some Pythons and containers have no ``memfd_create`` or ``/proc``."""
    try:
        os.close(_Block(0, 1, copies).descriptor)
    except AttributeError:
        return "has a Python without memfd_create()"
    except OSError as error:
        return f"has no memory to share ({error.strerror})"
    return None


def with_room(size: int) -> int:
    """Bytes of memory for messages of ``size`` bytes and a little more: whole pages, at most an eighth above."""
    step = max(_PAGES, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step


class _Block:
    """Shared memory of a sender for one message at a time."""

    def __init__(self, number: int, size: int, copies: DeviceCopies | None) -> None:
        total = with_room(size + _FLAG_BYTES)
        self.number, self.capacity = number, total - _FLAG_BYTES
        self.descriptor = os.memfd_create("ds_vpipe")  # until the receiver has got it
        try:
            memory = mapped(self.descriptor, total, copies)
        except OSError:
            os.close(self.descriptor)
            raise
        self._flag, self._data = memory[:1], torch.from_numpy(memory[_FLAG_BYTES:])
        self._packed: Packed | None = None

    @property
    def in_use(self) -> bool:
        """Whether the receiver has a message in it, or will have."""
        return bool(self._flag[0])

    def packed(self, form: Form) -> Packed:
        """A send buffer in the block, which is in use from now on."""
        self._flag[0] = 1
        if self._packed is None or self._packed.form is not form:
            self._packed = form.over(self._data)
        return self._packed


class SharedSender(Sender):
    """Sending end of a link through shared memory.

    Tensors in host memory are copied at once. Only where the socket is full of messages that nobody has received a send
    waits, or the ``runner``, which waits for ``copies`` of an accelerator and sends. Where ``threaded``, tensors of the
    accelerator that are sent are not changed before :meth:`wait_until_copied`.
    """

    payload = "shared"

    def __init__(
        self, connection: Connection, copies: DeviceCopies | None = None, runner: Runner | None = None,
        threaded: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(connection.peer, runner)
        self._connection, self._copies, self._threaded = connection, copies, threaded
        self._blocks: list[_Block] = []
        self._packer = Packer()
        self._unreceived: deque[int] = deque()
        self._kept: list[tuple[Tree, torch.Event]] = []  # until the accelerator has copied it
        self._error: OSError | None = None  # mostly the peer has gone, which matters only to one who waits for it

    def send(self, kind: Message, micro_batch: int, tree: Tree, note: int = 0) -> int:
        copies = None if self._copies is None or kind.on_host else self._copies  # a device may be what has failed
        if copies is not None:
            copies.accelerator.refuse_others(leaves(tree))
        if len(self._unreceived) >= _UNREAD:
            self._read_receipts()
        form, tensors = described(tree)
        self.bytes_sent += form.size
        self._unreceived.append(micro_batch)  # for who waits, also if the peer has gone and nothing is sent any more
        if self._error is not None and kind is not Message.ABORT:
            return form.size
        packed, parts, new = self._place(form, host_memory if copies is None else copies.accelerator.host_memory)
        if self._copies is None:
            packed.fill(kind, micro_batch, tensors, note)
            self._write(parts, new, kind)
            self._packer.release(packed)
        elif copies is None:
            packed.fill(kind, micro_batch, tensors, note)
            self._runner.submit(partial(self._write, parts, new, kind))
        else:  # beside the computation of the accelerator
            holds = copies.accelerator.holds
            leaving = copies.leaving(partial(packed.fill, kind, micro_batch, tensors, note, holds))
            self._kept.append((tree, leaving))
            self._runner.submit(partial(self._write_copied, leaving, parts, new, kind))
            if not self._threaded:
                self.wait_until_copied()
        return form.size

    def _place(self, form: Form, memory: Callable[[int], torch.Tensor]) -> tuple[Packed, list[Any], list[int]]:
        """A send buffer in a free block or in ``memory``, the packet that says so, and descriptors to send with it."""
        if form.size <= INLINE_BYTES:
            recycled = self._copies is None  # the thread reads others later
            packed = self._packer.reserve(form) if recycled else form.over(memory(form.size))
            return packed, [_REFERENCE.pack(_WHOLE, form.size), packed.data.numpy()], []
        new: list[int] = []
        try:
            block = self._block(form.size, new)
        except OSError as error:
            raise self._connection.no_memory(form.size, error) from error
        return block.packed(form), [_REFERENCE.pack(block.number, form.size)], new

    def _write_copied(self, leaving: torch.Event, parts: list[Any], new: list[int], kind: Message) -> None:
        """Send a packet once the accelerator has copied what is in it."""
        try:
            if self._error is None:
                leaving.synchronize()
        except RuntimeError as error:
            self._error = OSError(str(error))
            raise
        finally:
            self._write(parts, new, kind)

    def _write(self, parts: list[Any], new: list[int], kind: Message) -> None:
        """Send a packet, and close the descriptors in it."""
        try:
            if self._error is None or kind is Message.ABORT:  # else one before it could not leave
                self._connection.write(parts, new, ABORT_GRACE_S if kind is Message.ABORT else None)
        except OSError as error:
            self._error = error
            if isinstance(error, TimeoutError):
                raise self._connection.failed(self._awaited(), error) from error
        finally:
            for descriptor in new:
                os.close(descriptor)

    def _block(self, size: int, new: list[int]) -> _Block:
        """A block that is free; the descriptor of a new one is added to ``new``."""
        number = len(self._blocks)
        for block in self._blocks:
            if not block.in_use:
                if block.capacity >= size:
                    return block
                number = block.number
        block = _Block(number, size, self._copies)
        new.append(block.descriptor)
        self._blocks[number : number + 1] = [block]
        return block

    def _read_receipts(self) -> bool:
        """Note what has been received, without waiting; False if the other end is closed."""
        try:
            while self._connection.socket.recv(len(_RECEIPT)):
                self._unreceived.popleft()
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False

    def wait_until_copied(self) -> None:
        """Let what is queued on an accelerator from now on change tensors that have been sent."""
        if self._copies is not None and self._kept:
            self._copies.wait(self._kept[-1][1])
            self._kept.clear()

    def flush(self) -> None:
        """Wait until all is in the socket, where it stays if this process ends."""
        try:
            self._runner.settle(self._connection.timeout_s)
        except TimeoutError as error:
            raise self._connection.failed(COPYING, error) from error

    def throttle(self, under_way: int) -> None:
        self._read_receipts()
        while len(self._unreceived) > under_way:
            try:
                if self._error is not None:
                    raise self._error
                self._connection.read(len(_RECEIPT))
            except OSError as error:
                raise self._connection.failed(self._awaited(), error) from error
            self._unreceived.popleft()

    def _awaited(self) -> str:
        return f"{self.peer} to receive message {self._unreceived[0]}"


class SharedReceiver(Receiver):
    """Receiving end of a link through shared memory; arguments as of :class:`SharedSender`."""

    def __init__(
        self, connection: Connection, copies: DeviceCopies | None = None, runner: Runner | None = None
    ) -> None:
        super().__init__(connection.me, connection.peer)
        self._connection, self._copies, self._runner = connection, copies, runner or Immediate()
        self._memory = host_memory if copies is None else copies.accelerator.host_memory
        self._blocks: dict[int, np.ndarray[Any, Any]] = {}
        self._process = os.getpid()

    def _next(self, what: object) -> Received:
        self._runner.check()
        begin = time.perf_counter()
        try:
            packet, descriptors = self._connection.read(_REFERENCE.size + INLINE_BYTES)
        except OSError as error:
            raise self._connection.failed(f"{what} from {self.peer}", error) from error
        finally:
            self.waited_s += time.perf_counter() - begin
        if len(packet) < _REFERENCE.size:
            raise MalformedMessageError(f"a packet of {len(packet)} bytes")
        number, size = _REFERENCE.unpack_from(packet)
        for descriptor in descriptors:  # the block is new
            self._map(number, descriptor)
        if number == _WHOLE:
            data = self._memory(len(packet) - _REFERENCE.size)
            data.numpy()[:] = np.frombuffer(packet, dtype=np.uint8, offset=_REFERENCE.size)
        else:
            block = self._blocks.get(number)
            if block is None or not 0 <= size <= len(block) - _FLAG_BYTES:
                raise MalformedMessageError(f"{size} bytes in block {number}")
            memory = block[_FLAG_BYTES : _FLAG_BYTES + size]
            weakref.finalize(memory, _in_process, self._process, _give_back, block).atexit = False
            data = torch.from_numpy(memory)
        self._give_receipt(what)
        return unpack(data, self._memory)

    def _map(self, number: int, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        try:
            self._blocks[number] = mapped(descriptor, size, self._copies)
        except OSError as error:
            raise self._connection.no_memory(size, error) from error
        finally:
            os.close(descriptor)

    def _give_receipt(self, what: object) -> None:
        try:
            self._connection.write([_RECEIPT], [])
        except TimeoutError as error:
            raise self._connection.failed(f"{self.peer} to read the receipt of {what}", error) from error
        except OSError:
            pass  # the other end is closed: nobody is there to know


def _give_back(block: np.ndarray[Any, Any]) -> None:
    """Let the sender use a block again; wherever its last tensor is freed, also by the garbage collector."""
    block[0] = 0
