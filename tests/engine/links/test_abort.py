"""A failing stage's ABORT leaves on every link, whatever has failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_vpipe.engine.execution.ending import Failures
from ds_vpipe.engine.links import groups
from ds_vpipe.engine.links.device import Accelerator, DeviceCopies
from ds_vpipe.engine.links.failure_watch import FailureWatch
from ds_vpipe.engine.links.groups import Group, Peer
from ds_vpipe.engine.links.host_link import HostSender
from ds_vpipe.engine.links.link import Sender, abort_all
from ds_vpipe.engine.links.message import Message, Packed, unpack
from ds_vpipe.engine.links.send_thread import SendThread
from ds_vpipe.errors import PipelinePeerError, VPipeError


class Backend:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        self.sent += tensors
        return SimpleNamespace(wait=lambda limit: True)


class Failed(Accelerator):
    """Every call raises but the first, for streams."""

    def stream(self) -> Any:
        return SimpleNamespace(wait_event=self.host_memory, record_event=self.host_memory)

    def current_stream(self) -> Any:
        return self.host_memory(0)

    def host_memory(self, size: int) -> Any:
        raise RuntimeError("CUDA error: device-side assert triggered")


class OrdinaryMemory(Accelerator):
    """Has no page-locked memory."""

    def host_memory(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)


def sender(backend: Any, thread: SendThread, copies: DeviceCopies | None = None, threaded: bool = True) -> Sender:
    failures: Any = None
    group = Group("test", backend, (0, 1), Peer(0, 0), 5.0, failures)
    return HostSender(group, Peer(1, 1), 2, copies=copies, runner=thread, threaded=threaded)


def reasons(backend: Backend) -> list[str]:
    return [bytes(message.tree.tolist()).decode() for message in map(unpack, backend.sent)]


def test_abort_leaves_on_every_link_though_a_message_could_not_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, backends = SendThread(), [Backend(), Backend()]
    senders = [sender(backend, thread) for backend in backends]

    def fail(*_: Any) -> None:
        raise ValueError("copy")

    monkeypatch.setattr(Packed, "fill", fail)
    senders[0].send(Message.ACTIVATION, 0, torch.ones(3))
    while not thread._errors:
        pass
    monkeypatch.undo()
    abort_all(senders, "reason")
    assert [reasons(backend) for backend in backends] == [["reason"], ["reason"]]
    thread.stop()


def test_messages_of_the_host_leave_after_the_device_has_failed() -> None:
    thread, backend = SendThread(), Backend()
    link = sender(backend, thread, DeviceCopies(Failed(torch.device("cpu"))))
    with pytest.raises(RuntimeError, match="device-side assert"):
        link.send(Message.ACTIVATION, 0, torch.ones(3))
    link.send(Message.END, 1, torch.tensor([1, 1, 0, 0]))
    link.send(Message.PEERS, 2, torch.zeros(2, 2))
    link.send(Message.QUIESCE, 3, None)
    abort_all([link], "reason")
    kinds = [unpack(data).kind for data in backend.sent]
    assert kinds == [Message.END, Message.PEERS, Message.QUIESCE, Message.ABORT]
    thread.stop()


def test_abort_leaves_on_every_link_though_the_device_has_failed_in_one() -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    copies: Any = SimpleNamespace(
        accelerator=OrdinaryMemory(torch.device("cpu")),
        leaving=lambda copy: SimpleNamespace(synchronize=fail),
        wait=fail,
    )
    thread, backends = SendThread(), [Backend(), Backend()]
    senders = [sender(backend, thread, copies, threaded=False) for backend in backends]
    with pytest.raises(RuntimeError, match="device-side assert"):
        senders[0].send(Message.TIED, 0, torch.ones(3))
    abort_all(senders, "reason")
    assert [reasons(backend) for backend in backends] == [["reason"], ["reason"]]
    thread.stop()


class Elsewhere(OrdinaryMemory):
    """Takes every tensor for one of another accelerator."""

    def refuse_others(self, tensors: Iterable[torch.Tensor | None]) -> None:
        if any(tensor is not None for tensor in tensors):
            raise VPipeError("stage boundary: got a tensor on another one")


def test_tensors_of_another_accelerator_do_not_leave_but_messages_on_the_host_do() -> None:
    copies: Any = SimpleNamespace(accelerator=Elsewhere(torch.device("cpu")), wait=lambda event: None)
    thread, backend = SendThread(), Backend()
    link = sender(backend, thread, copies)
    with pytest.raises(VPipeError, match="on another one"):
        link.send(Message.ACTIVATION, 0, (None, torch.ones(3)))
    link.send(Message.ABORT, 0, torch.ones(3, dtype=torch.uint8))
    thread.settle()
    assert [unpack(data).kind for data in backend.sent] == [Message.ABORT]
    thread.stop()


def test_an_end_does_not_wait_for_a_device_that_hangs() -> None:
    gate = threading.Event()
    copies: Any = SimpleNamespace(
        accelerator=OrdinaryMemory(torch.device("cpu")),
        leaving=lambda copy: SimpleNamespace(synchronize=gate.wait),
        wait=lambda event: None,
    )
    thread, backend = SendThread(), Backend()
    link = sender(backend, thread, copies)
    link.send(Message.ACTIVATION, 0, torch.ones(3))
    begin = time.monotonic()
    link.wait_for_all(begin + 0.2)
    assert time.monotonic() - begin < 5
    assert not backend.sent
    gate.set()
    thread.stop()


def test_the_interfaces_that_gloo_is_given_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(groups.ProcessGroupGloo, "create_device", lambda interface: asked.append(interface))
    monkeypatch.setattr(groups.ProcessGroupGloo, "create_default_device", lambda: asked.append("default"))
    for names in ("ib0", "ib0,ib1", ""):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
        groups._devices()
    assert asked == ["ib0", "ib0", "ib1", "default"]


def test_a_collective_whose_ranks_are_gone_with_the_store_ends_in_one_line() -> None:
    """As for a rank that was stopped for longer than all others waited."""
    lost: list[bool] = []
    silent = SimpleNamespace(
        reason=lambda: None, publish=lambda reason, by_lost: lost.append(by_lost), wait_until_seen=lambda: None
    )
    stage: Any = SimpleNamespace(
        groups=SimpleNamespace(failures=silent), links=SimpleNamespace(me=Peer(1, 2)), senders=[], action="evaluation"
    )
    gone = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:20353.\nMore")
    with pytest.raises(PipelinePeerError, match=r"^stage 1 \(rank 2\) waited in evaluation for other ranks: one is "):
        Failures(stage).abort(gone)
    Failures(stage).abort(RuntimeError("gloo: sizes differ"))  # a defect stays what it is
    assert stage.failure == "stage 1 (rank 2) failed in evaluation: RuntimeError: gloo: sizes differ"
    for error, cause in (
        (PipelinePeerError("lost"), gone),
        (OSError("no data"), ValueError("operation on closed file")),
    ):
        error.__cause__ = cause
        Failures(stage).abort(error)
    assert lost == [True, False, True, False], "only ranks that are gone will not see it"


class UnprintableError(ValueError):
    """As of a class whose text needs what it has not been given."""

    def __str__(self) -> str:
        raise AttributeError("missing")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (FileNotFoundError("no file\n'caf\udce9'"), r"FileNotFoundError: no file 'caf\udce9'"),
        (UnprintableError("text"), "UnprintableError: its text cannot be shown"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
    ],
)
def test_a_failure_with_a_text_that_is_none(error: BaseException, says: str) -> None:
    """Names of files are any bytes; what cannot be encoded would end the failure watch in place of the run."""
    store = torch.distributed.HashStore()
    watch = FailureWatch(store, 1, limit_s=100)
    thread, backend = SendThread(), Backend()
    stage: Any = SimpleNamespace(
        groups=SimpleNamespace(failures=watch),
        links=SimpleNamespace(me=Peer(1, 2)),
        senders=[sender(backend, thread)],
        action="F3",
    )
    Failures(stage).abort(error)
    line = f"stage 1 (rank 2) failed in F3: {says}"
    assert reasons(backend) == [stage.failure] == [watch.reason()] == [line]
    thread.stop()
    watch.stop()


def test_a_collective_names_its_ranks_where_it_cannot_know_which_is_gone() -> None:
    silent: Any = SimpleNamespace(reason=lambda: None)

    def allreduce(*_: Any) -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:20353")

    backend = SimpleNamespace(allreduce=allreduce, size=lambda: 1)
    group = groups.Group("all", backend, (0, 1, 2), Peer(0, 0), 1.0, silent)
    with pytest.raises(PipelinePeerError, match=r"waited for data: one of ranks 0, 1, 2 is gone \(connection closed\)"):
        group.minimum(1, "data")


def test_a_wait_for_a_device_that_hangs_has_a_name_and_a_limit() -> None:
    thread, gate, failures = SendThread(), threading.Event(), SimpleNamespace(reason=lambda: None, known=None)
    thread.submit(gate.wait)  # type: ignore[arg-type]
    late = threading.Timer(5, gate.set)  # a wait without its limit ends well, and the test fails
    late.start()
    group = Group("test", Backend(), (0, 1), Peer(0, 0), 0.2, failures)  # type: ignore[arg-type]
    link = HostSender(group, Peer(1, 1), 2, runner=thread, threaded=True)
    link.send(Message.ACTIVATION, 0, torch.ones(3))
    with pytest.raises(PipelinePeerError, match="waited for its send thread to finish what is to be sent: nothing"):
        link.flush()
    late.cancel()
    gate.set()
    thread.stop()
