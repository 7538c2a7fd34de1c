"""Weight versions: storages in flight never change, whatever aliases them, and gradients through them are exact."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils.checkpoint import checkpoint

from ds_vpipe.engine.weights.versions import WeightVersions, find_aliases


def pointer(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def unseen(versions: WeightVersions) -> Iterator[None]:
    """Changes inside are not seen by autograd, as in an update."""
    with torch.no_grad(), _unsafe_preserve_version_counter(tuple(versions.parameters)):
        yield


def values_of(versions: WeightVersions, version: int) -> list[torch.Tensor]:
    """The parameters' values in a version, without pointing them to it."""
    return versions._alive[version].views[: len(versions.parameters)]


def update(versions: WeightVersions, amount: float = 1.0) -> None:
    """Fork and change every weight in place."""
    versions.fork()
    with unseen(versions):
        for parameter in versions.parameters:
            parameter.add_(amount)
    versions.advance()


class Flat(torch.optim.Optimizer):
    """An optimizer with the aliases that DeepSpeed's wrappers hold: a flat buffer, its partitions and fragments."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.flat_groups = [torch.arange(24, dtype=dtype)]
        flat = self.flat_groups[0]
        self.parameters = [
            nn.Parameter(flat[0:6].view(2, 3)),
            nn.Parameter(flat[6:10]),
            nn.Parameter(flat[10:22].view(3, 4).t()),
        ]
        super().__init__([nn.Parameter(torch.zeros(1))], {})  # fp32 masters are somewhere else
        self.nested = {0: {"partitions": [flat.narrow(0, 0, 12), flat.narrow(0, 12, 12)]}}
        for number, parameter in enumerate(self.parameters):
            parameter._hp_mapping = Mapping(flat.narrow(0, 6 * number, 4))  # type: ignore[attr-defined]

    def aliases(self) -> list[torch.Tensor]:
        fragments = [p._hp_mapping.lp_fragment for p in self.parameters]  # type: ignore[attr-defined]
        return [self.flat_groups[0], *self.nested[0]["partitions"], *fragments]


class Mapping:
    __module__ = "deepspeed.utils.tensor_fragment"

    def __init__(self, lp_fragment: torch.Tensor) -> None:
        self.lp_fragment = lp_fragment
        self.owner = self  # a cycle


def plain() -> tuple[list[nn.Parameter], list[object]]:
    return [nn.Parameter(torch.full((3,), float(n))) for n in range(3)], []


def flat() -> tuple[list[nn.Parameter], list[object]]:
    optimizer = Flat()
    return optimizer.parameters, [optimizer]


def flat_bf16() -> tuple[list[nn.Parameter], list[object]]:
    optimizer = Flat(torch.bfloat16)
    return optimizer.parameters, [optimizer]


def with_offsets() -> tuple[list[nn.Parameter], list[object]]:
    """Two storages that parameters share from different offsets, one of them strided, and one of its own."""
    first, second = torch.arange(10.0), torch.arange(20.0)
    views = [first[2:5], first[5:9], second[1::2], second[4:5], torch.ones(2, 2)]
    return [nn.Parameter(view) for view in views], []


def aliased_in_several() -> tuple[list[nn.Parameter], list[object]]:
    """Two small buffers, each with a partition and with a view of another dtype."""
    buffers = [torch.arange(6.0), torch.arange(10.0)]
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.kept = [(b, b[1:4], b.view(torch.int32), b.view(torch.uint8)[8:]) for b in buffers]
    return [nn.Parameter(b[2:5]) for b in buffers], [optimizer]


def large_and_small() -> tuple[list[nn.Parameter], list[object]]:
    """Two large storages among small ones of two kinds, one of which holds nothing."""
    sizes = [(3,), (64, 65), (2, 2), (0,), (17,), (5000,)]
    values = [torch.full(size, float(n)) for n, size in enumerate(sizes)]
    return [nn.Parameter(v) for v in [*values, *(torch.full((5,), n).bfloat16() for n in range(3))]], []


KINDS = [plain, flat, flat_bf16, with_offsets, aliased_in_several, large_and_small]
Build = Callable[[], tuple[list[nn.Parameter], list[object]]]


@pytest.mark.parametrize("build", KINDS)
def test_values_of_versions_in_flight_never_change(build: Build) -> None:
    parameters, holders = build()
    versions = WeightVersions(parameters, holders)
    history = []
    for number in range(4):
        history.append([p.detach().clone() for p in parameters])
        assert versions.latest == versions.pointed == number
        update(versions)
    for number, wanted in enumerate(history):
        versions.point_to(number)
        assert versions.pointed == number
        assert all(torch.equal(p, w) for p, w in zip(parameters, wanted, strict=True))
        assert all(torch.equal(t, w) for t, w in zip(values_of(versions, number), wanted, strict=True))
    versions.point_to(4)
    assert all(torch.equal(p, w + 4) for p, w in zip(parameters, history[0], strict=True))
    assert versions.alive == (0, 1, 2, 3, 4)


@given(
    steps=st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 12), max_size=3), st.integers(0, 12)), max_size=12)
)
def test_any_order_of_updates(steps: list[tuple[bool, set[int], int]]) -> None:
    for build in (flat, with_offsets, aliased_in_several, large_and_small):
        parameters, holders = build()
        versions = WeightVersions(parameters, holders)
        shadow = {0: [p.detach().clone() for p in parameters]}
        for number, (fork, keep, point) in enumerate(steps, 1):
            if fork:
                versions.fork()
            else:
                versions.point_to(versions.latest)
                del shadow[number - 1]
            with unseen(versions):
                for parameter in parameters:
                    parameter.add_(number)
            versions.advance()
            shadow[number] = [p.detach().clone() for p in parameters]
            versions.keep_only(keep)
            shadow = {v: values for v, values in shadow.items() if v in keep or v == number}
            assert versions.alive == tuple(sorted(shadow))
            if point in shadow:
                versions.point_to(point)
            for version, values in shadow.items():
                assert all(torch.equal(t, w) for t, w in zip(values_of(versions, version), values, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_alias_follows_a_fork(dtype: torch.dtype) -> None:
    optimizer = Flat(dtype)
    versions = WeightVersions(optimizer.parameters, [optimizer])
    layouts = [(t.storage_offset(), t.shape, t.stride(), t.dtype) for t in optimizer.aliases()]
    identities = [id(t) for t in optimizer.aliases()]
    old = pointer(optimizer.flat_groups[0])
    values = [t.clone() for t in optimizer.aliases()]
    versions.fork()
    assert [id(t) for t in optimizer.aliases()] == identities
    assert [(t.storage_offset(), t.shape, t.stride(), t.dtype) for t in optimizer.aliases()] == layouts
    (new,) = {pointer(t) for t in [*optimizer.aliases(), *optimizer.parameters]}
    assert new != old
    assert all(torch.equal(t, w) for t, w in zip(optimizer.aliases(), values, strict=True))

    with unseen(versions):  # a step of the wrapper: into a partition, and everything sees it
        optimizer.nested[0]["partitions"][1].fill_(-7)
    versions.advance()
    assert torch.equal(optimizer.flat_groups[0][12:], torch.full((12,), -7, dtype=dtype))
    assert int((optimizer.parameters[2] == -7).sum()) == 10
    versions.point_to(0)
    assert int((optimizer.parameters[2] == -7).sum()) == 0
    assert {pointer(t) for t in optimizer.aliases()} == {new}  # only parameters go back in time


def test_aliases_of_several_small_storages_follow_a_fork() -> None:
    parameters, (optimizer,) = aliased_in_several()
    versions = WeightVersions(parameters, [optimizer])
    update(versions)
    update(versions)
    for parameter, (buffer, partition, words, octets) in zip(parameters, optimizer.kept, strict=True):  # type: ignore[attr-defined]
        assert {pointer(t) for t in (parameter, buffer, partition, words, octets)} == {pointer(buffer)}
        assert torch.equal(parameter, buffer[2:5])
        assert torch.equal(partition, buffer[1:4])
        assert torch.equal(words.view(torch.float32), buffer)
        assert torch.equal(octets.view(torch.float32), buffer[2:])
    assert parameters[0].tolist() == [4.0, 5.0, 6.0]


def test_storages_stay_apart_or_shared_as_they_were() -> None:
    parameters, _ = with_offsets()
    versions = WeightVersions(parameters)
    update(versions)
    pointers = [pointer(p) for p in parameters]
    assert pointers[0] == pointers[1] != pointers[2] == pointers[3] != pointers[4]
    assert [p.storage_offset() for p in parameters] == [2, 5, 1, 4, 0]
    assert parameters[2].stride() == (2,)


def test_storages_have_the_sizes_of_their_tensors() -> None:
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])
    for _ in range(2):  # the second time on storages of forks
        versions = WeightVersions(module.parameters())
        update(versions)
        for parameter in module.parameters():
            assert parameter.untyped_storage().nbytes() == parameter.nbytes
            assert parameter.storage_offset() == 0


def test_weights_that_were_moved_to_shared_memory_are_still_those_that_updates_go_to() -> None:
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])
    versions = WeightVersions(module.parameters())
    update(versions)
    module.share_memory()
    for number in range(1, 4):
        with unseen(versions):
            for parameter in module.parameters():
                parameter.fill_(number)
        update(versions)
        versions.keep_only({versions.latest - 1})
        assert all((parameter == number + 1).all() for parameter in module.parameters())


def test_models_are_saved_and_copied_as_ever(tmp_path: Path) -> None:
    module = nn.Sequential(*[nn.Linear(4, 4) for _ in range(8)])
    torch.save(module[0].state_dict(), tmp_path / "model0.pt")
    versions = WeightVersions(module.parameters())
    update(versions)
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
    assert len(versions.parameters) == 1
    update(versions)
    versions.point_to(0)
    assert pointer(frozen) == before
    assert torch.equal(frozen, torch.ones(3))


def test_nothing_to_train() -> None:
    versions = WeightVersions([nn.Parameter(torch.ones(3), requires_grad=False)])
    update(versions)
    assert versions.alive == (0, 1)


def test_gradients_stay_with_the_parameter() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.full((3,), 2.0)
    versions = WeightVersions([parameter])
    update(versions)
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
    parameters, holders = build()
    versions = WeightVersions(parameters, holders)
    seen = set()
    for number in range(1, 20):
        update(versions)
        seen.add(tuple(pointer(p) for p in parameters))
        versions.keep_only({number - 1})
        assert versions.alive == (number - 1, number)
        assert versions.allocated <= 3
    assert len(seen) == 3
    versions.keep_only(set())
    assert versions.alive == (19,)


def test_find_aliases_follows_optimizers_but_no_modules() -> None:
    target = torch.zeros(6)
    optimizer = torch.optim.SGD([nn.Parameter(target[:2])], lr=1.0)
    optimizer.kept = {"a": [(target[2:],)], 3: {"other": torch.zeros(6)}}  # type: ignore[attr-defined]
    optimizer.module = nn.Linear(2, 2)  # type: ignore[attr-defined]
    optimizer.module.register_buffer("buffer", target[1:])  # type: ignore[attr-defined]
    found = find_aliases([optimizer], {pointer(target)})
    wanted = [optimizer.param_groups[0]["params"][0], optimizer.kept["a"][0][0]]  # type: ignore[attr-defined]
    assert {id(t) for t in found} == {id(t) for t in wanted}
    assert find_aliases([optimizer], set()) == []


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


def on_one_buffer(parameters: Iterable[nn.Parameter]) -> list[object]:
    """Move parameters to views of a flat buffer, as DeepSpeed's wrappers do."""
    listed = list(parameters)
    buffer = torch.cat([p.detach().flatten() for p in listed])
    for parameter, part in zip(listed, buffer.split([p.numel() for p in listed]), strict=True):
        parameter.data = part.view_as(parameter)
    optimizer: Any = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.flat = buffer
    return [optimizer]


@pytest.mark.parametrize("flat_buffer", [False, True], ids=["own storages", "one buffer"])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_two_versions_in_flight_are_exact(name: str, flat_buffer: bool) -> None:
    torch.manual_seed(0)
    module, embeds = MODULES[name](), name == "Embedding"
    versions = WeightVersions(module.parameters(), on_one_buffer(module.parameters()) if flat_buffer else [])
    wanted, under_way = [], []
    for number in range(3):
        clone = copy.deepcopy(module)
        x, loss = forward(clone, number, embeds)
        loss.backward()
        wanted.append(gradients(clone, x))
        under_way.append(forward(module, number, embeds))
        if number < 2:
            update(versions, 0.25)
    for number in (1, 0, 2):
        x, loss = under_way[number]
        versions.point_to(number)
        loss.backward()
        got = gradients(module, x)
        assert len(got) == len(wanted[number])
        assert all(torch.equal(g, w) for g, w in zip(got, wanted[number], strict=True)), f"version {number}"
    assert not torch.equal(wanted[0][0], wanted[1][0])
