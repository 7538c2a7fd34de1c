"""Links between accelerators of one host, on simulated ones: what waits for what, whose a slot is, and ends."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from simulated_device import Misuse, SimulatedAccelerator, SimulatedEvent, simulated_copies
from simulated_ipc import SharedBytes
from test_shared_link import connections, large

from ds_vpipe.engine.links import ipc_link
from ds_vpipe.engine.links.device import Accelerator, DeviceCopies
from ds_vpipe.engine.links.ipc_link import IpcReceiver, IpcSender
from ds_vpipe.engine.links.link import abort_all
from ds_vpipe.engine.links.message import Message
from ds_vpipe.engine.links.tensor_bytes import TensorBytes
from ds_vpipe.errors import PipelinePeerError, PipelineProtocolError, VPipeConfigError, VPipeError


class Link:
    """Both ends of a link, on an accelerator each."""

    def __init__(self, threaded: bool, early: float, limit_s: float) -> None:
        here, there = connections(limit_s)
        self.copies = [simulated_copies(seed, early) for seed in (1, 2)]
        self.sender = IpcSender(here, self.copies[0], threaded)
        self.receiver = IpcReceiver(there, self.copies[1])

    @property
    def waits(self) -> int:
        """Waits of the stages' own thread for an accelerator."""
        accelerators: list[Any] = [copies.accelerator for copies in self.copies]
        return sum(sum(accelerator.host_waits.values()) for accelerator in accelerators)


@contextmanager
def link(threaded: bool = False, early: float = 0.3, limit_s: float = 5.0) -> Iterator[Link]:
    made = Link(threaded, early, limit_s)
    accelerators: list[Any] = [copies.accelerator for copies in made.copies]
    try:
        yield made
        for accelerator in accelerators:
            accelerator.end()
    finally:
        for accelerator in accelerators:
            accelerator.close()


@pytest.mark.parametrize("threaded", [False, True])
def test_messages_of_any_size_arrive_in_order_without_a_wait(threaded: bool) -> None:
    chance = random.Random(int(threaded))
    with link(threaded) as made:
        for number in range(40):
            value = large(float(number), chance.choice([0, 1, 30, 700, 5_000]))
            spread = (torch.arange(12.0) + number).view(3, 4)[:, ::2]
            made.sender.send(Message.ACTIVATION, number, (value, [None, spread]))
            made.sender.send(Message.PEERS, number, torch.full((2,), number))
            if threaded:
                made.sender.wait_until_copied()
            wanted = value.clone(), spread.clone()
            value.zero_()
            spread.zero_()
            found, (none, other) = made.receiver.receive("RECV_ACT").tree
            assert none is None
            assert torch.equal(found, wanted[0])
            assert torch.equal(other, wanted[1])
            assert made.receiver.receive("RECV_PEERS").tree.tolist() == [number, number]
        made.sender.throttle(0)
        assert made.waits == 0
        assert len(made.sender._slots) <= 4


def test_slots_are_used_again_and_grow_with_messages() -> None:
    with link() as made:
        kept = []
        for number, size in enumerate([100, 100, 20_000, 200_000, 150_000, 200_000]):
            made.sender.send(Message.ACTIVATION, number, large(number, size))
            kept.append(made.receiver.receive("RECV_ACT").tree)
            settle(made)
        assert [float(tensor[-1]) for tensor in kept] == list(range(6))  # which are copies
        assert len(made.sender._slots) == 1
        made.sender.send(Message.ACTIVATION, 6, large(6, 10))
        made.sender.send(Message.ACTIVATION, 7, large(7, 10))
        assert len(made.sender._slots) == 2


def test_slots_have_room_for_messages_that_grow_a_little() -> None:
    shared = SimulatedAccelerator.shared
    with link() as made, mock.patch.object(SimulatedAccelerator, "shared", autospec=True, side_effect=shared) as asked:
        for number in range(50):
            made.sender.send(Message.ACTIVATION, number, large(number, 100_000 + 100 * number))
            made.receiver.receive("RECV_ACT")
            settle(made)
        assert asked.call_count == 1


def test_a_sender_whose_receiver_is_gone_takes_no_memory() -> None:
    with link() as made:
        made.receiver._connection.socket.close()
        for number in range(20):
            made.sender.send(Message.ACTIVATION, number, large(number))
        assert len(made.sender._slots) == 1
        with pytest.raises(PipelinePeerError, match="it is gone"):
            made.sender.flush()


def test_a_flush_waits_for_receipt() -> None:
    with link(limit_s=0.2) as made:
        made.sender.send(Message.ACTIVATION, 0, large(1.0))
        with pytest.raises(PipelinePeerError, match=r"to receive message 0: nothing came within 0\.2 s"):
            made.sender.flush()
        made.receiver.receive("RECV_ACT0")


