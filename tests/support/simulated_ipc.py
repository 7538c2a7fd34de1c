"""Memory of a simulated accelerator that two processes have, with the rules of CUDA's interprocess memory and events.

A wait for an event is for what has been recorded before, as CUDA's is. Numbers in shared memory tell one process what
the other has queued and done. A run fails at once, or at the next call, for

* a wait for an event that has not been recorded since the last one: the message has left too early;
* a copy from memory whose write was not waited for, or that is being written again;
* a write to memory that the other process has not read yet, or reads still.

A wait for a process that is gone ends, with whatever is in the memory. Nobody promises that of a real device.
"""

from __future__ import annotations

import os
import pickle
import time
import weakref
from pathlib import Path

import numpy as np
import torch
from simulated_device import SimulatedAccelerator, Work

_RECORDED, _WRITTEN, _WANTED, _QUEUED, _READ = range(5)  # numbers of writes, the latter two as the reader counts them
_HEADER_BYTES = 64


class SharedBytes:
    """Bytes that another process may map, and numbers beside them."""

    def __init__(self, device: SimulatedAccelerator, descriptor: int, size: int, process: int) -> None:
        memory = torch.from_file(
            f"/proc/self/fd/{descriptor}", shared=True, size=_HEADER_BYTES + size, dtype=torch.uint8
        )
        self.device = device
        self.numbers = memory.numpy()[:_HEADER_BYTES].view(np.int64)
        self.data = torch.empty(0, dtype=torch.uint8).set_(memory.untyped_storage(), _HEADER_BYTES, (size,))
        self._process = process  # that writes
        self.waited = 0  # number of the write that this process's copies come after
        device.shared_bytes(self)

    def record(self) -> None:
        """Record the event behind what is queued on the stream that is entered."""
        stream = self.device.entered()
        assert stream is not None
        self.numbers[_RECORDED] += 1
        self.device.put(stream, Work(record=_Done(self, int(self.numbers[_RECORDED]))))

    def wait(self) -> None:
        """Let the stream that is entered wait for the latest write."""
        stream, recorded = self.device.entered(), int(self.numbers[_RECORDED])
        assert stream is not None
        if recorded <= self.waited:
            self.device.fail("a wait for an event that has not been recorded since the last one")
        self.waited = recorded
        self.numbers[_WANTED] = recorded
        self.device.put(stream, Work(wait=_Done(self, recorded)))

    def is_written(self, number: int) -> bool:
        """Whether a write is there, or will never be."""
        return bool(self.numbers[_WRITTEN] >= number) or not _is_alive(self._process)

    @property
    def wanted(self) -> bool:
        """Whether the other process waits for a write of this one."""
        return bool(self.numbers[_WANTED] > self.numbers[_WRITTEN])

    def check_write(self) -> None:
        """Fail if what was written before has not been read."""
        if self.numbers[_READ] != self.numbers[_RECORDED]:
            self.device.fail("memory is written again before the other process has read it")

    def check_read(self, queued: bool) -> None:
        """Note a copy from the memory, when it is queued and when it is done."""
        if self.waited != self.numbers[_RECORDED] or (not queued and not self.is_written(self.waited)):
            self.device.fail("memory of another process is read without a wait for its write")
        self.numbers[_QUEUED if queued else _READ] = self.waited


class _Done:
    """A write as an entry of a stream."""

    def __init__(self, shared: SharedBytes, number: int) -> None:
        self._shared, self._number = shared, number

    @property
    def done(self) -> bool:
        return self._shared.is_written(self._number)

    @done.setter
    def done(self, _: bool) -> None:
        self._shared.numbers[_WRITTEN] = self._number


def _is_alive(process: int) -> bool:
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def shared_bytes(device: SimulatedAccelerator, size: int) -> tuple[SharedBytes, bytes]:
    """Memory for two processes, and what opens it."""
    descriptor = os.memfd_create("simulated")
    made = SharedBytes(device, descriptor, size, os.getpid())
    weakref.finalize(made, os.close, descriptor)
    return made, pickle.dumps((os.getpid(), descriptor, size, time.monotonic()))


def opened_bytes(device: SimulatedAccelerator, handle: bytes) -> SharedBytes:
    """Memory of another process."""
    process, descriptor, size, _ = pickle.loads(handle)
    try:
        found = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR)
    except OSError as error:
        raise RuntimeError(str(error)) from error
    try:
        return SharedBytes(device, found, size, process)
    finally:
        os.close(found)
