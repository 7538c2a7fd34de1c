"""Recomputation changes memory, not results."""

from __future__ import annotations

import gc
import math
import random
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import cases
import numpy as np
import pytest
import torch
import toy
from deepspeed.runtime.activation_checkpointing.checkpointing import get_cuda_rng_tracker
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from worlds import CaseFailed, Worlds

from ds_vpipe.errors import VPipeError

pytestmark = pytest.mark.mp

RATIOS = [0.0, 0.3, 0.5, 1.0]


@pytest.mark.parametrize(
    ("ratio", "layers", "recomputed"),
    [(0, 12, 0), (0.3, 12, 3), (0.5, 13, 6), (0.85, 12, 10), (0.999, 12, 11), (1, 12, 12), (0.9, 1, 0), (1, 1, 1)],
)
def test_ratio_is_rounded_down_to_layers(ratio: float, layers: int, recomputed: int) -> None:
    from ds_vpipe.engine.modules.recompute import recomputed_layers

    assert recomputed_layers(ratio, layers) == recomputed


class Scaled(nn.Module):
    """A layer that keeps what it has made of its input, for a function that it checkpoints if it is told how."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner, self.how = nn.Linear(4, 4), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale = 1 + x.detach().abs().mean()
        return checkpoint(self.inside, x, use_reentrant=self.how == "reentrant") if self.how else self.inside(x)

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x)) * self.scale


def scaled(how: str, ratio: float) -> list[torch.Tensor]:
    """Gradients of three micro-batches whose backward passes come behind all forward passes."""
    from deepspeed.pipe import LayerSpec, PipelineModule

    from ds_vpipe.engine.modules.random_states import RandomStates
    from ds_vpipe.engine.modules.recompute import Segment, apply_recompute

    torch.manual_seed(5)
    module = PipelineModule([LayerSpec(Scaled, how) for _ in range(3)], num_stages=1, partition_method="uniform")
    apply_recompute(module, Segment(0, len(module.forward_funcs), ratio, RandomStates()))
    outputs = [module(torch.full((2, 4), float(number), requires_grad=True)) for number in range(1, 4)]
    for output in outputs:
        output.sum().backward()
    return [parameter.grad for parameter in module.parameters()]


def all_scaled() -> dict[tuple[str, float], list[torch.Tensor]]:
    return {(how, ratio): scaled(how, ratio) for how in ("", "torch", "reentrant") for ratio in (0.0, 0.5, 1.0)}


def test_what_layers_checkpoint_themselves_finds_what_belongs_to_its_micro_batch(worlds: Worlds) -> None:
    (found,) = worlds.run(1, all_scaled)
    for key, gradients in found.items():
        for one, wanted in zip(gradients, found["", 0.0], strict=True):
            torch.testing.assert_close(one, wanted, msg=str(key))


def passes(ratio: float | None, seed_layers: bool, count: int = 3) -> dict[str, Any]:
    """Forward and backward passes of the toy model as the only stage, without a ratio by DeepSpeed's own forward.

    Inputs are integers.
    """
    from deepspeed.pipe import PipelineModule

    from ds_vpipe.engine.modules.random_states import RandomStates
    from ds_vpipe.engine.modules.recompute import Segment, apply_recompute

    module = PipelineModule(toy.layer_specs(0.3), num_stages=1, partition_method="uniform", seed_layers=seed_layers)
    if ratio is not None:
        apply_recompute(module, Segment(0, len(module.forward_funcs), ratio, RandomStates()))
    calls = [0] * len(module.forward_funcs)
    for position, layer in enumerate(module.forward_funcs):
        layer.register_forward_pre_hook(lambda *_, position=position: calls.__setitem__(position, calls[position] + 1))
    torch.manual_seed(5)
    outputs = [module(toy.micro_batch(number)[0]) for number in range(count)]
    for output in reversed(outputs):  # long after the forward pass, and in another order
        torch.rand(3)
        output.square().sum().backward()
    with torch.no_grad():
        module(toy.micro_batch(0)[0])
    return {
        "calls": calls,
        "outputs": [output.detach() for output in outputs],
        "gradients": [parameter.grad for parameter in module.parameters()],
        "random": torch.rand(4),
        "micro_offset": module.micro_offset,
    }


def all_passes(seed_layers: bool) -> list[dict[str, Any]]:
    return [passes(ratio, seed_layers) for ratio in (None, *RATIOS)]


@pytest.mark.parametrize("seed_layers", [False, True])
def test_every_ratio_gives_the_same_bits(worlds: Worlds, seed_layers: bool) -> None:
    ((plain, *reports),) = worlds.run(1, all_passes, seed_layers)
    assert not torch.equal(plain["outputs"][0], plain["outputs"][1])
    for ratio, report in zip(RATIOS, reports, strict=True):
        recomputed = int(ratio * len(toy.LAYERS))
        assert report["calls"] == [4] * (len(toy.LAYERS) - recomputed) + [7] * recomputed
        for name in ("outputs", "gradients"):
            assert len(report[name]) == len(plain[name])
            assert all(torch.equal(a, b) for a, b in zip(report[name], plain[name], strict=True)), (name, ratio)
        assert torch.equal(report["random"], plain["random"])
        assert report["micro_offset"] == plain["micro_offset"] == 4


def forward_of_a_script() -> float:
    """Output of a module whose class has a forward of its own."""
    from deepspeed.pipe import PipelineModule

    from ds_vpipe.engine.modules.random_states import RandomStates
    from ds_vpipe.engine.modules.recompute import Segment, apply_recompute

    class Seven(PipelineModule):
        def forward(self, forward_input: Any) -> float:
            return 7.0

    module = Seven(toy.layer_specs(0.3), num_stages=1, partition_method="uniform")
    apply_recompute(module, Segment(0, len(module.forward_funcs), 0.0, RandomStates()))
    return module(None)  # type: ignore[no-any-return]


def test_a_forward_of_a_script_is_left_alone(worlds: Worlds) -> None:
    assert worlds.run(1, forward_of_a_script) == [7.0]


def memory(ratio: float) -> int:
    """Bytes that autograd keeps between forward and backward pass."""
    from deepspeed.pipe import PipelineModule

    from ds_vpipe.engine.modules.random_states import RandomStates
    from ds_vpipe.engine.modules.recompute import Segment, apply_recompute

    module = PipelineModule(toy.layer_specs(0.3), num_stages=1)
    apply_recompute(module, Segment(0, len(module.forward_funcs), ratio, RandomStates()))
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        module(toy.micro_batch(0)[0])
    return sum(kept.values())


def test_less_is_kept_the_more_is_recomputed(worlds: Worlds) -> None:
    none, half, everything = (worlds.run(1, memory, ratio)[0] for ratio in (0, 0.5, 1))
    assert none > half > everything


class Differentiates(nn.Module):
    """A layer whose forward is a derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(toy.HIDDEN, toy.HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - torch.autograd.grad(self.linear(x).tanh().sum(), x, create_graph=True)[0]


def derivatives(ratio: float) -> tuple[torch.Tensor, list[Any]]:
    from deepspeed.pipe import LayerSpec, PipelineModule

    from ds_vpipe.engine.modules.random_states import RandomStates
    from ds_vpipe.engine.modules.recompute import Segment, apply_recompute

    torch.manual_seed(7)
    specs = [LayerSpec(nn.Linear, toy.HIDDEN, toy.HIDDEN), *(LayerSpec(Differentiates) for _ in range(2))]
    module = PipelineModule(specs, num_stages=1, partition_method="uniform")
    apply_recompute(module, Segment(0, len(module.forward_funcs), ratio, RandomStates()))
    output = module(torch.ones(2, toy.HIDDEN))
    output.square().sum().backward()
    return output.detach(), [parameter.grad for parameter in module.parameters()]


def test_layers_that_differentiate_are_recomputed_more_than_once(worlds: Worlds) -> None:
    (kept, gradients), (recomputed, others) = (worlds.run(1, derivatives, ratio)[0] for ratio in (0.0, 1.0))
    assert torch.equal(kept, recomputed)
    for one, other in zip(gradients, others, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


class Pair(nn.Module):
    """A layer whose two outputs are one tensor, or have memory together."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(toy.HIDDEN, toy.HIDDEN), kind

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        if self.kind == "parts":
            half = toy.HIDDEN // 2
            return y[:, :half], y[:, half:]
        return y, y if self.kind == "one" else y.view(-1, toy.HIDDEN)


class Sum(nn.Module):
    """A layer that may change the first of its inputs in place before it reads the second."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        first, second = pair
        return (first.mul_(3) if self.in_place else first * 3) + second.square()


def with_pairs(kind: str, in_place: bool) -> list[list[torch.Tensor] | str]:
    """Gradients, or the error, of each ratio."""
    from deepspeed.pipe import PipelineModule

    from ds_vpipe.engine.modules.random_states import RandomStates
    from ds_vpipe.engine.modules.recompute import Segment, apply_recompute

    found: list[list[torch.Tensor] | str] = []
    for ratio in (0.0, 0.5, 1.0):
        torch.manual_seed(0)
        module = PipelineModule([Pair(kind), Sum(in_place)], num_stages=1, partition_method="uniform")
        apply_recompute(module, Segment(0, len(module.forward_funcs), ratio, RandomStates()))
        try:
            module(torch.ones(2, toy.HIDDEN)).square().sum().backward()
            found.append([parameter.grad for parameter in module.parameters()])
        except RuntimeError as error:
            found.append(str(error))
    return found


def with_a_message(in_place: bool) -> list[torch.Tensor]:
    """Gradients of a layer whose inputs are parts of one message, as they come from another stage."""
    from deepspeed.pipe import PipelineModule

    from ds_vpipe.engine.links.message import Message, Packer, unpack
    from ds_vpipe.engine.modules.random_states import RandomStates
    from ds_vpipe.engine.modules.recompute import Segment, apply_recompute

    sent = tuple(torch.full((2, toy.HIDDEN), float(value), requires_grad=True) for value in (1, 2))
    inputs = unpack(Packer().pack(Message.ACTIVATION, 0, sent).data).tree
    module = PipelineModule([Sum(in_place), nn.Tanh()], num_stages=1, partition_method="uniform")
    apply_recompute(module, Segment(0, len(module.forward_funcs), 1.0, RandomStates()))
    leaves = [leaf.detach().requires_grad_() for leaf in inputs]
    module(tuple(leaf.view_as(leaf) for leaf in leaves)).sum().backward()
    return [leaf.grad for leaf in leaves]


def test_parts_of_one_message_may_change_in_place(worlds: Worlds) -> None:
    (wanted,), (found,) = (worlds.run(1, with_a_message, in_place) for in_place in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


@pytest.mark.parametrize("kind", ["one", "view", "parts"])
@pytest.mark.parametrize("in_place", [False, True])
def test_tensors_that_have_memory_together(worlds: Worlds, kind: str, in_place: bool) -> None:
    """The copies that a segment begins with are as exact, or the layer that would notice them is refused."""
    ((none, half, whole),) = worlds.run(1, with_pairs, kind, in_place)
    assert all(torch.equal(a, b) for a, b in zip(none, whole, strict=True))
    if in_place and kind == "view":
        assert half.startswith("vpipe.recompute_ratio: got a first recomputed layer that changes one of two tensors")
    else:
        assert all(torch.equal(a, b) for a, b in zip(none, half, strict=True))


class OtherLayouts(nn.Module):
    """A layer that takes and returns a sparse tensor and a nested one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(toy.HIDDEN, toy.HIDDEN)

    def forward(self, value: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        sparse, nested = value
        y = torch.tanh(self.linear(sparse.to_dense() + torch.stack(nested.unbind())))
        rows = y.detach()
        return y, rows.to_sparse(), torch.nested.as_nested_tensor([*rows], layout=torch.jagged)


def with_other_layouts() -> list[list[torch.Tensor]]:
    """Gradients of each ratio."""
    from deepspeed.pipe import PipelineModule

    from ds_vpipe.engine.modules.random_states import RandomStates
    from ds_vpipe.engine.modules.recompute import Segment, apply_recompute

    found = []
    for ratio in (0.0, 1.0):
        torch.manual_seed(0)
        module = PipelineModule([OtherLayouts()], num_stages=1, partition_method="uniform")
        apply_recompute(module, Segment(0, len(module.forward_funcs), ratio, RandomStates()))
        rows = torch.randn(2, toy.HIDDEN)
        module((rows.to_sparse(), torch.nested.as_nested_tensor([*rows])))[0].sum().backward()
        found.append([parameter.grad for parameter in module.parameters()])
    return found


def test_sparse_and_nested_tensors_at_both_ends(worlds: Worlds) -> None:
    ((none, all_layers),) = worlds.run(1, with_other_layouts)
    assert all(torch.equal(a, b) for a, b in zip(none, all_layers, strict=True))


class ChangesInPlace(nn.Module):
    """A layer that changes the result of a sigmoid, whose derivative is computed from it, or that of an unused one."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.linear, self.used = nn.Linear(toy.HIDDEN, toy.HIDDEN), used

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        changed = y.sigmoid().add_(1)
        return self.linear(changed if self.used else y + changed.detach())


def spoiled(used: bool) -> list[str]:
    """Errors without recomputation, by ratio, and by interval in asp and bsp, for data as inputs and for activations.

    Of three micro-batches: recomputation of the first two runs to its end, where outputs are compared, and that of the
    third ends with the last tensor that is saved.
    """
    from deepspeed.pipe import PipelineModule

    from ds_vpipe.engine.modules.checkpointing import use_sound_checkpointing
    from ds_vpipe.engine.modules.random_states import RandomStates
    from ds_vpipe.engine.modules.recompute import Segment, apply_recompute

    found = []
    for ratio, interval, asynchronous, activation in (
        (0.0, 0, True, False), (1.0, 0, True, False), (0.0, 1, True, False), (0.0, 2, True, True),
        (0.0, 1, False, False), (0.0, 2, False, True),
    ):  # fmt: skip
        layers = [ChangesInPlace(used), nn.Tanh()]
        module = PipelineModule(
            layers, num_stages=1, partition_method="uniform", activation_checkpoint_interval=interval
        )
        apply_recompute(module, Segment(0, len(module.forward_funcs), ratio, RandomStates()))
        use_sound_checkpointing(module, asynchronous, RandomStates())
        for _ in range(3):
            try:
                module(torch.ones(2, toy.HIDDEN, requires_grad=activation)).sum().backward()
                found.append("")
            except RuntimeError as error:
                found.append(str(error))
    return found


def test_what_autograd_refuses_it_refuses_in_recomputed_layers(worlds: Worlds) -> None:
    for error in worlds.run(1, spoiled, True)[0]:
        assert f"modified by an inplace operation: [torch.FloatTensor [2, {toy.HIDDEN}]]" in error
        assert "is at version 1; expected version 0 instead" in error
    assert not any(worlds.run(1, spoiled, False)[0])


class Tracker:
    """A generator state of its own, lent to torch for a block of code, as Megatron has it."""

    def __init__(self, seed: int) -> None:
        self.states_ = {"model-parallel-rng": torch.Generator().manual_seed(seed).get_state()}

    def get_states(self) -> dict[str, torch.Tensor]:
        return self.states_

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        self.states_ = states

    @contextmanager
    def fork(self) -> Iterator[None]:
        before = torch.get_rng_state()
        torch.set_rng_state(self.states_["model-parallel-rng"])
        try:
            yield
        finally:
            self.states_["model-parallel-rng"] = torch.get_rng_state()
            torch.set_rng_state(before)


class Drops(nn.Module):
    """Dropout with draws from elsewhere than torch's own state."""

    def __init__(self, source: str, tracker: Tracker) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.source, self.tracker = source, tracker

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        if self.source == "python":
            return x * random.random()
        if self.source == "numpy":
            return x * np.random.rand()
        with self.tracker.fork() if self.source != "deepspeed" else get_cuda_rng_tracker().fork():
            return nn.functional.dropout(x, 0.5, self.training)


def drawn_elsewhere(source: str, ratio: float, known: str) -> Any:
    """Losses and weights of a stage whose layers draw from ``source``; ``known``: how the engine knows the tracker."""
    from deepspeed.pipe import LayerSpec

    random.seed(1)
    np.random.seed(1)
    tracker = Tracker(3 + torch.distributed.get_rank())  # as the same masks twice drop nothing more
    get_cuda_rng_tracker().set_states(Tracker(4).get_states())
    module = types.SimpleNamespace(get_cuda_rng_tracker=lambda: tracker)
    modules = {"megatron.core.tensor_parallel.random": module} if known == "imported" else {}
    specs = [LayerSpec(toy.Embed, 100), *(LayerSpec(Drops, source, tracker) for _ in range(3)), LayerSpec(toy.Pool, 9)]
    block = {"recompute_ratio": ratio, "peer_timeout_s": 60}
    ds_config = cases.config(1, {"type": "SGD", "params": {"lr": 0.5}}, block)
    with mock.patch.dict(sys.modules, modules):
        engine = cases.engine(ds_config, 2, specs=lambda: specs)
        if known == "registered":
            engine.register_random_state(
                "own", lambda: dict(tracker.states_), lambda states: tracker.set_states(states)
            )
        iterator = toy.data()
        losses = [float(engine.train_batch(iterator)) for _ in range(4)]
        found = losses, cases.parameters(engine)
        engine.destroy()
    cases.close_groups()
    return found


SOURCES = [
    ("python", ""),
    ("numpy", ""),
    ("deepspeed", ""),
    ("tracker", "imported"),
    ("tracker", "registered"),
]


def drawn_everywhere() -> list[tuple[Any, Any]]:
    return [tuple(drawn_elsewhere(source, ratio, known) for ratio in (0, 1)) for source, known in SOURCES]


def test_draws_that_torch_does_not_know_are_repeated(worlds: Worlds) -> None:
    for report in worlds.run(2, drawn_everywhere):
        for source, (kept, recomputed) in zip(SOURCES, report, strict=True):
            assert kept[0] == recomputed[0], source
            assert all(torch.equal(kept[1][name], recomputed[1][name]) for name in kept[1]), source


def test_draws_of_an_unknown_tracker_are_refused(worlds: Worlds) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, drawn_elsewhere, "tracker", 1, "")
    line = "vpipe.recompute_ratio: got layers 3 to 4 (Drops to Pool) with another output when they are run again"
    assert line in failed.value.errors[1]
    for error in failed.value.errors.values():
        assert "engine.register_random_state(name, get, put)" in error
        assert "\n" not in error


class Counts(nn.Module):
    """Remembers something of every micro-batch, which its output depends on."""

    of_class = 0

    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight, self.way, self.calls, self.seen = nn.Parameter(torch.linspace(0.9, 1.1, 8)), way, 0, [0]
        self.late_calls = 0
        self.shape: torch.Size | None = None
        self.late: int | None = None
        self.mean: torch.Tensor | None = None
        self.shapes: dict[torch.Size, int] = {}
        self.register_buffer("steps", torch.zeros(()))
        self.norm = torch.jit.script(nn.BatchNorm1d(toy.SEQUENCE)) if way == "torch.jit" else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        if self.way == "attribute":
            self.calls += 1
            return x * (1 + self.calls / 10)
        if self.way == "attribute of the class":
            self.of_class += 1
            return x * (1 + self.of_class / 10)
        if self.way == "none at first":
            self.late = (self.late or 0) + 1
            return x * (1 + self.late / 10)
        if self.way == "tensor":
            self.mean = x.detach().mean() + (0 if self.mean is None else self.mean / 2)
            return x * (1 + self.mean)
        if self.way == "buffer":
            self.steps += 1
        elif self.way == "replaced buffer":
            self.steps = self.steps + 1
        elif self.way == "registered":
            self.register_buffer("passes", getattr(self, "passes", self.steps) + 1)
            return x * (1 + self.passes / 10)
        elif self.way in ("registered: shape", "registered: dict"):
            known = self.shape == x.shape if self.way.endswith("shape") else x.shape in self.shapes
            if not known:
                self.register_buffer("mask", torch.full(x.shape[-1:], 1.5))
                self.shape, self.shapes[x.shape] = x.shape, len(self.shapes)
            return x * self.mask
        elif self.way == "hook":
            if self.calls == 0:
                self.calls = 1
                self.register_forward_hook(lambda _module, _given, found: found * 1.1)
            return x
        elif self.way == "noise":
            return nn.functional.rrelu(x, training=True)
        elif self.norm is not None:
            return self.norm(x)
        if self.way.startswith("starts late"):
            self.calls += 1
            self.late_calls += int(self.calls > 2 and self.way.endswith("number"))
            if self.calls > 2 and self.way.endswith(": buffer"):
                self.steps += 1
            if self.calls > 2 and self.way.endswith("replaced"):
                self.steps = self.steps + 1
            return x * (1 + self.late_calls / 10 + self.steps / 10)
        if self.way == "late":
            self.steps += 1
            return x.tanh() if self.steps > 3 else x
        if self.way == "list":
            self.seen[0] += 1
            return x.tanh() if self.seen[0] > 5 else x
        if self.way == "torch.func":
            return x + torch.func.grad(lambda y: y.tanh().sum())(x)
        return x * (1 + self.steps / 10)


def counted(way: str, ratio: float) -> Any:
    """Losses, weights and buffers of two stages whose layers remember."""
    from deepspeed.pipe import LayerSpec

    specs = [LayerSpec(toy.Embed, 100), *(LayerSpec(Counts, way) for _ in range(3)), LayerSpec(toy.Pool, 9)]
    block = {"recompute_ratio": ratio, "peer_timeout_s": 60}
    engine = cases.engine(cases.config(1, {"type": "SGD", "params": {"lr": 0.5}}, block), 2, specs=lambda: specs)
    torch.manual_seed(5)
    iterator = toy.data()
    losses = [float(engine.train_batch(iterator)) for _ in range(5)]
    found = losses, cases.parameters(engine) | dict(engine.module.named_buffers())
    cases.end(engine)
    return found


COUNTERS = (
    "attribute", "attribute of the class", "none at first", "tensor", "buffer", "replaced buffer", "late",
    "starts late: number", "starts late: replaced", "starts late: buffer", "registered",
    "registered: shape", "registered: dict", "hook", "noise", "torch.jit",
)  # fmt: skip


def counted_everywhere() -> list[tuple[Any, Any]]:
    return [tuple(counted(way, ratio) for ratio in (0, 1)) for way in COUNTERS]


def test_layers_remember_every_micro_batch_once(worlds: Worlds) -> None:
    for report in worlds.run(2, counted_everywhere):
        for way, (kept, recomputed) in zip(COUNTERS, report, strict=True):
            assert kept[0] == recomputed[0], way
            assert all(torch.equal(kept[1][name], recomputed[1][name]) for name in kept[1]), way


def test_layers_that_take_another_way_are_refused_in_one_line(worlds: Worlds) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, counted, "list", 1)
    for error in failed.value.errors.values():
        assert "vpipe.recompute_ratio: got layers that go another way when they are run again" in error
        assert "\n" not in error


def test_layers_that_allow_no_hooks_are_refused_in_one_line(worlds: Worlds) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, counted, "torch.func", 1)
    for error in failed.value.errors.values():
        assert "vpipe.recompute_ratio: got layers that torch does not run under hooks for saved tensors" in error
        assert "\n" not in error


