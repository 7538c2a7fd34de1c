"""Copies to and from an accelerator: what waits for what, on a simulated device; and that mistakes are seen there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from simulated_device import Misuse, SimulatedAccelerator

from ds_vpipe.engine.links import device as module
from ds_vpipe.engine.links.device import DeviceCopies, copies_of
from ds_vpipe.engine.stage import Stage
from ds_vpipe.errors import VPipeError

SEEDS = pytest.mark.parametrize(("seed", "early"), [(0, 0.0), (1, 0.3), (2, 1.0)])


@pytest.fixture
def lazy() -> Iterator[DeviceCopies]:
    """Nothing is done before somebody waits for it."""
    accelerator = SimulatedAccelerator(early=0.0)
    yield DeviceCopies(accelerator)
    accelerator.close()


def out(copies: DeviceCopies, tensor: torch.Tensor, buffer: torch.Tensor | None = None) -> tuple[torch.Tensor, object]:
    """Queue a copy to the host."""
    host = copies.accelerator.host_memory(4 * tensor.numel()).view(torch.float32) if buffer is None else buffer
    return host, copies.leaving(lambda: host.copy_(tensor, non_blocking=True))


@SEEDS
def test_there_and_back(seed: int, early: float) -> None:
    copies = DeviceCopies(SimulatedAccelerator(seed, early))
    for number in range(30):
        sent = torch.arange(5.0) * number
        host, event = out(copies, sent)
        copies.wait(event)  # type: ignore[arg-type]
        sent.fill_(-1)
        back = copies.to_device(host)
        assert torch.equal(back, torch.arange(5.0) * number)
    assert not copies.accelerator.host_waits  # type: ignore[attr-defined]
    copies.accelerator.end()  # type: ignore[attr-defined]


def test_bytes_are_there_once_a_thread_has_waited(lazy: DeviceCopies) -> None:
    sent = torch.arange(5.0)
    host, event = out(lazy, sent)
    assert host.isnan().all()
    thread = threading.Thread(target=event.synchronize)  # type: ignore[attr-defined]
    thread.start()
    thread.join()
    assert torch.equal(host, sent)
    assert not lazy.accelerator.host_waits  # type: ignore[attr-defined]


def test_copies_keep_strides_and_gradients(lazy: DeviceCopies) -> None:
    rows, grid = torch.arange(6.0).view(2, 3).t(), torch.arange(16.0).view(4, 4)[:, ::2]
    tree = (rows.requires_grad_(), [None, grid], torch.tensor([True, False]))
    lazy.accelerator.holds = lambda tensor: False  # type: ignore[method-assign]
    found = lazy.tree_to_device(tree)
    assert isinstance(found, tuple)
    assert isinstance(found[1], list)
    assert found[0].stride() == (1, 3)
    assert found[0].requires_grad
    assert found[1][0] is None
    for wanted, got in ((rows, found[0]), (grid, found[1][1]), (tree[2], found[2])):
        assert torch.equal(wanted, got)
        assert got.data_ptr() != wanted.data_ptr()
    assert Stage.arrived(SimpleNamespace(copies=None), tree) is tree  # type: ignore[arg-type]


def test_sparse_tensors_arrive(lazy: DeviceCopies) -> None:
    """Their memory is not that of one tensor, which could be kept from use by another stream."""
    sparse = torch.eye(3).to_sparse()
    lazy.to_device(torch.ones(3))
    assert torch.equal(lazy.to_device(sparse).to_dense(), torch.eye(3))


def test_host_copies(lazy: DeviceCopies) -> None:
    for mine in (torch.arange(6).view(2, 3).t(), torch.zeros(0, 2), torch.tensor(True)):
        copy = lazy.host_copy(mine)
        assert torch.equal(copy, mine)
        assert copy.stride() == torch.empty_like(mine).stride()
        mine.zero_()
        assert copy.data_ptr() != mine.data_ptr() or not mine.numel()


# Mistakes: each is one line of the module, or of one that uses it, that is missing or in another place.


class Unordered(DeviceCopies):
    """Does not let copies wait for the computation."""

    def leaving(self, copy: Callable[[], object]) -> torch.Event:
        with self._leaving:
            copy()
        return self._leaving.record_event()


class Hasty(DeviceCopies):
    """Does not let the computation wait for copies."""

    def wait(self, event: torch.Event) -> None:
        pass


class Careless(DeviceCopies):
    """Does not keep what has arrived."""

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        self.accelerator.used_on = lambda *_: None  # type: ignore[method-assign]
        return super().to_device(tensor)


def free_early(copies: DeviceCopies) -> None:
    _, event = out(copies, torch.ones(3))  # of which nobody knows any more
    copies.wait(event)  # type: ignore[arg-type]


def write_early(copies: DeviceCopies) -> None:
    sent = torch.ones(3)
    _, event = out(copies, sent)
    sent.add_(1)
    copies.wait(event)  # type: ignore[arg-type]


def use_a_buffer_twice(copies: DeviceCopies) -> None:
    sent = torch.ones(3)
    host, event = out(copies, sent)
    copies.wait(event)  # type: ignore[arg-type]
    out(copies, sent, host)


def bring_two(copies: DeviceCopies) -> None:
    for _ in range(2):
        copies.to_device(torch.ones(3))


def send_one(copies: DeviceCopies) -> None:
    sent = torch.ones(3)
    copies.wait(out(copies, sent)[1])  # type: ignore[arg-type]


def compute_beside(copies: DeviceCopies) -> None:
    sent = torch.ones(3)
    copies.leaving(lambda: sent.add_(1))


MISTAKES = (
    (Unordered, send_one, "a copy from the device waits for no event recorded after the computation"),
    (Hasty, bring_two, "a copy to the device is used before its event"),
    (Careless, bring_two, "a copy to the device is not kept from being freed and used again"),
    (DeviceCopies, use_a_buffer_twice, "a buffer is written again before anybody has waited"),
    (DeviceCopies, compute_beside, "on a stream of copies"),
)
# No mistakes where the copy has been done by then.
EARLY = (
    (DeviceCopies, free_early, "a tensor was freed while a copy of it was pending"),
    (DeviceCopies, write_early, "a tensor was changed while a copy of it was pending"),
)


@pytest.mark.parametrize(
    ("early", "kind", "use", "line"),
    [(0.0, *mistake) for mistake in (*MISTAKES, *EARLY)] + [(1.0, *mistake) for mistake in MISTAKES],
)
def test_mistakes_are_seen(
    early: float, kind: type[DeviceCopies], use: Callable[[DeviceCopies], None], line: str
) -> None:
    accelerator = SimulatedAccelerator(early=early)
    with pytest.raises(Misuse, match=line):
        use(kind(accelerator))
    accelerator.close()


def test_what_a_copy_reads_may_be_freed_at_once() -> None:
    copies = DeviceCopies(SimulatedAccelerator(early=0.0))
    accelerator: Any = copies.accelerator
    host, sent = accelerator.host_memory(12).view(torch.float32), torch.ones(3)
    event = copies.leaving(partial(host.copy_, sent, non_blocking=True), reads=sent)
    del sent
    copies.wait(event)
    accelerator.end()
    assert host.tolist() == [1, 1, 1]


def test_waits_of_the_host_are_counted(lazy: DeviceCopies) -> None:
    waits = lazy.accelerator.host_waits  # type: ignore[attr-defined]
    sent = torch.ones(3)
    host = lazy.accelerator.host_memory(12).view(torch.float32)
    lazy.leaving(lambda: host.copy_(sent))
    assert sum(waits.values()) == 1
    out(lazy, sent)[1].synchronize()  # type: ignore[attr-defined]
    assert sum(waits.values()) == 2
    assert all(__file__ in line for line in waits)


def test_the_host_waits_for_copies_of_other_memory(lazy: DeviceCopies) -> None:
    waits = lazy.accelerator.host_waits  # type: ignore[attr-defined]
    lazy.to_device(lazy.host_copy(torch.ones(3)))
    assert not waits
    lazy.to_device(torch.ones(3))
    assert sum(waits.values()) == 1
    out(lazy, torch.ones(3), torch.empty(3))
    assert sum(waits.values()) == 2


def test_the_cpu_has_no_copies() -> None:
    assert copies_of(torch.device("cpu")) is None


def test_an_accelerator_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its calls are those of torch's interface for any accelerator; there is none here."""
    asked: list[object] = []

    def stream(device: torch.device) -> object:
        asked.append(("stream", device))
        return len(asked)

    place = torch.device("cuda", 1)
    monkeypatch.setattr(module.torch, "Stream", stream)
    monkeypatch.setattr(module.torch.accelerator, "set_device_index", lambda device: asked.append(("use", device)))
    monkeypatch.setattr(module.torch.accelerator, "current_stream", lambda device: ("current", device))
    copies = copies_of(place)
    assert copies is not None
    assert asked == [("stream", place), ("stream", place)]
    assert copies._leaving != copies._arriving
    copies.accelerator.use()
    assert asked[-1] == ("use", place)
    assert copies.accelerator.current_stream() == ("current", place)


def test_memory_of_another_accelerator_is_not_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of one host have accelerators of the same kind, with numbers; there is none here."""

    def on(*place: object) -> torch.Tensor:
        return SimpleNamespace(device=torch.device(*place))  # type: ignore[arg-type,return-value]

    monkeypatch.setattr(module.torch.accelerator, "current_device_index", lambda: 1)
    assert module.Accelerator(torch.device("hpu")).holds(on("hpu", 1))
    accelerator = module.Accelerator(torch.device("cuda", 1))
    assert accelerator.holds(on("cuda", 1))
    assert not accelerator.holds(on("cuda", 0))
    accelerator.refuse_others([on("cuda", 1), on("cpu"), None])
    for other in (on("cuda", 0), on("meta")):
        line = f"stage boundary: got a tensor on {other.device} from a stage on cuda:1, allowed are"
        with pytest.raises(VPipeError, match=line):
            accelerator.refuse_others([on("cuda", 1), other])
