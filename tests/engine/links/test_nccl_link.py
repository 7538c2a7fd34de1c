"""Tensors of links over NCCL, on a simulated accelerator: what waits for what, mistakes, ends, and refusals."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from types import SimpleNamespace
from typing import Any
from unittest import mock

import cases
import pytest
import simulated_nccl
import torch
import toy
from simulated_device import Misuse, SimulatedAccelerator, simulated_copies
from test_abort import Backend
from test_transport import barrier, content, ends, rank
from worlds import Worlds

from ds_vpipe.engine.links import idle_thread, nccl_link
from ds_vpipe.engine.links.device import Accelerator, DeviceCopies
from ds_vpipe.engine.links.groups import Group, Groups, Peer
from ds_vpipe.engine.links.link import abort_all
from ds_vpipe.engine.links.message import Message, left_out, map_tree, unpack
from ds_vpipe.engine.links.nccl_link import Communicator, NcclReceiver, NcclSender
from ds_vpipe.engine.links.tensor_bytes import TensorBytes
from ds_vpipe.engine.links.wiring import Payload, Wiring, refuse_payload
from ds_vpipe.errors import PipelinePeerError, VPipeConfigError, VPipeError

pytestmark = pytest.mark.mp
GROUP: Any = SimpleNamespace(
    failures=SimpleNamespace(failing=False, regularly=lambda look: None), name="test", me=Peer(1, 1), ranks=(0, 1)
)


@contextmanager
def made(timeout_s: float = 30.0, early: float = 0.3) -> Iterator[tuple[Any, Wiring]]:
    """A simulated accelerator of this rank, and its links."""
    copies = simulated_copies(seed=rank(), early=early)
    accelerator: Any = copies.accelerator
    groups = Groups(Peer(3 + rank(), rank()), timeout_s)
    wiring = Wiring(groups, copies, "nccl")
    try:
        yield accelerator, wiring
        wiring.stop()
        accelerator.end()
    except BaseException:
        groups.failures.publish("over")  # nothing is waited for
        wiring.stop()
        accelerator.close()
        raise
    finally:
        groups.failures.stop()


def exchange(sizes: list[int], threaded: bool) -> tuple[int, int]:
    """Tensors that are changed as soon as they may be; returns waits of the host and bytes."""
    with made() as (accelerator, wiring):
        end = ends(wiring, threaded=threaded)
        for number, size in enumerate(sizes):
            floats, (_, shorts), bools = content(size, number)
            spread = (torch.arange(12.0) + number).view(3, 4)[:, ::2]  # with gaps
            if rank() == 0:
                host, expanded = torch.from_numpy(torch.arange(3.0).numpy()), floats.detach().expand(2, size)
                tree = (floats, [None, shorts], bools, host, expanded, spread)
                end.send(Message.ACTIVATION, number, tree, note=2 * number)
                end.send(Message.PEERS, number, torch.ones(2))
                if threaded:
                    end.wait_until_copied()
                with torch.no_grad():
                    for changed in (floats, shorts, bools, spread):
                        changed.zero_()
                end.release(number - 4)
                continue
            message = end.receive("RECV_ACT")
            assert (message.micro_batch, message.note) == (number, 2 * number)
            assert end.receive("RECV_PEERS").kind is Message.PEERS
            one, (none, two), three, host, expanded, gaps = message.tree
            assert none is None
            assert one.requires_grad
            assert host.tolist() == [0, 1, 2]
            assert expanded.stride() == (0, 1)
            pairs = (one, floats), (two, shorts), (three, bools), (expanded[1], floats), (gaps, spread)
            for found, wanted in pairs:
                assert torch.equal(found, wanted), number
        if rank() == 0:
            end.wait_for_all(time.monotonic() + 30)
        waits = sum(accelerator.host_waits.values())
        return waits, end.bytes_sent if rank() == 0 else end.bytes_received


@pytest.mark.parametrize("threaded", [False, True])
def test_messages_of_any_size_arrive_in_order(worlds: Worlds, threaded: bool) -> None:
    chance = random.Random(int(threaded))
    sizes = [chance.choice([0, 1, 30, 700, 5_000]) for _ in range(30)]
    (waits, sent), (others, received) = worlds.run(2, exchange, sizes, threaded)
    assert (waits, others) == (0, 0)
    assert sent == received > 4 * sum(sizes)


# Mistakes: each is one line of the module that is missing or in another place.

_SEND, _LEAVING = NcclSender.send_tensors, DeviceCopies.leaving


def header_first(sends: NcclSender, tree: Any) -> tuple[Any, int]:
    """Each transfer is queued with the next message, the last one's never."""
    before = vars(sends).get("before")
    if before is not None:
        _SEND(sends, before)
    vars(sends)["before"] = tree
    return left_out(tree, torch.is_tensor)[0], 0


