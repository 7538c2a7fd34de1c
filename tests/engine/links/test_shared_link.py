"""Blocks of shared memory: whose they are, how many there are, and what is left of them."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_vpipe.engine.links import shared_link, wiring
from ds_vpipe.engine.links.failure_watch import break_off
from ds_vpipe.engine.links.groups import Peer
from ds_vpipe.engine.links.link import abort_all
from ds_vpipe.engine.links.message import Message
from ds_vpipe.engine.links.send_thread import SendThread
from ds_vpipe.engine.links.shared_link import INLINE_BYTES, Connection, SharedReceiver, SharedSender
from ds_vpipe.errors import PipelinePeerError, PipelineProtocolError, VPipeConfigError, VPipeError

HERE, THERE = Peer(3, 0), Peer(4, 1)


class Failures:
    """Failures of other ranks: none, or one that a test sets."""

    def __init__(self) -> None:
        self.why: str | None = None

    def breaks(self, end: object) -> None:
        """Nobody polls."""

    def reason(self) -> str | None:
        return self.why

    @property
    def failing(self) -> bool:
        return self.why is not None

    def publish(self, why: str) -> None:
        self.why = why

    def wait_until_seen(self) -> None:
        """Nobody else is there."""


def connections(timeout_s: float = 5.0, failures: Any = None) -> tuple[Connection, Connection]:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    known = failures or Failures()
    return Connection(ends[0], HERE, THERE, timeout_s, known), Connection(ends[1], THERE, HERE, timeout_s, known)


def beside(act: Callable[[Connection], None], timeout_s: float) -> tuple[Connection, int]:
    """This end of a link to a process that is forked for the other one, and its number."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    child = os.fork()
    here = ends[child == 0]
    ends[child != 0].close()
    if child == 0:
        status = 1
        try:
            act(Connection(here, THERE, HERE, timeout_s, Failures()))
            status = 0
        finally:
            os._exit(status)
    return Connection(here, HERE, THERE, timeout_s, Failures()), child


def link(timeout_s: float = 5.0) -> tuple[SharedSender, SharedReceiver]:
    here, there = connections(timeout_s)
    return SharedSender(here), SharedReceiver(there)


def large(value: float, size: int = 10_000) -> torch.Tensor:
    return torch.full((size,), value)


def test_a_message_that_is_kept_stays_as_it_came() -> None:
    sender, receiver = link()
    kept = []
    for number in range(6):
        sender.send(Message.ACTIVATION, number, (large(number), large(-number)))
        kept.append(receiver.receive("").tree[number % 2])  # a view of either tensor holds the block
    assert [float(tensor.sum()) / 10_000 for tensor in kept] == [0, -1, 2, -3, 4, -5]
    assert len(sender._blocks) == 6


def test_a_block_is_used_again_once_nothing_refers_to_it() -> None:
    sender, receiver = link()
    places = set()
    for number in range(20):
        sender.send(Message.ACTIVATION, number, large(number))
        tensor = receiver.receive("").tree
        part = tensor[5:9].view(2, 2)
        del tensor
        assert part.tolist() == [[number, number]] * 2
        places.add(part.data_ptr())
    assert len(sender._blocks) == len(places) <= 2


def test_what_autograd_has_saved_holds_a_block() -> None:
    sender, receiver = link()
    sender.send(Message.ACTIVATION, 0, large(3.0).requires_grad_())
    tensor = receiver.receive("").tree
    result = (tensor**2).sum()
    leaf = tensor.detach()
    del tensor
    sender.send(Message.ACTIVATION, 1, large(7.0))
    del leaf
    receiver.receive("")
    sender.send(Message.ACTIVATION, 2, large(8.0))
    result.backward()
    assert len(sender._blocks) == 2
    assert float(receiver.receive("").tree[0]) == 8.0


