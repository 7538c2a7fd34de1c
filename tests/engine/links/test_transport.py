"""Links between two stages: order, content, growth, recycling, and how every wait ends."""

from __future__ import annotations

import gc
import random
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch
from worlds import Worlds

from ds_vpipe.errors import PipelinePeerError, VPipeConfigError

pytestmark = pytest.mark.mp
PAYLOADS = pytest.mark.parametrize("payload", ["host", "shared"])

TIMEOUT_S = 30.0


def wiring_of(payload: str, timeout_s: float = TIMEOUT_S, copies: Any = None) -> Any:
    from ds_vpipe.engine.links.groups import Groups, Peer
    from ds_vpipe.engine.links.wiring import Wiring

    return Wiring(Groups(Peer(3 + rank(), rank()), timeout_s), copies, payload)  # type: ignore[arg-type]


def ends(wiring: Any, prefetch: int = 2, **how: Any) -> Any:
    """The sending end of a link on rank 0, the receiving end on rank 1."""
    from ds_vpipe.engine.links.groups import Peer

    if rank() == 0:
        return wiring.sender("test", Peer(4, 1), prefetch, **how)
    return wiring.receiver("test", Peer(3, 0), prefetch, **how)


def link(
    payload: str, prefetch: int = 2, timeout_s: float = TIMEOUT_S, threaded: bool = False, copies: Any = None
) -> Any:
    made = ends(wiring_of(payload, TIMEOUT_S, copies), prefetch, threaded=threaded)
    limit(made, timeout_s)
    return made


def limit(end: Any, timeout_s: float) -> None:
    """Give the waits of an end that has connected, which takes a busy machine its time, another limit."""
    if hasattr(end, "_connection"):
        end._connection.timeout_s = timeout_s
    else:
        object.__setattr__(end._group, "timeout_s", timeout_s)


def rank() -> int:
    import torch.distributed as dist

    return dist.get_rank()


def barrier() -> None:
    import torch.distributed as dist

    dist.barrier()


def content(size: int, number: int) -> tuple[Any, ...]:
    values = torch.arange(size) * 7 + number
    return values.float().requires_grad_(), (None, values.to(torch.int16)), values % 3 == 0


def exchange(payload: str, prefetch: int, sizes: list[int], threaded: bool, later: int = 0) -> int:
    """Send messages of ``sizes`` and check each; returns how many had to be announced.

    Half-way, where nothing is under way, ``later`` receives ahead take the place of ``prefetch``.
    """
    from ds_vpipe.engine.links import host_link as module
    from ds_vpipe.engine.links.message import Message

    announced: list[int] = []
    patched: Any = module
    original = patched.announcement

    def counted(size: int) -> torch.Tensor:
        announced.append(size)
        return original(size)

    patched.announcement = counted
    try:
        end = link(payload, prefetch, threaded=threaded)
        if rank() == 0:
            for number, size in enumerate(sizes):
                if number == len(sizes) // 2:
                    end.flush()
                    end.keep_posted(later)
                tensors = content(size, number)
                end.send(Message.ACTIVATION, number, tensors, note=2 * number)
                end.wait_until_copied()
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
            if number == len(sizes) // 2:
                end.keep_posted(later)
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


def exchange_all(payload: str, prefetch: int, all_sizes: list[list[int]], threaded: bool, later: int = 0) -> list[int]:
    return [exchange(payload, prefetch, sizes, threaded, later) for sizes in all_sizes]


@pytest.mark.parametrize(
    ("payload", "prefetch", "threaded"),
    [*(("host", prefetch, threaded) for prefetch in (1, 2, 5) for threaded in (False, True)), ("shared", 1, False)],
)
def test_messages_of_any_size_arrive_in_order(worlds: Worlds, payload: str, prefetch: int, threaded: bool) -> None:
    chance = random.Random(prefetch)
    jumps = [chance.choice([0, 1, 30, 700, 5_000, 200_000]) for _ in range(60)]
    grows, shrinks = [int(1.3**n) for n in range(40)], [int(1.3**n) for n in range(40, 0, -1)]
    level, small = [50_000] * 20, [9] * 30
    counts = worlds.run(2, exchange_all, payload, prefetch, [jumps, grows, shrinks, level, small], threaded)[0]
    if payload == "shared":
        return
    # Only growth needs an announcement: the receiver learns of a size ``prefetch`` messages later.
    assert counts[0] > 0
    assert counts[1] > prefetch
    assert counts[2:] == [prefetch, prefetch, 0]


