"""Links between GPUs over NCCL.

Messages go over gloo (:mod:`ds_vpipe.engine.links.host_link`), but tensors in an accelerator's memory are only
described in them. Their bytes go from device to device, those of a message in one piece, through a communicator of the
two ranks that is this link's alone:

* The sender packs them beside the computation, which waits for these copies alone and never for the receiver. Then it
  queues the transfer, and then the message leaves. So a receive is posted for what is under way, with its exact size:
  none occupies the device before, and an end of the data or a failure in the place of a message needs none.
* The two ends post in the order of messages, whatever their schedules do.
* The receiving stage waits for messages alone. What it queues afterwards waits for the tensors.
* While the stage does something else, a thread posts receives for messages that have come. Else the device of a stage
  that is ahead would be busy with transfers for as long as the next one does not train.

Every wait here has a name and a limit. NCCL itself has none, so the watch over failures ends the communicator of a
receive that takes too long. A sender cannot know when its tensors have arrived, but asks for the receiver's count.

Torch ends a process whose transfer is lost with the other end's communicator. So the end that closes first, whichever
it is, says so: from then on the sender sends nothing and leaves the number of its transfers, and the receiver receives
those. Only after a failure, or 10 s in vain, communicators are ended whatever is under way.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ds_vpipe.engine.links.device import DeviceCopies
from ds_vpipe.engine.links.groups import Group, Groups, Peer, end_communicator, failed_wait
from ds_vpipe.engine.links.host_link import HostReceiver, HostSender
from ds_vpipe.engine.links.message import Message, Received, Tree, filled_in, has_come, leaves, left_out
from ds_vpipe.engine.links.tensor_bytes import TensorBytes
from ds_vpipe.errors import PipelinePeerError, one_line

_POLL_S = 0.05
_PATIENCE_S = 2.0  # for transfers from ranks that are well, once another has failed
_ARRIVED, _ENDS, _SENT = "arrived", "the receiver ends", "sent in all"


class Communicator:
    """A link's NCCL communicator, and numbers of transfers that its two ends exchange through the store."""

    def __init__(self, groups: Groups, group: Group) -> None:
        self.group, self._groups = group, groups

    def leave(self, what: str, count: int) -> None:
        """Leave a number for the other end, from any thread."""
        with suppress(RuntimeError):  # the store is gone, and with it all who would ask
            self._groups.put_from_any_thread(f"{self.group.name}: {what}", str(count))

    def get(self, what: str) -> int | None:
        """The other end's number, or None if there is none; from any thread.

        Raises:
            RuntimeError: the store is gone.
        """
        found = self._groups.get_from_any_thread(f"{self.group.name}: {what}")
        return None if found is None else int(found)


