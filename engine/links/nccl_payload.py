"""Tensors of links between GPUs, over NCCL.

The messages of such a link go over gloo as ever (:mod:`ds_vpipe.engine.links.host_link`), but tensors in an
accelerator's memory are only described in them. Their bytes go from device to device, those of a message in one piece,
through a communicator of the two ranks that is this link's alone:

* The sender packs them beside the computation, which waits for these copies alone and never for the receiver. Then it
  queues the transfer, and then the message leaves. So a receive is posted for what is under way, with its exact size:
  none occupies the device before, and an end of the data or a failure in the place of a message needs none.
* The two ends post in the order of messages, whatever their schedules do.
* The receiving stage waits for messages alone. What it queues afterwards waits for the tensors.
* No transfer rests: while the stage does something else, the watch over failures posts receives for messages that have
  come. Else the device of a stage that is ahead would be busy for as long as the next one does not train.

Every wait here has a name and a limit, and NCCL itself has none: the watch over failures also ends the communicator of
a receive that takes too long. A sender cannot know when its tensors have arrived, but asks for the receiver's count.

To end a communicator under a transfer of the other end would end that process: torch sees to that. So an end that
closes first lets the other know, whichever it is. From then on the sender sends nothing, and says how much it has sent;
the receiver takes that, and counts it.
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
from ds_vpipe.engine.links.groups import Group, Groups, Peer, end, failed_wait
from ds_vpipe.engine.links.message import Received, Tree, leaves, map_tree
from ds_vpipe.engine.links.tensor_bytes import TensorBytes
from ds_vpipe.errors import PipelinePeerError

_POLL_S = 0.05
_PATIENCE_S = 2.0  # for transfers from ranks that are well, once another has failed
_END_S = 10.0  # for the other end, whose watch over failures answers within a second
_ARRIVED, _ENDS, _SENT = "arrived", "the receiver ends", "sent in all"


class Counts:
    """What the two ends of a link tell each other, through the store.

    Args:
        groups: of this rank.
        group: of the two ranks.
    """

    def __init__(self, groups: Groups, group: Group) -> None:
        self._groups, self._name = groups, group.name
        self._gone = False  # torch prints a stack with every further question

    def tell(self, what: str, count: int) -> None:
        """Leave a count for the other end, from any thread."""
        with suppress(RuntimeError):  # the store is gone, and with it all who would ask
            self._groups.tell_beside(f"{self._name}: {what}", str(count))

    def told(self, what: str) -> int | None:
        """The other end's count, or None if there is none.

        Raises:
            RuntimeError: the store is gone.
        """
        if self._gone:
            raise RuntimeError("the store is gone")
        try:
            found = self._groups.told(f"{self._name}: {what}")
        except RuntimeError:
            self._gone = True
            raise
        return None if found is None else int(found)


class NcclSends:
    """Tensors on their way from this stage's accelerator.

    Args:
        group: of the two ranks, over NCCL.
        peer: the stage at the other end.
        copies: of this stage.
        counts: of the link.
    """

    def __init__(self, group: Group, peer: Peer, copies: DeviceCopies, counts: Counts) -> None:
        self._group, self._peer, self._copies, self._counts = group, peer, copies, counts
        self._sent, self._ended = 0, False
        self._lock = threading.Lock()  # the watch over failures may end what the stage's own thread sends
        self._kept: list[tuple[tuple[torch.Tensor, ...], torch.Event]] = []
        group.failures.regularly(self.look)

    def send(self, tree: Tree) -> tuple[Tree, int]:
        """Queue the transfer of the tensors in the accelerator's memory, if the receiver has not ended.

        Returns:
            The tree with their descriptions, and their bytes.
        """
        accelerator = self._copies.accelerator
        accelerator.refuse_others(leaves(tree))
        tensors = tuple(leaf for leaf in leaves(tree) if leaf is not None and accelerator.holds(leaf))
        layout = TensorBytes.of(tensors)

        def pack_and_send() -> None:
            data = accelerator.memory(layout.size)
            layout.pack(data, tensors)
            self._group.send(data, self._peer.rank, 0)  # torch keeps its memory from other use until then

        with self._lock:
            if layout.size and not self._ended:
                self._kept.append((tensors, self._copies.leaving(pack_and_send)))
                self._sent += 1
        return map_tree(lambda one: _described(one) if accelerator.holds(one) else one, tree), layout.size

    def copied(self) -> None:
        """Let what is queued from now on change tensors that have been sent."""
        if self._kept:
            self._copies.wait(self._kept[-1][1])
            self._kept.clear()

    def wait(self, deadline: float) -> None:
        """Wait until the receiver has all tensors, until ``deadline``, or for a failure."""
        failures = self._group.failures
        try:
            while not failures.failing and time.monotonic() < deadline:
                if (self._counts.told(_ARRIVED) or 0) >= self._sent:
                    return
                time.sleep(_POLL_S)
        except RuntimeError:  # the store is gone, with a rank that has left: nobody can say any more
            time.sleep(max(0.0, min(_PATIENCE_S, deadline - time.monotonic())))

    def look(self, failed_at: float | None) -> None:
        """What the watch over failures does: answer a receiver that ends."""
        if not self._ended and self._counts.told(_ENDS) is not None:
            self._end_sending()

    def close(self, deadline: float) -> None:
        """Let the receiver take what has been sent, unless it takes too long, and end the communicator."""
        self._end_sending()
        self.wait(min(deadline, time.monotonic() + _END_S))
        end(self._group)

    def _end_sending(self) -> None:
        with self._lock:
            self._ended = True
        self._counts.tell(_SENT, self._sent)


@dataclass
class Arriving:
    """A message whose tensors a receive has been posted for; ``data`` holds them once ``event`` has happened."""

    message: Received
    data: torch.Tensor | None = None
    tensors: Sequence[torch.Tensor] = ()
    event: torch.Event | None = None


class NcclReceives:
    """Tensors on their way to this stage's accelerator.

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
        self._lock = threading.Lock()
        self._posted = self._seen = self._told = 0
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
        rest = iter(tensors)
        tree = map_tree(lambda one: next(rest) if one.is_meta else one, message.tree)
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
        pauses, self._seen = self._posted == self._seen, self._posted
        oldest = self._oldest()
        if oldest is None:
            if pauses:  # nobody asks before
                self._give_receipt()
            return None
        begin, what = oldest
        limit = self._group.timeout_s
        if failed_at is not None:
            begin, limit = max(begin, failed_at), _PATIENCE_S
        if time.monotonic() < begin + limit:
            return None
        end(self._group)
        return str(self._overdue(what))

    def close(self, deadline: float, take: Callable[[], None]) -> None:
        """Receive what has been sent, unless a rank has failed or it takes too long, and end the communicator.

        Args:
            deadline: as ``time.monotonic()`` says it.
            take: posts receives for messages that have come.

        Raises:
            PipelinePeerError: a transfer did not come in time.
        """
        failures, limit = self._group.failures, min(deadline, time.monotonic() + _END_S)
        self._counts.tell(_ENDS, self._posted)
        with suppress(RuntimeError):  # the store is gone, with all who might say
            while not failures.failing and time.monotonic() < limit:
                sent = self._counts.told(_SENT)
                if sent is not None and self._posted >= sent:
                    break
                take()
                time.sleep(_POLL_S)
        while (oldest := self._oldest()) is not None and not failures.failing and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if oldest is None:
            self._give_receipt()
        end(self._group)
        if oldest is not None and not failures.failing:
            raise self._overdue(oldest[1])

    def _oldest(self) -> tuple[float, str] | None:
        """When the oldest receive that is under way was posted, and its name."""
        with self._lock:  # two threads ask
            while self._under_way and self._under_way[0][0].query():
                self._under_way.popleft()
            return self._under_way[0][1:] if self._under_way else None

    def _give_receipt(self) -> None:
        if self._told != self._posted:
            self._told = self._posted
            self._counts.tell(_ARRIVED, self._told)

    def _overdue(self, what: str) -> PipelinePeerError:
        group = self._group
        what = f"the tensors of {what} from {self._peer}"
        return failed_wait(group.me, None, what, TimeoutError("Timed out"), group.timeout_s)


def _described(tensor: torch.Tensor) -> torch.Tensor:
    size, strides = tensor.shape, tensor.stride()
    return torch.empty_strided(size, strides, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
