"""Links between two stages: order, content, growth, recycling, and how every wait ends."""

from __future__ import annotations

import gc
import random
import time
from typing import Any

import pytest
import torch
from worlds import Worlds

from ds_vpipe.errors import PipelinePeerError

pytestmark = pytest.mark.mp

TIMEOUT_S = 30.0


def group_of_two(timeout_s: float = TIMEOUT_S) -> Any:
    from ds_vpipe.engine.links.groups import Groups, Peer

    return Groups(Peer(3 + rank(), rank()), timeout_s).of("test", [0, 1])


def link(prefetch: int, timeout_s: float = TIMEOUT_S, threaded: bool = False) -> Any:
    """The sending end of a link on rank 0, the receiving end on rank 1."""
    from ds_vpipe.engine.links.groups import Peer
    from ds_vpipe.engine.links.link import Receiver, Sender
    from ds_vpipe.engine.links.send_thread import Immediate, SendThread

    group, here, there = group_of_two(timeout_s), Peer(3, 0), Peer(4, 1)
    runner = SendThread() if threaded else Immediate()
    if rank() == 0:
        return Sender(group, there, prefetch, runner=runner)
    return Receiver(group, here, prefetch, runner=runner)


def rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def content(size: int, number: int) -> tuple[Any, ...]:
    values = torch.arange(size) * 7 + number
    return values.float().requires_grad_(), (None, values.to(torch.int16)), values % 3 == 0


def exchange(prefetch: int, sizes: list[int], threaded: bool) -> int:
    """Send messages of ``sizes`` and check each; returns how many had to be announced."""
    from ds_vpipe.engine.links import link as module
    from ds_vpipe.engine.links.message import Message

    announced: list[int] = []
    patched: Any = module
    original = patched.announcement

    def counted(size: int) -> torch.Tensor:
        announced.append(size)
        return original(size)

    patched.announcement = counted
    try:
        end = link(prefetch, threaded=threaded)
        if rank() == 0:
            for number, size in enumerate(sizes):
                tensors = content(size, number)
                end.send(Message.ACTIVATION, number, tensors, note=2 * number)
                end.copied()
                with torch.no_grad():  # the tensors are free now, without a threaded as soon as send() returns
                    tensors[0].fill_(-1)
                    tensors[1][1].fill_(-1)
                end.release(number - 2 * prefetch)
            end.flush()
            return len(announced)
        received = []
        for number in range(len(sizes)):
            if number % 5 == 0:
                time.sleep(0.002)
            received.append(end.receive(f"RECV_ACT{number}"))
        for number, (message, size) in enumerate(zip(received, sizes, strict=True)):
            assert (message.kind, message.micro_batch, message.note) == (Message.ACTIVATION, number, 2 * number)
            floats, (none, shorts), bools = message.tree
            wanted = content(size, number)
            assert none is None
            assert floats.requires_grad
            assert torch.equal(floats, wanted[0]), number
            assert torch.equal(shorts, wanted[1][1]), number
            assert torch.equal(bools, wanted[2]), number
        return 0
    finally:
        patched.announcement = original


def exchange_all(prefetch: int, all_sizes: list[list[int]], threaded: bool) -> list[int]:
    return [exchange(prefetch, sizes, threaded) for sizes in all_sizes]


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("prefetch", [1, 2, 5])
def test_messages_of_any_size_arrive_in_order(worlds: Worlds, prefetch: int, threaded: bool) -> None:
    chance = random.Random(prefetch)
    jumps = [chance.choice([0, 1, 30, 700, 5_000, 200_000]) for _ in range(60)]
    grows, shrinks = [int(1.3**n) for n in range(40)], [int(1.3**n) for n in range(40, 0, -1)]
    level, small = [50_000] * 20, [9] * 30
    counts = worlds.run(2, exchange_all, prefetch, [jumps, grows, shrinks, level, small], threaded)[0]
    # Only growth needs an announcement: the receiver learns of a size ``prefetch`` messages later.
    assert counts[0] > 0
    assert counts[1] > prefetch
    assert counts[2:] == [prefetch, prefetch, 0]