class NcclSender(HostSender):
    """Sending end of a link over NCCL. Its ``group`` of the two ranks is over gloo."""

    payload = "nccl"

    def __init__(
        self, group: Group, peer: Peer, prefetch: int, threaded: bool, copies: DeviceCopies, communicator: Communicator
    ) -> None:
        super().__init__(group, peer, prefetch, threaded=threaded)
        self._device, self._communicator = copies, communicator
        self._sent, self._arrived, self._ended = 0, 0, False
        self._lock = threading.Lock()  # the idle thread ends what the stage's own thread sends
        self._kept: list[tuple[tuple[torch.Tensor, ...], torch.Event]] = []

    def send(self, kind: Message, micro_batch: int, tree: Tree, note: int = 0) -> int:
        beside = 0
        if not kind.on_host:
            tree, beside = self.send_tensors(tree)
        self.bytes_sent += beside
        return beside + super().send(kind, micro_batch, tree, note)

    def send_tensors(self, tree: Tree) -> tuple[Tree, int]:
        """Queue the transfer of the tensors in the accelerator's memory.

        Returns:
            The tree with their descriptions, and their bytes; nothing for a receiver that has ended.
        """
        accelerator = self._device.accelerator
        accelerator.refuse_others(leaves(tree))
        tree, tensors = left_out(tree, accelerator.holds)
        layout = TensorBytes.of(tensors)

        def pack_and_send() -> None:
            data = accelerator.memory(layout.size)
            layout.pack(data)
            self._communicator.group.send(data, self.peer.rank, 0)  # torch keeps its memory from other use until then

        with self._lock:
            if self._ended:
                return None, 0
            if layout.size:
                self._kept.append((tensors, self._device.leaving(pack_and_send)))
                self._sent += 1
        return tree, layout.size

    def wait_until_copied(self) -> None:
        if self._kept:
            self._device.wait(self._kept[-1][1])
            self._kept.clear()
        super().wait_until_copied()

    def wait_for_all(self, deadline: float) -> None:
        super().wait_for_all(deadline)
        self.wait_for_tensors(deadline)

    def wait_for_tensors(self, deadline: float) -> None:
        """Wait until the receiver has all tensors, until ``deadline``, or for a failure."""
        failures = self._group.failures
        try:
            while self._arrived < self._sent and not failures.failing and time.monotonic() < deadline:
                self._arrived = self._communicator.get(_ARRIVED) or self._arrived
                if self._arrived < self._sent:
                    time.sleep(_POLL_S)
        except RuntimeError:  # the store is gone, with a rank that has left: nobody can say any more
            time.sleep(max(0.0, min(_PATIENCE_S, deadline - time.monotonic())))

    def answer(self) -> None:
        """End sending to a receiver that ends."""
        if not self._ended and self._communicator.get(_ENDS) is not None:
            self.begin_to_close()

    def begin_to_close(self) -> None:
        """Send nothing any more, and let the receiver know how much was sent."""
        with self._lock:
            self._ended = True
        self._communicator.leave(_SENT, self._sent)

    def close(self, limit: float, deadline: float) -> None:
        """End the communicator, once the receiver has what was sent, until ``limit``."""
        self.wait_for_tensors(limit)
        end_communicator(self._communicator.group.backend)


@dataclass
class _Arriving:
    """Message whose tensors NCCL receives: they are in ``data`` once ``event`` has happened."""

    message: Received
    data: torch.Tensor | None = None
    tensors: Sequence[torch.Tensor] = ()
    event: torch.Event | None = None


