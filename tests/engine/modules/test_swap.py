"""Activations on the host between forward and backward pass: what moves, what comes back, what autograd still sees."""

from __future__ import annotations

import errno
import gc
import math
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ds_vpipe.engine.modules import swap as swapping
from ds_vpipe.engine.modules.swap import Swap
from ds_vpipe.engine.weights.versions import WeightVersions
from ds_vpipe.errors import VPipeError

WIDTH, ROWS = 16, 6
SIZE = 4 * WIDTH * ROWS  # bytes of an activation


@pytest.fixture(autouse=True)
def every_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "SMALLEST", 1)


class Stage:
    """One stage's worth of layers, run forward with a swap and backward later."""

    def __init__(self, module: nn.Module, run: Callable[[Any], Any] | None = None) -> None:
        self.module, self.swap, self.run = module, Swap(torch.device("cpu")), run or module
        self.versions = WeightVersions(module.parameters())

    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, Any]:
        swapped = self.swap.begin(self.module, self.versions)
        return self.swap.run(self.run, value), swapped


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH))


def value(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def gradients(module: nn.Module, leaf: torch.Tensor) -> list[torch.Tensor]:
    found = [leaf.grad, *(p.grad for p in module.parameters())]
    assert all(gradient is not None for gradient in found)
    return [gradient.clone() for gradient in found]  # type: ignore[union-attr]


def test_gradients_are_those_of_a_plain_pass_for_several_in_flight() -> None:
    stage, plain = Stage(layers()), layers()
    passes = [(leaf, *stage.forward(leaf)) for leaf in map(value, range(3))]
    # The output of the first Tanh, saved twice, that of the second, saved twice; mean and deviation of the norm.
    assert stage.swap.bytes_moved == 3 * (2 * SIZE + 2 * 4 * ROWS)
    for seed, (leaf, output, swapped) in enumerate(passes):
        stage.module.zero_grad()
        plain.zero_grad()
        swapped.fetch()
        output.square().sum().backward()
        other = value(seed)
        plain(other).square().sum().backward()
        for got, wanted in zip(gradients(stage.module, leaf), gradients(plain, other), strict=True):
            assert torch.equal(got, wanted)


def test_what_moves_is_no_longer_in_memory_and_comes_back_when_it_is_due() -> None:
    held: list[int] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x * 2)
        held.append(hidden.untyped_storage()._weak_ref())
        return hidden * hidden

    stage = Stage(nn.Linear(1, 1), run)
    leaf = value(0)
    output, swapped = stage.forward(leaf)
    assert torch.UntypedStorage._expired(held[0])
    swapped.fetch()
    output.sum().backward()
    wanted = value(0)
    (torch.tanh(wanted * 2) ** 2).sum().backward()
    assert torch.allclose(leaf.grad, wanted.grad)  # type: ignore[arg-type]


def test_what_has_come_back_is_given_up_once_it_has_been_used() -> None:
    module = layers()
    stage, taken, seen = Stage(module), [], []

    def run(x: torch.Tensor) -> torch.Tensor:
        first = module[1](module[0](x))
        first.register_hook(lambda gradient: seen.append([torch.UntypedStorage._expired(one) for one in taken]))
        return module[3](module[2](first)) * 2

    stage.run = run
    output, swapped = stage.forward(value(0))
    swapped.fetch()
    memory: Any = stage.swap._memory
    memory.take = lambda fetched: (taken.append(fetched._weak_ref()), fetched)[1]
    output.sum().backward()
    assert seen == [[True, False]], "the first Tanh still needs its output, which the second layer has used as well"
    assert len(taken) == 3


def test_without_a_fetch_the_backward_pass_brings_back_what_it_needs() -> None:
    stage, plain = Stage(layers()), layers()
    leaf, other = value(0), value(0)
    stage.forward(leaf)[0].sum().backward()
    plain(other).sum().backward()
    assert torch.equal(leaf.grad, other.grad)  # type: ignore[arg-type]


def test_views_share_a_storage_again_and_keep_their_strides() -> None:
    seen: list[torch.Tensor] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            big = x.detach() * 3
            ctx.save_for_backward(big, big.t()[2:], big[:, 1].expand(4, ROWS))
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            seen.extend(ctx.saved_tensors)
            return grads[0]

    leaf = value(1)
    stage = Stage(nn.Linear(1, 1), Look.apply)
    output, _ = stage.forward(leaf)
    assert stage.swap.bytes_moved == SIZE, "three tensors, one storage"
    output.sum().backward()
    big = leaf.detach() * 3
    for got, wanted in zip(seen, (big, big.t()[2:], big[:, 1].expand(4, ROWS)), strict=True):
        assert torch.equal(got, wanted)
        assert (got.stride(), got.storage_offset()) == (wanted.stride(), wanted.storage_offset())
    assert len({tensor.untyped_storage().data_ptr() for tensor in seen}) == 1