def test_a_message_that_is_longer_than_its_slot_is_none() -> None:
    with link() as made:
        made.sender.send(Message.ACTIVATION, 0, large(1.0))
        opened, less = made.copies[1].accelerator.opened, torch.empty(1, dtype=torch.uint8)
        with (
            mock.patch.object(SimulatedAccelerator, "opened", lambda _, handle: opened(handle)._replace(data=less)),
            pytest.raises(PipelineProtocolError, match="bytes in slot 0"),
        ):
            made.receiver.receive("RECV_ACT0")


def settle(made: Link) -> None:
    """Let the receiver's copies happen, and the sender know."""
    limit = time.monotonic() + 10
    while made.sender._flags.any() and time.monotonic() < limit:
        made.receiver.give_back()
        time.sleep(0.001)
    assert not made.sender._flags.any()


def test_tensors_on_the_host_and_empty_ones_need_no_slot() -> None:
    with link() as made:
        host = torch.from_numpy(np.arange(3.0))
        made.sender.send(Message.ACTIVATION, 0, (host, torch.ones(0, 5).requires_grad_()))
        first, second = made.receiver.receive("RECV_ACT").tree
        assert first.tolist() == [0, 1, 2]
        assert (second.shape, second.requires_grad, second.is_meta) == ((0, 5), True, False)
        assert not made.sender._flags.any()


def test_tensors_of_another_device_are_refused() -> None:
    with link() as made, pytest.raises(VPipeError, match="stage boundary: got a tensor on meta"):
        made.sender.send(Message.ACTIVATION, 0, torch.empty(3, device="meta"))


def test_a_failure_needs_no_device() -> None:
    with link() as made:
        with mock.patch.object(DeviceCopies, "leaving", side_effect=RuntimeError("CUDA error")):
            with pytest.raises(RuntimeError, match="CUDA error"):
                made.sender.send(Message.ACTIVATION, 0, large(1.0))
            abort_all([made.sender], "why")
        with pytest.raises(PipelinePeerError, match="why"):
            made.receiver.receive("RECV_ACT0")


# Mistakes: each is one line of the module that is missing or in another place.


def exchange(threaded: bool = False) -> None:
    with link(threaded, early=0.2) as made:
        for number in range(60):
            made.sender.send(Message.ACTIVATION, number, large(number))
            made.sender.send(Message.ACTIVATION, number, large(number))
            made.sender.wait_until_copied()
            for _ in range(2):
                assert float(made.receiver.receive("RECV_ACT").tree[-1]) == number


def test_without_mistakes() -> None:
    exchange()
    exchange(threaded=True)


def without_record(slot: Any, layout: TensorBytes) -> None:
    layout.pack(slot.memory.data)


def record_first(slot: Any, layout: TensorBytes) -> None:
    slot.memory.written.record()
    layout.pack(slot.memory.data)


def test_a_message_that_leaves_before_its_event_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_link._Slot, "fill", without_record)
    with pytest.raises(Misuse, match="has not been recorded since the last one"):
        exchange()


def test_an_event_before_the_copy_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ipc_link._Slot, "fill", record_first)
    with pytest.raises((Misuse, AssertionError)):
        exchange()


def test_a_copy_that_waits_for_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SharedBytes, "wait", lambda shared: None)
    with pytest.raises(Misuse, match="read without a wait for its write"):
        exchange()


def test_a_slot_is_not_given_back_before_it_has_been_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the simulated accelerator the computation's wait for a copy ends it; on others it ends later."""
    happened: list[bool] = []
    monkeypatch.setattr(SimulatedEvent, "query", lambda event: bool(happened))
    with link() as made:
        for number in range(2):
            made.sender.send(Message.ACTIVATION, number, large(1.0))
            made.receiver.receive("RECV_ACT")
            made.receiver.give_back()
        assert made.sender._flags.sum() == len(made.sender._slots) == 2
        happened.append(True)
        made.receiver.give_back()
        assert made.sender._flags.sum() == 0


def changed_too_early(act: Callable[[Link, torch.Tensor], object]) -> None:
    with link(threaded=True, early=0) as made:
        made.sender.send(Message.ACTIVATION, 0, value := large(1.0))
        act(made, value)  # without wait_until_copied()
        del value
        made.receiver.receive("RECV_ACT")


def test_tensors_that_are_changed_before_their_copy_are_seen() -> None:
    with pytest.raises(Misuse, match="changed while a copy of it was pending"):
        changed_too_early(lambda _, value: value.zero_())


def test_tensors_that_are_let_go_before_their_copy_are_seen() -> None:
    with pytest.raises(Misuse, match="freed while a copy of it was pending"):
        changed_too_early(lambda made, _: made.sender._kept.clear())


# Ends


def closing_s(made: Link, limit_s: float) -> float:
    """Seconds in which the sender closes."""
    begin = time.monotonic()
    made.sender.begin_to_close()
    made.sender.close(begin + limit_s, begin + limit_s)
    return time.monotonic() - begin


def test_a_sender_that_ends_waits_for_what_is_read() -> None:
    with link(early=0.0) as made:
        made.sender.send(Message.ACTIVATION, 0, large(1.0))
        tensor = made.receiver.receive("RECV_ACT0").tree
        giving = threading.Timer(0.3, made.receiver.give_back)
        giving.start()
        assert 0.2 < closing_s(made, 10) < 5
        giving.join()
        assert float(tensor[-1]) == 1