def sources_let_go(sends: NcclSender, tree: Any) -> tuple[Any, int]:
    try:
        return _SEND(sends, map_tree(torch.clone, tree))
    finally:
        sends._kept.clear()


def transfer_beside_the_copies(copies: DeviceCopies, copy: Callable[[], object], *reads: Any) -> Any:
    send, later = Group.send, list[Any]()
    with mock.patch.object(Group, "send", lambda *arguments: later.append(arguments)):
        event = _LEAVING(copies, copy, *reads)
    send(*later[0])
    return event


def one_buffer(accelerator: SimulatedAccelerator, size: int, known: dict[int, Any] = {}) -> torch.Tensor:  # noqa: B006
    if size not in known:
        known[size] = MEMORY(accelerator, size)
    return known[size]


MEMORY = SimulatedAccelerator.memory
OF = TensorBytes.of


def goes_on(sends: NcclSender) -> None:
    """Does not wait for the copies."""


def larger(tensors: Any) -> TensorBytes:
    found = OF(tensors)
    return found._replace(size=found.size + 64)


MISTAKES: dict[str, tuple[int, Any, str, Any, str]] = {
    "no wait for the transfer": (
        1, simulated_nccl.SimulatedWork, "wait", lambda work: None, "a received tensor is used before it has come",
    ),
    "no wait of the computation": (
        1, DeviceCopies, "wait", lambda copies, event: None, "a copy to the device is used before its event",
    ),
    "memory that is not kept": (1, SimulatedAccelerator, "used_on", lambda *_: None, "is not kept from being freed"),
    "another size": (1, TensorBytes, "of", larger, "bytes is received as one of"),
    "the header first": (
        0, NcclSender, "send_tensors", header_first, "a receive is posted before its transfer has been queued",
    ),
    "sources that are not kept": (
        0, NcclSender, "send_tensors", sources_let_go, "a tensor was freed while a copy of it",
    ),
    "no wait for the copies": (0, NcclSender, "wait_until_copied", goes_on, "a tensor was changed while a copy of it"),
    "a transfer beside the copies": (
        0, DeviceCopies, "leaving", transfer_beside_the_copies, "a transfer with memory of another stream",
    ),
    "a buffer that is used again": (0, SimulatedAccelerator, "memory", one_buffer, "a buffer is written again"),
}  # fmt: skip


def mistaken(name: str) -> str:
    """What the simulated accelerator says of a mistake."""
    where, place, attribute, replacement, _ = MISTAKES[name]
    found = ""
    with suppress(PipelinePeerError, Misuse), made() as (accelerator, wiring):
        end = ends(wiring)
        with mock.patch.object(place, attribute, replacement) if where == rank() else nullcontext():
            try:
                for number in range(4):
                    if rank() == 0:
                        sent = torch.full((300,), float(number))
                        # Under its lock, the device copies nothing before the tensor is changed.
                        with accelerator.changed if replacement is goes_on else nullcontext():
                            end.send(Message.ACTIVATION, number, sent)
                            sent.fill_(-1)
                        end.wait_for_all(time.monotonic() + 2)
                    else:
                        end.receive(f"RECV_ACT{number}")
                        accelerator.check_kept()
                accelerator.raise_misuse()
            except Misuse as error:
                found = str(error)
                raise
    return found


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_seen(worlds: Worlds, name: str) -> None:
    *_, line = MISTAKES[name]
    found = worlds.run(2, mistaken, name)
    assert any(line in text for text in found), found


