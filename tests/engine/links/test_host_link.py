"""Buffers of links over gloo, and what a stage does itself while its send thread waits for a device."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_device import simulated_copies

from ds_vpipe.engine.links.device import DeviceCopies
from ds_vpipe.engine.links.groups import Group, Peer
from ds_vpipe.engine.links.host_link import HostReceiver, HostSender
from ds_vpipe.engine.links.message import Message, Packer
from ds_vpipe.engine.links.send_thread import SendThread


class Backend:
    """Keeps what is sent, and where receives were posted; the first of those gets a message."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.posted: list[torch.Tensor] = []

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.sent += tensors
        return SimpleNamespace(wait=lambda limit: True)

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        if not self.posted:
            message = Packer().pack(Message.ACTIVATION, 0, torch.ones(3)).data
            tensors[0][: len(message)] = message
        self.posted += tensors
        return SimpleNamespace(wait=lambda limit: True)


def group_of(backend: Any) -> Group:
    failures: Any = None
    return Group("test", backend, (0, 1), Peer(0, 0), 5.0, failures)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_buffer_is_used_again_once_its_message_has_been_received(on_device: bool) -> None:
    copies = simulated_copies() if on_device else None
    backend, thread = Backend(), SendThread()
    sender = HostSender(group_of(backend), Peer(1, 1), 1, copies=copies, runner=thread)
    for number in range(4):
        if number == 3:
            sender.release(0)
        sender.send(Message.ACTIVATION, number, torch.full((2000,), float(number)))
        thread.settle()
    first, second, third, fourth = [data.data_ptr() for data in backend.sent if data.numel() > 8000]
    assert len({first, second, third}) == 3
    assert fourth == first
    thread.stop()


def test_receives_are_posted_while_the_send_thread_waits_for_a_device() -> None:
    backend, thread, gate = Backend(), SendThread(), threading.Event()
    copies: DeviceCopies = simulated_copies()
    receiver = HostReceiver(group_of(backend), Peer(1, 1), 1, copies=copies, runner=thread)
    thread.submit(gate.wait)
    assert receiver.receive("RECV_ACT0").tree.tolist() == [1, 1, 1]
    assert len(backend.posted) == 2
    gate.set()
    thread.stop()