def test_weights_buffers_inputs_and_outputs_stay() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(ROWS, WIDTH))
            self.frozen = nn.Parameter(torch.rand(ROWS, WIDTH), requires_grad=False)
            self.register_buffer("buffer", torch.rand(ROWS, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.weight * self.frozen[:, :] * self.buffer
            return torch.exp(x)

    stage = Stage(Layer())
    leaf = value(2)
    stage.forward(leaf)
    # x * weight is saved for nothing that requires a gradient: frozen and buffer are not trained. exp saves its output.
    assert stage.swap.bytes_moved == 0


@pytest.mark.parametrize("swaps", [True, False])
def test_a_change_in_place_is_the_error_that_it_is_without_a_swap(swaps: bool) -> None:
    interior: list[torch.Tensor] = []

    def run(x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(x)
        interior.append(hidden)
        return hidden * 2

    leaf, stage = value(3), Stage(nn.Linear(1, 1), run)
    output = stage.forward(leaf)[0] if swaps else run(leaf)
    assert (stage.swap.bytes_moved > 0) == swaps
    with torch.no_grad():
        interior[0].add_(1)
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .*Tensor \[6, 16\].* is at version 1; "):
        output.sum().backward()


def test_a_weight_changed_in_place_is_an_error_too() -> None:
    scale = nn.Linear(WIDTH, WIDTH)
    stage = Stage(scale, lambda x: x * scale.weight[:ROWS])
    output, _ = stage.forward(value(4))
    with torch.no_grad():
        scale.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_small_and_unusual_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "SMALLEST", SIZE + 1)
    stage = Stage(layers())
    stage.forward(value(5))
    assert stage.swap.bytes_moved == 0
    monkeypatch.setattr(swapping, "SMALLEST", 1)

    def conjugate(x: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(torch.stack([x, x + 1], -1)).conj()
        return (turned * turned).real * 1

    leaf, other = value(5), value(5)
    Stage(nn.Linear(1, 1), conjugate).forward(leaf)[0].sum().backward()
    conjugate(other).sum().backward()
    assert torch.equal(leaf.grad, other.grad)  # type: ignore[arg-type]


def test_a_graph_without_a_backward_pass_is_freed_whatever_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swapping, "SMALLEST", SIZE + 1)  # what stays is saved too: outputs of the nodes that save them
    stage = Stage(layers())
    leaf = value(6)
    output, _ = stage.forward(leaf)
    alive = weakref.ref(leaf)
    del leaf, output, _
    gc.collect()
    assert alive() is None


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("kind", ["nested", "quantized"])
def test_tensors_that_are_more_than_a_view_of_a_storage(kind: str) -> None:
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8))
            return x * 1

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * ctx.saved_tensors[0].dequantize()

    def nested(x: torch.Tensor) -> torch.Tensor:
        rows = torch.nested.as_nested_tensor([x[:2] * 1, x[2:] * 1])
        return (rows * rows).to_padded_tensor(0.0) * 1

    run = nested if kind == "nested" else Scale.apply
    leaf, other = value(7), value(7)
    Stage(nn.Linear(1, 1), run).forward(leaf)[0].sum().backward()
    run(other).sum().backward()
    assert torch.equal(leaf.grad, other.grad)  # type: ignore[arg-type]


def test_layers_that_allow_no_hooks_are_refused_in_one_line() -> None:
    stage = Stage(nn.Linear(1, 1), lambda x: torch.func.grad(lambda y: y.tanh().sum())(x) * x)
    with pytest.raises(VPipeError, match=r"^vpipe\.swap_ratio: got layers .* write 0 for this stage$") as error:
        stage.forward(value(8))
    assert "\n" not in str(error.value)


def test_places_in_the_file_are_used_again() -> None:
    stage, ends = Stage(layers()), []
    for turn in range(4):
        passes = [stage.forward(value(seed)) for seed in range(3)]
        for output, swapped in passes[: 2 if turn % 2 else 3]:
            swapped.fetch()
            output.sum().backward()
        del passes, output, swapped  # also those that had no backward pass
        gc.collect()
        memory: Any = stage.swap._memory
        ends.append(memory._end)
        assert sum(size * len(offsets) for size, offsets in memory._unused.items()) == ends[0] == ends[-1]


def test_reads_and_writes_may_stop_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: write(file, data[:100], offset))
    monkeypatch.setattr(os, "preadv", lambda file, parts, offset: read(file, [parts[0][:70]], offset))
    test_gradients_are_those_of_a_plain_pass_for_several_in_flight()


def test_a_full_disk_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    stage = Stage(layers())
    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(VPipeError, match=r"vpipe\.swap_ratio: got \d+ bytes .*No space left .* set TMPDIR") as error:
        stage.forward(value(6))
    assert "\n" not in str(error.value)


def test_the_file_has_no_name() -> None:
    stage = Stage(layers())
    stage.forward(value(7))
    memory: Any = stage.swap._memory
    assert os.fstat(memory._file.fileno()).st_nlink == 0


def test_zeros_of_forward_mode_differentiation() -> None:
    """They have a storage that nobody has filled."""
    module = layers()

    def run(x: torch.Tensor) -> torch.Tensor:
        primal, tangent = torch.func.jvp(lambda value: torch.tanh(module[2](value)), (x * 1,), (torch.ones_like(x),))
        return primal + tangent

    leaf, other = value(7), value(7)
    output, swapped = Stage(module, run).forward(leaf)
    junk = [torch.full((ROWS, WIDTH), math.nan) for _ in range(20)]  # memory that was freed
    swapped.fetch()
    output.sum().backward()
    run(other).sum().backward()
    assert junk
    assert torch.equal(leaf.grad, other.grad)  # type: ignore[arg-type]