def starved() -> tuple[str | None, float]:
    """A transfer from a device that does nothing; returns what the watch over failures says, and after how long."""
    with made() as (_, wiring):
        end, begin = ends(wiring), time.monotonic()
        if rank() == 0:
            with mock.patch.object(simulated_nccl.SimulatedCommunicator, "_send"):
                end.send(Message.ACTIVATION, 0, torch.ones(3))
                barrier()
        else:
            object.__setattr__(end._communicator.group, "timeout_s", 1.5)
            end.receive("RECV_ACT0")
            barrier()
        failures = wiring._groups.failures
        while failures.state.reason is None and time.monotonic() < begin + 20:
            time.sleep(0.02)
        return failures.state.reason, time.monotonic() - begin
    return None, 0.0


def test_a_transfer_that_does_not_come_ends_at_the_time_limit_on_all_ranks(worlds: Worlds) -> None:
    for known, seconds in worlds.run(2, starved):
        assert known is not None
        assert known.startswith("stage 4 (rank 1) waited for the tensors of RECV_ACT0 from stage 3 (rank 0): nothing ")
        assert "vpipe.peer_timeout_s" in known
        assert 1.4 < seconds < 10


def received_late() -> list[float]:
    """The sender leaves as soon as it may, the receiver comes later."""
    with made() as (_, wiring):
        end = ends(wiring)
        if rank() == 0:
            for number in range(3):
                end.send(Message.GRADIENT, number, torch.full((50,), float(number)))
            end.wait_for_all(time.monotonic() + 30)
            return []
        time.sleep(1.0)
        return [float(end.receive("").tree.mean()) for _ in range(3)]


def test_a_sender_may_leave_once_its_tensors_have_arrived(worlds: Worlds) -> None:
    assert worlds.run(2, received_late)[1] == [0.0, 1.0, 2.0]


def sent_ahead() -> tuple[float, list[float]]:
    """Messages that the receiver asks for only once all transfers are done; returns seconds of these, and values."""
    with made() as (_, wiring):
        end, begin = ends(wiring, threaded=True), time.monotonic()
        if rank() == 0:
            for number in range(3):
                end.send(Message.ACTIVATION, number, torch.full((5_000 * number,), float(number)))
            end.wait_for_all(begin + 60)
        barrier()
        seconds = time.monotonic() - begin
        return seconds, [float(end.receive("").tree.sum()) for _ in range(3)] if rank() == 1 else []


def test_what_is_sent_ahead_does_not_rest_on_the_device(worlds: Worlds) -> None:
    (seconds, _), (_, values) = worlds.run(2, sent_ahead)
    assert values == [0.0, 5_000.0, 20_000.0]
    assert seconds < 30


def ended(first: int, behind: bool) -> int:
    """One end closes before the other, which goes on; returns the number of transfers that were queued."""
    with made() as (_, wiring):
        end = ends(wiring, threaded=True)
        if rank() == 0:
            for number in range(2):
                end.send(Message.ACTIVATION, number, torch.full((500,), float(number)))
        elif not behind:
            assert [float(end.receive("").tree.mean()) for _ in range(2)] == [0.0, 1.0]
        if rank() == first:
            wiring.stop()
        barrier()
        if rank() == 0:
            end.send(Message.ACTIVATION, 2, torch.ones(500))  # for nobody, as over gloo
            return int(end._sent)
        return 0


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_an_end_that_closes_first_leaves_no_transfer_of_the_other_under_way(
    worlds: Worlds, first: int, behind: bool
) -> None:
    begin = time.monotonic()
    assert worlds.run(2, ended, first, behind)[0] == 2
    assert time.monotonic() - begin < 30


def ended_under_sends() -> tuple[int, int]:
    """The receiver closes while the other end goes on sending; returns messages, and transfers sent or posted."""
    with made() as (_, wiring):
        end = ends(wiring, threaded=True)
        begin, number = time.monotonic(), 0
        while rank() == 0 and time.monotonic() < begin + 3:
            end.send(Message.ACTIVATION, number, torch.full((500,), float(number)))
            end.wait_until_copied()
            number += 1
            time.sleep(0.004)
        if rank() == 1:
            for _ in range(3):
                end.receive("RECV_ACT")
            time.sleep(0.3)
            wiring.stop()
        barrier()
        return number, end._sent if rank() == 0 else end._transfers