def test_blocks_grow_and_are_not_more_than_messages_in_use() -> None:
    sender, receiver = link()
    for number, size in enumerate(int(1000 * 1.2**step) for step in range(40)):
        sender.send(Message.ACTIVATION, number, large(number, size))
        assert float(receiver.receive("").tree.sum()) == number * size
    assert len(sender._blocks) <= 2
    assert len(receiver._blocks) <= 2
    mapped = Path("/proc/self/maps").read_text().count("memfd:ds_vpipe")
    assert mapped <= 4  # both ends are here; what was replaced is no longer mapped


def test_small_messages_need_no_block() -> None:
    sender, receiver = link()
    for number in range(300):
        tree = (torch.tensor(number / 2), torch.arange(number % 100, dtype=torch.int16), None)
        size = sender.send(Message.LOSS, number, tree, note=number)
        assert size <= INLINE_BYTES
        message = receiver.receive("")
        assert (message.kind, message.micro_batch, message.note) == (Message.LOSS, number, number)
        assert message.tree[0].item() == number / 2
        assert torch.equal(message.tree[1], tree[1])
    assert sender._blocks == []


def test_both_ways_round_the_limit_of_small_messages() -> None:
    sender, receiver = link()
    for size in (*range(INLINE_BYTES - 200, INLINE_BYTES + 200, 8), 0, 1):
        sender.send(Message.ACTIVATION, 0, torch.arange(size, dtype=torch.uint8).requires_grad_(False))
        tensor = receiver.receive("").tree
        assert torch.equal(tensor, torch.arange(size, dtype=torch.uint8))
        assert tensor.data_ptr() % 64 == 0 or size == 0
    assert 0 < len(sender._blocks) <= 2


def test_a_process_that_was_forked_gives_nothing_back() -> None:
    """As the workers of a DataLoader are: their copies of tensors are freed at any time."""
    sender, receiver = link()
    sender.send(Message.ACTIVATION, 0, large(1.0))
    held = [receiver.receive("").tree]
    child = os.fork()
    if child == 0:
        held.clear()
        os._exit(0)
    os.waitpid(child, 0)
    for number in range(1, 4):
        sender.send(Message.ACTIVATION, number, large(9.0))
        receiver.receive("")
    assert held[0].sum() == 10_000


def test_a_process_that_was_forked_keeps_no_connection_open() -> None:
    """Workers of a DataLoader outlive a rank that is killed by seconds, and the other end has to know at once."""
    here, there = connections(5.0)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    try:
        there.socket.close()  # as the end of this process would
        with pytest.raises(ConnectionError):
            here.read(10)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_wait_for_a_device_that_hangs_has_a_name_and_a_limit() -> None:
    here, _ = connections(0.2)
    thread, gate = SendThread(), threading.Event()
    thread.submit(gate.wait)  # type: ignore[arg-type]
    late = threading.Timer(5, gate.set)  # a wait without its limit ends well, and the test fails
    late.start()
    sender = SharedSender(here, runner=thread)
    with pytest.raises(PipelinePeerError, match="waited for its send thread to finish what is to be sent: nothing"):
        sender.flush()
    late.cancel()
    gate.set()
    thread.stop()


def test_tensors_may_be_freed_by_any_thread() -> None:
    sender, receiver = link()
    for number in range(50):
        sender.send(Message.ACTIVATION, number, large(number))
        held = [receiver.receive("").tree]
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
    assert len(sender._blocks) <= 2


def test_receipts_find_room_where_their_messages_did() -> None:
    """Stages that run all forward passes first send as many messages as there is room for, and then read receipts."""
    sender, receiver = link(timeout_s=0.5)
    for number in range(250):
        sender.send(Message.ACTIVATION, number, large(number, 600))
    for _ in range(250):
        receiver.receive("")  # freed at once
    sender.throttle(0)


