"""Tensors of links between GPUs, over NCCL.

The messages of such a link go over gloo as ever (:mod:`ds_vpipe.engine.links.nccl_link`), but tensors in an
accelerator's memory are only described in them. Their bytes go from device to device, those of a message in one piece,
through a communicator of the two ranks that is this link's alone:

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
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from ds_vpipe.engine.links.device import DeviceCopies
from ds_vpipe.engine.links.groups import Group, Groups, Peer, end_communicator, failed_wait
from ds_vpipe.engine.links.message import Received, Tree, filled_in, leaves, left_out
from ds_vpipe.engine.links.tensor_bytes import TensorBytes
from ds_vpipe.errors import PipelinePeerError

_POLL_S = 0.05
_PATIENCE_S = 2.0  # for transfers from ranks that are well, once another has failed
_ARRIVED, _ENDS, _SENT = "arrived", "the receiver ends", "sent in all"


class Counts:
    """Numbers of transfers that the ends of a link exchange through the store.

    Args:
        groups: of this rank.
        group: of the two ranks.
    """

    def __init__(self, groups: Groups, group: Group) -> None:
        self._groups, self._name = groups, group.name

    def leave(self, what: str, count: int) -> None:
        """Leave a number for the other end, from any thread."""
        with suppress(RuntimeError):  # the store is gone, and with it all who would ask
            self._groups.put_from_any_thread(f"{self._name}: {what}", str(count))

    def get(self, what: str) -> int | None:
        """The other end's number, or None if there is none; from any thread.

        Raises:
            RuntimeError: the store is gone.
        """
        found = self._groups.get_from_any_thread(f"{self._name}: {what}")
        return None if found is None else int(found)


class NcclSends:
    """Sending end of a link's NCCL communicator.

    Args:
        group: of the two ranks, over NCCL.
        peer: the stage at the other end.
        copies: of this stage.
        counts: of the link.
    """

    def __init__(self, group: Group, peer: Peer, copies: DeviceCopies, counts: Counts) -> None:
        self._group, self._peer, self._copies, self._counts = group, peer, copies, counts
        self._sent, self._arrived, self._ended = 0, 0, False
        self._lock = threading.Lock()  # the idle thread ends what the stage's own thread sends
        self._kept: list[tuple[tuple[torch.Tensor, ...], torch.Event]] = []

    def send(self, tree: Tree) -> tuple[Tree, int]:
        """Queue the transfer of the tensors in the accelerator's memory.

        Returns:
            The tree with their descriptions, and their bytes; nothing for a receiver that has ended.
        """
        accelerator = self._copies.accelerator
        accelerator.refuse_others(leaves(tree))
        tree, tensors = left_out(tree, accelerator.holds)
        layout = TensorBytes.of(tensors)

        def pack_and_send() -> None:
            data = accelerator.memory(layout.size)
            layout.pack(data, tensors)
            self._group.send(data, self._peer.rank, 0)  # torch keeps its memory from other use until then

        with self._lock:
            if self._ended:
                return None, 0
            if layout.size:
                self._kept.append((tensors, self._copies.leaving(pack_and_send)))
                self._sent += 1
        return tree, layout.size

    def copied(self) -> None:
        """Let what is queued from now on change tensors that have been sent."""
        if self._kept:
            self._copies.wait(self._kept[-1][1])
            self._kept.clear()

    def wait(self, deadline: float) -> None:
        """Wait until the receiver has all tensors, until ``deadline``, or for a failure."""
        failures = self._group.failures
        try:
            while self._arrived < self._sent and not failures.failing and time.monotonic() < deadline:
                self._arrived = self._counts.get(_ARRIVED) or self._arrived
                if self._arrived < self._sent:
                    time.sleep(_POLL_S)
        except RuntimeError:  # the store is gone, with a rank that has left: nobody can say any more
            time.sleep(max(0.0, min(_PATIENCE_S, deadline - time.monotonic())))

    def answer(self) -> None:
        """End sending to a receiver that ends."""
        if not self._ended and self._counts.get(_ENDS) is not None:
            self.begin_to_close()

    def begin_to_close(self) -> None:
        """Send nothing any more, and let the receiver know how much was sent."""
        with self._lock:
            self._ended = True
        self._counts.leave(_SENT, self._sent)

    def close(self, limit: float, deadline: float) -> None:
        """End the communicator, once the receiver has what was sent, until ``limit``."""
        self.wait(limit)
        end_communicator(self._group.backend)


@dataclass
class Arriving:
    """Message whose tensors NCCL receives: they are in ``data`` once ``event`` has happened."""

    message: Received
    data: torch.Tensor | None = None
    tensors: Sequence[torch.Tensor] = ()
    event: torch.Event | None = None


class NcclReceives:
    """Receiving end of a link's NCCL communicator.

    Args:
        group: of the two ranks, over NCCL.
        peer: the stage at the other end.
        copies: of this stage.
        counts: of the link.
    """

    def __init__(self, group: Group, peer: Peer, copies: DeviceCopies, counts: Counts) -> None:
        self._group, self._peer, self._copies, self._counts = group, peer, copies, counts
        self._stream = copies.accelerator.stream()
        self._under_way: deque[tuple[torch.Event, float, str]] = deque()
        self._lock = threading.Lock()  # two threads look at what is under way, and count it
        self._posted = self._seen = self._received = 0
        group.failures.regularly(self.look)

    def post(self, message: Received, what: str) -> Arriving:
        """Post the receive of the tensors that a message describes, from any thread, in the order of messages."""
        described = [leaf for leaf in leaves(message.tree) if leaf is not None and leaf.is_meta]
        if not described:
            return Arriving(message)
        accelerator, layout = self._copies.accelerator, TensorBytes.of(described)
        with self._stream:
            data = accelerator.memory(layout.size)
            if layout.size:
                self._group.recv(data, self._peer.rank, 0).wait()  # a wait of the stream, not of the host
            tensors = layout.unpack(data, described)
        event = self._stream.record_event()
        if layout.size:
            self._under_way.append((event, time.monotonic(), what))
            self._posted += 1
        tree = filled_in(message.tree, tensors)
        return Arriving(replace(message, tree=tree, size=message.size + layout.size), data, tensors, event)

    def arrived(self, arriving: Arriving) -> Received:
        """The message with its tensors, for which what is queued from now on waits."""
        if arriving.event is not None and arriving.data is not None:
            self._copies.wait(arriving.event)
            accelerator = self._copies.accelerator
            for tensor in (arriving.data, *arriving.tensors):
                accelerator.used_on(tensor, accelerator.current_stream())
        return arriving.message

    def look(self, failed_at: float | None) -> str | None:
        """What the watch over failures does: tell the sender what has arrived, and end what takes too long.

        Args:
            failed_at: when the failure of a rank became known, in seconds; None if none has failed.

        Returns:
            The line of a transfer that has taken too long.
        """
        self._copies.accelerator.use()  # else an event's query may make a context on the first device
        posted = self._posted
        pauses, self._seen = posted == self._seen, posted
        oldest = self._oldest()
        if oldest is None:
            if pauses:  # nobody asks before
                self._give_receipt(posted)
            return None
        begin, what = oldest
        limit = self._group.timeout_s
        if failed_at is not None:
            begin, limit = max(begin, failed_at), _PATIENCE_S
        if time.monotonic() < begin + limit:
            return None
        end_communicator(self._group.backend)
        return str(self._overdue(what))

    def begin_to_close(self) -> None:
        """Let the sender know that nothing is to be sent any more."""
        self._counts.leave(_ENDS, self._posted)

    def close(self, limit: float, deadline: float, take: Callable[[], bool]) -> None:
        """Receive what has been sent, unless a rank has failed, and end the communicator.

        Args:
            limit: for the messages, as ``time.monotonic()`` says it.
            deadline: for their tensors.
            take: posts receives for messages that have come; False if no more can be.

        Raises:
            PipelinePeerError: tensors did not come in time.
        """
        failures = self._group.failures
        with suppress(RuntimeError):  # the store is gone, with all who might say how many
            while not failures.failing and time.monotonic() < limit:
                sent = self._counts.get(_SENT)
                if (sent is not None and self._posted >= sent) or not take():
                    break
                time.sleep(_POLL_S)
        posted = self._posted
        while (oldest := self._oldest()) is not None and not failures.failing and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if oldest is None:
            self._give_receipt(posted)
        end_communicator(self._group.backend)
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
            if self._received < arrived:
                self._received = arrived
                self._counts.leave(_ARRIVED, arrived)

    def _overdue(self, what: str) -> PipelinePeerError:
        group = self._group
        what = f"the tensors of {what} from {self._peer}"
        return failed_wait(group.me, None, what, TimeoutError("Timed out"), group.timeout_s)