def counted_in_large_buffers(way: str, ratio: float) -> Any:
    with mock.patch("ds_vpipe.engine.modules.run_again._SMALL_BYTES", 0):
        return counted(way, ratio)


def test_large_buffers_that_begin_to_change_are_refused_in_one_line(worlds: Worlds) -> None:
    with pytest.raises(CaseFailed) as failed:
        worlds.run(2, counted_in_large_buffers, "starts late: buffer", 1)
    for error in failed.value.errors.values():
        assert (
            "got a layer whose 'steps' changes in place in a forward pass, allowed are buffers that change in the first"
            in error
        )
        assert "\n" not in error


class Caching(nn.Module):
    """Keeps what it multiplies with for the latest length, as rotary embeddings do."""

    def __init__(self, length: int | None) -> None:
        super().__init__()
        self.length = length
        self.cached: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[-1] != self.length:
            self.length, self.cached = x.shape[-1], torch.arange(x.shape[-1])
        return x * self.cached


@pytest.mark.parametrize("first", [None, 0])
def test_a_cache_fits_its_length_after_a_recomputation(first: int | None) -> None:
    from ds_vpipe.engine.modules.run_again import ModuleMemory

    layer, waiting = Caching(first), []
    memory = ModuleMemory([layer])
    for length in (4, 8, 8, 1, 8, 4):
        before = memory.read()
        assert torch.equal(layer(torch.ones(length)), torch.arange(length).float())
        memory.note_changes(before, True)
        waiting.append((before, length))
        if len(waiting) == 2:
            before, length = waiting.pop(0)
            with memory.as_remembered(before, True):
                assert torch.equal(layer(torch.ones(length)), torch.arange(length).float())