def test_blocks_that_are_freed_together_come_back() -> None:
    sender, receiver = link(timeout_s=0.5)
    kept = []
    for number in range(400):
        sender.send(Message.EVAL, number, large(number, 600))
        kept.append(receiver.receive("").tree)
    kept.clear()
    sender.send(Message.EVAL, number, large(number, 600))
    receiver.receive("")
    sender.throttle(0)
    assert len(sender._blocks) == 400
    assert not any(block.in_use for block in sender._blocks)


def test_messages_that_are_kept_need_no_descriptors() -> None:
    """A script may keep the results of more evaluations than a process may have open files."""
    sender, receiver = link()
    before, kept = len(os.listdir("/proc/self/fd")), []
    for number in range(20):
        sender.send(Message.EVAL, number, large(number))
        kept.append(receiver.receive("").tree)
    assert len(os.listdir("/proc/self/fd")) == before


@contextmanager
def no_more_open_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_too_many_open_files_have_a_name() -> None:
    sender, receiver = link()
    sender.send(Message.ACTIVATION, 0, large(1.0))
    with no_more_open_files(), pytest.raises(PipelinePeerError, match=r"waited for RECV_ACT0 .*no descriptor left"):
        receiver.receive("RECV_ACT0")
    with no_more_open_files(), pytest.raises(VPipeError, match=r"stage 3 .* no shared memory .*Too many open files"):
        sender.send(Message.ACTIVATION, 1, large(1.0))


def test_a_failure_for_want_of_memory_is_told() -> None:
    sender, receiver = link()
    with no_more_open_files():
        abort_all([sender], "why " * 2000)
    with pytest.raises(PipelinePeerError, match="why why"):
        receiver.receive("")


def test_limits_of_years() -> None:
    sender, receiver = link(timeout_s=1e8)
    timer = threading.Timer(0.1, sender.send, (Message.LOSS, 7, torch.zeros(())))
    timer.start()
    assert receiver.receive("").micro_batch == 7
    timer.join()


class Directory:
    """What one rank tells another, where an address has been left."""

    me, timeout_s, failures = THERE, 1.0, Failures()

    def __init__(self) -> None:
        self.told: list[str] = []

    def wait_for(self, key: str, peer: Peer) -> str:
        return "nowhere"

    def put(self, key: str, value: str) -> None:
        self.told.append(value)


def wiring_of(payload: wiring.Payload) -> wiring.Wiring:
    groups: Any = Directory()
    return wiring.Wiring(groups, None, payload)


def test_where_blocks_cannot_be_had_nothing_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_link.without_memory() is None
    monkeypatch.delattr(os, "memfd_create")  # as in Pythons that were built for old systems
    assert shared_link.without_memory() == "has a Python without memfd_create()"
    assert not wiring_of("auto")._shares_memory_with(HERE, 2)
    with pytest.raises(VPipeConfigError, match=r'vpipe\.link: got "shared"'):
        wiring_of("shared")._shares_memory_with(HERE, 2)


def test_programs_that_a_script_starts_do_not_keep_a_link_open() -> None:
    ends, given = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), socket.socketpair()
    wired = wiring_of("shared")
    wired._sockets[HERE.rank] = ends[0]
    with ends[0], ends[1], given[0], given[1]:
        socket.send_fds(ends[1], [b"forward, channel 0"], [given[0].fileno()])
        assert not wired._connection("forward", HERE, wiring.Channel.TRAINING).socket.get_inheritable()


def test_a_full_socket_is_waited_for_with_a_limit() -> None:
    sender, receiver = link(timeout_s=0.3)

    def send() -> None:
        for number in range(100_000):
            sender.send(Message.LOSS, number, torch.zeros(()))

    with pytest.raises(PipelinePeerError, match=r"stage 3 \(rank 0\) waited for stage 4 \(rank 1\) to receive message"):
        send()
    assert receiver.receive("").micro_batch == 0
    abort_all([sender], "why")  # there may be room for it or not


