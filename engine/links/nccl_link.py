"""Links between GPUs: messages over gloo, tensors over NCCL beside them (:mod:`ds_vpipe.engine.links.nccl_payload`)."""

from __future__ import annotations

import threading
from collections import deque

from ds_vpipe.engine.links.groups import Group, Peer
from ds_vpipe.engine.links.host_link import HostReceiver, HostSender
from ds_vpipe.engine.links.message import Message, Received, Tree, has_come
from ds_vpipe.engine.links.nccl_payload import Arriving, NcclReceives, NcclSends
from ds_vpipe.errors import one_line


class NcclSender(HostSender):
    """Sending end of a link over NCCL.

    Args:
        group: of the two ranks, over gloo.
        peer: the stage at the other end.
        prefetch: messages that the receiving end takes ahead.
        threaded: tensors that are sent are not changed before :meth:`copied`.
        tensors: sends those in the accelerator's memory.
    """

    payload = "nccl"

    def __init__(self, group: Group, peer: Peer, prefetch: int, threaded: bool, tensors: NcclSends) -> None:
        super().__init__(group, peer, prefetch, threaded=threaded)
        self._tensors = tensors

    def send(self, kind: Message, micro_batch: int, tree: Tree, note: int = 0) -> int:
        beside = 0
        if not kind.on_host:
            tree, beside = self._tensors.send(tree)
        self.bytes_sent += beside
        return beside + super().send(kind, micro_batch, tree, note)

    def copied(self) -> None:
        self._tensors.copied()
        super().copied()

    def wait_for_all(self, deadline: float) -> None:
        super().wait_for_all(deadline)
        self._tensors.wait(deadline)


class NcclReceiver(HostReceiver):
    """Receiving end of a link over NCCL.

    Args:
        group: of the two ranks, over gloo.
        peer: the stage at the other end.
        prefetch: messages that are taken ahead.
        tensors: receives those in the accelerator's memory.
    """

    def __init__(self, group: Group, peer: Peer, prefetch: int, tensors: NcclReceives) -> None:
        super().__init__(group, peer, prefetch)
        self._tensors = tensors
        self._early: deque[Arriving | Exception] = deque()  # taken before the stage has asked for them
        self._taking = threading.Lock()
        self._taken = self._seen = 0

    def _next(self, what: object) -> Received:
        with self._taking:
            if not self._early:
                self._take(str(what))
            found = self._early[0]
            if isinstance(found, Exception):  # it stays: what follows would get its bytes
                raise found
            self._early.popleft()
        return self._tensors.arrived(found)

    def keep_posted(self, prefetch: int) -> None:
        with self._taking:
            super().keep_posted(prefetch)

    def take_if_idle(self) -> None:
        """:meth:`take_early` if the stage has not asked for a message lately."""
        idle, self._seen = self._taken == self._seen, self._taken
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

    def begin_to_close(self) -> None:
        """:meth:`NcclReceives.begin_to_close`."""
        self._tensors.begin_to_close()

    def close(self, limit: float, deadline: float) -> None:
        """:meth:`NcclReceives.close`, with the messages that come meanwhile.

        Raises:
            Exception: one could not be taken; all ranks know then why the communicator ends under those that follow.
        """
        failures, unknown = self._group.failures, None

        def take() -> bool:
            nonlocal unknown
            if not self.take_early() and not failures.failing and self._error is not None:
                unknown = self._error
                failures.publish(f"{self._me} failed in receiving from {self.peer}: {one_line(unknown)}")
                failures.wait_until_seen()
            return self._error is None

        self._tensors.close(limit, deadline, take)
        if unknown is not None:
            raise unknown

    def _take(self, what: str = "") -> None:
        """Take the next message, or the error of doing so."""
        try:
            message = super()._next(what or "a message")
            self._taken += 1
            self._early.append(self._tensors.post(message, what or f"{message.kind.name}{message.micro_batch}"))
        except Exception as error:
            self._early.append(error)

    @property
    def _error(self) -> Exception | None:
        last = self._early[-1] if self._early else None
        return last if isinstance(last, Exception) else None