@pytest.mark.parametrize("prefetch", [1, 3])
@pytest.mark.parametrize("threaded", [False, True])
def test_more_receives_ahead_in_mid_run(worlds: Worlds, prefetch: int, threaded: bool) -> None:
    """Both ends agree on the length of every buffer, which is not what it would have been with as many at first."""
    chance = random.Random(prefetch)
    jumps = [[chance.choice([0, 1, 30, 700, 5_000, 200_000]) for _ in range(40)] for _ in range(4)]
    grows = [int(1.3**n) for n in range(40)]
    for later in (prefetch - 1, prefetch + 1, prefetch + 6):
        counts = worlds.run(2, exchange_all, "host", prefetch, [*jumps, grows], threaded, later)[0]
        assert counts[-1] > later
    worlds.run(2, exchange_all, "shared", prefetch, [*jumps, grows], False, prefetch + 6)


def two_channels(payload: str, count: int) -> list[list[int]]:
    """Two links of one name; the receiver empties the second one first."""
    from ds_vpipe.engine.links.host_link import Channel
    from ds_vpipe.engine.links.message import Message

    wiring = wiring_of(payload)
    links = [ends(wiring, channel=channel) for channel in (Channel.TRAINING, Channel.EVALUATION)]
    if rank() == 0:
        for number in range(count):
            for sender, first in zip(links, (0, 1000), strict=True):
                sender.send(Message.ACTIVATION, number, torch.full((1 + 3000 * (number % 2),), first + number))
        for sender in links:
            sender.flush()
        return []
    return [[int(receiver.receive("").tree[-1]) for _ in range(count)] for receiver in reversed(links)]


@PAYLOADS
def test_links_of_one_name_do_not_mix(worlds: Worlds, payload: str) -> None:
    assert worlds.run(2, two_channels, payload, 7)[1] == [list(range(1000, 1007)), list(range(7))]


def chosen(payload: str, unable: int | None, tensor: float, accelerated: tuple[int, ...] = ()) -> tuple[str, float]:
    """The payload of a link, on a rank of which shared memory may not work, and a value that it carries."""
    from simulated_device import simulated_copies

    from ds_vpipe.engine.links import wiring
    from ds_vpipe.engine.links.message import Message

    if unable == rank():
        patched: Any = wiring
        able, patched.without_memory = patched.without_memory, lambda copies: "has none"
    try:
        end = link(payload, copies=simulated_copies() if rank() in accelerated else None)
        if rank() == 0:
            end.send(Message.ACTIVATION, 0, torch.full((9_000,), tensor))
            end.throttle(0)
            return end.payload, tensor
        received = end.receive("").tree
        return "shared" if type(end).__name__.startswith("Shared") else "host", float(received.mean())
    finally:
        if unable == rank():
            patched.without_memory = able


@pytest.mark.parametrize(
    ("payload", "unable", "accelerated", "wanted"),
    [
        ("auto", None, (), "shared"),
        ("shared", None, (), "shared"),
        ("host", None, (), "host"),
        ("auto", 0, (), "host"),
        ("auto", 1, (), "host"),
        ("auto", None, (0, 1), "shared"),
        ("auto", None, (1,), "shared"),
        ("host", None, (0, 1), "host"),
        ("shared", None, (0, 1), "shared"),
        ("shared", None, (0,), "shared"),
    ],
)
def test_payload_of_a_link(
    worlds: Worlds, payload: str, unable: int | None, accelerated: tuple[int, ...], wanted: str
) -> None:
    assert worlds.run(2, chosen, payload, unable, 2.5, accelerated) == [(wanted, 2.5)] * 2


def refused(unable: int) -> str:
    with pytest.raises(VPipeConfigError) as error:
        chosen("shared", unable, 0.0)
    return str(error.value)


def far_apart() -> tuple[str, str]:
    with pytest.raises(VPipeConfigError) as error:
        link("shared", prefetch=34)
    return type(link("auto", prefetch=34)).__name__, str(error.value)