class NcclReceiver(HostReceiver):
    """Receiving end of a link over NCCL; arguments as of :class:`NcclSender`."""

    def __init__(
        self, group: Group, peer: Peer, prefetch: int, copies: DeviceCopies, communicator: Communicator
    ) -> None:
        super().__init__(group, peer, prefetch)
        self._device, self._communicator = copies, communicator
        self._early: deque[_Arriving | Exception] = deque()  # taken before the stage has asked for them
        self._taking = threading.Lock()
        self._taken = self._taken_before = 0
        self._stream = copies.accelerator.stream()
        self._under_way: deque[tuple[torch.Event, float, str]] = deque()
        self._lock = threading.Lock()  # two threads look at what is under way, and count it
        self._transfers = self._transfers_before = self._receipts = 0
        communicator.group.failures.regularly(self.look)

    def _next(self, what: object) -> Received:
        with self._taking:
            if not self._early:
                self._take(str(what))
            found = self._early[0]
            if isinstance(found, Exception):  # it stays: what follows would get its bytes
                raise found
            self._early.popleft()
        if found.event is not None and found.data is not None:
            self._device.wait(found.event)
            accelerator = self._device.accelerator
            for tensor in (found.data, *found.tensors):
                accelerator.used_on(tensor, accelerator.current_stream())
        return found.message

    def keep_posted(self, prefetch: int) -> None:
        with self._taking:
            super().keep_posted(prefetch)

    def take_if_idle(self) -> None:
        """:meth:`take_early` if the stage has not asked for a message lately."""
        idle, self._taken_before = self._taken == self._taken_before, self._taken
        if idle and not self._group.failures.failing:
            self.take_early()

    def take_early(self) -> bool:
        """Take messages that have come, so that transfers between accelerators begin; from any thread.

        Returns:
            False after an error, which is raised by :meth:`receive` in its turn.
        """
        if not self._taking.acquire(blocking=False):  # the stage's own thread takes the next one
            return True
        try:
            while self._posted and has_come(self._posted[0][0]) and self._error is None:
                self._take()
            return self._error is None
        finally:
            self._taking.release()

    def _take(self, what: str = "") -> None:
        """Take the next message, or the error of doing so."""
        try:
            message = super()._next(what or "a message")
            self._taken += 1
            self._early.append(self._post_tensors(message, what or f"{message.kind.name}{message.micro_batch}"))
        except Exception as error:
            self._early.append(error)

    @property
    def _error(self) -> Exception | None:
        last = self._early[-1] if self._early else None
        return last if isinstance(last, Exception) else None

    def _post_tensors(self, message: Received, what: str) -> _Arriving:
        """Post the receive of the tensors that a message describes, in the order of messages."""
        described = [leaf for leaf in leaves(message.tree) if leaf is not None and leaf.is_meta]
        if not described:
            return _Arriving(message)
        accelerator, layout = self._device.accelerator, TensorBytes.of(described)
        with self._stream:
            data = accelerator.memory(layout.size)
            if layout.size:
                self._communicator.group.recv(data, self.peer.rank, 0).wait()  # of the stream, not of the host
            tensors = layout.unpack(data)
        event = self._stream.record_event()
        if layout.size:
            self._under_way.append((event, time.monotonic(), what))
            self._transfers += 1
        tree = filled_in(message.tree, tensors)
        return _Arriving(replace(message, tree=tree, size=message.size + layout.size), data, tensors, event)

    def look(self, failed_at: float | None) -> str | None:
        """What the watch over failures does: tell the sender what has arrived, and end what takes too long.

        Args:
            failed_at: when the failure of a rank became known, in seconds; None if none has failed.

        Returns:
            The line of a transfer that has taken too long.
        """
        self._device.accelerator.use()  # else an event's query may make a context on the first device
        transfers = self._transfers
        pauses, self._transfers_before = transfers == self._transfers_before, transfers
        oldest = self._oldest()
        if oldest is None:
            if pauses:  # nobody asks before
                self._give_receipt(transfers)
            return None
        begin, what = oldest
        limit = self._communicator.group.timeout_s
        if failed_at is not None:
            begin, limit = max(begin, failed_at), _PATIENCE_S
        if time.monotonic() < begin + limit:
            return None
        end_communicator(self._communicator.group.backend)
        return str(self._overdue(what))

    def begin_to_close(self) -> None:
        """Let the sender know that nothing is to be sent any more."""
        self._communicator.leave(_ENDS, self._transfers)

    def close(self, limit: float, deadline: float) -> None:
        """Receive what has been sent, unless a rank has failed, and end the communicator.

        Args:
            limit: for the messages, as ``time.monotonic()`` says it.
            deadline: for their tensors.

        Raises:
            PipelinePeerError: tensors did not come in time.
            Exception: a message could not be taken; all ranks know then why the communicator ends under those that
                follow.
        """
        failures, unknown = self._group.failures, None
        with suppress(RuntimeError):  # the store is gone, with all who might say how many
            while not failures.failing and time.monotonic() < limit:
                sent = self._communicator.get(_SENT)
                if sent is not None and self._transfers >= sent:
                    break
                if not self.take_early():
                    unknown = None if failures.failing else self._error
                    break
                time.sleep(_POLL_S)
        if unknown is not None:
            failures.publish(f"{self._me} failed in receiving from {self.peer}: {one_line(unknown)}")
            failures.wait_until_seen()
        transfers = self._transfers
        while (oldest := self._oldest()) is not None and not failures.failing and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if oldest is None:
            self._give_receipt(transfers)
        end_communicator(self._communicator.group.backend)
        if unknown is not None:
            raise unknown
        if oldest is not None and not failures.failing:
            raise self._overdue(oldest[1])

    def _oldest(self) -> tuple[float, str] | None:
        """When the oldest receive that is under way was posted, and its name."""
        with self._lock:
            while self._under_way and self._under_way[0][0].query():
                self._under_way.popleft()
            return self._under_way[0][1:] if self._under_way else None

    def _give_receipt(self, arrived: int) -> None:
        with self._lock:
            if self._receipts < arrived:
                self._receipts = arrived
                self._communicator.leave(_ARRIVED, arrived)

    def _overdue(self, what: str) -> PipelinePeerError:
        group = self._communicator.group
        what = f"the tensors of {what} from {self.peer}"
        return failed_wait(group.me, None, what, TimeoutError("Timed out"), group.timeout_s)
