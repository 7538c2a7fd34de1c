"""A failing stage's ABORT leaves on every link, whatever has failed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_vpipe.engine.courier import Courier
from ds_vpipe.engine.link import Peer
from ds_vpipe.engine.sender import Sender, abort_all
from ds_vpipe.engine.wire import Message, unpack


class Backend:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.sent += tensors
        return SimpleNamespace(wait=lambda limit: True)


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_group_rank", lambda group, rank: rank)


def sender(backend: Any, courier: Courier, pin: bool = False) -> Sender:
    return Sender(backend, Peer(0, 0), Peer(1, 1), 2, 5.0, pin=pin, runner=courier)


def reasons(backend: Backend) -> list[str]:
    return [bytes(message.tree.tolist()).decode() for message in map(unpack, backend.sent)]


def test_abort_leaves_on_every_link_though_a_message_could_not_be_copied() -> None:
    courier, backends = Courier(), [Backend(), Backend()]
    senders = [sender(backend, courier) for backend in backends]

    def fail(*_: Any) -> None:
        raise ValueError("copy")

    senders[0]._packer.fill = fail  # type: ignore[method-assign]
    senders[0].send(Message.ACTIVATION, 0, torch.ones(3))
    while not courier._errors:
        pass
    del senders[0]._packer.fill
    abort_all(senders, "reason")
    assert [reasons(backend) for backend in backends] == [["reason"], ["reason"]]
    courier.stop()


def test_messages_of_the_host_leave_after_the_device_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(wait_event=broken, synchronize=broken))
    for name in ("current_stream", "stream", "synchronize", "Event"):
        monkeypatch.setattr(torch.cuda, name, broken)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **k: broken() if pin_memory else empty(*a, **k))
    courier, backend = Courier(), Backend()
    link = sender(backend, courier, pin=True)
    with pytest.raises(RuntimeError, match="device-side assert"):
        link.send(Message.ACTIVATION, 0, torch.ones(3))
    link.send(Message.END, 1, torch.tensor([1, 1, 0, 0]))
    link.send(Message.NEWS, 2, torch.zeros(2, 2))
    link.send(Message.QUIESCE, 3, None)
    abort_all([link], "reason")
    kinds = [unpack(data).kind for data in backend.sent]
    assert kinds == [Message.END, Message.NEWS, Message.QUIESCE, Message.ABORT]
    courier.stop()