def test_a_receiver_that_closes_takes_what_was_sent_and_no_more(worlds: Worlds) -> None:
    begin = time.monotonic()
    (number, sent), (_, posted) = worlds.run(2, ended_under_sends)
    assert 3 < sent == posted < number
    assert time.monotonic() - begin < 20


def no_memory() -> str:
    """The device has no memory for the first message when it is taken early."""
    with made() as (accelerator, wiring):
        end = ends(wiring, threaded=True)
        barrier()
        if rank() == 0:
            for number in range(2):
                end.send(Message.ACTIVATION, number, torch.full((500,), float(number)))
        else:
            with mock.patch.object(accelerator, "memory", side_effect=torch.OutOfMemoryError("CUDA out of memory")):
                time.sleep(3.0)
            assert not end.take_early()
            for _ in range(2):  # no message gets the bytes of another
                with pytest.raises(torch.OutOfMemoryError):
                    end.receive("RECV_ACT0")
            with pytest.raises(torch.OutOfMemoryError):
                wiring.stop()
            wiring.stop()
        barrier()
        begin = time.monotonic()
        while wiring._groups.failures.state.reason is None and time.monotonic() < begin + 20:
            time.sleep(0.02)
        known = wiring._groups.failures.state.reason
        wiring.stop()
        accelerator.has_lost_a_transfer = False  # after a failure
        return str(known)


def test_an_error_of_a_message_that_was_taken_early_is_raised_in_its_turn(worlds: Worlds) -> None:
    line = "stage 4 (rank 1) failed in receiving from stage 3 (rank 0): OutOfMemoryError: CUDA out of memory"
    assert worlds.run(2, no_memory) == [line] * 2


def test_a_sender_does_not_ask_for_long_a_store_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def gone(key: str) -> str:
        asked.append(key)
        raise RuntimeError("the connection is closed")

    monkeypatch.setattr(nccl_link, "_PATIENCE_S", 0.3)
    communicator = Communicator(SimpleNamespace(get_from_any_thread=gone), GROUP)  # type: ignore[arg-type]
    sends: Any = NcclSender(GROUP, Peer(1, 1), 2, True, SimpleNamespace(), communicator)  # type: ignore[arg-type]
    begin = time.monotonic()
    sends.wait_for_tensors(begin + 60)
    assert not asked, "nothing was sent"
    sends._sent = 1
    sends.wait_for_tensors(begin + 60)
    assert 0.2 < time.monotonic() - begin < 30


def test_receipts_only_rise() -> None:
    """Two threads give them."""
    copies: Any = SimpleNamespace(accelerator=SimpleNamespace(stream=lambda: None))
    communicator, left = Communicator(SimpleNamespace(), GROUP), list[int]()  # type: ignore[arg-type]
    communicator.leave = lambda what, count: left.append(count)  # type: ignore[method-assign]
    receives = NcclReceiver(GROUP, Peer(0, 0), 0, copies, communicator)
    for arrived in (5, 6, 5, 6):
        receives._give_receipt(arrived)
    assert left == [5, 6]


class Looked:
    """Raises at the first look."""

    def __init__(self) -> None:
        self.looks = 0
        self.again = threading.Event()

    def look(self) -> None:
        self.looks += 1
        if self.looks == 1:
            raise ValueError("an error of its own")
        self.again.set()


def test_an_idle_thread_survives_errors_and_objects_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_thread, "_INTERVAL_S", 0.01)
    looked, gone, before = Looked(), Looked(), threading.enumerate()
    thread = idle_thread.IdleThread(Failed(torch.device("cpu")))
    for one in (gone, looked):
        thread.add(one.look)
    del gone, one
    assert looked.again.wait(10)
    (started,) = [found for found in threading.enumerate() if found not in before]
    del thread  # as with an engine that nothing refers to
    started.join(10)
    assert not started.is_alive()


