"""Ends of links: asynchronous, ordered messages from one rank to another.

Sends do not wait for the receiver. Every wait has a limit and a name: a timeout, a lost peer and a peer's own failure
all end it with a :class:`~ds_vpipe.errors.PipelinePeerError`, which says who waited, for what, and from whom.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

import torch

from ds_vpipe.engine.links.groups import Peer
from ds_vpipe.engine.links.message import MalformedMessageError, Message, Received, Tree
from ds_vpipe.engine.links.send_thread import Immediate, Runner
from ds_vpipe.errors import PipelinePeerError, PipelineProtocolError

ABORT_GRACE_S = 5.0
"""Limit of a failing stage for sending the reason to its neighbours."""
_REASON_BYTES = 1024  # so that it needs no memory, which may be what has failed


class Sender(ABC):
    """Sending end of a link.

    Attributes:
        payload: how tensors travel, such as "shared" (memory); each kind of link sets it.
        peer: the stage at the other end.
        bytes_sent: so far.
        waited_s: seconds spent so far waiting for copies.
    """

    payload: str

    def __init__(self, peer: Peer, runner: Runner | None) -> None:
        self.peer = peer
        self._runner = runner or Immediate()
        self.bytes_sent = 0
        self.waited_s = 0.0

    @abstractmethod
    def send(self, kind: Message, micro_batch: int, tree: Tree, note: int = 0) -> int:
        """Start sending ``tree`` and return its size in bytes.

        Raises:
            VPipeError: the tree holds something that cannot be sent.
        """

    @abstractmethod
    def wait_until_copied(self) -> None:
        """Wait until tensors sent so far may be changed."""

    def release(self, number: int) -> None:  # noqa: B027 - nothing where the receiver gives memory back
        """Recycle buffers up to the first message ``number``, if it is still kept: it has been received."""

    def flush(self) -> None:
        """Wait until no message needs this process any more."""
        self.throttle(0)

    @abstractmethod
    def throttle(self, under_way: int) -> None:
        """Wait until the receiver has all messages but the latest ``under_way``."""

    def wait_for_all(self, deadline: float) -> None:
        """:meth:`flush` until ``deadline`` (``time.monotonic()``), without an error."""
        with suppress(Exception):  # what a task has raised comes after all are done
            self._runner.settle(max(0.01, deadline - time.monotonic()))  # one may wait for a device that hangs

    def keep_posted(self, prefetch: int) -> None:  # noqa: B027 - nothing where no receives are posted
        """Count on ``prefetch`` receives ahead, if that is more than before; only while nothing is under way."""


class Receiver(ABC):
    """Receiving end of a link.

    Attributes:
        peer: the stage at the other end.
        bytes_received: so far.
        waited_s: seconds spent waiting in :meth:`receive` so far.
    """

    def __init__(self, me: Peer, peer: Peer) -> None:
        self.peer = peer
        self.bytes_received = 0
        self.waited_s = 0.0
        self._me = me

    def receive(self, what: object) -> Received:
        """Wait for the next message.

        Args:
            what: text of what is expected, such as ``RECV_GRAD7``, for the message of a failure.

        Raises:
            PipelineProtocolError: what came is no message.
        """
        try:
            message = self._next(what)
            reason = _reason(message.tree) if message.kind is Message.ABORT else None
        except MalformedMessageError as error:
            raise PipelineProtocolError(
                f"{self._me}: what came as {what} from {self.peer} is no message of ds_vpipe: {error}; start all ranks "
                f"with the same version, on a network where nobody else writes to their ports"
            ) from error
        self.bytes_received += message.size
        if reason is not None:
            raise PipelinePeerError(f"{self._me} stopped waiting for {what} from {self.peer}: {reason}", reason)
        return message

    def keep_posted(self, prefetch: int) -> None:  # noqa: B027 - nothing where no receives are posted
        """Keep ``prefetch`` receives ahead, if that is more than before; only while nothing is under way."""

    def leave(self) -> None:  # noqa: B027 - nothing where a sender does not wait for receives to be posted
        """Receive no more, as when this process ends: the sender waits no longer."""

    @abstractmethod
    def _next(self, what: object) -> Received:
        """The next message, also of a failure.

        Raises:
            MalformedMessageError: what came is no message.
        """


def _reason(text: Tree) -> str:
    """Text of a message about the peer's failure."""
    if not isinstance(text, torch.Tensor) or text.dtype != torch.uint8 or text.dim() != 1:
        raise MalformedMessageError("a failure without a text")
    return bytes(text.tolist()).decode(errors="replace")


def abort_all(senders: Sequence[Sender], reason: str) -> None:
    """Send ``reason`` over every link, with a short time limit."""
    text = torch.frombuffer(bytearray(reason.encode()[:_REASON_BYTES]), dtype=torch.uint8)
    for sender in senders:
        with suppress(PipelinePeerError):  # it is lost, or does not read
            sender.send(Message.ABORT, 0, text)
    deadline = time.monotonic() + ABORT_GRACE_S
    for sender in senders:
        sender.wait_for_all(deadline)