def outputs_kept(counts: Sequence[int]) -> list[int]:
    """Copies of outputs that wait for the recomputation's, after each number of forward passes, before backward."""
    from deepspeed.pipe import PipelineModule

    from ds_vpipe.engine.modules.random_states import RandomStates
    from ds_vpipe.engine.modules.recompute import Segment
    from ds_vpipe.engine.modules.run_again import OutputCheck

    module = PipelineModule(toy.layer_specs(0.3), num_stages=1)
    segment = Segment(0, len(module.forward_funcs), 1.0, RandomStates())
    found = []

    def waiting() -> int:
        gc.collect()
        return sum(isinstance(item, OutputCheck) for item in gc.get_objects())

    segment.run_part(module, toy.micro_batch(0)[0], 1)  # and is dropped, so that the next one is compared
    for count in counts:
        outputs = [segment.run_part(module, toy.micro_batch(number)[0], 1) for number in range(count)]
        found.append(waiting())
        for output in outputs:
            output.sum().backward()
        del output, outputs
    return found


def test_micro_batches_are_compared_at_doubling_distances(worlds: Worlds) -> None:
    """Here the second, as the first is dropped, the next one in its place, and then 4, 8 and 16."""
    assert worlds.run(1, outputs_kept, [1, 1, 1, 1, 1, 1, 1, 3, 5, 1]) == [[1, 1, 1, 0, 0, 0, 1, 0, 1, 0]]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        (torch.ones(3), torch.ones(3), True),
        (torch.ones(3), torch.ones(3) + 1e-6, False),
        (torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan]), True),
        (torch.tensor([1.0, math.nan]), torch.tensor([2.0, math.nan]), False),
        (torch.ones(3, dtype=torch.int64), torch.zeros(3, dtype=torch.int64), False),
        (torch.ones(3), torch.ones(4), False),
        (torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.bool), True),
    ],
)
def test_bit_for_bit_on_cpus(first: torch.Tensor, second: torch.Tensor, same: bool) -> None:
    from ds_vpipe.engine.modules.run_again import _difference

    assert (_difference(first, second) == 0) == same


