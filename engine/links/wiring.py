"""Choice of the payload of each link, and the two ends of every link.

``shared`` needs two processes of one host. Whether they are is not guessed from names of hosts, of which containers may
have one of their own each: the two ranks try to connect. ``ipc`` and ``nccl`` need GPUs, and are not chosen by
themselves.
"""

from __future__ import annotations

import os
import socket
import struct
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from typing import Any, Literal

from ds_vpipe.engine.links.device import DeviceCopies
from ds_vpipe.engine.links.groups import Group, Groups, Peer
from ds_vpipe.engine.links.host_link import Channel, HostReceiver, HostSender
from ds_vpipe.engine.links.idle_thread import IdleThread
from ds_vpipe.engine.links.ipc_link import IpcReceiver, IpcSender
from ds_vpipe.engine.links.link import Receiver, Sender
from ds_vpipe.engine.links.nccl_link import Communicator, NcclReceiver, NcclSender
from ds_vpipe.engine.links.send_thread import SendThread
from ds_vpipe.engine.links.shared_link import (
    Connection,
    SharedReceiver,
    SharedSender,
    close_when_forked,
    without_memory,
)
from ds_vpipe.errors import VPipeConfigError

Payload = Literal["auto", "shared", "ipc", "nccl", "host"]
_END_S = 10.0  # for neighbours, whose threads answer within a second
MOST_AHEAD = 32
"""Messages that a socket has room for, each of the largest that go through it whole; in fact there is more."""


def refuse_payload(
    payload: Payload, copies: DeviceCopies | None, me: Peer, of_all: Callable[[Any, str], list[Any]]
) -> None:
    """Refuse a payload that does not work on a rank; all ranks call it. ``of_all`` gives the values of all ranks."""
    if payload not in ("shared", "ipc", "nccl"):
        return
    place = ""  # of GPUs, as NCCL tells them apart
    if payload == "shared":
        reason = without_memory(copies)
    elif copies is None:
        reason = "computes on the CPU"
    elif payload == "ipc":
        reason = without_memory() or copies.accelerator.without_sharing()
    elif (reason := copies.accelerator.without_nccl()) is None:
        place = copies.accelerator.place()
    found = of_all((str(me), reason, place), f'all ranks to look at "link": "{payload}"')
    line = next((f"{stage} {reason}" for stage, reason, _ in found if reason is not None), None)
    places: dict[str, str] = {}
    for stage, _, place in found if line is None else ():
        if place and (other := places.setdefault(place, stage)) != stage:
            line = f"{other} and {stage} share a GPU and, to NCCL, a host; NCCL_HOSTID may give each its own"
            break
    if line is not None:
        raise VPipeConfigError(f'vpipe.link: got "{payload}", and {line}; allowed here: "auto", "host"; change the key')


