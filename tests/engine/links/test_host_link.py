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
from ds_vpipe.engine.links.message import Message, Packer, announcement, unpack
from ds_vpipe.engine.links.send_thread import SendThread
from ds_vpipe.errors import PipelineProtocolError


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


class Garbage(Backend):
    """Receives always find ``content``."""

    def __init__(self, content: torch.Tensor) -> None:
        super().__init__()
        self.content = content

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        tensors[0].zero_()[: len(self.content)] = self.content[: len(tensors[0])]
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


def test_conjugates_leave_a_device() -> None:
    """Torch would conjugate what is in the buffer before their bytes have come."""
    copies = simulated_copies(early=0.0)
    backend, thread = Backend(), SendThread()
    sender = HostSender(group_of(backend), Peer(1, 1), 1, copies=copies, runner=thread)
    turned = torch.tensor([1 + 2j, 3 - 4j]).conj()
    sender.send(Message.ACTIVATION, 0, (turned, turned.imag))
    thread.settle()
    thread.stop()
    assert [tensor.tolist() for tensor in unpack(backend.sent[-1]).tree] == [[1 - 2j, 3 + 4j], [-2, 4]]
    copies.accelerator.end()  # type: ignore[attr-defined]


def test_receives_are_posted_while_the_send_thread_waits_for_a_device() -> None:
    backend, thread, gate = Backend(), SendThread(), threading.Event()
    copies: DeviceCopies = simulated_copies()
    receiver = HostReceiver(group_of(backend), Peer(1, 1), 1, copies=copies, runner=thread)
    thread.submit(gate.wait)
    assert receiver.receive("RECV_ACT0").tree.tolist() == [1, 1, 1]
    assert len(backend.posted) == 2
    gate.set()
    thread.stop()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (torch.full((4096,), 0xA5, dtype=torch.uint8), "a header of -"),
        (torch.zeros(0, dtype=torch.uint8), "a header of 0 words"),
        (announcement(2**60), f"it announces {2**60} bytes, this host has"),
        (Packer().pack(Message.ABORT, 0, None).data, "a failure without a text"),
    ],
)
def test_garbage_of_a_peer_ends_in_one_line_without_an_allocation(content: torch.Tensor, why: str) -> None:
    backend = Garbage(content)
    receiver = HostReceiver(group_of(backend), Peer(1, 1), 1)
    with pytest.raises(PipelineProtocolError, match=why) as error:
        receiver.receive("RECV_ACT0")
    assert str(error.value).startswith("stage 0 (rank 0): what came as RECV_ACT0 from stage 1 (rank 1) is no message")
    assert "\n" not in str(error.value)
    assert sum(data.numel() for data in backend.posted) < 20_000