def test_modules_have_their_present_values_afterwards() -> None:
    """Also those that a script has taken away, and buffers that two modules share."""
    from ds_vpipe.engine.modules.run_again import ModuleMemory

    layers = [nn.Linear(2, 2) for _ in range(2)]
    rated: Any = layers[0]
    rated.rate = 0.5
    shared = torch.zeros(3)
    for layer in layers:
        layer.register_buffer("shared", shared)
    memory = ModuleMemory(layers)
    remembered = memory.read()
    memory.note_changes(remembered, training=True)
    del rated.rate
    shared.add_(1)
    with memory.as_remembered(remembered, knows_modules=True):
        assert rated.rate == 0.5
        assert layers[0].shared is layers[1].shared
        assert layers[0].shared.tolist() == [0, 0, 0]
    assert not hasattr(rated, "rate")
    assert all(layer.shared is shared for layer in layers)


def test_modules_that_register_buffers_in_their_first_pass() -> None:
    """That pass runs again as if it had not been run; what later ones have left is there afterwards."""
    from ds_vpipe.engine.modules.run_again import ModuleMemory

    layer: Any = nn.Linear(2, 2)
    layer.state = "new"
    memory = ModuleMemory([layer])
    remembered = memory.read()
    scale = torch.ones(1)
    layer.register_buffer("scale", scale)
    layer.handle = handle = layer.register_forward_hook(lambda *_: None)
    layer.state = "after the first pass"
    memory.note_changes(remembered, training=True)
    layer.state = "after the second pass"
    with memory.as_remembered(remembered, knows_modules=True):
        assert layer.state == "new"
        assert not hasattr(layer, "scale")
        assert not layer._forward_hooks
        assert not hasattr(layer, "handle")
        layer.handle = layer.register_forward_hook(lambda *_: None)
        layer.register_buffer("scale", torch.ones(1))
        layer.register_buffer("other", torch.ones(1))
        layer.state = "after the first pass"
    assert layer.state == "after the second pass"
    assert layer.scale is scale
    assert list(layer._forward_hooks) == [handle.id]
    assert layer.handle is handle
    assert not hasattr(layer, "other")