class Wiring:
    """Maker of the links of one engine; all ranks make the same ones in the same order.

    Payload ``auto`` takes ``shared`` where it works, else ``host``. ``copies`` are those of the accelerator that the
    stage computes on, if any.
    """

    def __init__(self, groups: Groups, copies: DeviceCopies | None, payload: Payload) -> None:
        self._groups, self.copies, self._payload = groups, copies, payload
        self._sockets: dict[int, socket.socket | None] = {}  # by the rank at the other end; None if it is elsewhere
        self._made: dict[tuple[str, int], Group] = {}
        self._device_ends: list[NcclReceiver | NcclSender | IpcReceiver | IpcSender] = []
        self._thread: SendThread | None = None
        self._idle: IdleThread | None = None

    def sender(
        self, name: str, peer: Peer, prefetch: int, channel: Channel = Channel.TRAINING, threaded: bool = False,
        small: bool = False,
    ) -> Sender:  # fmt: skip
        """Sending end of a link to ``peer``.

        Args:
            name: of the link, the same on both ends; links of two channels may share it.
            peer: the stage at the other end.
            prefetch: messages that the receiver takes ahead.
            channel: of the name.
            threaded: whether messages may be packed in a thread, until :meth:`Sender.wait_until_copied`.
            small: whether all its messages are, so that it needs no communicator.

        Raises:
            VPipeConfigError: the payload that was asked for does not work between the two.
        """
        if self._shares_memory_with(peer, prefetch):
            if self._payload == "ipc" and self.copies is not None:
                end = IpcSender(self._connection(name, peer, channel), self.copies, threaded)
                self._device_ends.append(end)
                return end
            thread = self._send_thread(self.copies is not None)
            return SharedSender(self._connection(name, peer, channel), self.copies, thread, threaded)
        copies = self._copies_for_nccl(channel, small)
        if copies is not None:
            control = self._group(name, peer)
            group = self._groups.between_devices(control, name, copies.accelerator, sends=True)
            sender = NcclSender(control, peer, prefetch, threaded, copies, Communicator(self._groups, group))
            self._idle_thread(copies).add(sender.answer)
            self._device_ends.append(sender)
            return sender
        thread = self._send_thread(threaded or self.copies is not None)
        return HostSender(self._group(name, peer), peer, prefetch, channel, self.copies, thread, threaded)

    def receiver(
        self, name: str, peer: Peer, prefetch: int, channel: Channel = Channel.TRAINING, threaded: bool = False,
        small: bool = False,
    ) -> Receiver:  # fmt: skip
        """Receiving end of a link from ``peer``; see :meth:`sender`."""
        if self._shares_memory_with(peer, prefetch):
            if self._payload == "ipc" and self.copies is not None:
                taken = IpcReceiver(self._connection(name, peer, channel), self.copies)
                self._idle_thread(self.copies).add(taken.give_back)
                self._device_ends.append(taken)
                return taken
            thread = self._send_thread(self.copies is not None)
            return SharedReceiver(self._connection(name, peer, channel), self.copies, thread)
        copies = self._copies_for_nccl(channel, small)
        if copies is not None:
            control = self._group(name, peer)
            group = self._groups.between_devices(control, name, copies.accelerator, sends=False)
            receiver = NcclReceiver(control, peer, prefetch, copies, Communicator(self._groups, group))
            self._idle_thread(copies).add(receiver.take_if_idle)
            self._device_ends.append(receiver)
            return receiver
        return HostReceiver(self._group(name, peer), peer, prefetch, channel, self.copies, self._send_thread(threaded))

    def stop(self) -> None:
        """End communicators, once what has been sent and posted is there, and threads, if there are any."""
        now = time.monotonic()
        limit, deadline = now + _END_S, now + self._groups.timeout_s  # of all together
        with ExitStack() as ends:  # all of them, whatever one raises
            for thread in (self._thread, self._idle):
                if thread is not None:
                    ends.callback(thread.stop)
            while self._device_ends:  # once
                end = self._device_ends.pop()
                end.begin_to_close()
                ends.callback(end.close, limit, deadline)

    def _copies_for_nccl(self, channel: Channel, small: bool) -> DeviceCopies | None:
        """Copies of a stage whose tensors go over NCCL; None for a link whose tensors do not.

        An evaluation overtakes activations that have been sent ahead, for which one communicator has no means, and is
        too rare for another.
        """
        return self.copies if self._payload == "nccl" and channel is Channel.TRAINING and not small else None

    def _idle_thread(self, copies: DeviceCopies) -> IdleThread:
        self._idle = self._idle or IdleThread(copies.accelerator)
        return self._idle

    def _send_thread(self, wanted: bool) -> SendThread | None:
        if wanted and self._thread is None:
            self._thread = SendThread()
            if self.copies is not None:
                self._thread.submit(self.copies.accelerator.use)
        return self._thread if wanted else None

    def _group(self, name: str, peer: Peer) -> Group:
        key = name, peer.rank
        if key not in self._made:
            self._made[key] = self._groups.of(name, sorted((self._groups.me.rank, peer.rank)))
        return self._made[key]

    def _shares_memory_with(self, peer: Peer, prefetch: int) -> bool:
        if prefetch > MOST_AHEAD and self._payload not in ("shared", "ipc"):
            return False
        if peer.rank not in self._sockets:
            found = None if self._payload in ("host", "nccl") else self._connect(peer)
            if found is None and self._payload in ("shared", "ipc"):
                line = (
                    f'vpipe.link: got "{self._payload}", and {self._groups.me} and {peer} are not processes of one '
                    f'Linux host and user that may share memory; allowed here: "auto", "host"; change the key'
                )
                self._groups.failures.publish(line)  # others wait for one of the two
                self._groups.failures.wait_until_seen()
                raise VPipeConfigError(line)
            self._sockets[peer.rank] = found
            self._groups.failures.breaks(found)
            if found is not None:
                close_when_forked(found)
        if prefetch > MOST_AHEAD:
            raise VPipeConfigError(
                f'vpipe.link: got "{self._payload}", and {self._groups.me} and {peer} are {prefetch - 1} micro-batches '
                f'apart; allowed are {MOST_AHEAD - 1}, or "auto" or "host"; change the key, or the depths'
            )
        return self._sockets[peer.rank] is not None

    def _connect(self, peer: Peer) -> socket.socket | None:
        """Socket to the other rank, on which those of links travel; None if the two share no memory.

        The address is an abstract one: no file is left behind. Processes of other users are refused.
        """
        groups, able = self._groups, without_memory(self.copies) is None
        low, high = sorted((groups.me.rank, peer.rank))
        pair = f"socket of {low} and {high}"
        if groups.me.rank == high:
            address = groups.wait_for(f"{pair}: address", peer)
            found = _connected(address, groups.timeout_s) if able and address else None
            groups.put(f"{pair}: answer", "" if found is None else "connected")
            return found
        address = f"ds_vpipe-{uuid.uuid4()}" if able else ""
        with _socket(groups.timeout_s) if able else nullcontext() as server:
            if server is not None:
                groups.failures.breaks(server)
                server.bind(f"\0{address}")
                server.listen()
            groups.put(f"{pair}: address", address)
            if not groups.wait_for(f"{pair}: answer", peer) or server is None:
                return None
            try:
                while not _is_of_same_user(accepted := server.accept()[0]):
                    accepted.close()
            except OSError as error:
                raise groups.failed(f"{peer} to connect ({pair})", error) from error
            accepted.settimeout(groups.timeout_s)
            return accepted

    def _connection(self, name: str, peer: Peer, channel: Channel) -> Connection:
        """A link's own socket, which the lower rank makes."""
        groups, pair = self._groups, self._sockets[peer.rank]
        assert pair is not None
        link = f"{name}, channel {channel.value}".encode()
        try:
            if groups.me.rank < peer.rank:
                end, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                with other:
                    socket.send_fds(pair, [link], [other.fileno()])
            else:
                given, descriptors, *_ = socket.recv_fds(pair, 1024, 1)
                if given != link:
                    raise ConnectionError(f"connection closed, or another link: {given.decode()!r}")
                end = socket.socket(fileno=descriptors[0])
                end.set_inheritable(False)  # programs that a script starts would keep it open after this process
        except OSError as error:
            raise groups.failed(f"{peer} to connect ({link.decode()})", error) from error
        return Connection(end, groups.me, peer, groups.timeout_s, groups.failures)


def _socket(timeout_s: float) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.settimeout(timeout_s)
    return made


def _connected(address: str, timeout_s: float) -> socket.socket | None:
    made = _socket(timeout_s)
    with suppress(OSError):
        made.connect(f"\0{address}")
        if _is_of_same_user(made):
            return made
    made.close()
    return None


def _is_of_same_user(end: socket.socket) -> bool:
    _, user, _ = struct.unpack("iii", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(user == os.getuid())
