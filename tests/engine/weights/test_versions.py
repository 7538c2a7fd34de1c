"""Weight versions: storages in flight never change, whatever aliases them, and gradients through them are exact."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.checkpoint import checkpoint

from ds_vpipe.engine.weights.versions import WeightVersions


def pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def unseen(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Changes inside are not seen by autograd, as in an update."""
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(parameters)):
        yield


def values_of(versions: WeightVersions, parameters: list[nn.Parameter], version: int) -> list[torch.Tensor]:
    """The parameters' values in a version."""
    pointed = versions.pointed
    versions.point_to(version)
    values = [parameter.detach().clone() for parameter in parameters]
    versions.point_to(pointed)
    return values


def update(versions: WeightVersions, parameters: Sequence[nn.Parameter], amount: float = 1.0) -> None:
    """Fork and change every weight in place."""
    versions.fork()
    with unseen(parameters):
        for parameter in parameters:
            parameter.add_(amount)
    versions.advance()


def keep_only(versions: WeightVersions, used: set[int]) -> None:
    """Recycle all versions but those in use and the newest."""
    versions.in_flight = {version: version for version in used}
    versions.recycle()


def test_a_copy_overwrites_the_recycled_version_alone() -> None:
    weights = [nn.Parameter(torch.zeros(shape)) for shape in (5, (16, 16))]
    versions = WeightVersions(weights)
    for _ in range(2):
        update(versions, weights)
    for version in (0, 1, 2):  # each leaves its memory to the one before
        versions.point_to(version)
        assert all(weight.data_ptr() % 64 == 0 for weight in weights)
    keep_only(versions, {0})
    update(versions, weights)
    found = [values_of(versions, weights, version) for version in versions.alive]
    assert [[value.unique().tolist() for value in values] for values in found] == [[[n], [n]] for n in (0, 2, 3)]


