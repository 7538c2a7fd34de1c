"""What layers keep, against counts by hand; models left as they were."""

from __future__ import annotations

import functools
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile
from ds_vpipe.planning.memory import stage_memory
from ds_vpipe.planning.meters import OpMeter, Roofline
from ds_vpipe.planning.profiler import enter, modules_of, parameters_of, profile_layers, run_backward
from ds_vpipe.schedules.counts import StageLoad

analytic_profile = functools.partial(profile_layers, roofline=Roofline())
BOTH = profile_layers, analytic_profile

B, H = 6, 16  # samples and features; 4 bytes each
X = 4 * B * H


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(H, H).requires_grad_(False)
        self.outer = nn.Linear(H, 2 * H, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x)))


class Table(nn.Module):
    """A frozen weight as a buffer, as quantized ones are in some libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(H, 2 * H))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.table


class Spec:
    """What DeepSpeed's LayerSpec is to the profiler."""

    def __init__(self, kind: Any, *args: Any) -> None:
        self.kind, self.args = kind, args

    def build(self) -> nn.Module:
        return self.kind(*self.args)


HAND_COUNTS = [
    # layer, parameters, kept without the input, of the output, of the input, output
    (nn.Linear(H, 2 * H), 4 * (H + 1) * 2 * H, 0, 0, X, 2 * X),
    (nn.LayerNorm(H), 4 * 2 * H, 2 * 4 * B, 0, X, X),  # mean and deviation of each sample
    (nn.GELU(), 0, 0, 0, X, X),
    (nn.Tanh(), 0, X, X, 0, X),  # saves its output
    (nn.Dropout(0.1), 0, X, 0, 0, X),  # saves its mask, scaled
    (nn.Dropout(0.0), 0, 0, 0, 0, X),
    (nn.Sequential(nn.Linear(H, 4 * H), nn.GELU(), nn.Linear(4 * H, H)), 4 * (8 * H * H + 5 * H), 8 * X, 0, X, X),
    (nn.Sequential(nn.Linear(H, H), nn.ReLU(inplace=True)), 4 * (H * H + H), X, X, X, X),
    (Frozen(), 4 * (H * H + H + 2 * H * H), X, 0, 0, 2 * X),  # the frozen one needs no input for its weights
    (Table(), 4 * 2 * H * H, 0, 0, 0, 2 * X),  # there once, whatever is in flight
    (torch.sin, 0, 0, 0, X, X),
    (functools.partial(torch.mul, torch.ones(B, H)), 0, X, 0, 0, X),
    (torch.neg, 0, 0, 0, 0, X),
]


@pytest.mark.parametrize("analytic", [False, True])
@pytest.mark.parametrize("case", HAND_COUNTS, ids=lambda case: getattr(case[0], "__name__", type(case[0]).__name__))
def test_bytes_equal_hand_counts(case: Any, analytic: bool) -> None:
    layer, parameters, kept, output_kept, input_kept, boundary = case
    x = torch.randn(B, H, requires_grad=True)
    if analytic and isinstance(layer, functools.partial):
        pytest.skip("holds a tensor with values")
    if analytic:
        profile = analytic_profile([layer], x)
    else:
        profile = profile_layers([layer], x, micro_batches=1, warm_up=0)
    found = profile.layers[0]
    assert found.parameter_bytes == parameters
    assert found.activation_bytes == kept
    assert found.output_kept_bytes == output_kept
    assert found.input_kept_bytes == input_kept
    assert found.boundary_bytes == boundary
    sizes = [p.numel() * 4 for module in modules_of(layer) for p in module.parameters() if p.requires_grad]
    assert found.largest_weight_bytes == max(sizes, default=0)
    assert found.frozen_bytes == {Frozen: 4 * (H * H + H), Table: parameters}.get(type(layer), 0)
    assert (profile.input_bytes, profile.micro_batch_size, profile.dtype) == (X, B, "float32")
    assert profile.source == ("analytic" if analytic else "measured")