def test_stages_too_far_apart_for_a_socket(worlds: Worlds) -> None:
    for (name, text), wanted in zip(worlds.run(2, far_apart), ("HostSender", "HostReceiver"), strict=True):
        assert name == wanted
        assert "33 micro-batches apart; allowed are 31, or" in text


@pytest.mark.parametrize("unable", [0, 1])
def test_shared_memory_that_does_not_work_is_refused_on_both_ranks(worlds: Worlds, unable: int) -> None:
    for text in worlds.run(2, refused, unable):
        assert text.startswith('vpipe.link: got "shared", and stage ')
        assert text.endswith('allowed here: "auto", "host"; change the key')
        assert "\n" not in text


def refused_at_start() -> tuple[str, float]:
    """What an engine says whose middle stage has no memory to share, and after how long."""
    import cases

    from ds_vpipe.engine.links import shared_link

    config = cases.config(1, {"type": "SGD", "params": {"lr": 0.1}}, {"link": "shared", "partition": "uniform"})
    begin = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        if rank() == 1:
            patch.delattr(shared_link.os, "memfd_create")
        with pytest.raises(VPipeConfigError) as error:
            cases.engine(config, 3)
    return str(error.value), time.monotonic() - begin


def test_shared_memory_that_one_stage_does_not_have_is_refused_on_all(worlds: Worlds) -> None:
    for text, seconds in worlds.run(3, refused_at_start):
        assert text.startswith(
            'vpipe.link: got "shared", and stage 1 (rank 1) has a Python without memfd_create(); allowed'
        )
        assert seconds < 30  # the limit of waits is 60


def recycle() -> int:
    from ds_vpipe.engine.links.message import Message

    end = link("host")
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


def abort(payload: str, reason: str, prefetch: int) -> Any:
    from ds_vpipe.engine.links.link import abort_all
    from ds_vpipe.engine.links.message import Message

    end = link(payload, prefetch)
    if rank() == 0:
        end.send(Message.ACTIVATION, 0, torch.ones(3))
        abort_all([end], reason)
        return None
    assert end.receive("RECV_ACT0").tree.tolist() == [1, 1, 1]
    with pytest.raises(PipelinePeerError) as error:
        end.receive("RECV_ACT1")
    return str(error.value), error.value.reason


@pytest.mark.parametrize(("payload", "prefetch"), [("host", 1), ("host", 3), ("shared", 1)])
def test_abort_arrives_in_place_of_a_message(worlds: Worlds, payload: str, prefetch: int) -> None:
    reason = "stage 3 (rank 0) failed in F1: ValueError: größer"
    text, got = worlds.run(2, abort, payload, reason, prefetch)[1]
    assert got == reason
    assert text == f"stage 4 (rank 1) stopped waiting for RECV_ACT1 from stage 3 (rank 0): {reason}"


@PAYLOADS
def test_a_long_reason_is_cut(worlds: Worlds, payload: str) -> None:
    _, got = worlds.run(2, abort, payload, "x" * 10_000, 1)[1]
    assert set(got) == {"x"}
    assert 1000 < len(got) < 4096


def wait_to_send(payload: str) -> tuple[str, float]:
    from ds_vpipe.engine.links.message import Message

    end = link(payload, 1, timeout_s=0.5)
    start, text = time.monotonic(), ""
    if rank() == 0:
        for number in range(5, 9):
            end.send(Message.ACTIVATION, number, torch.ones(3))
        with pytest.raises(PipelinePeerError) as error:
            end.throttle(0)
        text = str(error.value)
    waited = time.monotonic() - start
    barrier()
    return text, waited


def wait_to_receive(payload: str) -> tuple[str, float]:
    end = link(payload, timeout_s=0.5)
    start, text = time.monotonic(), ""
    if rank() == 1:
        with pytest.raises(PipelinePeerError) as error:
            end.receive("RECV_ACT7")
        text = str(error.value)
    waited = time.monotonic() - start
    barrier()
    return text, waited


