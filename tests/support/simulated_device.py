"""An accelerator without a device: streams that are late, in another thread, and in any order that events allow.

Computation is the ordinary one of the stage's own thread, on tensors in host memory. Copies between "device" and
"page-locked" memory are queued, as on an accelerator, and done by another thread: at the latest when somebody waits for
an event behind them, before that now and then, and in a seeded order of streams. Until then their targets hold poison.
What a stream and a caching allocator leave to their users fails the run at once, or at the next call:

* a copy from the device that waits for no event recorded after the computation;
* a source that is freed or changed before the copy, a target that is written again before anybody has waited for it;
* a copy to the device that is used before its event, or whose memory is not kept from use by the stream that made it.

Waits of the stage's own thread for an event, a stream or a blocking copy, such as one of memory that is not page-locked
(what has been computed is not, either), are counted with the line that made them.
"""

from __future__ import annotations

import random
import sys
import threading
import time
import uuid
import weakref
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ds_vpipe.engine.links.device import Accelerator, DeviceCopies, SharedDeviceMemory

POISON = 0xFF  # bytes: NaN, -1
LIMIT_S = 60.0
_TORCH = str(Path(torch.__file__).parent)
_VIEWS = {"detach", "as_strided", "alias", "view", "slice", "select", "lift_fresh"}
_NEW = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}


class Misuse(AssertionError):  # noqa: N818 - a verdict of a test
    """Something that would be wrong on an accelerator, at least at times."""


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    content = tensor.detach().clone(memory_format=torch.contiguous_format)
    return content.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)