def test_hooks_that_a_plain_model_leaves_beside_an_interval_are_refused() -> None:
    from ds_vpipe.engine.modules.run_again import ModuleMemory

    layer = nn.Linear(2, 2)
    memory = ModuleMemory([layer], copies_all=True)
    remembered = memory.read()
    layer.register_forward_hook(lambda *_: None).remove()
    memory.note_changes(remembered, training=True)
    layer.register_forward_hook(lambda *_: None)
    line = r"^pipeline.activation_checkpoint_interval: got a forward .* hook \(_forward_hooks of a Linear\)"
    with pytest.raises(VPipeError, match=line):
        memory.note_changes(remembered, training=True)


def test_frozen_weights_that_have_changed_in_place_are_refused() -> None:
    from ds_vpipe.engine.modules.run_again import ModuleMemory

    layer = nn.Linear(2, 2).requires_grad_(False)
    memory = ModuleMemory([layer])
    remembered, before = memory.read(), layer.weight
    layer.weight = nn.Parameter(torch.ones(2, 2), requires_grad=False)
    with memory.as_remembered(remembered, knows_modules=True):
        assert torch.equal(layer.weight, before)
    before.add_(1)
    changed = pytest.raises(VPipeError, match=r"got 'weight' of recomputed layers that .* changed in place since")
    with changed, memory.as_remembered(remembered, knows_modules=True):
        pass
    with memory.as_remembered(remembered, knows_modules=False):
        assert torch.equal(layer.weight, before)