@PAYLOADS
def test_a_wait_ends_at_the_time_limit(worlds: Worlds, payload: str) -> None:
    remedy = (
        "nothing came within 0.5 s; see that rank's log, or raise vpipe.peer_timeout_s if a step may take that long"
    )
    text, waited = worlds.run(2, wait_to_receive, payload)[1]
    assert text == f"stage 4 (rank 1) waited for RECV_ACT7 from stage 3 (rank 0): {remedy}"
    assert 0.4 < waited < 10
    text, waited = worlds.run(2, wait_to_send, payload)[0]
    first = 6 if payload == "host" else 5  # a receive that is posted ahead takes a message that nobody asks for
    assert text == f"stage 3 (rank 0) waited for stage 4 (rank 1) to receive message {first}: {remedy}"
    assert 0.4 < waited < 10


def outlive(payload: str, sends: int) -> str:
    """Rank 1 leaves the link after one message; rank 0 goes on sending, and notices when it waits."""
    from ds_vpipe.engine.links.link import abort_all
    from ds_vpipe.engine.links.message import Message

    end = link(payload, 1)
    if rank() == 1:
        end.receive("RECV_ACT0")
        del end
        gc.collect()
        barrier()
        barrier()
        return ""
    end.send(Message.ACTIVATION, 0, torch.ones(3))
    end.release(0)
    barrier()
    for number in range(1, 1 + sends):
        end.send(Message.ACTIVATION, number, torch.ones(3))
        time.sleep(0.05)
    text = "no error"
    try:
        end.throttle(0)
    except PipelinePeerError as error:
        text = str(error)
    end.wait_for_all(time.monotonic() + 1.0)
    abort_all([end], "reason")
    barrier()
    return text


@PAYLOADS
def test_sending_to_a_peer_that_has_gone_is_no_error_until_somebody_waits(worlds: Worlds, payload: str) -> None:
    text = worlds.run(2, outlive, payload, 4)[0]
    assert text.startswith("stage 3 (rank 0) waited for stage 4 (rank 1) to receive message 1: it is gone")
    assert "\n" not in text


def fail_to_copy() -> str:
    """A tensor that cannot be copied: wait_until_copied() raises the error, though another thread has met it."""
    from ds_vpipe.engine.links.message import Message, Packed

    end = link("host", 1, threaded=True)
    barrier()
    if rank() == 1:
        return ""
    tensor = torch.ones(3)
    with mock.patch.object(Packed, "fill", side_effect=lambda *_: torch.ones(2).copy_(tensor)):
        end.send(Message.ACTIVATION, 0, tensor)
        try:
            end.wait_until_copied()
        except RuntimeError as error:
            return str(error)
    return "no error"


def test_a_copy_that_fails_is_raised(worlds: Worlds) -> None:
    assert "must match" in worlds.run(2, fail_to_copy)[0]


def from_a_device(threaded: bool) -> tuple[list[float], int, bool]:
    """Tensors of a simulated accelerator, changed as soon as they may be; what came, and waits of the stage itself."""
    from simulated_device import simulated_copies

    from ds_vpipe.engine.links.message import Message

    copies = simulated_copies(seed=rank(), early=0.0)
    accelerator: Any = copies.accelerator
    end = link("host", 2, threaded=threaded, copies=copies)
    found: list[float] = []
    for number in range(20):
        if rank() == 0:
            tensor = torch.full((4096,), float(number))
            end.send(Message.ACTIVATION, number, (tensor, torch.zeros(3)))
            if threaded:
                end.wait_until_copied()
            tensor.fill_(-1)
            end.send(Message.PEERS, number, torch.ones(2))
            end.wait_until_copied()
        else:
            received, zeros = copies.to_device(end.receive("RECV_ACT").tree[0]), end.receive("RECV_PEERS")
            assert zeros.tree.tolist() == [1, 1]
            found += received.unique().tolist()
    if rank() == 0:
        waits = sum(accelerator.host_waits.values())
        end.flush()
        users = accelerator.users
        assert accelerator.num_copies == 40
    else:
        waits, users = sum(accelerator.host_waits.values()), {-1}
    accelerator.end()
    return found, waits, len(users) == 1 and threading.get_ident() not in users


@pytest.mark.parametrize("threaded", [False, True])
def test_a_stage_does_not_wait_for_its_device(worlds: Worlds, threaded: bool) -> None:
    sender, receiver = worlds.run(2, from_a_device, threaded)
    assert sender == ([], 0, True)
    assert receiver == ([float(number) for number in range(20)], 0, True)