def two_channels(count: int) -> list[list[int]]:
    """Two links in one group; the receiver empties the second one first."""
    from ds_vpipe.engine.links.groups import Peer
    from ds_vpipe.engine.links.link import Channel, Receiver, Sender
    from ds_vpipe.engine.links.message import Message

    group, here, there = group_of_two(), Peer(3, 0), Peer(4, 1)
    channels = (Channel.TRAINING, Channel.EVALUATION)
    if rank() == 0:
        senders = [Sender(group, there, 2, channel) for channel in channels]
        for number in range(count):
            for sender, first in zip(senders, (0, 1000), strict=True):
                sender.send(Message.ACTIVATION, number, torch.full((1 + 3000 * (number % 2),), first + number))
        for sender in senders:
            sender.flush()
        return []
    receivers = [Receiver(group, here, 2, channel) for channel in channels]
    return [[int(receiver.receive("").tree[-1]) for _ in range(count)] for receiver in reversed(receivers)]


def test_links_of_one_group_do_not_mix(worlds: Worlds) -> None:
    assert worlds.run(2, two_channels, 7)[1] == [list(range(1000, 1007)), list(range(7))]


def recycle() -> int:
    from ds_vpipe.engine.links.message import Message

    end = link(2)
    if rank() == 1:
        for number in range(20):
            assert end.receive("").tree.tolist() == [number] * 4
        return 0
    used = set()
    for number in range(20):
        end.send(Message.GRADIENT, number, torch.full((4,), float(number)))
        used.add(id(end._outgoing[-1].packed))
        end.release(number - 2)
    end.flush()
    return len(used)


def test_buffers_are_recycled_once_delivered(worlds: Worlds) -> None:
    assert worlds.run(2, recycle)[0] <= 4


def abort(reason: str, prefetch: int) -> Any:
    from ds_vpipe.engine.links.link import abort_all
    from ds_vpipe.engine.links.message import Message

    end = link(prefetch)
    if rank() == 0:
        end.send(Message.ACTIVATION, 0, torch.ones(3))
        abort_all([end], reason)
        return None
    assert end.receive("RECV_ACT0").tree.tolist() == [1, 1, 1]
    with pytest.raises(PipelinePeerError) as error:
        end.receive("RECV_ACT1")
    return str(error.value), error.value.reason


@pytest.mark.parametrize("prefetch", [1, 3])
def test_abort_arrives_in_place_of_a_message(worlds: Worlds, prefetch: int) -> None:
    reason = "stage 3 (rank 0) failed in F1: ValueError: größer"
    text, got = worlds.run(2, abort, reason, prefetch)[1]
    assert got == reason
    assert text == f"stage 4 (rank 1) stopped waiting for RECV_ACT1 from stage 3 (rank 0): {reason}"


def test_a_long_reason_is_cut(worlds: Worlds) -> None:
    _, got = worlds.run(2, abort, "x" * 10_000, 1)[1]
    assert set(got) == {"x"}
    assert 1000 < len(got) < 4096


def wait_to_send() -> tuple[str, float]:
    from ds_vpipe.engine.links.message import Message

    end = link(1, timeout_s=0.5)
    start, text = time.monotonic(), ""
    if rank() == 0:
        for number in range(5, 9):
            end.send(Message.ACTIVATION, number, torch.ones(3))
        with pytest.raises(PipelinePeerError) as error:
            end.flush()
        text = str(error.value)
    waited = time.monotonic() - start
    barrier()
    return text, waited


def wait_to_receive() -> tuple[str, float]:
    end = link(2, timeout_s=0.5)
    start, text = time.monotonic(), ""
    if rank() == 1:
        with pytest.raises(PipelinePeerError) as error:
            end.receive("RECV_ACT7")
        text = str(error.value)
    waited = time.monotonic() - start
    barrier()
    return text, waited


def test_a_wait_ends_at_the_time_limit(worlds: Worlds) -> None:
    remedy = (
        "nothing came within 0.5 s; see that rank's log, or raise vpipe.peer_timeout_s if a step may take that long"
    )
    text, waited = worlds.run(2, wait_to_receive)[1]
    assert text == f"stage 4 (rank 1) waited for RECV_ACT7 from stage 3 (rank 0): {remedy}"
    assert 0.4 < waited < 10
    text, waited = worlds.run(2, wait_to_send)[0]
    assert text == f"stage 3 (rank 0) waited for stage 4 (rank 1) to receive message 6: {remedy}"
    assert 0.4 < waited < 10