def test_buffers_that_change_in_training_alone() -> None:
    """A first pass in evaluation mode says nothing of them."""
    from ds_vpipe.engine.modules.run_again import ModuleMemory

    layer = nn.BatchNorm1d(2000)
    memory = ModuleMemory([layer])
    memory.note_changes(memory.read(), training=False)
    means = []
    for _ in range(2):
        remembered = memory.read()
        means.append(layer.running_mean.clone())  # type: ignore[operator,union-attr]
        layer(torch.randn(4, 2000))  # which changes it without a count of changes
        memory.note_changes(remembered, training=True)
    with memory.as_remembered(remembered, knows_modules=True):
        assert torch.equal(layer.running_mean, means[1])  # type: ignore[arg-type]
    assert not torch.equal(layer.running_mean, means[1])  # type: ignore[arg-type]


def test_another_number_of_outputs_is_another_output() -> None:
    from ds_vpipe.engine.modules.run_again import OutputCheck

    differences: list[float] = []
    check, value = OutputCheck(differences.append), torch.ones(2)
    check.run(lambda value: (value, value), value)
    check.run(lambda value: value, value)
    assert differences == [math.inf]


def test_copies_of_inputs_keep_their_strides() -> None:
    """Last bits of results may depend on them."""
    from ds_vpipe.engine.modules.recompute import alias_free

    value = torch.randn(3, 4).t()
    first, second = alias_free((value, value))
    assert first is second
    assert first.stride() == value.stride()
    assert torch.equal(first, value)
    assert first.data_ptr() != value.data_ptr()


