"""Links between accelerators of one host: tensors in memory of the sender's device, which the receiver opens.

Messages go as through shared memory of the host (:mod:`ds_vpipe.engine.links.shared_link`), but tensors of the
accelerator are only described in them. They are copied into a slot, memory of the sender's device that both processes
have, and out of it, each time beside the computation:

* The sender's copy is queued, then its event is recorded, then the message leaves. So the event that the receiver finds
  is that of this copy, its device waits for it, and neither host does.
* A slot has a flag in host memory, which the sender sets and the receiver clears once its own copy has happened. It is
  seen to have when the next message is asked for, or by a thread. Until then the sender takes another slot, or a new
  one; one that is too small is replaced.
* Slots end with their process. So an engine that ends waits until the receiver has read all of them, or has ended.

Torch counts who has opened them in named files under ``/dev/shm``, which a killed process leaves. Without its name
nobody would count down in one any more, and the memory of slots that were replaced would be kept.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import replace
from typing import NamedTuple

import torch

from ds_vpipe.engine.links.device import DeviceCopies, SharedDeviceMemory
from ds_vpipe.engine.links.message import MalformedMessageError, Message, Received, Tree, filled_in, leaves, left_out
from ds_vpipe.engine.links.shared_link import Connection, SharedReceiver, SharedSender, mapped, with_room
from ds_vpipe.engine.links.tensor_bytes import TensorBytes
from ds_vpipe.errors import VPipeConfigError, VPipeError, one_line

_SLOTS = 4096  # the most slots of a link, each with a byte in the memory of flags; as many are made as are in use
_HANDLE_BYTES = 4096
_POLL_S = 0.05


class _Slot(NamedTuple):
    """Memory for one message's tensors at a time, and what opens it."""

    memory: SharedDeviceMemory
    handle: torch.Tensor

    @classmethod
    def of(cls, size: int, copies: DeviceCopies) -> _Slot:
        memory, handle = copies.accelerator.shared(size)
        return cls(memory, torch.frombuffer(bytearray(handle), dtype=torch.uint8))

    def fill(self, layout: TensorBytes) -> None:
        """Copy tensors on the stream that is entered."""
        layout.pack(self.memory.data)
        self.memory.written.record()


class IpcSender(SharedSender):
    """Sending end of a link between accelerators.

    Raises:
        PipelinePeerError: the peer is lost.
    """

    payload = "ipc"

    def __init__(self, connection: Connection, copies: DeviceCopies, threaded: bool = False) -> None:
        super().__init__(connection)
        self._device, self._tensors_stay = copies, threaded
        self._slots = [_Slot.of(1, copies)]
        descriptor = os.memfd_create("ds_vpipe")
        try:
            self._flags = mapped(descriptor, _SLOTS)
            connection.write([self._slots[0].handle.numpy()], [descriptor])
        except OSError as error:
            raise connection.failed(f"{self.peer} to open this device's memory", error) from error
        finally:
            os.close(descriptor)

    def send(self, kind: Message, micro_batch: int, tree: Tree, note: int = 0) -> int:
        if kind.on_host:  # a device may be what has failed
            return super().send(kind, micro_batch, tree, note)
        accelerator = self._device.accelerator
        accelerator.refuse_others(leaves(tree))
        tree, tensors = left_out(tree, accelerator.holds)
        layout, place = TensorBytes.of(tensors), None
        if layout.size and self._error is None:
            number = self._free_slot(layout.size)
            slot = self._slots[number]
            self._kept.append((tensors, self._device.leaving(lambda: slot.fill(layout))))
            place = torch.tensor(number, device="cpu"), slot.handle
            if not self._tensors_stay:
                self.wait_until_copied()
        self.bytes_sent += layout.size
        return layout.size + super().send(kind, micro_batch, (tree, place), note)

    def _free_slot(self, size: int) -> int:
        """Number of a slot that has room for ``size`` bytes and is in use from now on."""
        free = [number for number in range(len(self._slots)) if not self._flags[number]]
        fitting = [number for number in free if self._slots[number].memory.data.numel() >= size]
        number = (fitting or free or [len(self._slots)])[0]
        if not fitting:
            self._slots[number : number + 1] = [_Slot.of(with_room(size), self._device)]
        self._flags[number] = 1
        return number

    def wait_until_copied(self) -> None:
        if self._kept:
            self._device.wait(self._kept[-1][1])
            self._kept.clear()

    def flush(self) -> None:
        self.throttle(0)

    def wait_for_all(self, deadline: float) -> None:
        """Wait until the receiver has read all slots or has ended, or a rank has failed, until ``deadline``."""
        failures = self._connection.failures
        while self._flags.any() and self._read_receipts() and not failures.failing and time.monotonic() < deadline:
            time.sleep(_POLL_S)

    def begin_to_close(self) -> None:
        """Nothing to do: the receiver sees what has been sent."""

    def close(self, limit: float, deadline: float) -> None:
        """:meth:`wait_for_all` until ``limit``."""
        self.wait_for_all(limit)