def test_a_socket_has_room_for_messages_that_stages_are_apart() -> None:
    sender, receiver = link(timeout_s=0.3)
    for number in range(wiring.MOST_AHEAD + 1):
        size = sender.send(Message.ACTIVATION, number, torch.zeros(INLINE_BYTES - 192, dtype=torch.uint8))
    assert INLINE_BYTES - 64 <= size <= INLINE_BYTES
    assert sender._blocks == []
    del receiver


def test_a_sender_waits_for_room_in_the_socket() -> None:
    sender, receiver = link()

    def send() -> None:
        for number in range(2_000):
            sender.send(Message.LOSS, number, torch.zeros(()))

    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    assert [receiver.receive("").micro_batch for _ in range(2_000)] == list(range(2_000))
    thread.join()


def test_throttle() -> None:
    sender, receiver = link(timeout_s=0.2)
    for number in range(5):
        sender.send(Message.EVAL, number, large(number))
    sender.throttle(5)
    for _ in range(3):
        receiver.receive("")
    sender.throttle(2)
    with pytest.raises(PipelinePeerError, match="to receive message 3"):
        sender.throttle(1)


def test_throttle_ends_once_the_receiver_has_gone() -> None:
    sender, receiver = link()
    receiver._connection.socket.close()
    for number in range(4):
        sender.send(Message.GRADIENT, number, torch.ones(1))
    with pytest.raises(PipelinePeerError, match="it is gone"):
        sender.throttle(3)


def test_what_was_sent_arrives_though_the_sender_has_gone() -> None:
    sender, receiver = link()
    sender.send(Message.ACTIVATION, 0, large(1.0))
    sender.send(Message.ACTIVATION, 1, large(2.0))
    receiver.receive("")  # its answers are never read
    del sender
    assert receiver.receive("").tree.sum() == 20_000
    with pytest.raises(PipelinePeerError, match=r"waited for RECV_ACT2 from stage 3 \(rank 0\): it is gone"):
        receiver.receive("RECV_ACT2")


def test_a_known_failure_ends_a_wait() -> None:
    failures = Failures()
    here, there = connections(60.0, failures)
    receiver = SharedReceiver(there)

    def fail() -> None:
        time.sleep(0.1)
        failures.why = "stage 0 (rank 2) failed"
        break_off(there.socket)

    threading.Thread(target=fail).start()
    with pytest.raises(
        PipelinePeerError, match=r"stopped waiting for RECV_ACT0 .*: stage 0 \(rank 2\) failed"
    ) as error:
        receiver.receive("RECV_ACT0")
    assert error.value.reason == failures.why
    del here


def test_processes_of_other_users_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ends[0], ends[1]:
        assert wiring._is_of_same_user(ends[0])
        monkeypatch.setattr(wiring.os, "getuid", lambda: os.geteuid() + 1)
        assert not wiring._is_of_same_user(ends[0])


def test_a_block_that_cannot_be_had_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise RuntimeError("unable to mmap:\nCannot allocate memory (12)")

    sender, _ = link()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(shared_link.torch, "from_file", full)
    with pytest.raises(VPipeError, match=r"stage 3 \(rank 0\): no shared memory for a message of .*Cannot allocate"):
        sender.send(Message.ACTIVATION, 0, large(1.0))
    assert len(os.listdir("/proc/self/fd")) == before


def killed(act: Callable[[Connection], None], survive: Callable[[Connection], str], seed: int) -> str:
    """What the survivor says whose peer, a process of its own, is killed at a random moment."""
    here, child = beside(act, 20.0)
    timer = threading.Timer(random.Random(seed).uniform(0.0, 0.02), os.kill, (child, signal.SIGKILL))
    timer.start()
    try:
        return survive(here)
    finally:
        timer.join()
        os.waitpid(child, 0)


def receive_all(connection: Connection) -> str:
    receiver, number = SharedReceiver(connection), 0
    try:
        while True:
            message = receiver.receive("RECV_ACT")
            assert message.micro_batch == number
            assert not message.tree[0].numel() or bool((message.tree[0] == number).all())
            number += 1
    except PipelinePeerError as error:
        return str(error)