def receipt_beside_a_wait() -> str:
    """The stage's own thread waits for an answer to what another thread of it tells."""
    groups = Groups(Peer(3 + rank(), rank()), 20.0)
    try:
        if rank() == 1:
            groups.put("answer", groups.wait_for("receipt", Peer(3, 0)))
            return ""
        threading.Timer(0.5, groups.put_from_any_thread, ("receipt", "7")).start()
        return groups.wait_for("answer", Peer(4, 1))
    finally:
        groups.failures.stop()


def test_receipts_need_not_wait_for_the_stages_own_thread(worlds: Worlds) -> None:
    assert worlds.run(2, receipt_beside_a_wait)[0] == "7"


def test_communicators_that_end_late_have_one_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    wiring = Wiring(SimpleNamespace(timeout_s=900.0), None, "nccl")  # type: ignore[arg-type]
    end: Any = SimpleNamespace(begin_to_close=lambda: calls.append(()), close=lambda *limits: calls.append(limits))
    wiring._device_ends = [end] * 3
    monkeypatch.setattr(time, "monotonic", iter(range(100, 1000)).__next__)
    wiring.stop()
    wiring.stop()
    assert calls == [()] * 3 + [(110.0, 1000.0)] * 3, "once"


def never_connected() -> tuple[str, float]:
    begin = time.monotonic()
    with (
        mock.patch.object(SimulatedAccelerator, "communicator", side_effect=lambda *_: threading.Event().wait()),
        pytest.raises(PipelinePeerError) as error,
        made(timeout_s=4.0) as (_, wiring),  # which is enough for all other waits, on a machine under load
    ):
        ends(wiring)
    return str(error.value), time.monotonic() - begin


def test_devices_that_do_not_connect_end_at_the_time_limit(worlds: Worlds) -> None:
    found = worlds.run(2, never_connected)
    what = "ranks [0, 1] to connect their devices (test): "
    assert all(what in text and seconds < 30 for text, seconds in found), found
    assert any(f"waited for {what}nothing came within 4 s" in text for text, _ in found)  # the first lets others know


class Failed(Accelerator):
    """Every call raises but the first, for streams."""

    def stream(self) -> Any:
        return SimpleNamespace(wait_event=self.memory)

    def current_stream(self) -> Any:
        return self.memory(0)

    def memory(self, size: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered")


def test_no_message_leaves_without_its_tensors_and_those_of_the_host_leave_after_the_device_has_failed() -> None:
    failures: Any = SimpleNamespace(failing=True)
    backend = Backend()
    group = Group("test", backend, (0, 1), Peer(0, 0), 5.0, failures)
    copies: Any = DeviceCopies(Failed(torch.device("cpu")))
    link = NcclSender(group, Peer(1, 1), 2, True, copies, SimpleNamespace(get=lambda what: None))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="device-side assert"):
        link.send(Message.ACTIVATION, 0, torch.ones(3))
    link.send(Message.END, 1, torch.tensor([1, 1, 0, 0]))
    link.send(Message.PEERS, 2, torch.zeros(2, 2))
    link.send(Message.QUIESCE, 3, (torch.zeros(0), torch.zeros(2)))
    abort_all([link], "reason")
    kinds = [unpack(data).kind for data in backend.sent]
    assert kinds == [Message.END, Message.PEERS, Message.QUIESCE, Message.ABORT]


def test_tensors_without_values_are_refused() -> None:
    """To the receiver they look like what is sent beside the message."""
    copies = DeviceCopies(Accelerator(torch.device("cpu")))
    sends = NcclSender(GROUP, Peer(1, 1), 2, True, copies, SimpleNamespace())  # type: ignore[arg-type]
    with pytest.raises(VPipeError, match="stage boundary: got a tensor on meta from a stage on cpu"):
        sends.send_tensors((torch.empty(2, device="meta"), None))


# Refusals

REMEDY = 'allowed here: "auto", "host"; change the key'


