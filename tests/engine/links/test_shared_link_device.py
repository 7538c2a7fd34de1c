"""Links through shared memory between stages on accelerators: what waits for what, and whose a block is."""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from simulated_device import Misuse, SimulatedAccelerator, SimulatedEvent, simulated_copies
from test_shared_link import connections, large

from ds_vpipe.engine.links.device import Accelerator, DeviceCopies
from ds_vpipe.engine.links.link import abort_all
from ds_vpipe.engine.links.message import Message
from ds_vpipe.engine.links.send_thread import SendThread
from ds_vpipe.engine.links.shared_link import SharedReceiver, SharedSender, without_memory
from ds_vpipe.errors import PipelinePeerError, VPipeError


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """Other tests look for memory that is left."""
    yield
    gc.collect()


class Link:
    """Both ends of a link, on an accelerator each."""

    def __init__(self, threaded: bool, early: float, limit_s: float) -> None:
        here, there = connections(limit_s)
        self.copies = [simulated_copies(seed, early) for seed in (1, 2)]
        self.thread = SendThread()
        self.sender = SharedSender(here, self.copies[0], self.thread, threaded)
        self.receiver = SharedReceiver(there, self.copies[1], self.thread)

    def receive(self) -> Any:
        """The next message, on the receiver's accelerator."""
        return self.copies[1].tree_to_device(self.receiver.receive("RECV_ACT").tree)

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
        made.sender.flush()
        for accelerator in accelerators:
            accelerator.end()
    finally:
        made.thread.stop()
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
            found, (none, other) = made.receive()
            assert none is None
            assert torch.equal(found, wanted[0])
            assert torch.equal(other, wanted[1])
            assert made.receiver.receive("RECV_PEERS").tree.tolist() == [number, number]
        made.sender.throttle(0)
        assert made.waits == 0
        assert len(made.sender._blocks) <= 4


def changed_too_early() -> None:
    with link(threaded=True, early=0.0) as made:
        value = large(1.0)
        made.sender.send(Message.ACTIVATION, 0, value)
        value.zero_()  # without wait_until_copied()
        made.receive()


def test_a_tensor_that_is_changed_before_its_copy_is_seen() -> None:
    with pytest.raises(Misuse, match="changed while a copy of it was pending"):
        changed_too_early()


def test_a_message_that_leaves_before_its_copy_is_seen() -> None:
    def at_once(sender: SharedSender, leaving: Any, *packet: Any) -> None:
        sender._write(*packet)

    with mock.patch.object(SharedSender, "_write_copied", at_once), link(threaded=True, early=0.0) as made:
        for number in range(20):
            made.sender.send(Message.ACTIVATION, number, large(number))
        found = [float(made.receive()[0]) for _ in range(20)]
        assert found != [float(number) for number in range(20)]


def test_memory_that_is_not_page_locked_is_waited_for() -> None:
    with mock.patch.object(SimulatedAccelerator, "lock", return_value=int), link() as made:
        made.sender.send(Message.ACTIVATION, 0, large(1.0))
        made.receive()
        assert made.waits == 2


def test_memory_is_locked_while_it_is_used() -> None:
    with link() as made:
        accelerators: list[Any] = [copies.accelerator for copies in made.copies]
        kept = []
        for number in range(4):
            made.sender.send(Message.ACTIVATION, number, large(number, 10_000 * (number + 1)))
            kept.append(made.receiver.receive("RECV_ACT").tree)
        assert [len(accelerator._locked) for accelerator in accelerators] == [4, 4]
        last = made.sender._blocks[-1]._data.data_ptr()
        assert any(last in pages for pages in accelerators[0]._locked)
        kept.clear()
        made.sender._blocks.clear()
        made.receiver._blocks.clear()
        made.sender.send(Message.LOSS, 4, torch.ones(()))  # the simulation keeps the latest copy
        assert [accelerator._locked for accelerator in accelerators] == [[], []]


def test_a_block_is_not_given_back_before_it_has_been_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the simulated accelerator the computation's wait for a copy ends it; on others it ends later."""
    done: list[bool] = []
    event = SimpleNamespace(query=lambda: bool(done))
    monkeypatch.setattr(DeviceCopies, "start", lambda copies, tensor: (tensor.clone(), event))
    monkeypatch.setattr(DeviceCopies, "finish", lambda copies, started: started[0])
    with link() as made:
        made.sender.send(Message.ACTIVATION, 0, large(1.0))
        made.receive()
        (block,) = made.sender._blocks
        made.copies[1].to_device(torch.ones(1))
        assert block.in_use
        done.append(True)
        made.copies[1].to_device(torch.ones(1))
        assert not block.in_use