def send_all(connection: Connection) -> str:
    sender, number = SharedSender(connection), 0
    try:
        while True:
            sender.send(Message.ACTIVATION, number, (large(number, 700 * (number % 90)), None))
            sender.throttle(8)
            number += 1
    except PipelinePeerError as error:
        return str(error)


KILLS = int(os.environ.get("DS_VPIPE_KILLS", "15"))  # at either end
MESSAGES = int(os.environ.get("DS_VPIPE_MESSAGES", "2000"))
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)


@pytest.mark.parametrize("act", [send_all, receive_all])
def test_a_killed_peer_ends_every_wait_and_leaves_nothing(act: Callable[[Connection], str]) -> None:
    survive = receive_all if act is send_all else send_all
    gc.collect()
    descriptors = len(os.listdir("/proc/self/fd"))
    for seed in range(KILLS):
        text = killed(act, survive, seed)  # type: ignore[arg-type]
        assert "it is gone (connection closed)" in text
        assert "\n" not in text
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert "memfd:ds_vpipe" not in Path("/proc/self/maps").read_text()


def random_tree(seed: int) -> tuple[Any, ...]:
    """Most are small, a few have megabytes."""
    chance = random.Random(seed)
    sizes = [int(10 ** (5.5 * chance.random() ** 2)) - 1 for _ in range(chance.choice([0, 1, 1, 2, 5]))]
    tensors = [torch.full((size,), (seed + at) % 100).to(chance.choice(DTYPES)) for at, size in enumerate(sizes)]
    return None, *tensors


def random_messages(trees: list[tuple[Any, ...]], delays: int) -> Iterator[tuple[int, tuple[Any, ...]]]:
    """Numbers and trees of all messages, the same at both ends, with random delays in between."""
    chance, pauses = random.Random(0), random.Random(delays)
    for number in range(MESSAGES):
        yield number, (torch.tensor(number), *chance.choice(trees))
        if pauses.random() < 0.01:
            time.sleep(pauses.uniform(0, 0.002))


def test_random_messages() -> None:
    """Of random sizes and dtypes, with random delays at both ends; some are kept for a while."""
    trees = [random_tree(seed) for seed in range(300)]

    def act(there: Connection) -> None:
        sender = SharedSender(there)
        for number, tree in random_messages(trees, 1):
            sender.send(Message.ACTIVATION, number, tree)
        sender.throttle(0)

    here, child = beside(act, 60.0)
    receiver, chance, kept = SharedReceiver(here), random.Random(2), []
    for sent in random_messages(trees, 3):
        kept.append((sent, receiver.receive("")))
        while kept and chance.random() < 0.6:
            (number, tree), message = kept.pop(chance.randrange(len(kept)))
            assert message.micro_batch == number
            for found, wanted in zip(message.tree, tree, strict=True):
                assert (found is None and wanted is None) or torch.equal(found, wanted), number
        if len(kept) > 40:
            del kept[:20]
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize(
    ("packet", "why"),
    [
        (b"short", "a packet of 5 bytes"),
        (b"\xa5" * 64, "bytes in block -"),
        (struct.pack("qq", 0, 2**40), f"{2**40} bytes in block 0"),
        (struct.pack("qq", 7, 64), "64 bytes in block 7"),
        (struct.pack("qq", -1, 2**40), "0 bytes, the shortest has 48"),
        (struct.pack("qq", -1, 480) + b"\xa5" * 480, "a header of -"),
    ],
)
def test_garbage_of_a_peer_ends_in_one_line(packet: bytes, why: str) -> None:
    here, there = connections()
    here.write([packet], [])
    with pytest.raises(PipelineProtocolError, match=why) as error:
        SharedReceiver(there).receive("RECV_ACT0")
    assert str(error.value).startswith("stage 4 (rank 1): what came as RECV_ACT0 from stage 3 (rank 0) is no message")
    assert "\n" not in str(error.value)