class CountedBytes(TorchDispatchMode):
    """Counts the bytes of tensors that operators return."""

    made = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.made += result.nbytes if isinstance(result, torch.Tensor) else 0
        return result


def test_equal_outputs_are_compared_without_temporaries() -> None:
    """They would be the peak of a last stage that recomputes."""
    from ds_vpipe.engine.modules.run_again import _difference

    output = torch.randn(1000)
    with CountedBytes() as counted:
        assert _difference(output, output.clone()) == 0
    assert counted.made == output.nbytes  # the second one itself


class OnDevice(torch.Tensor):
    """A tensor that says that it is on another device."""

    device = property(lambda _: torch.device("cuda"))  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ([1.0, 2.0], [1.0, 2.0 + 1e-5], True),
        ([1.0, 2.0], [1.0, 3.0], False),
        ([1.0, 2.0, -math.inf], [1.0, 2.0 + 1e-5, -math.inf], True),
        ([1.0, 2.0, -math.inf], [50.0, -7.0, -math.inf], False),
        ([1.0, 2.0, math.nan], [1.0, 3.0, math.nan], False),
        ([1.0, 2.0, math.inf], [1.0, 2.0, -math.inf], False),
        ([1.0, 0.0, 2.0], [1.0, math.nan, 2.0], False),
    ],
)
def test_up_to_the_order_of_sums_on_devices(first: list[float], second: list[float], same: bool) -> None:
    """Infinities, such as those of masks, hide no difference of what is beside them."""
    from ds_vpipe.engine.modules.run_again import _difference

    found = _difference(*(torch.tensor(values).as_subclass(OnDevice) for values in (first, second)))
    assert (found == 0) == same