class Flat:
    """What DeepSpeed's wrappers hold: a flat buffer, its partitions and fragments."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.flat = torch.arange(24, dtype=dtype)
        self.parameters = [
            nn.Parameter(self.flat[0:6].view(2, 3)),
            nn.Parameter(self.flat[6:10]),
            nn.Parameter(self.flat[10:22].view(3, 4).t()),
        ]
        self.partitions = [self.flat.narrow(0, 0, 12), self.flat.narrow(0, 12, 12)]
        self.fragments = [self.flat.narrow(0, 6 * number, 4) for number in range(3)]

    def aliases(self) -> list[torch.Tensor]:
        return [self.flat, *self.partitions, *self.fragments]


def plain() -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((3,), float(n))) for n in range(3)]


def flat() -> list[nn.Parameter]:
    return Flat().parameters


def flat_bf16() -> list[nn.Parameter]:
    return Flat(torch.bfloat16).parameters


def with_offsets() -> list[nn.Parameter]:
    """Two storages that parameters share from different offsets, one of them strided, and one of its own."""
    first, second = torch.arange(10.0), torch.arange(20.0)
    views = [first[2:5], first[5:9], second[1::2], second[4:5], torch.ones(2, 2)]
    return [nn.Parameter(view) for view in views]


def large_and_small() -> list[nn.Parameter]:
    """Two large storages among small ones of two kinds, one of which holds nothing."""
    sizes = [(3,), (64, 65), (2, 2), (0,), (17,), (5000,)]
    values = [torch.full(size, float(n)) for n, size in enumerate(sizes)]
    return [nn.Parameter(v) for v in [*values, *(torch.full((5,), n).bfloat16() for n in range(3))]]


KINDS = [plain, flat, flat_bf16, with_offsets, large_and_small]
Build = Callable[[], list[nn.Parameter]]


@pytest.mark.parametrize("build", KINDS)
def test_values_of_versions_in_flight_never_change(build: Build) -> None:
    parameters = build()
    versions = WeightVersions(parameters)
    history = []
    for number in range(4):
        history.append([p.detach().clone() for p in parameters])
        assert versions.latest == versions.pointed == number
        update(versions, parameters)
    for number, wanted in enumerate(history):
        versions.point_to(number)
        assert versions.pointed == number
        assert all(torch.equal(p, w) for p, w in zip(parameters, wanted, strict=True))
        assert all(torch.equal(t, w) for t, w in zip(values_of(versions, parameters, number), wanted, strict=True))
    versions.point_to(4)
    assert all(torch.equal(p, w + 4) for p, w in zip(parameters, history[0], strict=True))
    assert versions.alive == (0, 1, 2, 3, 4)


@given(
    steps=st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 12), max_size=3), st.integers(0, 12)), max_size=12)
)
def test_any_order_of_updates(steps: list[tuple[bool, set[int], int]]) -> None:
    for build in (flat, with_offsets, large_and_small):
        parameters = build()
        versions = WeightVersions(parameters)
        shadow = {0: [p.detach().clone() for p in parameters]}
        for number, (fork, keep, point) in enumerate(steps, 1):
            if fork:
                versions.fork()
            else:
                versions.point_to(versions.latest)
                del shadow[number - 1]
            with unseen(parameters):
                for parameter in parameters:
                    parameter.add_(number)
            versions.advance()
            shadow[number] = [p.detach().clone() for p in parameters]
            keep_only(versions, keep)
            shadow = {v: values for v, values in shadow.items() if v in keep or v == number}
            assert versions.alive == tuple(sorted(shadow))
            if point in shadow:
                versions.point_to(point)
            for version, values in shadow.items():
                assert all(
                    torch.equal(t, w) for t, w in zip(values_of(versions, parameters, version), values, strict=True)
                )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_whatever_shares_a_storage_sees_the_version_that_is_pointed_to(dtype: torch.dtype) -> None:
    wrapper = Flat(dtype)
    versions = WeightVersions(wrapper.parameters)
    layouts = [(t.storage_offset(), t.shape, t.stride(), t.dtype) for t in wrapper.aliases()]
    values = [t.clone() for t in wrapper.aliases()]
    versions.fork()
    assert [(t.storage_offset(), t.shape, t.stride(), t.dtype) for t in wrapper.aliases()] == layouts
    assert len({pointer(t) for t in [*wrapper.aliases(), *wrapper.parameters]}) == 1
    assert all(torch.equal(t, w) for t, w in zip(wrapper.aliases(), values, strict=True))

    with unseen(wrapper.parameters):  # a step of the wrapper: into a partition, and everything sees it
        wrapper.partitions[1].fill_(-7)
    versions.advance()
    assert torch.equal(wrapper.flat[12:], torch.full((12,), -7, dtype=dtype))
    assert int((wrapper.parameters[2] == -7).sum()) == 10
    versions.point_to(0)
    assert int((wrapper.parameters[2] == -7).sum()) == 0
    assert all(torch.equal(t, w) for t, w in zip(wrapper.aliases(), values, strict=True))
    versions.point_to(1)
    assert torch.equal(wrapper.partitions[1], torch.full((12,), -7, dtype=dtype))


def test_views_of_small_storages_follow() -> None:
    """Of every dtype and offset, whoever holds them."""
    buffers = [torch.arange(6.0), torch.arange(10.0)]
    parameters = [nn.Parameter(b[2:5]) for b in buffers]
    views = [(b, b[1:4], b.view(torch.int32), b.view(torch.uint8)[8:]) for b in buffers]
    versions = WeightVersions(parameters)
    update(versions, parameters)
    update(versions, parameters)
    for parameter, (buffer, partition, words, octets) in zip(parameters, views, strict=True):
        assert {pointer(t) for t in (parameter, buffer, partition, words, octets)} == {pointer(buffer)}
        assert torch.equal(parameter, buffer[2:5])
        assert torch.equal(partition, buffer[1:4])
        assert torch.equal(words.view(torch.float32), buffer)
        assert torch.equal(octets.view(torch.float32), buffer[2:])
    assert parameters[0].tolist() == [4.0, 5.0, 6.0]


def test_storages_stay_apart_or_shared_as_they_were() -> None:
    parameters = with_offsets()
    versions = WeightVersions(parameters)
    update(versions, parameters)
    pointers = [pointer(p) for p in parameters]
    assert pointers[0] == pointers[1] != pointers[2] == pointers[3] != pointers[4]
    assert [p.storage_offset() for p in parameters] == [2, 5, 1, 4, 0]
    assert parameters[2].stride() == (2,)


def test_storages_have_the_sizes_of_their_tensors() -> None:
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])
    parameters = list(module.parameters())
    for _ in range(2):  # the second time on storages of forks
        versions = WeightVersions(parameters)
        update(versions, parameters)
        for parameter in module.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
            assert parameter.storage_offset() == 0


def test_weights_that_were_moved_to_shared_memory_are_still_those_that_updates_go_to() -> None:
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])
    parameters = list(module.parameters())
    versions = WeightVersions(parameters)
    update(versions, parameters)
    module.share_memory()
    for number in range(1, 4):
        with unseen(parameters):
            for parameter in module.parameters():
                parameter.fill_(number)
        update(versions, parameters)
        keep_only(versions, {versions.latest - 1})
        assert all((parameter == number + 1).all() for parameter in module.parameters())
        assert all(parameter.is_shared() for parameter in parameters), "updates are seen by other processes"
        assert all((value == number).all() for value in values_of(versions, parameters, versions.latest - 1))


def test_models_are_saved_and_copied_as_ever(tmp_path: Path) -> None:
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])
    torch.save(module[0].state_dict(), tmp_path / "model0.pt")
    parameters = list(module.parameters())
    versions = WeightVersions(parameters)
    update(versions, parameters)
    torch.save(module[0].state_dict(), tmp_path / "model1.pt")
    assert (tmp_path / "model1.pt").stat().st_size == (tmp_path / "model0.pt").stat().st_size
    safetensors.torch.save_model(module, str(tmp_path / "model.safetensors"))
    loaded = safetensors.torch.load_file(tmp_path / "model.safetensors")
    duplicate = copy.deepcopy(module).state_dict()
    for name, weight in module.state_dict().items():
        assert torch.equal(loaded[name], weight)
        assert torch.equal(duplicate[name], weight)


def test_frozen_and_repeated_parameters() -> None:
    frozen, trained = nn.Parameter(torch.ones(3), requires_grad=False), nn.Parameter(torch.ones(3))
    before = pointer(frozen)
    versions = WeightVersions([frozen, trained, trained])
    update(versions, [trained])
    assert trained.tolist() == [2, 2, 2]
    versions.point_to(0)
    assert trained.tolist() == [1, 1, 1]
    assert pointer(frozen) == before
    assert torch.equal(frozen, torch.ones(3))


def test_arrays_over_weights_see_the_newest() -> None:
    """They know an address and keep no memory alive."""
    parameter = nn.Parameter(torch.zeros(1000))
    array = parameter.detach().numpy()
    versions = WeightVersions([parameter])
    for number in range(1, 4):
        update(versions, [parameter])
        versions.point_to(number - 1)
        assert (array == number).all()
        versions.point_to_newest()
        keep_only(versions, {number})
        assert array.ctypes.data == parameter.data_ptr()


def test_two_storages_in_the_same_memory() -> None:
    array = torch.zeros(3).numpy()
    parameters = [nn.Parameter(torch.from_numpy(array)), nn.Parameter(torch.from_numpy(array[1:]))]
    versions = WeightVersions([*parameters, nn.Parameter(torch.from_numpy(array))])
    update(versions, parameters)
    assert parameters[1].tolist() == [2, 2]
    versions.point_to(0)
    assert [parameter.tolist() for parameter in parameters] == [[0, 0, 0], [0, 0]]


@pytest.mark.parametrize("view", [lambda w: w, lambda w: w.t(), lambda w: w.detach()[1], lambda w: w.data])
def test_what_leaves_a_version_is_copied(view: Callable[[nn.Parameter], torch.Tensor]) -> None:
    weight, other = nn.Parameter(torch.zeros(2, 2)), torch.zeros(2)
    versions = WeightVersions([weight])
    update(versions, [weight])
    versions.point_to(0)
    first, (second, none) = versions.unshared((view(weight), [other, None]))
    assert (second is other, none) == (True, None)
    assert first.requires_grad == view(weight).requires_grad
    versions.point_to_newest()
    assert view(weight).flatten().tolist() == [1] * first.numel()
    assert first.flatten().tolist() == [0] * first.numel()
    named = namedtuple("Output", "weight")(weight)
    assert versions.unshared(named).weight.data_ptr() != weight.data_ptr()


def test_parameters_that_go() -> None:
    """All versions lose them, those to be used again too; memory that is left has the others' sizes."""
    gone, kept = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(3))
    versions = WeightVersions([gone, kept])
    for number in range(3):
        update(versions, [gone, kept])
        keep_only(versions, {number})
    versions.remove({id(gone)})
    assert versions.has_all()
    assert versions.unshared(gone) is gone, "nothing refers to its memory"
    for number in range(3, 6):
        update(versions, [kept])
        keep_only(versions, {number})
        versions.point_to(number)
        assert (gone.unique().tolist(), kept.unique().tolist()) == ([3], [number])