class Graph(nn.Module):
    """A sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(B).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.graph, x)


def test_sparse_gradients_and_buffers() -> None:
    layers, indices = [nn.Embedding(2, H, sparse=True), Graph()], torch.zeros(B, dtype=torch.int64)
    first, second = profile_layers(layers, indices, micro_batches=1, warm_up=0).layers
    assert (first.parameter_bytes, first.activation_bytes, first.input_kept_bytes) == (4 * 2 * H, 0, 8 * B)
    assert (second.parameter_bytes, second.frozen_bytes, second.activation_bytes) == (4 * B * B, 4 * B * B, 0)


def test_the_workspace_of_a_linear_layer() -> None:
    profile = profile_layers([nn.Linear(H, H)], torch.randn(B, H, requires_grad=True), micro_batches=1)
    # In its backward pass: the gradients of output, input, weight and bias, before the last two are added up.
    assert profile.layers[0].workspace_bytes == 2 * X + 4 * (H * H + H)


def test_seconds_are_medians_of_work() -> None:
    calls = []

    class Slow(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            busy = torch.ones(600, 600)
            for _ in range(2 if len(calls) > 2 else 40):  # warm-up takes longer
                busy = busy @ busy * 1e-3
            return x + busy[0, 0]

    profile = profile_layers([Slow(), nn.Identity()], torch.zeros(B, H), micro_batches=3, warm_up=2)
    slow, nothing = profile.layers
    assert len(calls) == 6  # two to warm up, three timed, one counted
    assert 0 < nothing.forward_s < slow.forward_s
    assert slow.backward_s == 0  # nothing requires a gradient


def test_device_model_seconds() -> None:
    device = Roofline(flops_per_s=1e3, bytes_per_s=float("inf"))
    profile = analytic_profile([nn.Linear(H, H, bias=False)], torch.zeros(B, H, requires_grad=True), roofline=device)
    assert profile.layers[0].forward_s == 2 * B * H * H / 1e3
    assert profile.layers[0].backward_s == 4 * B * H * H / 1e3
    device = Roofline(flops_per_s=float("inf"), bytes_per_s=1e3)
    profile = analytic_profile([torch.neg], torch.zeros(B, H), roofline=device)
    assert profile.layers[0].forward_s == 2 * X / 1e3


def test_loss_counts_with_the_last_layer() -> None:
    labels = torch.zeros(B, dtype=torch.long)
    profile = profile_layers(
        [nn.Linear(H, H), nn.Linear(H, H)], torch.zeros(B, H), loss_fn=nn.functional.cross_entropy, labels=labels
    )
    assert [layer.boundary_bytes for layer in profile.layers] == [X, 4]
    assert profile.layers[0].activation_bytes == 0
    assert profile.layers[1].activation_bytes == X + 8 * B + 4  # log-probabilities, labels, and the number of them
    weighted, unknown = nn.CrossEntropyLoss(torch.ones(H)), torch.empty(B, dtype=torch.long, device="meta")
    profiles = [run([nn.Linear(H, H)], torch.zeros(B, H), loss_fn=weighted, labels=unknown) for run in BOTH]
    assert [one.layers[0].activation_bytes for one in profiles] == [X + 8 * B + 4] * 2


def untimed(profile: ModelProfile) -> list[LayerProfile]:
    return [replace(layer, forward_s=0, backward_s=0) for layer in profile.layers]


def test_examples_are_made_of_outputs_without_values() -> None:
    seen: list[Any] = []

    def look(value: Any) -> torch.Tensor:
        seen.append(value)
        return value["floats"].sum()

    floats = torch.empty(2, 3, device="meta", requires_grad=True)
    flags, indices = (torch.empty(2, dtype=dtype, device="meta") for dtype in (torch.bool, torch.long))
    profile_layers([look], {"floats": floats, "others": (None, [flags, indices])}, micro_batches=1, warm_up=0)
    made = seen[0]
    nothing, (flags, indices) = made["others"]
    assert nothing is None
    assert made["floats"].requires_grad
    assert made["floats"].std() > 0
    assert 0 <= made["floats"].min() <= made["floats"].max() <= 1
    assert flags.all()
    assert not indices.any()


class Replacing(nn.Module):
    """A buffer that every pass replaces, a count of passes, and a tensor that a pass leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(H))
        self.passes, self.last = 0, torch.zeros(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + x.detach().mean(0)
        self.passes, self.last = self.passes + 1, x * 2
        return x + self.mean


def test_modules_stay_as_they_were() -> None:
    layer = nn.Sequential(nn.Linear(H, H), nn.BatchNorm1d(H), nn.Dropout(0.5), Replacing()).eval()
    layer[0].weight.grad = torch.full((H, H), 3.0)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    random = torch.get_rng_state()
    profile_layers([layer], torch.randn(B, H))
    passes, last = layer[3].passes, layer[3].last
    assert last.requires_grad  # which torch does not copy
    analytic_profile([layer], torch.randn(B, H))
    assert (layer[3].passes, layer[3].last) == (passes, last)
    assert not layer.training
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
    assert torch.equal(layer[0].weight.grad, torch.full((H, H), 3.0))
    assert layer[0].bias.grad is None
    random_now = torch.get_rng_state()
    torch.set_rng_state(random)
    torch.randn(B, H), torch.randn(B, H)
    assert torch.equal(random_now, torch.get_rng_state())


def test_a_layer_that_cannot_be_copied_is_refused() -> None:
    layer = nn.Linear(H, H)
    layer.lock = threading.Lock()
    with pytest.raises(
        VPipeConfigError, match=r"^layer: got \"Linear\"; TypeError: .*_thread.lock.*; allowed: "
    ) as refused:
        analytic_profile([layer], torch.randn(B, H))
    assert "\n" not in str(refused.value)
    profile_layers([layer], torch.randn(B, H), micro_batches=1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(64), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(nn.functional.gelu(self.up(self.norm(x)))))


@pytest.mark.parametrize("recomputed", [0, 2, 5])
@pytest.mark.parametrize("in_flight", [1, 3])
def test_predicted_peak_is_that_of_a_stage(recomputed: int, in_flight: int) -> None:
    layers: list[Any] = [Block(), nn.Tanh(), Block(), Block(), nn.Linear(64, 32)]
    x = torch.randn(40, 64, requires_grad=True)
    profile = profile_layers(layers, x, micro_batches=1, warm_up=0)
    predicted = stage_memory(profile, 0, 5, StageLoad(in_flight, with_gradients=in_flight), recomputed=recomputed)
    parameters = [p for layer in layers for p in parameters_of(layer)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)

    def run(inputs: torch.Tensor, chosen: list[Any]) -> torch.Tensor:
        for layer in chosen:
            inputs = layer(inputs)
        return inputs

    def stage(inputs: torch.Tensor) -> torch.Tensor:
        inputs = run(inputs, layers[: 5 - recomputed])
        last = lambda value: run(value.clone(), layers[5 - recomputed :])  # noqa: E731
        return checkpoint(last, inputs, use_reentrant=False) if recomputed else inputs

    static = [x, *parameters, *(p.grad for p in parameters if p.grad is not None)]
    with OpMeter(outside=static) as meter:
        flights = []
        for _ in range(in_flight):
            inputs = enter(x)[0].detach().requires_grad_()
            flights.append((inputs, stage(inputs)))
        for _, outputs in flights[:1]:
            run_backward(outputs)
    mine = predicted.activations + predicted.recompute + predicted.workspace
    assert predicted.weights == predicted.gradients == sum(4 * p.numel() for p in parameters)
    assert mine / 1.03 <= meter.peak_bytes <= mine


def test_gpt3_on_paper() -> None:
    specs, tokens = gpt3_layers(), torch.zeros(1, 2048, dtype=torch.long)
    profile = analytic_profile(specs, tokens, dtype=torch.bfloat16, roofline=Roofline(312e12, 2e12))
    boundary = torch.empty(1, 2048, 12288, dtype=torch.bfloat16, device="meta", requires_grad=True)
    h, parameters = 12288, sum(layer.parameter_bytes for layer in profile.layers) // 2
    embedding, head = 50257 * h + 2048 * h, 50257 * h
    assert parameters == 96 * (12 * h * h + 13 * h) + embedding + head + 2 * h
    assert parameters - head == pytest.approx(175e9, rel=0.003)  # OpenAI's decoder is tied to the embedding
    assert len(profile) == 98
    assert profile.layers[-1].boundary_bytes == 2 * 2048 * 50257
    # Forward FLOPs of a block: 24 B S h^2 + 4 B S^2 h (Narayanan et al., SC 2021); memory traffic comes on top.
    products = (24 * 2048 * h**2 + 4 * 2048**2 * h) / 312e12
    assert products < profile.layers[50].forward_s < 1.5 * products
    unlimited = analytic_profile(specs[50:51], boundary, dtype=torch.bfloat16, roofline=Roofline(312e12, float("inf")))
    assert unlimited.layers[0].forward_s == pytest.approx(products, rel=1e-3)
    assert unlimited.layers[0].backward_s == pytest.approx(2 * products, rel=0.02)
    assert profile.layers[50].boundary_bytes == 2 * 2048 * h


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(50257, 12288), nn.Embedding(2048, 12288)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.tokens(tokens) + self.places.weight[: tokens.size(1)]


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        h = 12288
        self.first, self.second = nn.LayerNorm(h), nn.LayerNorm(h)
        self.qkv, self.out = nn.Linear(h, 3 * h), nn.Linear(h, h)
        self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (96, 128)).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.decoder = nn.LayerNorm(12288), nn.Linear(12288, 50257, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.norm(x))