def outlive(sends: int) -> str:
    """Rank 1 leaves the link after one message; rank 0 goes on sending, and notices when it waits."""
    from ds_vpipe.engine.links.groups import Peer
    from ds_vpipe.engine.links.link import Receiver
    from ds_vpipe.engine.links.message import Message

    group = group_of_two(5.0)
    end: Any
    if rank() == 1:
        end = Receiver(group, Peer(3, 0), 1)
        end.receive("RECV_ACT0")
        del end, group
        gc.collect()
        barrier()
        barrier()
        return ""
    from ds_vpipe.engine.links.link import Sender, abort_all

    end = Sender(group, Peer(4, 1), 1)
    end.send(Message.ACTIVATION, 0, torch.ones(3))
    end.release(0)
    barrier()
    for number in range(1, 1 + sends):
        end.send(Message.ACTIVATION, number, torch.ones(3))
        time.sleep(0.05)
    text = "no error"
    try:
        end.flush()
    except PipelinePeerError as error:
        text = str(error)
    end.wait_for_all(time.monotonic() + 1.0)
    abort_all([end], "reason")
    barrier()
    return text


def test_sending_to_a_peer_that_has_gone_is_no_error_until_somebody_waits(worlds: Worlds) -> None:
    text = worlds.run(2, outlive, 4)[0]
    assert text.startswith("stage 3 (rank 0) waited for stage 4 (rank 1) to receive message 1: it is gone")
    assert "\n" not in text


def fail_to_copy() -> str:
    """A tensor that cannot be copied: copied() raises the error, though another thread has met it."""
    from ds_vpipe.engine.links.message import Message

    end = link(1, threaded=True)
    barrier()
    if rank() == 1:
        return ""
    tensor = torch.ones(3)
    end._packer.fill = lambda *_: torch.ones(2).copy_(tensor)
    end.send(Message.ACTIVATION, 0, tensor)
    try:
        end.copied()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_copy_that_fails_is_raised(worlds: Worlds) -> None:
    assert "must match" in worlds.run(2, fail_to_copy)[0]


def through_a_fake_accelerator() -> list[str]:
    """What a link does with streams, in order; there is no accelerator here."""
    from contextlib import contextmanager

    from ds_vpipe.engine.links import link as module
    from ds_vpipe.engine.links.groups import Peer
    from ds_vpipe.engine.links.message import Message, Packer

    log: list[str] = []

    class Stage:
        def record_event(self) -> str:
            log.append("record")
            return "computed"

        def synchronize(self) -> None:
            log.append("stage waits")

    class Copies:
        def wait_event(self, event: str) -> None:
            log.append(f"wait for {event}")

        def synchronize(self) -> None:
            log.append("synchronize")

    class Logged(Packer):
        def __init__(self, pin: bool = False) -> None:
            self.asked_to_pin = pin
            super().__init__(False)

        def fill(self, *content: Any) -> None:
            log.append("fill")
            super().fill(*content)

    @contextmanager
    def on(stream: Any) -> Any:
        assert isinstance(stream, Copies)
        log.append("on")
        yield
        log.append("off")

    fakes = {(torch.cuda, "Stream"): Copies, (torch.cuda, "current_stream"): Stage, (torch.cuda, "stream"): on}
    fakes[module, "Packer"] = Logged
    kept = {(place, name): getattr(place, name) for place, name in fakes}
    for (place, name), fake in fakes.items():
        setattr(place, name, fake)
    try:
        here, there = Peer(3, 0), Peer(4, 1)
        from ds_vpipe.engine.links.send_thread import SendThread

        group = group_of_two()
        if rank() == 0:
            end = module.Sender(group, there, 1, pin=True, runner=SendThread())
            assert end._packer.asked_to_pin
            start, end._start = end._start, lambda *message: log.append("send") or start(*message)
            end.send(Message.ACTIVATION, 0, torch.ones(3))
            end.flush()
        else:
            assert module.Receiver(group, here, 1).receive("RECV_ACT0").tree.tolist() == [1, 1, 1]
    finally:
        for (place, name), original in kept.items():
            setattr(place, name, original)
    return log


def test_copies_from_an_accelerator_wait_on_a_stream_of_their_own(worlds: Worlds) -> None:
    """The stage itself waits for nothing; the message goes out once the copy is complete."""
    log = worlds.run(2, through_a_fake_accelerator)[0]
    assert log == ["record", "on", "wait for computed", "fill", "synchronize", "off", "send"]