def test_nothing_to_train() -> None:
    versions = WeightVersions([nn.Parameter(torch.ones(3), requires_grad=False)])
    update(versions, [])
    assert versions.alive == (0, 1)


def test_gradients_stay_with_the_parameter() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    versions = WeightVersions([parameter])
    update(versions, [parameter])
    versions.point_to(0)
    assert parameter.grad.tolist() == [2, 2, 2]
    assert parameter.is_leaf
    assert parameter.requires_grad


def test_update_without_a_fork_is_in_place() -> None:
    parameter = nn.Parameter(torch.ones(3))
    versions = WeightVersions([parameter])
    before = pointer(parameter)
    versions.advance()
    assert versions.alive == (1,)
    assert versions.latest == versions.pointed == 1
    assert pointer(parameter) == before
    assert versions.allocated == 1
    with pytest.raises(KeyError):
        versions.point_to(0)


@pytest.mark.parametrize("build", KINDS)
def test_storages_are_recycled(build: Build) -> None:
    parameters = build()
    versions = WeightVersions(parameters)
    seen = set()
    for number in range(1, 20):
        update(versions, parameters)
        keep_only(versions, {number - 1})
        for version in (number, number - 1):
            versions.point_to(version)
            seen.add(tuple(pointer(p) for p in parameters))
        assert versions.alive == (number - 1, number)
        assert versions.allocated <= 3
    assert len(seen) <= 3
    keep_only(versions, set())
    assert versions.alive == (19,)