def gpt3_layers() -> list[Any]:
    return [Spec(Embed), *[Spec(Decoder)] * 96, Spec(Head)]


def test_bert_large_on_paper() -> None:
    from ds_vpipe.models.bert.layers import bert_layers
    from ds_vpipe.models.bert.model import bert_config

    config = bert_config("large")
    tokens = torch.zeros(4, 128, dtype=torch.long)
    slots = torch.zeros(4, 20, dtype=torch.long)
    profile = analytic_profile(bert_layers(config), (tokens, tokens, tokens.bool(), slots))
    assert len(profile) == 49
    h, vocabulary = 1024, config.vocab_size
    layer = 12 * h * h + 13 * h
    # The word embeddings count in both layers that have them, tied or not.
    outside = (vocabulary + 512 + 2 + 2) * h + (vocabulary * (h + 1) + h * h + 3 * h) + (h * h + h) + 2 * (h + 1)
    indices = 2 * 8 * 512  # buffers: positions and types
    assert sum(one.parameter_bytes for one in profile.layers) == 4 * (24 * layer + outside) + indices
    hidden, mask, positions = 4 * 4 * 128 * h, 4 * 128, 8 * 4 * 20
    assert {one.boundary_bytes for one in profile.layers[:-1]} == {hidden + mask + positions}
    # Feed-forward: GELU's input and output, 4 h wide; dropout's mask; LayerNorm's input, mean and deviation.
    assert profile.layers[1].activation_bytes == 8 * hidden + hidden + hidden + 2 * 4 * 4 * 128


def test_analytic_bytes_are_the_measured_ones() -> None:
    from ds_vpipe.models.bert.layers import bert_layers
    from ds_vpipe.models.bert.model import bert_config

    specs = bert_layers(bert_config("mini"))
    tokens = torch.zeros(4, 32, dtype=torch.long)
    inputs = (tokens, tokens, tokens.bool(), tokens[:, :5])
    measured = profile_layers(specs, inputs, micro_batches=1, warm_up=0)
    analytic = analytic_profile(specs, inputs)
    assert untimed(measured) == untimed(analytic)