class IpcReceiver(SharedReceiver):
    """Receiving end of a link between accelerators; arguments as of :class:`IpcSender`.

    Raises:
        PipelinePeerError: the sender did not make its end in time.
        VPipeConfigError: its memory cannot be opened here.
    """

    def __init__(self, connection: Connection, copies: DeviceCopies) -> None:
        super().__init__(connection)
        self._device = copies
        self._opened: dict[int, tuple[bytes, SharedDeviceMemory]] = {}
        self._read: deque[tuple[torch.Event, int]] = deque()
        self._giving_back, self._ends = threading.Lock(), False
        try:
            handle, (descriptor,) = connection.read(_HANDLE_BYTES)
            self._flags = mapped(descriptor, _SLOTS)
        except OSError as error:
            raise connection.failed(f"{self.peer} to share its device's memory", error) from error
        os.close(descriptor)
        try:
            self._slot(0, handle)
        except RuntimeError as error:
            line = (
                f'vpipe.link: got "ipc", and {connection.me} cannot open memory of {self.peer}\'s device '
                f'({one_line(error)}); allowed here: "auto", "host"; change the key'
            )
            connection.failures.publish(line)  # which the others do not find by themselves
            connection.failures.wait_until_seen()
            raise VPipeConfigError(line) from error

    def _next(self, what: object) -> Received:
        self.give_back()
        message = super()._next(what)
        if message.kind.on_host:
            return message
        tree, place = message.tree
        described = [leaf for leaf in leaves(tree) if leaf is not None and leaf.is_meta]
        if not described:
            return replace(message, tree=tree)
        layout, accelerator = TensorBytes.of(described), self._device.accelerator
        number = None if place is None else int(place[0])  # None if all are empty
        try:
            memory = None if number is None else self._slot(number, place[1].numpy().tobytes())
        except RuntimeError as error:
            raise VPipeError(
                f"{self._connection.me} cannot open {layout.size} bytes of {self.peer}'s device ({one_line(error)}); "
                f'set vpipe.link to "host"'
            ) from error
        if layout.size > (0 if memory is None else memory.data.numel()):
            raise MalformedMessageError(f"{layout.size} bytes in slot {number}")

        def copy() -> list[torch.Tensor]:
            data = accelerator.memory(layout.size)
            if memory is not None:
                memory.written.wait()
                data.copy_(memory.data[: layout.size], non_blocking=True)
            return [data, *layout.unpack(data)]

        tensors, event = self._device.arriving(copy)
        if number is not None:
            self._read.append((event, number))
        _, *found = [self._device.finish((tensor, event)) for tensor in tensors]
        return replace(message, tree=filled_in(tree, found), size=message.size + layout.size)

    def _slot(self, number: int, handle: bytes) -> SharedDeviceMemory:
        """The sender's slot, opened if it is new."""
        known = self._opened.get(number)
        if known is None or known[0] != handle:
            self._opened[number] = known = handle, self._device.accelerator.opened(handle)
        return known[1]

    def give_back(self) -> None:
        """Let the sender use slots again whose copies have happened; from any thread."""
        with self._giving_back:
            while self._read and self._read[0][0].query():
                self._flags[self._read.popleft()[1]] = 0
            if self._ends and not self._read:
                self._flags[:] = 0

    def begin_to_close(self) -> None:
        """Receive nothing any more."""
        self._ends = True
        self.give_back()

    def close(self, limit: float, deadline: float) -> None:
        """Wait for copies from slots that are queued, until ``limit``."""
        while self._read and not self._connection.failures.failing and time.monotonic() < limit:
            time.sleep(_POLL_S)
            self.give_back()
        self._opened.clear()