def refusals(*accelerators: Accelerator | None, payload: Payload = "nccl") -> list[str]:
    """What each of some ranks says that compute on these accelerators."""
    values: list[Any] = []
    lines = []
    for answers in ([], values):
        lines.clear()
        for number, one in enumerate(accelerators):
            copies: Any = None if one is None else SimpleNamespace(accelerator=one)

            def of_all(value: Any, what: str, answers: list[Any] = answers) -> list[Any]:
                if answers is not values:
                    values.append(value)
                return answers

            try:
                refuse_payload(payload, copies, Peer(number, 10 + number), of_all)
            except VPipeConfigError as error:
                lines.append(str(error))
    return lines


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    """An accelerator for which NCCL is there; nothing is done with it."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU {device.index}"))
    return Accelerator(torch.device("cuda", 0))


def test_one_rank_that_cannot_is_named_on_all(cuda: Accelerator) -> None:
    line = f'vpipe.link: got "nccl", and stage 1 (rank 11) computes on the CPU; {REMEDY}'
    assert refusals(cuda, None) == [line, line]
    other = refusals(Accelerator(torch.device("xpu", 0)))
    assert "computes on xpu, for which there is no NCCL" in other[0]


def test_memory_that_cannot_be_shared_between_processes(cuda: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerator, "without_sharing", lambda accelerator: None)
    assert refusals(cuda, payload="ipc") == []
    line = f'vpipe.link: got "ipc", and stage 1 (rank 11) computes on the CPU; {REMEDY}'
    assert refusals(cuda, None, payload="ipc") == [line, line]
    monkeypatch.undo()
    reason = "shares no memory of its device (RuntimeError: torch shares no memory of xpu with other processes)"
    line = f'vpipe.link: got "ipc", and stage 0 (rank 10) {reason}; {REMEDY}'
    assert refusals(Accelerator(torch.device("xpu", 0)), payload="ipc") == [line]
    monkeypatch.delattr("os.memfd_create")
    assert "has a Python without memfd_create()" in refusals(cuda, payload="ipc")[0]


def test_torch_without_nccl() -> None:
    if torch.distributed.is_nccl_available():
        pytest.skip("this torch has it")
    (line,) = refusals(Accelerator(torch.device("cuda", 0)))
    assert line.startswith('vpipe.link: got "nccl", and stage 0 (rank 10) has a torch without NCCL; allowed here: ')


def test_streams_that_share_queues(cuda: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusals(cuda) == []
    for connections in ("1", "8", "many", None):
        if connections is None:
            monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS")
        else:
            monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
        (line,) = refusals(cuda)
        given = f"CUDA_DEVICE_MAX_CONNECTIONS={connections}" if connections else "no CUDA_DEVICE_MAX_CONNECTIONS"
        assert f"has {given}, so that streams share queues" in line
        assert "\n" not in line


def test_ranks_that_share_a_gpu(cuda: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    other = Accelerator(torch.device("cuda", 1))
    assert refusals(cuda, other) == []
    first, second = refusals(cuda, cuda)
    assert first == second
    assert (
        "stage 0 (rank 10) and stage 1 (rank 11) share a GPU and, to NCCL, a host; NCCL_HOSTID may give each " in first
    )
    places = set()
    for name in ("rank0", "rank1", "rank1"):
        monkeypatch.setenv("NCCL_HOSTID", name)
        places.add(cuda.place())
    assert len(places) == 2


def on_the_cpu() -> str:
    import deepspeed

    import ds_vpipe

    net = deepspeed.pipe.PipelineModule(toy.layer_specs(), num_stages=2, loss_fn=torch.nn.CrossEntropyLoss())
    ds_config = cases.config(1, {"type": "SGD", "params": {"lr": 0.1}}, {"link": "nccl"})
    with pytest.raises(VPipeConfigError) as error:
        ds_vpipe.initialize(model=net, config=ds_config)
    return str(error.value)


def test_the_cpu_is_refused_on_every_rank(worlds: Worlds) -> None:
    line = f'vpipe.link: got "nccl", and stage 0 (rank 0) computes on the CPU; {REMEDY}'
    assert worlds.run(2, on_the_cpu) == [line, line]
