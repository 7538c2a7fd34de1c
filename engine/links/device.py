"""Copies between an accelerator and host memory, beside its computation.

Gloo sends and receives host memory. Copies there and back are queued on streams of their own and ordered by events, so
that the stage's own thread never waits for the device: what it queues next does, and bytes that must be in host memory
before they leave are waited for by the thread that sends them.

Copies between host and device are queued here alone; links between devices queue theirs by
:meth:`DeviceCopies.leaving` and :meth:`DeviceCopies.arriving`, or on a stream of their own. The module is written
against torch's interface for any accelerator.
"""

from __future__ import annotations

import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ds_vpipe.engine.links.message import Tree, map_tree
from ds_vpipe.engine.links.tensor_bytes import copied_to
from ds_vpipe.errors import VPipeError, one_line

T = TypeVar("T")

_LONG = timedelta(days=365)
_FOR_ALL_CONTEXTS = 1  # cudaHostRegisterPortable
_MOST_BLOCKS = 4  # of threads that a transfer takes from the computation
_QUEUES = 32  # the most that CUDA has; by default it has 8, and a stage with ties has 15 streams


class SharedDeviceMemory(NamedTuple):
    """Memory of an accelerator that two processes of one host have.

    Attributes:
        data: its bytes.
        written: event of the latest write. Its ``record()`` and ``wait()`` are of the stream that is entered, and a
            wait is for what has been recorded before.
    """

    data: torch.Tensor
    written: Any