# Autograd


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (x[None, None] @ part for part in self.weight)
        return nn.functional.scaled_dot_product_attention(query, key, value)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Dropout(0.5), nn.Linear(4, 4))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(4, 4),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "RMSNorm": lambda: nn.RMSNorm(4),
    "Embedding": lambda: nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4)),
    "scale": Scaled,
    "Conv1d": lambda: nn.Conv1d(2, 2, 3),
    "attention": Attention,
    "mixed": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), Scaled(), nn.GELU(), nn.Linear(4, 4)),
    "checkpoint": lambda: Checkpointed(False),
    "reentrant checkpoint": lambda: Checkpointed(True),
}


def forward(module: nn.Module, number: int, embeds: bool) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(number)
    x = torch.randint(7, (2,)) if embeds else torch.randn(2, 4, requires_grad=True)
    return x, module(x).square().sum()


def gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    result = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    return result if x.grad is None else [*result, x.grad]


def on_one_buffer(listed: Sequence[nn.Parameter]) -> None:
    """Move parameters to views of a flat buffer, as DeepSpeed's wrappers do."""
    buffer = torch.cat([p.detach().flatten() for p in listed])
    for parameter, part in zip(listed, buffer.split([p.numel() for p in listed]), strict=True):
        parameter.data = part.view_as(parameter)


@pytest.mark.parametrize("flat_buffer", [False, True], ids=["own storages", "one buffer"])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_two_versions_in_flight_are_exact(name: str, flat_buffer: bool) -> None:
    torch.manual_seed(0)
    module, embeds = MODULES[name](), name == "Embedding"
    parameters = list(module.parameters())
    if flat_buffer:
        on_one_buffer(parameters)
    versions = WeightVersions(parameters)
    wanted, under_way = [], []
    for number in range(3):
        clone = copy.deepcopy(module)
        x, loss = forward(clone, number, embeds)
        loss.backward()
        wanted.append(gradients(clone, x))
        under_way.append(forward(module, number, embeds))
        if number < 2:
            update(versions, parameters, 0.25)
    for number in (1, 0, 2):
        x, loss = under_way[number]
        versions.point_to(number)
        loss.backward()
        got = gradients(module, x)
        assert len(got) == len(wanted[number])
        assert all(torch.equal(g, w) for g, w in zip(got, wanted[number], strict=True)), f"version {number}"
    assert not torch.equal(wanted[0][0], wanted[1][0])


def test_an_exchange_that_is_built_does_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_vpipe.engine.weights.versions._BUILT_IN", False)
    for build in KINDS:
        test_values_of_versions_in_flight_never_change(build)
    for name in MODULES:
        test_gradients_of_two_versions_in_flight_are_exact(name, flat_buffer=True)