def test_a_device_that_fails_is_told_by_the_stages_own_thread() -> None:
    with link() as made:
        error = RuntimeError("CUDA error: an illegal memory access was encountered")
        with mock.patch.object(SimulatedEvent, "synchronize", side_effect=error):
            made.sender.send(Message.ACTIVATION, 0, large(1.0))
            with pytest.raises(RuntimeError, match="illegal memory access"):
                made.sender.flush()
        abort_all([made.sender], "why")
        with pytest.raises(PipelinePeerError, match="why"):
            made.receiver.receive("RECV_ACT0")


def test_nothing_leaves_after_a_message_that_could_not() -> None:
    with link(limit_s=0.5) as made:
        begin = time.monotonic()
        for number in range(150):  # more than there is room for
            made.sender.send(Message.ACTIVATION, number, torch.zeros(400))
        with pytest.raises(PipelinePeerError, match="to receive message"):
            made.sender.flush()
        assert time.monotonic() - begin < 10  # and not 0.5 s for each
        made.sender.send(Message.ACTIVATION, 150, torch.zeros(400))
        made.sender.flush()
        found = []
        with suppress(PipelinePeerError):  # nothing more comes
            while True:
                found.append(made.receiver.receive("RECV_ACT").micro_batch)
        assert 0 < len(found) < 150
        assert found == list(range(len(found)))


def test_tensors_with_gaps_are_copied_to_the_device_without_a_wait() -> None:
    with link() as made:
        accelerator: Any = made.copies[1].accelerator
        for number, tensor in enumerate((large(1.0), torch.ones(10_000)[::2])):
            made.sender.send(Message.ACTIVATION, number, tensor)
            made.receive()
            assert accelerator.num_copies == number + 1
        assert made.waits == 0


def unusual() -> list[torch.Tensor]:
    """Tensors that torch would conjugate, negate, or make dense on the host."""
    turned = torch.arange(24.0).view(2, 3, 4).to(torch.complex64).mul(1 + 2j).conj()
    heads = torch.arange(360.0).view(2, 5, 36).chunk(3, -1)[1].view(2, 5, 3, 4).transpose(1, 2)
    odd = [
        turned,
        turned.mT,
        turned[..., ::2],
        turned.imag,
        turned[..., 0].real,
        turned.unfold(2, 3, 1),
        turned[0, 0, 0],
    ]
    return [*odd, heads, heads[:, :, :1].expand(2, 3, 5, 4), torch.arange(600.0).view(20, 30).t()[::2, 10:], turned[:0]]


def test_unusual_tensors_leave_and_arrive_without_a_wait() -> None:
    with link(early=0.0) as made:
        for number, tensor in enumerate(unusual()):
            made.sender.send(Message.ACTIVATION, number, tensor)
            found = made.receive()
            assert torch.equal(found, tensor), number
            assert found.stride() == tensor.stride()
            assert made.waits == 0, number


def test_tensors_of_another_device_are_refused() -> None:
    with link() as made, pytest.raises(VPipeError, match="stage boundary: got a tensor on meta"):
        made.sender.send(Message.ACTIVATION, 0, torch.empty(3, device="meta"))


class Runtime:
    """What CUDA's runtime is asked for."""

    def __init__(self, error: int) -> None:
        self.error, self.calls = error, list[tuple[str, int, int]]()

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls.append(("lock", address, size))
        return self.error

    def cudaGetErrorString(self, error: int) -> str:  # noqa: N802
        return {2: "out of memory"}[error]

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append(("unlock", address, 0))
        return 0


@pytest.mark.parametrize("error", [0, 2])
def test_cuda_is_asked_for_whole_pages_and_given_them_back(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def found_by(accelerator: Accelerator, size: int) -> torch.Tensor:
        kernels.append(size)
        raise RuntimeError("CUDA error: out of memory")

    runtime, used, kernels = Runtime(error), list[Any](), list[int]()
    monkeypatch.setattr(Accelerator, "memory", found_by)
    monkeypatch.setattr("torch.cuda.cudart", lambda: runtime)
    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext(used.append(device)))
    copies: Any = SimpleNamespace(accelerator=Accelerator(torch.device("cuda", 1)))
    reason = without_memory(copies)
    assert reason is None if error == 0 else "page-locks no 65536 bytes: out of memory" in str(reason)
    assert kernels == ([] if error == 0 else [1])  # else one of the script's would find the error
    (lock, address, size), *rest = runtime.calls
    assert lock == "lock"
    assert address % 4096 == size % 4096 == 0 < size
    assert rest == ([("unlock", address, 0)] if error == 0 else [])
    assert used == [torch.device("cuda", 1)] * len(rest)  # whatever thread frees it


def test_other_accelerators_have_no_means_to_lock() -> None:
    copies: Any = SimpleNamespace(accelerator=Accelerator(torch.device("xpu", 0)))
    assert "for xpu" in str(without_memory(copies))
