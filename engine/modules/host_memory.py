"""Memory of the host for bytes that leave a device for a while: page-locked memory, or a file for a CPU's own.

Where stages compute on the CPU, device and host are the same memory, and the tier below it is a file without a name.
What goes there leaves the process, so that bytes and exactness of a swap are the same on every device.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections import defaultdict
from typing import NamedTuple

import torch

from ds_vpipe.engine.links.device import Accelerator, DeviceCopies
from ds_vpipe.errors import VPipeError


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _Block(NamedTuple):
    """Place in the file."""

    offset: int
    size: int  # bytes in use


class _File:
    """A file without a name, read and written in blocks that are used again. It ends with the process.

    Sizes of blocks are powers of two, so that storages of changing sizes find free ones. A file has holes where nothing
    was written. Reads and writes, unlike a mapping, take no memory of the process, and a full disk is an error of a
    call and not a signal.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="ds_vpipe_swap_")  # noqa: SIM115 - closed with the last reference
        self._end = 0
        self._unused: dict[int, list[int]] = defaultdict(list)  # offsets of free blocks by size

    def put(self, storage: torch.UntypedStorage) -> _Block:
        """A copy there of a storage, which may be freed at once."""
        data = _bytes(storage).numpy().data
        size = _block_size(len(data))
        if self._unused[size]:
            offset = self._unused[size].pop()
        else:
            offset, self._end = self._end, self._end + size
        done = 0
        try:
            while done < len(data):  # a call moves 2 GiB at most
                done += os.pwrite(self._file.fileno(), data[done:], offset + done)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
                raise
            raise VPipeError(
                f"vpipe.swap_ratio: got {self._end} bytes of activations to keep in a file in {tempfile.gettempdir()}: "
                f"{error.strerror}; allowed is what fits there; set TMPDIR to another disk, or write smaller ratios"
            ) from error
        return _Block(offset, len(data))

    def fetch(self, copy: _Block) -> torch.UntypedStorage:
        """Start bringing ``copy`` back."""
        found = torch.empty(copy.size, dtype=torch.uint8, device="cpu")
        data = found.numpy().data
        done = 0
        while done < copy.size:
            done += os.preadv(self._file.fileno(), [data[done:]], copy.offset + done)
        return found.untyped_storage()

    def take(self, fetched: torch.UntypedStorage) -> torch.UntypedStorage:
        """The storage that is fetched. What is computed from now on waits for it."""
        return fetched

    def free(self, copy: _Block) -> None:
        """Give up the memory of ``copy``, also while it is fetched."""
        self._unused[_block_size(copy.size)].append(copy.offset)


def _block_size(size: int) -> int:
    return 1 << (size - 1).bit_length()


class PageLocked:
    """Page-locked memory, with methods as of :class:`_File`. The allocators keep what copies still read or write."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._copies = DeviceCopies(accelerator)  # of its own: none of them waits for a message

    def put(self, storage: torch.UntypedStorage) -> tuple[torch.Tensor, torch.Event]:
        data = _bytes(storage)
        copy = self._copies.accelerator.host_memory(len(data))
        return copy, self._copies.leaving(lambda: copy.copy_(data, non_blocking=True), reads=data)

    def fetch(self, copy: tuple[torch.Tensor, torch.Event]) -> tuple[torch.Tensor, torch.Event]:
        data, written = copy
        return self._copies.start(data, after=written)

    def take(self, fetched: tuple[torch.Tensor, torch.Event]) -> torch.UntypedStorage:
        return self._copies.finish(fetched).untyped_storage()

    def free(self, copy: tuple[torch.Tensor, torch.Event]) -> None:
        pass


HostMemory = _File | PageLocked
"""Memory that storages are copied to and back from. The host waits for no copy of a device."""


def host_memory(device: torch.device) -> HostMemory:
    """Host memory for a stage that computes on ``device``."""
    return _File() if device.type == "cpu" else PageLocked(Accelerator(device))