@pytest.mark.parametrize("end", ["nothing", "receiver", "connection", "failure"])
def test_a_sender_waits_for_nobody_who_has_ended(end: str) -> None:
    with link() as made:
        made.sender.send(Message.ACTIVATION, 0, large(1.0))
        if end == "receiver":
            made.receiver.begin_to_close()
            made.receiver.close(time.monotonic() + 5, time.monotonic() + 5)
        elif end == "connection":
            made.receiver._connection.socket.close()
        elif end == "failure":
            made.sender._connection.failures.why = "stage 7 failed"
        if end == "nothing":
            assert 0.4 < closing_s(made, 0.5) < 2
        else:
            assert closing_s(made, 5) < 0.3


def test_a_receiver_that_ends_waits_for_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    with link() as made:
        made.sender.send(Message.ACTIVATION, 0, large(1.0))
        happened: list[bool] = []
        monkeypatch.setattr(SimulatedEvent, "query", lambda event: bool(happened))
        made.receiver.receive("RECV_ACT0")
        made.receiver.begin_to_close()
        assert made.sender._flags.any()
        happening = threading.Timer(0.3, happened.append, [True])
        happening.start()
        made.receiver.close(time.monotonic() + 5, time.monotonic() + 5)
        happening.join()
        assert not made.sender._flags.any()


# Refusals, and what CUDA is asked for


def test_memory_that_cannot_be_opened_is_a_line() -> None:
    error = RuntimeError("CUDA error: peer access is not supported\nbetween these two devices")
    with mock.patch.object(SimulatedAccelerator, "opened", side_effect=error), pytest.raises(VPipeConfigError) as found:
        Link(threaded=False, early=0.3, limit_s=5.0)
    assert str(found.value) == (
        'vpipe.link: got "ipc", and stage 4 (rank 1) cannot open memory of stage 3 (rank 0)\'s device (RuntimeError: '
        "CUDA error: peer access is not supported between these two devices); "
        'allowed here: "auto", "host"; change the key'
    )


def test_a_later_slot_that_cannot_be_opened_is_a_line() -> None:
    error = RuntimeError("pidfd_getfd: Operation not permitted")
    with link() as made, mock.patch.object(SimulatedAccelerator, "opened", side_effect=error):
        made.sender.send(Message.ACTIVATION, 0, torch.ones(100))
        with pytest.raises(VPipeError) as found:
            made.receiver.receive("RECV_ACT0")
    assert str(found.value) == (
        "stage 4 (rank 1) cannot open 448 bytes of stage 3 (rank 0)'s device (RuntimeError: pidfd_getfd: Operation not "
        'permitted); set vpipe.link to "host"'
    )


@pytest.mark.parametrize("end", [0, 1])
def test_an_end_that_is_gone_before_the_link_is_made(end: int) -> None:
    known = connections()
    known[1 - end].socket.close()
    with pytest.raises(PipelinePeerError, match="it is gone"):
        (IpcSender, IpcReceiver)[end](known[end], simulated_copies())


class Event:
    """An interprocess event as torch has it."""

    def __init__(self, *, interprocess: bool) -> None:
        assert interprocess

    def ipc_handle(self) -> bytes:
        return b"event"

    @staticmethod
    def from_ipc_handle(device: torch.device, handle: bytes) -> tuple[torch.device, bytes]:
        return device, handle


def test_what_torch_is_asked_for_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is opened on the receiver's own device, whichever the sender's is."""
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr(Accelerator, "memory", lambda accelerator, size: memory)
    monkeypatch.setattr("torch.empty", lambda *size, **options: empty)
    memory, empty = mock.MagicMock(), mock.MagicMock()
    share = (1, b"handle", 2048, 512, b"counter", 3, b"share", True)
    memory.untyped_storage()._share_cuda_.return_value = share
    made, handle = Accelerator(torch.device("cuda", 1)).shared(2048)
    assert made.data is memory
    new = mock.Mock()
    monkeypatch.setattr("torch.UntypedStorage", SimpleNamespace(_new_shared_cuda=new))
    opened = Accelerator(torch.device("cuda", 0)).opened(handle)
    new.assert_called_once_with(0, *share[1:])
    empty.set_.assert_called_once_with(new.return_value)
    assert opened.written == (torch.device("cuda", 0), b"event")


def test_a_look_whether_memory_can_be_shared_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps what it has shared until somebody has opened and closed it."""
    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr(Accelerator, "memory", lambda accelerator, size: memory)
    memory, released = mock.MagicMock(), mock.Mock()
    memory.untyped_storage()._share_cuda_.return_value = (1, b"handle", 512, 0, b"counter", 3, b"share", True)
    monkeypatch.setattr("torch.UntypedStorage", SimpleNamespace(_release_ipc_counter=released))
    assert Accelerator(torch.device("cuda", 1)).without_sharing() is None
    released.assert_called_once_with(b"counter", 3)