def _unresolved(tensor: torch.Tensor) -> torch.Tensor:
    """The values in a tensor's memory, without their lazy conjugation and negation."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def _is_one_block(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether two tensors have their elements in one order and without gaps, so that their bytes can be copied."""
    steps = [[step for size, step in zip(one.shape, one.stride(), strict=True) if size > 1] for one in (target, source)]
    span = 1 + sum((size - 1) * step for size, step in zip(source.shape, source.stride(), strict=True))
    return not source.numel() or (steps[0] == steps[1] and source.numel() == span)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _holders(tensor: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(_storage(tensor))


def _alone() -> int:
    tensor = torch.ones(4).detach()
    return _holders(tensor)


@dataclass(eq=False)
class Transfer:
    """A transfer to or from another accelerator, which another thread carries out once it has begun."""

    is_aborted: Callable[[], bool]
    begun: bool = False
    done: bool = False


@dataclass(eq=False)
class Copy:
    """A copy that is queued, or done and not waited for."""

    target: torch.Tensor
    source: torch.Tensor
    arrives: bool  # on the device; else it leaves
    content: torch.Tensor | None  # of the source when it was queued; None if nobody here knew it
    kept: bool = False  # memory of the source, once freed, is not used again before the copy
    transfer: Transfer | None = None  # from another accelerator, in the place of the source


@dataclass(eq=False)
class Work:
    """An entry of a stream: a copy, a transfer, an event to wait for, or an event to record."""

    copy: Copy | None = None
    transfer: Transfer | None = None
    wait: SimulatedEvent | None = None
    record: SimulatedEvent | None = None


class SimulatedEvent:
    """Event of a stream; one of the computation has happened when it is recorded."""

    def __init__(self, device: SimulatedAccelerator, stream: SimulatedStream | None, covers: bool = True) -> None:
        self.device, self.stream = device, stream
        self.done = stream is None
        self.number = device.next_number()
        self.before: list[Copy] = [] if stream is None or not covers else stream.not_covered()

    def query(self) -> bool:
        """Whether it has happened."""
        return self.done

    def synchronize(self) -> None:
        """Let the calling thread wait."""
        self.device.count_wait()
        self.device.complete(self)
        self.device.read(self.before)


class SimulatedStream:
    """Stream beside the computation."""

    def __init__(self, device: SimulatedAccelerator) -> None:
        self._device = device
        self.queue: deque[Work] = deque()
        self.busy = False  # with a transfer
        self.open: list[Copy] = []  # that the computation has not waited for
        self._covered: list[Copy] = []  # those of them that an event is behind
        self.waited = -1  # number of the newest event of the computation that it has been given
        self.used = -1  # of the one that the latest copies from the device came after
        self.modes: list[_Queued] = []  # of the blocks that are open

    def not_covered(self) -> list[Copy]:
        """Copies since the last event, for the next one: of copies before, their own event has to be waited for."""
        found = [copy for copy in self.open if copy not in self._covered]
        self._covered = list(self.open)
        return found

    def wait_event(self, event: SimulatedEvent) -> None:
        """Let what is queued from now on wait."""
        self._device.raise_misuse()
        if event.stream is None:
            self.waited = max(self.waited, event.number)
        self._device.put(self, Work(wait=event))

    def record_event(self) -> SimulatedEvent:
        """Event behind what has been queued."""
        event = SimulatedEvent(self._device, self)
        self._device.put(self, Work(record=event))
        self.used = self.waited
        return event

    def synchronize(self) -> None:
        """Let the calling thread wait for everything."""
        self.record_event().synchronize()

    def __enter__(self) -> SimulatedStream:
        self._device.raise_misuse()
        self._device.check_kept()
        self._device.streams_entered[threading.get_ident()].append(self)
        self.modes.append(_Queued(self._device, self))
        self.modes[-1].__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.modes.pop().__exit__(*error)
        self._device.streams_entered[threading.get_ident()].pop()


class _Computation:
    """The stream of the stage's own thread."""

    def __init__(self, device: SimulatedAccelerator) -> None:
        self._device = device

    def record_event(self) -> SimulatedEvent:
        return SimulatedEvent(self._device, None)

    def wait_event(self, event: SimulatedEvent) -> None:
        """A stream's wait, which is not the host's: here the computation is done by the thread that queues it."""
        self._device.complete(event)
        if event.stream is not None:
            self._device.waited_for(event.stream, event.before)
        self._device.raise_misuse()


class _Queued(TorchDispatchMode):
    """Queues copies in a stream's block."""

    def __init__(self, device: SimulatedAccelerator, stream: SimulatedStream) -> None:
        super().__init__()
        self._device, self._stream = device, stream
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "copy_":
            target, source, *blocking = args
            if self._is_within(target, source):
                self._device.copy(self._stream, target, source, arrives=False, within=True)
                return target
            self._device.copy(self._stream, target, source, self._arrives(target, source))
            if not (blocking[0] if blocking else kwargs.get("non_blocking", False)):
                self._stream.synchronize()
            return target
        result = func(*args, **kwargs)
        if name in _NEW:
            result.untyped_storage().fill_(POISON)
            self._made.add(_storage(result))
        elif name not in _VIEWS:
            raise Misuse(f"{func} on a stream of copies")
        return result

    def _is_within(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether what has been computed is copied to memory of the device, from which it leaves."""
        leaves = self._stream.waited > self._stream.used and self._device.holds(source)
        return leaves and _storage(target) in self._made

    def _arrives(self, target: torch.Tensor, source: torch.Tensor) -> bool:
        """Whether it is the target that nobody may use yet; what is packed to be sent leaves."""
        device = self._device
        if device.is_shared(source):
            return True
        packed = device.stream_of(target) is not None and device.stream_of(source) is None
        return _storage(target) in self._made and not packed


class SimulatedAccelerator(Accelerator):
    """Accelerator of the thread that makes it, which is the stage's own.

    Args:
        seed: of the order of copies.
        early: how often copies are done before anybody waits for them, 0 to 1.

    Attributes:
        host_waits: of the stage's own thread, by the line that made them.
        num_copies: that have been queued.
        users: threads that have taken the device.
    """

    alive: ClassVar[weakref.WeakSet[SimulatedAccelerator]] = weakref.WeakSet()

    def __init__(self, seed: int = 0, early: float = 0.3) -> None:
        super().__init__(torch.device("cpu"))
        self._chance, self._early, self._alone = random.Random(seed), early, _alone()
        self._thread = threading.get_ident()
        self._streams: list[SimulatedStream] = []
        self.streams_entered: dict[int, list[SimulatedStream]] = defaultdict(list)  # by thread
        self.changed = threading.Condition(threading.RLock())
        self._buffers: dict[int, tuple[Any, Any]] = {}  # of transfers, by storage: weak reference, stream
        self._shared: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by storage
        self._wanted: list[SimulatedEvent] = []
        self._misuse: list[str] = []
        self._not_kept: dict[int, torch.Tensor] = {}  # copies that the computation has waited for, by their storage
        self._page_locked: dict[int, Any] = {}  # weak references by storage
        self._locked: list[range] = []  # addresses of memory that was page-locked later
        self._unread: dict[int, object] = {}  # block in which memory of the host was last copied to, by storage
        self._numbers = 0
        self.has_lost_a_transfer = False  # whose other end has ended the communicator: torch would end the process
        self.host_waits: Counter[str] = Counter()
        self.num_copies = 0
        self.users: set[int] = set()
        self._ended = False
        self._worker = threading.Thread(target=_run, args=(weakref.ref(self), self.changed), daemon=True)
        self._worker.start()
        self.alive.add(self)

    # What the engine uses

    def use(self) -> None:
        self.users.add(threading.get_ident())

    def stream(self) -> Any:
        self._streams.append(SimulatedStream(self))
        return self._streams[-1]

    def current_stream(self) -> Any:
        return _Computation(self)

    def host_memory(self, size: int) -> torch.Tensor:
        memory = torch.full((size,), POISON, dtype=torch.uint8)
        self._page_locked = {key: found for key, found in self._page_locked.items() if not found.expired()}
        self._page_locked[_storage(memory)] = StorageWeakRef(memory.untyped_storage())
        self._unread.pop(_storage(memory), None)  # of what had this address before
        return memory

    def lock(self, memory: torch.Tensor) -> Callable[[], object]:
        pages = range(memory.data_ptr(), memory.data_ptr() + memory.nbytes)
        self._locked.append(pages)
        return partial(self._locked.remove, pages)  # no reference to copies, which refer to the memory

    def used_on(self, tensor: torch.Tensor, stream: Any) -> None:
        with self.changed:
            for found in self._streams:
                if any(_storage(copy.target) == _storage(tensor) for copy in found.open):
                    self.fail("a copy to the device is used before its event")
                for copy in found.open if found is stream else ():
                    copy.kept = copy.kept or _storage(copy.source) == _storage(tensor)
            self._not_kept.pop(_storage(tensor), None)
        self.raise_misuse()

    def holds(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return storage._cdata not in self._page_locked and storage.resizable()  # else NumPy's

    def memory(self, size: int) -> torch.Tensor:
        memory = torch.empty(size, dtype=torch.uint8)
        self._buffers = {key: found for key, found in self._buffers.items() if not found[0].expired()}
        self._buffers[_storage(memory)] = StorageWeakRef(memory.untyped_storage()), self.entered()
        self._unread.pop(_storage(memory), None)
        return memory

    def shared(self, size: int) -> tuple[SharedDeviceMemory, bytes]:
        from simulated_ipc import shared_bytes

        made, handle = shared_bytes(self, size)
        return SharedDeviceMemory(made.data, made), handle

    def opened(self, handle: bytes) -> SharedDeviceMemory:
        from simulated_ipc import opened_bytes

        made = opened_bytes(self, handle)
        return SharedDeviceMemory(made.data, made)

    def is_shared(self, memory: torch.Tensor) -> bool:
        """Whether two processes have the memory."""
        return _storage(memory) in self._shared

    def shared_bytes(self, made: Any) -> None:
        """Know memory that two processes have."""
        self._shared[_storage(made.data)] = made

    def without_sharing(self) -> str | None:
        return None

    def without_nccl(self) -> str | None:
        return None

    def place(self) -> str:
        return str(uuid.uuid4())

    def communicator(self, store: Any, rank: int) -> Any:
        from simulated_nccl import SimulatedCommunicator

        return SimulatedCommunicator(self, store, rank)

    # What communicators use

    def entered(self) -> SimulatedStream | None:
        """The stream that the calling thread has entered; None for the computation."""
        found = self.streams_entered[threading.get_ident()]
        return found[-1] if found else None

    def stream_of(self, memory: torch.Tensor) -> SimulatedStream | None:
        """The stream for which a transfer's buffer was allocated; None for the computation, and other memory."""
        found: SimulatedStream | None = self._buffers.get(_storage(memory), (None, None))[1]
        return found

    def content(self, data: torch.Tensor) -> torch.Tensor:
        """What a buffer will be once what is queued has been copied to it."""
        with self.changed:
            content = data.clone()
            for stream in self._streams:
                for copy in stream.open:
                    if _storage(copy.target) == _storage(data) and copy.content is not None:
                        target = copy.target
                        view = torch.empty(0, dtype=target.dtype)
                        view.set_(content.untyped_storage(), target.storage_offset(), target.shape, target.stride())
                        view.copy_(copy.content.view(target.dtype).view(target.shape))
            return content

    @contextmanager
    def wanted(self, event: SimulatedEvent) -> Iterator[None]:
        """Block in which what is before ``event`` is done at once."""
        with self.changed:
            self._wanted.append(event)
            self.changed.notify_all()
        try:
            yield
        finally:
            with self.changed:
                self._wanted.remove(event)

    def fail(self, what: str) -> None:
        """Note that something is wrong."""
        self._misuse.append(what)

    # For tests

    def end(self) -> None:
        """Do what is queued, end the thread, and raise what was wrong; once."""
        if self._ended:
            return
        for stream in self._streams:
            self.complete(stream.record_event())
        self.close()
        self.check_kept()
        if self.has_lost_a_transfer:
            self.fail("a communicator was ended under a transfer of the other end")
        self.raise_misuse()

    def close(self) -> None:
        """End the thread."""
        with self.changed:
            self._ended = True
            self.changed.notify_all()
        self._worker.join(LIMIT_S)

    # What streams and events use

    def next_number(self) -> int:
        """Numbers of events rise."""
        self._numbers += 1
        return self._numbers

    def put(self, stream: SimulatedStream, work: Work) -> None:
        """Queue an entry."""
        with self.changed:
            stream.queue.append(work)
            self.changed.notify_all()

    def copy(
        self, stream: SimulatedStream, target: torch.Tensor, source: torch.Tensor, arrives: bool, within: bool = False
    ) -> None:
        """Queue a copy; the host waits if its end of it is not page-locked, or not contiguous.

        Torch copies bytes between host and device. It has other elements in other memory of the host first, and lets
        the host conjugate and negate what it copies there, at once.
        """
        host = source if arrives else target
        locked = _storage(host) in self._page_locked or any(host.data_ptr() in pages for pages in self._locked)
        read, written = (self._shared.get(_storage(end)) for end in (source, target))
        on_device = within or read or written or _storage(host) in self._buffers
        if not on_device:
            if not locked or not (_is_one_block(target, source) or host.is_contiguous()):
                self.count_wait()
            source = source if arrives else _unresolved(source)
        with self.changed:
            if within:
                self._unread.pop(_storage(target), None)  # of what had this address before
            if read is not None:
                read.check_read(queued=True)
            if written is not None:
                written.check_write()
                self._unread.pop(_storage(target), None)
            if not arrives and stream.waited <= stream.used:
                self.fail("a copy from the device waits for no event recorded after the computation")
            if not arrives and self._unread.setdefault(_storage(target), stream.modes[-1]) is not stream.modes[-1]:
                self.fail("a buffer is written again before anybody has waited for what was copied to it")
            # Of its own, and without a base: others that use the memory can be counted.
            pending = [one for other in self._streams for one in other.open if _storage(one.target) == _storage(source)]
            content = pending[-1].content if pending else _bytes(source)  # of what is not there yet
            content = content if read is None else None
            found = Copy(target, source.detach(), arrives, content)
            if not arrives:
                target.fill_(float("nan") if target.dtype.is_floating_point or target.dtype.is_complex else 1)
            stream.open.append(found)
            self.num_copies += 1
        self.put(stream, Work(copy=found))
        self.raise_misuse()

    def complete(self, event: SimulatedEvent) -> None:
        """Wait until ``event`` has happened."""
        limit = time.monotonic() + LIMIT_S
        with self.changed:
            self._wanted.append(event)
            self.changed.notify_all()
            while not event.done:
                if time.monotonic() > limit:
                    raise Misuse("an event does not happen: streams wait for each other")
                self.changed.wait(1.0)
            self._wanted.remove(event)

    def read(self, copies: list[Copy]) -> None:
        """The host has waited for ``copies``."""
        with self.changed:
            for copy in copies:
                self._unread.pop(_storage(copy.target), None)

    def waited_for(self, stream: SimulatedStream, copies: list[Copy]) -> None:
        """The computation has waited for ``copies``."""
        with self.changed:
            for copy in copies:
                if copy not in stream.open:
                    continue
                stream.open.remove(copy)
                if copy.transfer is not None and not (copy.transfer.done or copy.transfer.is_aborted()):
                    self.fail("a received tensor is used before it has come")
                if copy.arrives:
                    self._not_kept[_storage(copy.target)] = copy.target
                elif copy.content is not None and not torch.equal(_bytes(copy.source), copy.content):
                    self.fail("a tensor was changed while a copy of it was pending")

    def check_kept(self) -> None:
        """Fail if memory may be used again by the stream that allocated it, while the computation reads it."""
        if self._not_kept and threading.get_ident() == self._thread:
            self.fail("a copy to the device is not kept from being freed and used again under the computation")
            self._not_kept.clear()
            self.raise_misuse()

    def count_wait(self) -> None:
        """Count a wait of the calling thread if it is the stage's own."""
        if threading.get_ident() != self._thread:
            return
        frame: Any = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename.startswith((__file__, _TORCH)):
            frame = frame.f_back
        self.host_waits["?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"] += 1

    def raise_misuse(self) -> None:
        """Raise what has been wrong so far, in the stage's own thread."""
        if self._misuse and threading.get_ident() == self._thread:
            raise Misuse(self._misuse[0])

    # The thread

    def turn(self) -> bool:
        """Do one entry of one stream; False once the accelerator has ended. The caller has the lock."""
        if self._ended:
            return False
        shared = list(self._shared.values())
        wanted = any(not event.done for event in self._wanted) or any(one.wanted for one in shared)
        ready = [stream for stream in self._streams if stream.queue and self._may_go(stream)]
        if ready and (wanted or self._chance.random() < self._early):
            stream = self._chance.choice(ready)
            self._do(stream, stream.queue.popleft())
            self.changed.notify_all()
        elif not (wanted and ready):
            soon = ready or shared  # another process may do what a stream waits for, or may want what is queued
            self.changed.wait(self._chance.choice((0.0002, 0.001, 0.005)) if soon else 0.5)
        return True

    @staticmethod
    def _may_go(stream: SimulatedStream) -> bool:
        wait = stream.queue[0].wait
        return not stream.busy and (wait is None or wait.done)

    def _do(self, stream: SimulatedStream, work: Work) -> None:
        if work.record is not None:
            work.record.done = True
        if work.transfer is not None:
            work.transfer.begun, stream.busy = True, not work.transfer.is_aborted()
        copy = work.copy
        if copy is None:
            return
        if not copy.arrives and not copy.kept and _holders(copy.source) <= self._alone:
            self.fail("a tensor was freed while a copy of it was pending")
        if copy.content is not None and not torch.equal(_bytes(copy.source), copy.content):
            self.fail("a tensor was changed while a copy of it was pending")
        with torch.no_grad():
            copy.target.copy_(copy.source)
        if (read := self._shared.get(_storage(copy.source))) is not None:
            read.check_read(queued=False)


def _run(device: Callable[[], SimulatedAccelerator | None], changed: threading.Condition) -> None:
    going = True
    while going:
        with changed:
            found = device()
            going = found is not None and found.turn()
            del found
        time.sleep(0)


def simulated_copies(seed: int = 0, early: float = 0.3) -> DeviceCopies:
    """Copies of a stage, to and from a simulated accelerator."""
    return DeviceCopies(SimulatedAccelerator(seed, early))