class Accelerator:
    """Streams and memory of an accelerator, as torch has them.

    Args:
        device: of this rank; some have no index, unlike their tensors.
    """

    def __init__(self, device: torch.device) -> None:
        if device.index is None and device.type != "cpu":
            device = torch.device(device.type, torch.accelerator.current_device_index())
        self.device = device

    def use(self) -> None:
        """Make this the device of the calling thread; every thread starts with the first one."""
        torch.accelerator.set_device_index(self.device)

    def stream(self) -> torch.Stream:
        """A new stream."""
        return torch.Stream(self.device)

    def current_stream(self) -> torch.Stream:
        """The stream on which the calling thread's work is queued."""
        return torch.accelerator.current_stream(self.device)

    def host_memory(self, size: int) -> torch.Tensor:
        """Page-locked bytes; once freed, they are used again only after copies that have been queued."""
        return torch.empty(size, dtype=torch.uint8, pin_memory=True, device="cpu")

    def lock(self, memory: torch.Tensor) -> Callable[[], object]:
        """Page-lock whole pages of host memory; returns what ends that, from any thread, before they are given up.

        Raises:
            RuntimeError: they cannot be.
        """
        if self.device.type != "cuda":
            raise RuntimeError(f"torch page-locks no memory of others for {self.device.type}")
        runtime, address = torch.cuda.cudart(), memory.data_ptr()
        error = runtime.cudaHostRegister(address, memory.nbytes, _FOR_ALL_CONTEXTS)
        if int(error):
            with suppress(RuntimeError):  # of the next kernel, which finds CUDA's last error, and forgets it
                self.memory(1).fill_(1)
            raise RuntimeError(f"CUDA page-locks no {memory.nbytes} bytes: {runtime.cudaGetErrorString(error)}")

        def unlock() -> None:
            with suppress(RuntimeError), torch.cuda.device(self.device):  # the first one if a thread has taken none
                runtime.cudaHostUnregister(address)

        return unlock

    def used_on(self, tensor: torch.Tensor, stream: torch.Stream) -> None:
        """Use the memory of ``tensor``, once freed, again only after what ``stream`` has been given until then."""
        tensor.record_stream(stream)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is in the accelerator's memory."""
        return tensor.device == self.device

    def refuse_others(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Refuse tensors of another accelerator, and those without values.

        No stream here would wait for copies of the first, and over NCCL the second look like what is sent beside.
        """
        for tensor in tensors:
            place = None if tensor is None else tensor.device
            if place is not None and place != self.device and place.type != "cpu":
                raise VPipeError(
                    f"stage boundary: got a tensor on {place} from a stage on {self.device}, allowed are tensors there "
                    f"and in host memory; move it to {self.device} in the last layer"
                )

    def memory(self, size: int) -> torch.Tensor:
        """Bytes of the accelerator, for the stream that the calling thread has entered."""
        return torch.empty(size, dtype=torch.uint8, device=self.device)

    def shared(self, size: int) -> tuple[SharedDeviceMemory, bytes]:
        """Memory for two processes of this host, and what the other one needs to open it.

        Raises:
            RuntimeError: the accelerator has none to share.
        """
        if self.device.type != "cuda":
            raise RuntimeError(f"torch shares no memory of {self.device.type} with other processes")
        made = SharedDeviceMemory(self.memory(size), torch.cuda.Event(interprocess=True))
        return made, pickle.dumps((made.data.untyped_storage()._share_cuda_()[1:], made.written.ipc_handle()))

    def opened(self, handle: bytes) -> SharedDeviceMemory:
        """Memory of another process, on this device or on one that it has access to.

        Raises:
            RuntimeError: it cannot be opened here.
        """
        memory, written = pickle.loads(handle)
        storage = torch.UntypedStorage._new_shared_cuda(self.device.index, *memory)
        data = torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)
        return SharedDeviceMemory(data, torch.cuda.Event.from_ipc_handle(self.device, written))

    def without_sharing(self) -> str | None:
        """Why no memory can be shared with other processes, or None."""
        try:
            _, handle = self.shared(1)
            counter = pickle.loads(handle)[0][3:5]
            torch.UntypedStorage._release_ipc_counter(*counter)  # else torch keeps the memory for who opens it
        except RuntimeError as error:
            return f"shares no memory of its device ({one_line(error)})"
        return None

    def without_nccl(self) -> str | None:
        """Why nothing can be sent from this accelerator's memory, or None."""
        if self.device.type != "cuda":
            return f"computes on {self.device.type}, for which there is no NCCL"
        if not dist.is_nccl_available():
            return "has a torch without NCCL"
        name = "CUDA_DEVICE_MAX_CONNECTIONS"
        queues = os.environ.get(name)
        if queues is None or not queues.isdecimal() or int(queues) < _QUEUES:
            return (
                f"has {f'no {name}' if queues is None else f'{name}={queues}'}, so that streams share queues, and a "
                f"transfer that waits for its peer may stop what the peer waits for; with {name}={_QUEUES} in every "
                f"rank's environment NCCL may be used"
            )
        return None

    def place(self) -> str:
        """The device as NCCL tells it from others: the host's name may be given by hand, for tests on one device."""
        return f"{os.environ.get('NCCL_HOSTID', '')} {torch.cuda.get_device_properties(self.device).uuid}"

    def communicator(self, store: Any, rank: int) -> Any:
        """Backend of two ranks, 0 and 1, for one direction, with a store of these two alone.

        Its first operation connects them, and returns when both have begun.
        """
        from torch._C._distributed_c10d import ProcessGroupNCCL  # not in every build of torch

        options = ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = _LONG  # after which torch ends the process; a script may let a pipeline wait
        options.config.max_ctas = _MOST_BLOCKS
        return ProcessGroupNCCL(store, rank, 2, options)


class DeviceCopies:
    """Copies of one stage to and from its accelerator."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self._leaving, self._arriving = accelerator.stream(), accelerator.stream()
        self._read: deque[tuple[torch.Event, torch.Tensor]] = deque()  # by copies to the device

    def leaving(self, copy: Callable[[], object], reads: torch.Tensor | None = None) -> torch.Event:
        """Queue copies of what has been computed, and return the event of their end.

        Args:
            copy: copies without waiting, to page-locked memory or to a buffer that is sent. What it reads must be kept,
                and must not be changed, until :meth:`wait`.
            reads: what it reads, if that may be freed at once.
        """
        self._leaving.wait_event(self.accelerator.current_stream().record_event())
        with self._leaving:
            copy()
        if reads is not None:
            self.accelerator.used_on(reads, self._leaving)
        return self._leaving.record_event()

    def wait(self, event: torch.Event) -> None:
        """Let what is queued from now on wait for ``event``; the host goes on."""
        self.accelerator.current_stream().wait_event(event)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy of a tensor in host memory, for which what is queued from now on waits; the host does not.

        Args:
            tensor: page-locked, or the host may wait for the copy. One of a device may not be computed yet.
        """
        if tensor.layout is not torch.strided:  # several tensors, which used_on() does not know
            return tensor.to(self.accelerator.device)
        while self._read and self._read[0][0].query():
            self._read.popleft()
        started = self.start(tensor)
        self._read.append((started[1], tensor))  # torch keeps page-locked memory of its own only
        return self.finish(started)

    def arriving(self, copy: Callable[[], T]) -> tuple[T, torch.Event]:
        """Queue copies to the device, which ``copy`` returns; nothing waits for the event of their end yet."""
        with self._arriving:  # into memory of this stream, which waits for nothing that is computed meanwhile
            copies = copy()
        return copies, self._arriving.record_event()

    def start(self, tensor: torch.Tensor, after: torch.Event | None = None) -> tuple[torch.Tensor, torch.Event]:
        """Queue a copy of page-locked memory to the device, for which nothing waits yet; it waits for ``after``."""
        if after is not None:
            self._arriving.wait_event(after)
        return self.arriving(lambda: copied_to(tensor, self.accelerator.device))

    def finish(self, started: tuple[torch.Tensor, torch.Event]) -> torch.Tensor:
        """The copy of :meth:`start`, for which what is queued from now on waits."""
        copy, event = started
        self.wait(event)
        self.accelerator.used_on(copy, self.accelerator.current_stream())
        return copy

    def tree_to_device(self, tree: Tree) -> Tree:
        """:meth:`to_device` of tensors in a tree that are not there yet; they require gradients as before."""

        def there(one: torch.Tensor) -> torch.Tensor:
            if self.accelerator.holds(one):
                return one
            return self.to_device(one.detach()).requires_grad_(one.requires_grad)

        return map_tree(there, tree)

    def host_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy of a tensor in host memory, page-locked."""
        strides = torch.empty_like(tensor, device="meta").stride()
        memory = self.accelerator.host_memory(tensor.numel() * tensor.element_size())
        return memory.view(tensor.dtype).as_strided(tensor.shape, strides).copy_(tensor)


def copies_of(device: torch.device) -> DeviceCopies | None:
    """Copies of a stage that computes on ``device``; None on the CPU, where nothing is copied."""
    return None if device.type == "cpu" else DeviceCopies(Accelerator(device))
