"""Communicators of a simulated accelerator, with NCCL's rules: a transfer is late, and rests until both ends want it.

It is an entry of a stream of its communicator's own, as in torch, behind the stream that was entered when it was
queued. Its bytes go over gloo, once both ends have come to it. A run fails at once, or at the next call, for

* a buffer that is not yet, or no longer, what was to be sent when the transfer begins;
* two ends that differ in size;
* a receive that is posted before its transfer has been queued at the other end: it would occupy the device;
* memory of another stream, which the computation may still use;
* both directions on one communicator, where one may stop the other;
* a received tensor that is used before it has come;
* at its end, a transfer whose other end has ended its communicator.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from simulated_device import POISON, Copy, SimulatedAccelerator, SimulatedEvent, SimulatedStream, Transfer, Work
from torch.distributed import ProcessGroupGloo
from torch.utils._python_dispatch import _disable_current_modes

from ds_vpipe.engine.links.failure_watch import break_off

_LIMIT = timedelta(seconds=300)


class SimulatedWork:
    """A transfer as its caller sees it."""

    def __init__(self, device: SimulatedAccelerator, end: SimulatedEvent) -> None:
        self._device, self._end = device, end

    def wait(self) -> None:
        """Let what is queued on the stream that is entered wait."""
        stream = self._device.entered()
        assert stream is not None, "a wait of the computation itself, which is not the link's"
        self._device.put(stream, Work(wait=self._end))


class SimulatedCommunicator:
    """Transfers of one direction between two ranks."""

    def __init__(self, device: SimulatedAccelerator, store: Any, rank: int) -> None:
        self._device, self._store, self._peer = device, store, 1 - rank
        self._stream: SimulatedStream = device.stream()
        self._gloo = ProcessGroupGloo(store, rank, 2, _LIMIT)
        self._queued: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._direction = ""
        self._count = 0
        self._aborted = False
        arguments = self._queued, weakref.ref(self)
        self._thread = threading.Thread(target=_work, args=arguments, name="simulated NCCL", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._queued.put, None)

    def size(self) -> int:
        """Number of ranks."""
        return 2

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> SimulatedWork:
        """Queue a transfer from here."""
        (data,) = tensors
        self._begin("send", data)
        with _disable_current_modes():
            content = self._device.content(data)
        self._store.add("queued", 1)  # which returns when it is done, as set() does not
        return self._queue(data, lambda transfer, end: self._send(data, content, transfer, end))

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> SimulatedWork:
        """Queue a transfer to here."""
        (data,) = tensors
        number = self._begin("recv", data)
        if number and self._store.add("queued", 0) <= number:  # the first one connects
            self._device.fail("a receive is posted before its transfer has been queued at the other end")
        with _disable_current_modes():
            data.fill_(POISON)
        work = self._queue(data, lambda transfer, _: self._receive(data, transfer))
        stream = self._device.entered()
        if stream is not None:
            stream.open.append(Copy(data, data, arrives=True, content=None, transfer=self._latest))
        return work

    def abort(self) -> None:
        """Give up what is under way: targets keep what they have, which is poison."""
        with self._device.changed:
            self._aborted = True
            self._stream.busy = False
            self._device.changed.notify_all()
        self._queued.put(None)
        break_off(self._gloo)
        self._thread.join(10)

    def _begin(self, direction: str, data: torch.Tensor) -> int:
        device = self._device
        if self._direction not in ("", direction):
            device.fail("both directions on one communicator")
        self._direction = direction
        if device.stream_of(data) is not device.entered():
            device.fail("a transfer with memory of another stream")
        device.raise_misuse()
        self._count += 1
        return self._count - 1

    def _queue(self, data: torch.Tensor, run: Callable[[Transfer, SimulatedEvent], None]) -> SimulatedWork:
        device, entered = self._device, self._device.entered()
        if entered is not None:
            begin = SimulatedEvent(device, entered, covers=False)
            device.put(entered, Work(record=begin))
            device.put(self._stream, Work(wait=begin))
        transfer, end = Transfer(lambda: self._aborted), SimulatedEvent(device, self._stream, covers=False)
        self._latest = transfer
        self._queued.put(lambda: run(transfer, end))
        device.put(self._stream, Work(transfer=transfer))
        device.put(self._stream, Work(record=end))
        return SimulatedWork(device, end)

    # What the thread runs

    def _send(self, data: torch.Tensor, content: torch.Tensor, transfer: Transfer, end: SimulatedEvent) -> None:
        device, size = self._device, torch.tensor([data.numel()])
        theirs = torch.zeros_like(size)
        self._gloo.recv([theirs], self._peer, 0).wait(_LIMIT)
        with device.wanted(end):
            self._wait_for(transfer)
            with device.changed:
                if not torch.equal(data, content):
                    device.fail("a buffer is not, or no longer, what was to be sent when its transfer begins")
            self._gloo.send([size], self._peer, 1).wait(_LIMIT)
            if int(theirs) != int(size):
                device.fail(f"a transfer of {int(size)} bytes is received as one of {int(theirs)}")
            else:
                self._gloo.send([data], self._peer, 2).wait(_LIMIT)
            self._complete(transfer)

    def _receive(self, data: torch.Tensor, transfer: Transfer) -> None:
        device, size = self._device, torch.tensor([data.numel()])
        self._wait_for(transfer)
        self._gloo.send([size], self._peer, 0).wait(_LIMIT)
        theirs, arrived = torch.zeros_like(size), torch.empty_like(data)
        self._gloo.recv([theirs], self._peer, 1).wait(_LIMIT)
        if int(theirs) != int(size):
            device.fail(f"a transfer of {int(theirs)} bytes is received as one of {int(size)}")
        else:
            self._gloo.recv([arrived], self._peer, 2).wait(_LIMIT)
        with device.changed:
            if not self._aborted:
                data.copy_(arrived)
        self._complete(transfer)

    def _wait_for(self, transfer: Transfer) -> None:
        with self._device.changed:
            while not transfer.begun:
                if self._aborted:
                    raise RuntimeError("aborted")
                self._device.changed.wait(1.0)

    def _complete(self, transfer: Transfer) -> None:
        with self._device.changed:
            transfer.done, self._stream.busy = True, False
            self._device.changed.notify_all()

    def lose(self) -> None:
        """Note that the other end has gone, unless this one was aborted; what is under way rests."""
        self._device.has_lost_a_transfer |= not self._aborted


def _work(queued: SimpleQueue[Callable[[], None] | None], communicator: Callable[[], Any]) -> None:
    try:
        while (run := queued.get()) is not None:
            run()
            del run
    except RuntimeError:
        if (found := communicator()) is not None:
            found.lose()
