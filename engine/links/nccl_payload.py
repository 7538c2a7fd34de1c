"""Tensors of links between GPUs, over NCCL.

The messages of such a link go over gloo as ever (:mod:`ds_vpipe.engine.links.host_link`), but tensors in an
accelerator's memory are only described in them. Their bytes go from device to device, those of a message in one piece,
through a communicator of the two ranks that is this link's alone:

* The sender packs them beside the computation, which waits for these copies alone and never for the receiver. Then it
  queues the transfer, and then the message leaves. So a receive is posted for what is under way, with its exact size:
  none occupies the device before, and an end of the data or a failure in the place of a message needs none.
* The two ends post in the order of messages, whatever their schedules do.
* The receiving stage waits for messages alone. What it queues afterwards waits for the tensors.

Every wait here has a name and a limit. NCCL itself has none: a transfer may rest for as long as a script does between
two batches. So the watch over failures looks after receives, and ends the communicator of one that takes too long.
A sender cannot know when its tensors have arrived. Before a process ends it asks for the receiver's count of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from ds_vpipe.engine.links.device import DeviceCopies
from ds_vpipe.engine.links.groups import Group, Peer, end, failed_wait
from ds_vpipe.engine.links.message import Received, Tree, leaves, map_tree
from ds_vpipe.engine.links.tensor_bytes import TensorBytes
from ds_vpipe.errors import PipelinePeerError

_POLL_S = 0.05
_PATIENCE_S = 2.0  # for transfers from ranks that are well, once another has failed


class NcclSends:
    """Tensors on their way from this stage's accelerator.

    Args:
        group: of the two ranks, over NCCL.
        peer: the stage at the other end.
        copies: of this stage.
        arrived: how many transfers the receiver has said that it has got, as a text; None if it has not. It raises
            RuntimeError if nobody can say.
    """

    def __init__(self, group: Group, peer: Peer, copies: DeviceCopies, arrived: Callable[[], str | None]) -> None:
        self._group, self._peer, self._copies, self._arrived = group, peer, copies, arrived
        self._sent = 0
        self._kept: list[tuple[tuple[torch.Tensor, ...], torch.Event]] = []

    def send(self, tree: Tree) -> tuple[Tree, int]:
        """Queue the transfer of the tensors in the accelerator's memory.

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

        if layout.size:
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
            while int(self._arrived() or 0) < self._sent and not failures.failing and time.monotonic() < deadline:
                time.sleep(_POLL_S)
        except RuntimeError:  # the store is gone, with a rank that has left: nobody can say any more
            time.sleep(max(0.0, min(_PATIENCE_S, deadline - time.monotonic())))

    def close(self, deadline: float) -> None:
        """End the communicator at once; what has not been received is lost."""
        end(self._group)


class NcclReceives:
    """Tensors on their way to this stage's accelerator.

    Args:
        group: of the two ranks, over NCCL.
        peer: the stage at the other end.
        copies: of this stage.
        tell: leaves the number of transfers that have arrived for the sender.
    """

    def __init__(self, group: Group, peer: Peer, copies: DeviceCopies, tell: Callable[[str], None]) -> None:
        self._group, self._peer, self._copies, self._tell = group, peer, copies, tell
        self._stream = copies.accelerator.stream()
        self._under_way: deque[tuple[torch.Event, float, str]] = deque()
        self._lock = threading.Lock()
        self._posted = self._seen = self._told = 0
        group.failures.regularly(self.look)

    def arrived(self, message: Received, what: str) -> Received:
        """The message with the tensors that it describes, for which what is queued from now on waits."""
        described = [leaf for leaf in leaves(message.tree) if leaf is not None and leaf.is_meta]
        if not described:
            return message
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
        self._copies.wait(event)
        for tensor in (data, *tensors):
            accelerator.used_on(tensor, accelerator.current_stream())
        rest = iter(tensors)
        tree = map_tree(lambda one: next(rest) if one.is_meta else one, message.tree)
        return replace(message, tree=tree, size=message.size + layout.size)

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

    def close(self, deadline: float) -> None:
        """Wait until ``deadline`` for what has been posted, unless a rank has failed, and end the communicator.

        Raises:
            PipelinePeerError: it did not come in time.
        """
        failures = self._group.failures
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
            with suppress(RuntimeError):  # the store is gone, and with it all who would ask
                self._tell(str(self._told))

    def _overdue(self, what: str) -> PipelinePeerError:
        group = self._group
        what = f"the tensors of {what} from {self._peer}"
        return failed_wait(group.me, None, what, TimeoutError("Timed out"), group.timeout_s)


def receipt_of(group: Group) -> str:
    """Key of the count of a link's transfers that have arrived."""
    return f"{group.name}: arrived"


def _described(tensor: torch.Tensor) -> torch.Tensor:
    size, strides = tensor.shape, tensor.stride()
    return torch.empty_strided(size, strides, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
