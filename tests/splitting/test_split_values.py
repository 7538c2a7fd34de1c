"""Values that travel from the piece that makes them to any later one, and what cannot."""

from __future__ import annotations

import copy
import random
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from split_models import LAYOUT_INPUT, Layouts, Noted, OldBert, Stages, built, padding, pass_through, tokens
from torch import Tensor, nn
from transformers import (
    AlbertConfig,
    AlbertForMaskedLM,
    DebertaV2Config,
    DebertaV2ForMaskedLM,
    MixtralConfig,
    MixtralForCausalLM,
    MPNetConfig,
    MPNetForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

from ds_vpipe.splitting.meta_tensor import SplitError
from ds_vpipe.splitting.split import split_in_process

TEXT = {"input_ids": tokens(1), "attention_mask": padding(), "labels": tokens(2)}
SIZES = {"vocab_size": 83, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}


def parts(model: nn.Module, stages: int, example: Any = None) -> list[int]:
    count = len(split_in_process(model, stages, example).pieces)
    bounds = [round(stage * count / stages) for stage in range(stages + 1)]
    return [bounds[stage + 1] - bounds[stage] for stage in range(stages)]


def check(build: Callable[[], nn.Module], args: Any, kwargs: Any, *, stages: int = 3, example: bool = False) -> Stages:
    """Two passes in pieces have the loss and the gradients of the whole model."""
    given = (args, kwargs) if example else None
    model = built(build)
    split = Stages(model, parts(built(build), stages, given), given)
    for _ in range(2):
        for stage in split.models:
            stage.model.zero_grad()
        torch.manual_seed(7)
        random.seed(7)
        wanted, gradients = pass_through(model, args, kwargs)
        torch.manual_seed(7)
        random.seed(7)
        loss = split.forward(*args, **kwargs)
        assert torch.equal(loss, wanted)
        split.backward(loss)
        found, ties = split.gradients(), split.models[0].ties()
        assert found.keys() == gradients.keys()
        for name, value in gradients.items():
            torch.testing.assert_close(
                found[name], value, rtol=1e-5 if name in ties else 0, atol=1e-6 if name in ties else 0
            )
    return split


class Warns(nn.Module):
    """Says something about what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        warnings.warn("seen", stacklevel=1)
        return values.sum()


def test_trials_say_nothing_of_values_that_are_made_up() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        check(Warns, (torch.ones(2, 4),), {})
    assert sum(str(warning.message) == "seen" for warning in said) == 4  # twice as a whole, twice in pieces


MODELS: dict[str, Callable[[], nn.Module]] = {
    "front's value in every block": lambda: DebertaV2ForMaskedLM(
        DebertaV2Config(
            **SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"], norm_rel_ebd="layer_norm", type_vocab_size=0
        )
    ),
    "front's position bias": lambda: MPNetForMaskedLM(MPNetConfig(**SIZES)),
    "encoder and decoder, bias of the first block": lambda: T5ForConditionalGeneration(
        T5Config(vocab_size=83, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    ),
    "blocks that look at values": lambda: MixtralForCausalLM._from_config(
        MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=3), experts_implementation="eager"
    ),
    "one block called again and again": lambda: AlbertForMaskedLM(AlbertConfig(**SIZES, embedding_size=16)),
}


@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_without_an_example(name: str) -> None:
    check(MODELS[name], (), TEXT)


def test_encoder_and_decoder_are_both_split() -> None:
    names = split_in_process(built(MODELS["encoder and decoder, bias of the first block"]), 3).piece_names
    assert names == ["front", *(f"{part}.block.{i}" for part in ("encoder", "decoder") for i in range(2)), "tail"]


@pytest.mark.parametrize("head", ["all", "embedded"])
def test_heads_on_earlier_values(head: str) -> None:
    def build() -> nn.Module:
        model = OldBert()
        model.head = head
        return model

    check(build, ([tokens(1), tokens(2, 2, low=0), padding(), tokens(3, 2, (3,), 0), tokens(4)],), {}, stages=4)


class Down(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.convolution(x)))


class Up(Down):
    def forward(self, x: Tensor, skipped: Tensor | None = None) -> Tensor:  # type: ignore[override]
        assert skipped is not None
        return super().forward(x + skipped)


class Skipping(nn.Module):
    """As a U-Net: two lists of blocks, of which the last of one is the first that the other needs again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 1)
        self.down = nn.ModuleList([Down() for _ in range(3)])
        self.up = nn.ModuleList([Up() for _ in range(3)])
        self.last = nn.Linear(4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, kept = self.first(x), []
        for block in self.down:
            x = block(x)
            kept.append(x)
        for block in self.up:
            x = block(x, kept.pop())
        return nn.functional.cross_entropy(self.last(x.mean((2, 3))), y)


IMAGES = (torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("example", [False, True])
def test_skip_connections_between_two_lists(example: bool) -> None:
    split = check(Skipping, IMAGES, {}, stages=4, example=example)
    assert len(split.models[0].piece_names) == 8
    model = built(Skipping)
    model(*IMAGES)
    model(*IMAGES)
    for name, value in split.state().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=0)


class Flexible(nn.Module):
    """Blocks between an embedding and a head, and something in between."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.words, self.way, self.calls, self.rate = nn.Embedding(83, 8), way, 0, 0.0
        self.blocks = nn.ModuleList([Odd(way) if i % 2 else nn.Linear(8, 8) for i in range(4)])
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x, self.calls, numbers = self.words(ids), self.calls + 1, []
        table = self.words.weight[:8, :8]
        if self.way == "noise":
            x = torch.where((torch.rand(ids.shape) < 0.3)[..., None], 0, x)
        if self.way == "dropped layers" and self.training and torch.rand([]) < self.rate:
            return x.sum()
        if self.way == "late draws" and self.calls > 9:
            torch.rand(3)
        if self.way == "late numpy" and self.calls > 9:
            np.random.rand()
        seen = x[:, 0]
        for block in self.blocks:
            x = block(x, mask, numbers) if isinstance(block, Odd) else block(x)
        if self.way == "view":
            x[:, 0] = 0
            x = x + seen[:, None]
        if self.way == "again":
            x = self.blocks[0](x)
        if self.way == "parameter":
            x = x @ table
        for number in numbers:
            x = x * number
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels)


class Odd(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(8, 8), way

    def forward(self, x: Tensor, mask: Tensor, numbers: list[int]) -> Tensor:
        if self.way == "python draws":
            x = x * random.random()
        return x + torch.tanh(self.linear(x))


def call(seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    return tokens(seed), padding(), tokens(seed, 3, (3,), 0)


class Spoken(nn.Module):
    """As models of speech, with a second loss between its two lists of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.decoder = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.letters = nn.Linear(8, 5)

    def forward(self, x: Tensor, lengths: Tensor, labels: Tensor, label_lengths: Tensor) -> Tensor:
        for layer in self.encoder:
            x = layer(x).tanh()
        scores = self.letters(x).log_softmax(-1).transpose(0, 1)
        loss = nn.functional.ctc_loss(scores, labels, lengths, label_lengths, zero_infinity=True)
        for layer in self.decoder:
            x = layer(x).tanh()
        return loss + nn.functional.cross_entropy(self.letters(x.mean(1)), labels[:, 0])


def test_a_ctc_loss_between_layers() -> None:
    x, lengths = torch.randn(3, 9, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([9, 8, 7])
    split = check(Spoken, (x, lengths, 1 + tokens(1, 4, (3, 3), 0), torch.tensor([3, 2, 1])), {}, example=True)
    assert len(split.models[0].pieces) == 8, "both lists"


@pytest.mark.parametrize("way", ["plain", "noise", "dropped layers", "python draws", "again", "parameter"])
def test_lists_of_several_classes_and_what_may_be_between(way: str) -> None:
    split = check(lambda: Flexible(way), call(), {}, stages=4)
    assert len(split.models[0].piece_names) == (7 if way == "again" else 6)


@pytest.mark.parametrize("way", ["late draws", "late numpy"])
def test_draws_that_begin_later_are_refused(way: str) -> None:
    split = Stages(built(lambda: Flexible(way)), (3, 3))
    split.forward(*call())
    for stage in split.models:
        stage.model.calls = 9
    with pytest.raises(SplitError, match="draws random numbers outside the blocks"):
        split.forward(*call())


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64, np.random.Philox])
def test_any_generator_of_numpys(kind: Any) -> None:
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(kind(3))
    try:
        test_draws_that_begin_later_are_refused("late numpy")
        check(lambda: Flexible("plain"), call(), {}, stages=2)
    finally:
        np.random.set_bit_generator(before)


class Asking(Flexible):
    """Asks blocks for their class, and calls their forward itself."""

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            assert isinstance(block, block.__class__)
            x = block.forward(x, mask, []) if block.__class__ is Odd else block(x)
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels)


def test_blocks_have_their_class_and_their_forward() -> None:
    split = check(lambda: Asking("plain"), call(), {}, stages=4)
    assert len(split.models[0].piece_names) == 6
    assert {type(block) for stage in split.models for block in stage.model.blocks} == {nn.Linear, Odd}


class Counting(nn.Module):
    """Blocks that return a Python number, which depends on the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(83, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Counts() for _ in range(3)])

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x, total = self.words(ids), 0
        for block in self.blocks:
            x, number = block(x, mask)
            total += number
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels) * total


class Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, int]:
        return x + self.linear(x), int(mask.sum())


def test_numbers_of_skipped_blocks_are_those_of_the_call() -> None:
    model = built(Counting)
    split = Stages(model, (2, 2, 1))
    ids, mask, labels = call()
    for kept in (12, 7, 3):
        arguments = ids, mask * (torch.arange(12) < kept), labels
        assert torch.equal(split.forward(*arguments), model(*arguments))


class LateCount(nn.Module):
    """Counts its calls by a number that it does not have at first."""

    calls: int | None

    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        if way == "none":
            self.calls = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls = (getattr(self, "calls", 0) or 0) + 1
        return x + torch.tanh(self.linear(x)) / self.calls


class ClassCount(LateCount):
    calls = 0


class LateCounting(nn.Module):
    """Counts outside its blocks or in them."""

    def __init__(self, way: str, where: str) -> None:
        super().__init__()
        counting = ClassCount if way == "class" else LateCount
        self.words, self.head, self.front = nn.Embedding(83, 8), nn.Linear(8, 3), counting(way)
        blocks = [counting(way) if where == "blocks" else nn.Linear(8, 8) for _ in range(4)]
        self.blocks, self.outside = nn.ModuleList(blocks), where == "outside"

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        x = self.front(x) if self.outside else x
        for block in self.blocks:
            x = block(x) / (self.front.calls or 1 if self.outside else 1)
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels)


@pytest.mark.parametrize("where", ["outside", "blocks"])
@pytest.mark.parametrize("way", ["class", "none", "missing"])
def test_counters_that_are_no_numbers_at_first_count_once_where_a_stage_runs_in_portions(way: str, where: str) -> None:
    model = built(lambda: LateCounting(way, where))
    split = Stages(model, (3, 3), (call(), {}), recompute_ratio=0.5)
    for _ in range(3):
        assert torch.equal(split.forward(*call()), model(*call()))


class Towers(LateCounting):
    """Calls its blocks once for each of two inputs, and looks at values afterwards."""

    def __init__(self) -> None:
        super().__init__("none", "")
        self.register_buffer("seen", torch.zeros(2, 8))

    def tower(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x.mean(1)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        one, other = self.tower(ids), self.tower(ids.flip(1))
        self.seen[: len(other)] = other.detach()[:2]
        loss = (one * other).sum()
        return loss * 2 if loss.item() > 0 else nn.functional.cross_entropy(self.head(one), labels)


@pytest.mark.parametrize("example", [True, False])
def test_values_behind_the_last_call_of_blocks_that_are_called_twice(example: bool) -> None:
    check(Towers, call(), {}, stages=2, example=example)


class Hooking(LateCounting):
    """Registers hooks in its first call, on itself and in its blocks, or in every call and removes them."""

    def __init__(self, where: str) -> None:
        super().__init__("none", "")
        self.handles: list[Any] = []
        self.where = where
        for block in self.blocks if where == "by blocks" else ():
            block.forward = partial(self.of_block, block)
            block.hooked = False

    def of_block(self, block: Any, x: Tensor) -> Tensor:
        if not block.hooked:
            block.hooked = True
            block.register_forward_hook(lambda _module, _given, found: found * 1.5)
        return nn.functional.linear(x, block.weight, block.bias)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        handles = [] if self.where == "for this call" else self.handles
        if not handles and self.where != "by blocks":
            for module in (self.head, *self.blocks):
                handles.append(module.register_forward_hook(lambda _module, _given, found: found * 1.5))
        loss = super().forward(ids, mask, labels)
        if self.where == "for this call":
            self.remove(handles)
        return loss

    def remove(self, handles: list[Any]) -> None:
        while handles:
            handles.pop().remove()


@pytest.mark.parametrize("where", ["by the model", "by blocks", "for this call"])
@pytest.mark.parametrize("partition", [(3, 3), (6,)])
def test_hooks_that_calls_register_are_there_once(partition: tuple[int, ...], where: str) -> None:
    """Though a flag that says so is put back for each portion, and pieces before the last end a call before its end."""
    model = built(partial(Hooking, where))
    split = Stages(model, partition, (call(), {}), recompute_ratio=0.5)
    for number in range(4):
        assert torch.equal(split.forward(*call()), model(*call()))
        if number == 2 and where == "by the model":
            for one in (model, *(stage.model for stage in split.models)):
                one.remove(one.handles)
    counts = [len(block._forward_hooks) for stage in split.models for block in stage.model.blocks]
    assert max(counts) == int(where != "for this call")


class Centred(nn.Module):
    """Keeps a running mean of its inputs outside the blocks, in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head, self.mean = nn.Embedding(83, 8), nn.Linear(8, 3), torch.zeros(12)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        self.mean = 0.5 * self.mean + ids.float().mean(0)
        x = self.words(ids) * torch.sin(self.mean)[:, None]
        for block in self.blocks:
            x = x + torch.tanh(block(x)) * torch.cos(self.mean)[:, None]
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_tensors_that_are_kept_outside_the_blocks_change_once(ratio: float) -> None:
    model = built(Centred)
    split = Stages(model, (3, 3), (call(), {}), recompute_ratio=ratio)
    for _ in range(3):
        model.zero_grad()
        loss = model(*call())
        loss.backward()
        for stage in split.models:
            stage.model.zero_grad()
        found = split.forward(*call())
        split.backward(found)
        assert torch.equal(found, loss)
        gradients = split.gradients()
        for name, parameter in model.named_parameters():
            assert torch.equal(gradients[name], parameter.grad), name


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Reshaping(nn.Module):
    """Operations that change a tensor's shape in place, as recurrent layers use outside the blocks or inside."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.words, self.head, self.way = nn.Embedding(83, 8), nn.Linear(8, 3), way
        self.before = nn.GRU(8, 8, batch_first=True)
        self.blocks = nn.ModuleList([Recurrent(way) for _ in range(4)])

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        if self.way == "outside":
            x = self.before(x)[0]
        elif self.way == "pooled":
            x = x.mean(1)
            x.unsqueeze_(1)
            x = x.expand(-1, ids.shape[1], -1)
        elif self.way == "several":
            first = (2 * x[:, :1]).transpose_(0, 1).squeeze_(0).t_()
            x = x + first.t().reshape(first.shape[1], 1, first.shape[0])
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels)


class Recurrent(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.linear = way, nn.Linear(8, 8)
        self.layer = nn.RNN(8, 8, batch_first=True) if way in ("inside", "looks at values") else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "looks at values" and x.sum() > 1e9:
            return x
        made = self.layer(x)
        return x + torch.tanh(self.linear(made if isinstance(made, Tensor) else made[0]))


@pytest.mark.parametrize("way", ["outside", "inside", "looks at values", "pooled", "several"])
def test_shapes_that_change_in_place(way: str) -> None:
    check(lambda: Reshaping(way), call(), {})


class Positions(nn.Module):
    """Its first layer changes its argument, so that it needs a gradient and has another shape."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.linspace(0, 1, 8))

        def forward(self, x: Tensor) -> Tensor:
            x += self.weight
            return x.unsqueeze_(1)

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(83, 8).requires_grad_(False)
        self.layers = nn.ModuleList([self.Layer(), *(nn.Linear(8, 8) for _ in range(3))])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_blocks_that_change_their_argument_do_so_in_every_call() -> None:
    model = built(Positions)
    split = Stages(model, (2, 4))
    for _ in range(2):
        loss = split.forward(call()[0])
        assert torch.equal(loss, model(call()[0]))
        split.backward(loss)


class Padded(nn.Module):
    """torch's encoder with a mask of padding, for which it has a fast path in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.words, self.encoder, self.head = nn.Embedding(83, 8), nn.TransformerEncoder(layer, 4), nn.Linear(8, 3)

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x = self.encoder(self.words(ids), src_key_padding_mask=mask == 0)
        return nn.functional.cross_entropy(self.head(x[:, 0]), labels)


def evaluated(split: Stages, *arguments: Tensor) -> Any:
    """Loss of an evaluation."""
    for stage in split.models:
        stage.model.eval()
    with torch.no_grad():
        loss = split.forward(*arguments)
    for stage in split.models:
        stage.model.train()
    return loss


def test_an_encoder_that_has_a_fast_path_in_evaluation() -> None:
    model = built(Padded)
    split = Stages(model, parts(copy.deepcopy(model), 3))
    split.backward(split.forward(*call()))
    torch.testing.assert_close(evaluated(split, *call()), model.eval()(*call()).detach())
    assert all(stage.model.encoder.use_nested_tensor for stage in split.models)


class Layers(nn.Module):
    """Layers that have a fast path each in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.layers, self.head = nn.ModuleList([copy.deepcopy(layer) for _ in range(4)]), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def test_the_first_evaluation_takes_the_fast_path_too() -> None:
    """Torch takes the other one where a mode sees its functions, and last bits are others."""
    model = built(Layers)
    split, x = Stages(model, parts(copy.deepcopy(model), 2)), LAYOUT_INPUT.expand(3, 4, 5).repeat(1, 1, 2)[..., :8]
    with mock.patch.object(torch, "_transformer_encoder_layer_fwd", wraps=torch._transformer_encoder_layer_fwd) as fast:
        for calls in (4, 8):
            evaluated(split, x)
            assert fast.call_count == calls


def test_autocast_takes_no_fast_path_in_evaluation() -> None:
    """Of layers whose outputs have another dtype there than in the forward that the split has seen."""
    model = built(Layers)
    split, x = Stages(model, parts(copy.deepcopy(model), 2)), LAYOUT_INPUT.expand(3, 4, 5).repeat(1, 1, 2)[..., :8]
    with torch.autocast("cpu", torch.bfloat16):
        found = evaluated(split, x)
        assert torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            assert torch.equal(found, model.eval()(x).detach())
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


def test_evaluations_with_and_without_autocast() -> None:
    model = built(lambda: Flexible("plain"))
    split = Stages(model, (2, 2, 2))
    for casts in (False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=casts):
            assert torch.equal(evaluated(split, *call()), model.eval()(*call()).detach())
            loss = split.forward(*call())
            assert torch.equal(loss, model.train()(*call()))
        split.backward(loss)


class Casting(Layers):
    """Casts in a part of its forward. By calls, it also switches gradients off and on again."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "by calls":
            casting = torch.autocast("cpu", torch.bfloat16)
            casting.__enter__()
            torch.set_grad_enabled(False)
            x = self.layers[0](x)
            torch.set_grad_enabled(self.training)
            for layer in self.layers[1:]:
                x = layer(x)
            casting.__exit__(None, None, None)
            return self.head(x.float()).square().mean()
        with torch.autocast("cpu", torch.bfloat16, enabled=self.where == "around blocks"):
            for layer in self.layers:
                with torch.autocast("cpu", torch.bfloat16, enabled=self.where != "head"):
                    x = layer(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.where == "head"):
            return self.head(x.float()).square().mean()


@pytest.mark.parametrize("where", ["blocks", "around blocks", "head", "by calls"])
def test_a_forward_that_casts(where: str) -> None:
    """Also in the stages behind a cut; and what it switches by calls is as before where it is ended early."""
    x = LAYOUT_INPUT.repeat(1, 1, 2)[..., :8]
    split = check(lambda: Casting(where), (x,), {})
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0
    found, whole = evaluated(split, x), built(lambda: Casting(where)).eval()
    with torch.no_grad(), mock.patch.object(torch.backends.mha, "_is_fastpath_enabled", where == "head"):
        assert torch.equal(found, whole(x))


class Graph(nn.Module):
    """Layers with settings, and sparse tensors that they and the model have."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.tells = nn.Linear(5, 5), False
            self.register_buffer("near", torch.eye(3).to_sparse())

        def forward(self, x: Tensor) -> Any:
            x = torch.sparse.mm(self.near, self.linear(x)).tanh()
            return (x, x.square().mean()) if self.tells else x

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.far = nn.ModuleList([self.Layer() for _ in range(3)]), torch.eye(3).to_sparse()

    def forward(self, x: Tensor) -> Any:
        told, found = x.new_zeros(()), []
        for layer in self.layers:
            found.append(layer(x))
            x, told = (found[-1][0], told + found[-1][1]) if layer.tells else (found[-1], told)
        return {"loss": torch.sparse.mm(self.far, x).square().mean() + told, "found": found}


@pytest.mark.parametrize("partition", [(2, 3), (4, 1)])
def test_sparse_tensors_and_settings_that_change(partition: tuple[int, ...]) -> None:
    model, x = built(Graph), torch.linspace(-1, 1, 15).view(3, 5)
    split = Stages(model, partition)
    for tells in (False, True, False, True):
        for layer in (one for whole in (model, *(stage.model for stage in split.models)) for one in whole.layers):
            layer.tells = tells
        loss, wanted = split.forward(x), model(x)["loss"]
        assert torch.equal(loss, wanted)
        split.backward(loss)


def test_evaluations_in_training_mode_have_the_values_of_earlier_stages() -> None:
    model, x = built(Graph), torch.linspace(-1, 1, 15).view(3, 5)
    split = Stages(model, (3, 2))
    with torch.no_grad():
        split.forward(x)
    found = split.models[-1].take_output()["found"]
    assert all(torch.equal(*pair) for pair in zip(found, model(x)["found"], strict=True))


class Free(nn.Module):
    """Layers without a list, and a forward with what a traced graph of it would lose."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.way, self.tau = nn.LayerNorm(6), way, 1.0

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = torch.zeros(6)
        mask[3:] = 1
        shifted = y.new_zeros(y.shape)
        shifted[1:] = y[:-1]
        hidden = torch.relu(self.first(x)) * mask.to(x.dtype)
        if self.way == "backward":
            hidden = Reversed.apply(hidden)
        if self.way == "hook" and hidden.requires_grad:
            hidden.register_hook(lambda gradient: 2 * gradient)
        hidden = hidden + self.second(hidden) * self.tau
        hidden = self.norm(self.third(hidden) * mask.to(x.dtype)) + torch.nn.functional.one_hot(shifted, 6)
        return nn.functional.cross_entropy(hidden, y)


FREE = (torch.randn(4, 6, generator=torch.Generator().manual_seed(3)), torch.tensor([5, 1, 0, 2]))


@pytest.mark.parametrize("way", ["slices", "backward", "hook"])
def test_models_without_lists_keep_what_their_forward_does(way: str) -> None:
    check(lambda: Free(way), FREE, {}, stages=3, example=True)


def test_attributes_that_the_script_changes_without_lists() -> None:
    model = built(lambda: Free("slices"))
    split = Stages(model, (1, 1, 2), example=(FREE, {}))
    for module in (model, *(stage.model for stage in split.models)):
        module.tau = 2.0
    assert torch.equal(split.forward(*FREE), model(*FREE))


def test_half_precision_without_lists() -> None:
    model = built(lambda: Free("slices"))
    split = Stages(model, (1, 1, 2), example=(FREE, {}))
    for stage in split.models:
        for parameter in stage.model.parameters():  # as DeepSpeed does after the split
            parameter.data = parameter.data.bfloat16()
    arguments = FREE[0].bfloat16(), FREE[1]
    assert torch.equal(split.forward(*arguments), model.bfloat16()(*arguments))


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("way", ["transposed", "one sample", "gaps", "expanded", "overlapping"])
def test_values_and_gradients_keep_their_strides(way: str, ratio: float) -> None:
    """Last bits of what kernels compute depend on them."""
    model, x = built(lambda: Layouts(way)), LAYOUT_INPUT
    split = Stages(model, parts(copy.deepcopy(model), 3), recompute_ratio=ratio)
    split.forward(x)  # looks how the call goes
    noted = []
    for run in (lambda: pass_through(model, (x,), {}), lambda: split.backward(split.forward(x))):
        Noted.values.clear()
        Noted.gradients.clear()
        run()
        noted.append((Noted.values[:4], Noted.gradients[:]))  # values behind the fourth are computed again
    assert noted[0] == noted[1]
    assert len(noted[0][1]) == 4
    assert len(Noted.values) == 4 or ratio > 0


class Residual(nn.Module):
    """Convolutions without a list; two values would cross inside of the branch, so that there is no cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.fourth = (nn.Conv1d(4, 4, 1) for _ in range(4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.third(torch.relu(self.second(x)))
        return nn.functional.cross_entropy(self.norm(self.fourth(x)).mean(2), y)


def test_buffers_are_in_the_piece_of_their_module_where_cuts_are_left_out() -> None:
    """In evaluation mode nothing writes to them, which would say where they are."""
    model = built(Residual).eval()
    stage = split_in_process(model, 2, ((torch.randn(3, 4, 5), torch.tensor([0, 1, 2])), {}))
    assert stage.piece_names == ["first", "second", "fourth", "norm"]
    assert {piece for name, (_, piece) in stage.owners().items() if name.startswith("norm.")} == {3}


class Scaled(nn.Module):
    """A list of blocks, and a normalisation that is used in two pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(6), nn.Linear(6, 3)
        self.blocks = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.norm(block(x))
        return nn.functional.cross_entropy(self.head(x), y % 3)


def test_statistics_that_two_pieces_would_write() -> None:
    with pytest.raises(SplitError, match=r"buffer norm\.running_mean: is written in pieces"):
        split_in_process(built(Scaled), 2, (FREE, {}))


def test_writes_that_another_tensor_of_an_earlier_piece_would_not_see() -> None:
    class Viewed(Flexible):
        def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
            x = self.words(ids)
            first = x[:, 0]
            hidden = self.blocks[0](x)
            hidden = self.blocks[1](hidden, mask, [])
            x[:, 0] = 0
            return nn.functional.cross_entropy(self.head((hidden + x).mean(1) + first), labels)

    with pytest.raises(SplitError, match="an earlier piece has made a view"):
        split_in_process(built(lambda: Viewed("plain")), 2, (call(), {}))


class Remembering(nn.Module):
    """Blocks, and something that a call leaves behind for later ones or for the code behind them."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.words, self.way, self.calls = nn.Embedding(83, 8), way, 0
        self.blocks = nn.ModuleList([Leaving(way) for _ in range(4)])
        self.head, self.one, self.other = nn.Linear(8, 3), nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("variance", torch.ones(8))

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x, factor = self.words(ids), torch.ones(())
        # Numbers are looked at by many who branch on none: only the branch itself is seen.
        full = mask.min().item() == 1 if "statistics" in self.way else bool(mask.all())
        numbers: list[int] = []
        if self.way == "counter in a buffer":
            self.steps += 1
            factor = self.steps.sum()
        elif self.way == "counter that is replaced":
            self.steps = self.steps + 1
            factor = self.steps.sum()
        elif self.way == "memory":
            x = x + self.mean
        elif self.way == "counter for a log":
            self.steps += 1
        elif self.way == "attribute of the model":
            self.calls += 1
            factor = factor * self.calls
        one, other = self.one(x), self.other(x)
        x = self.blocks[1](self.blocks[0](x, mask, numbers), mask, numbers)
        if self.way == "statistics outside":
            x = nn.functional.batch_norm(x.transpose(1, 2), self.mean, self.variance, training=True).transpose(1, 2)
        if full and self.way in ("branch", "statistics", "statistics outside"):
            x = torch.relu(x)
        kept = torch.sin(x)
        x = self.blocks[2](x, mask, numbers)
        if self.way == "branch":
            x = x + (one if full else other)
        elif self.way == "shared statistics":
            for _ in range(2):
                x = nn.functional.batch_norm(x.transpose(1, 2), self.mean, self.variance, training=True).transpose(1, 2)
                x = self.blocks[3](x, mask, numbers)
        x = self.blocks[3](x, mask, numbers) + kept
        if self.way == "memory":
            self.mean = 0.9 * self.mean + x.detach().mean((0, 1))
        if self.way == "attribute of a block":
            factor = factor * sum(block.kept for block in self.blocks)
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels) * factor * (1 + sum(numbers))


class Leaving(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way, self.calls = nn.Linear(8, 8), way, 0
        self.norm = nn.BatchNorm1d(8) if way == "statistics" else None

    def forward(self, x: Tensor, mask: Tensor, numbers: list[int]) -> Tensor:
        if self.way == "attribute of a block":
            self.kept = int(mask.sum())
        elif self.way == "list":
            numbers.append(3)
        if self.norm is not None:
            self.calls += 1
            x = nn.functional.dropout(self.norm(x.transpose(1, 2)).transpose(1, 2), 0.1) * self.calls
        return x + torch.tanh(self.linear(x))


@pytest.mark.parametrize("way", ["counter in a buffer", "counter that is replaced", "memory", "shared statistics"])
def test_buffers_that_one_piece_writes_and_another_needs_are_refused(way: str) -> None:
    with pytest.raises(SplitError, match=r"buffer .* is written in piece"):
        split_in_process(built(lambda: Remembering(way)), 3, (call(), {}))


class Borrowing(nn.Module):
    """Blocks that use a buffer of the model or of the first block, as an argument or by reference."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.words, self.way, self.head = nn.Embedding(83, 8), way, nn.Linear(8, 3)
        self.blocks = nn.ModuleList([BorrowingBlock(self) for _ in range(4)])
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        if self.way in ("argument", "reference"):
            self.steps += 1
        x = self.words(ids)
        for number, block in enumerate(self.blocks):
            lender: Any = self.blocks[0] if self.way == "first block" else self
            x = block(x, lender.steps if self.way in ("argument", "first block") else None, number == 0)
        if self.way in ("tail", "behind"):
            (self if self.way == "tail" else self.blocks[0]).steps += 1  # type: ignore[operator]
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels)


class BorrowingBlock(nn.Module):
    def __init__(self, model: Borrowing) -> None:
        super().__init__()
        self.linear, self.model = nn.Linear(8, 8), [model]
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor, steps: Tensor | None, first: bool) -> Tensor:
        model = self.model[0]
        if model.way == "first block" and first:
            self.steps += 1
        if model.way == "one block" and first:
            model.steps += 1
        if steps is None and (first or model.way != "one block"):
            steps = self.steps if model.way == "behind" else model.steps
        return x + torch.tanh(self.linear(x)) * (1 if steps is None else torch.exp(-steps / 4))


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (
            "argument",
            "buffer steps: is written in piece 0, whose stage alone keeps the values, and read in piece 1; allowed",
        ),
        ("reference", "is written in piece 0, whose stage alone keeps the values, and read in piece 1; allowed"),
        (
            "first block",
            "blocks.0.steps: is written in piece 1, whose stage alone keeps the values, and read in piece 2; allowed",
        ),
        ("behind", "is written in piece 5, whose stage alone keeps the values, and read in piece 1; allowed"),
        ("tail", "is written in piece 5, whose stage alone keeps the values, and read in piece 1; allowed"),
    ],
)
def test_buffers_that_another_block_reads_are_refused(way: str, words: str) -> None:
    with pytest.raises(SplitError, match=words):
        split_in_process(built(lambda: Borrowing(way)), 3, (call(), {}))


def test_a_buffer_of_the_model_that_one_block_alone_uses() -> None:
    model = built(lambda: Borrowing("one block"))
    split = Stages(model, (1, 2, 3))
    for _ in range(3):
        assert torch.equal(split.forward(*call()), model(*call()))
    assert split.state()["steps"] == 3


@pytest.mark.parametrize("way", ["attribute of the model", "attribute of a block", "list"])
def test_what_python_remembers_is_that_of_the_call(way: str) -> None:
    model = built(lambda: Remembering(way))
    split = Stages(model, (2, 2, 2))
    ids, mask, labels = call()
    for kept in (12, 7, 12, 3):
        arguments = ids, mask * (torch.arange(12) < kept), labels
        assert torch.equal(split.forward(*arguments), model(*arguments))


def test_values_of_another_branch_do_not_take_each_others_places() -> None:
    model = built(lambda: Remembering("branch"))
    split = Stages(model, (2, 2, 2))
    ids, mask, labels = call()
    for given in (mask, torch.ones_like(mask), mask):
        assert torch.equal(split.forward(ids, given, labels), model(ids, given, labels))


@pytest.mark.parametrize(
    ("way", "partition", "ratio"),
    [("statistics", (1, 3, 2), 0.0), ("statistics outside", (1, 3, 2), 0.0), ("counter for a log", (3, 3), 0.5)],
)
def test_what_a_pass_leaves_is_there_once_where_a_forward_is_run_again(
    way: str, partition: tuple[int, ...], ratio: float
) -> None:
    model = built(lambda: Remembering(way))
    split = Stages(model, partition, recompute_ratio=ratio)
    ids, mask, labels = call()
    for given in (mask, torch.ones_like(mask), mask):
        losses = []
        for run in (split.forward, model):
            torch.manual_seed(0)
            losses.append(run(ids, given, labels))
        assert torch.equal(*losses)
    for name, value in split.state().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=0)


@dataclass
class Steps:
    number: int = 0


def flag(part: Any, x: Tensor) -> Any:
    first, part.first = part.first, False
    return 3 if first else 1


def new_attribute(part: Any, x: Tensor) -> Any:
    part.steps = getattr(part, "steps", 0) + 1
    return part.steps


def deleted_attribute(part: Any, x: Tensor) -> Any:
    if not hasattr(part, "first"):
        return 1
    del part.first
    return 3


def from_none(part: Any, x: Tensor) -> Any:
    part.nothing = 1 if part.nothing is None else part.nothing + 1
    return part.nothing


def in_a_dict(part: Any, x: Tensor) -> Any:
    part.held["n"]["n"] = part.held["n"].get("n", 0) + 1
    return part.held["n"]["n"]


def in_lists(part: Any, x: Tensor) -> Any:
    part.items.append(1)
    part.queue.append(len(part.items))
    part.seen.add(len(part.items))
    return len(part.items) + sum(part.queue) + len(part.seen)


def in_an_object(part: Any, x: Tensor) -> Any:
    part.state.number += 1
    return part.state.number


def in_a_tensor(part: Any, x: Tensor) -> Any:
    part.count += 1
    return part.count


def average(part: Any, x: Tensor) -> Any:
    now = x.detach().mean((0, 1))
    part.nothing = now if part.nothing is None else 0.9 * part.nothing + 0.1 * now
    return 1 + part.nothing


def cached_buffer(part: Any, x: Tensor) -> Any:
    if part.cache is None:
        part.cache = 1 + 0 * x[0, 0].detach()
    return part.cache


def one_time_hook(part: Any, x: Tensor) -> Any:
    if part.first:
        part.register_forward_hook(lambda module, given, output: 2 * output)
    part.first = False
    return 1


STATES = [
    flag, new_attribute, deleted_attribute, from_none, in_a_dict, in_lists, in_an_object, in_a_tensor, average,
    cached_buffer, one_time_hook,
]  # fmt: skip


class Stateful(nn.Module):
    """Scales by what it remembers of earlier calls."""

    def __init__(self, state: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.memory = nn.Linear(8, 8), state
        self.first, self.nothing, self.held, self.items = True, None, {"n": dict[str, int]()}, list[int]()
        self.queue, self.seen, self.state, self.count = deque([0], 2), set[int](), Steps(), torch.zeros(1)
        self.register_buffer("cache", None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.memory(self, x)


class States(nn.Module):
    def __init__(self, state: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(83, 8), nn.Linear(8, 3)
        self.front, self.tail = Stateful(state), Stateful(state)
        self.blocks = nn.ModuleList([Stateful(state) for _ in range(3)])

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x = self.front(self.words(ids))
        if mask.all():
            x = torch.relu(x)
        kept = torch.sin(x)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(self.tail(x + kept).mean(1)), labels)


@pytest.mark.parametrize("state", STATES)
def test_trials_and_forwards_that_begin_again_leave_nothing_in_python(state: Callable[[Any, Tensor], Any]) -> None:
    """A full mask is tried out when its branch is seen, by the stage that has begun the wrong way."""
    model = built(lambda: States(state))
    split = Stages(model, (2, 1, 2))
    ids, mask, labels = call()
    for given in (mask, mask, torch.ones_like(mask), mask):
        torch.testing.assert_close(split.forward(ids, given, labels), model(ids, given, labels))


class Measured(nn.Module):
    """Ways to compute with other things than real torch tensors."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.words, self.head, self.way = nn.Embedding(83, 8), nn.Linear(8, 3), way
        self.blocks = nn.ModuleList([Norming(way) for _ in range(3)])

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Any:
        x = self.words(ids)
        if self.way == "conjugate":
            x = x.to(torch.cfloat)
        for block in self.blocks:
            x = block(x).conj()
        logits = self.head(x.imag.mean(1) if x.is_complex() else x.mean(1))
        found = {"loss": nn.functional.cross_entropy(logits, labels)}
        if self.way == "behind":
            found["accuracy"] = (logits.detach().cpu().numpy().argmax(1) == labels.numpy()).mean()
        return found


class Norming(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.cfloat if way == "conjugate" else torch.float))
        self.way = way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "block":
            x = x / float(np.linalg.norm(x.detach()))
        return torch.tanh(x @ self.weight)


@pytest.mark.parametrize("way", ["behind", "block", "conjugate"])
def test_numpy_and_conjugates(way: str) -> None:
    check(lambda: Measured(way), call(), {}, stages=5)


def test_numpy_before_the_last_block() -> None:
    class Early(Measured):
        def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Any:
            self.words(ids).detach().numpy()
            return super().forward(ids, mask, labels)

    with pytest.raises(SplitError, match=r"numpy\(\) looks at the value of what is computed from parameter words"):
        split_in_process(built(lambda: Early("plain")), 2)


class Chosen(nn.Module):
    """As models of images and text: rows of computed values are chosen and replaced by masks of the call's inputs."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.words, self.images, self.way = nn.Embedding(83, 8), nn.Linear(8, 8), way
        self.blocks = nn.ModuleList([Chooses(way) if i == 1 else nn.Linear(8, 8) for i in range(4)])
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor, images: Tensor, shown: Tensor, labels: Tensor) -> Tensor:
        x, seen, factor = self.words(ids).clone(), self.images(images), 1.0
        at = (ids == 5) & (shown == 1)[:, None]
        if self.way == "rows":
            x = x + seen[shown == 1].sum(0)
        elif self.way == "elements":
            x = x + seen.masked_select(shown[:, None] == 1).mean()
        elif self.way == "assigned":
            x[at] = x[at] * 0.5 + seen[shown == 1][:, None].expand(-1, 2, -1).reshape(-1, 8)
        elif self.way == "scattered":
            x = x.masked_scatter(at[..., None].expand_as(x), seen[shown == 1].repeat_interleave(2, 0))
        elif self.way == "caught":
            try:
                x[at] = seen.repeat_interleave(2, 0)
            except RuntimeError:  # not as many images as there are places for
                factor = 0.5
        elif self.way in ("caught type", "caught shape"):
            try:
                x[at[:, :10] if self.way == "caught shape" else at] = x[at].double()
            except (RuntimeError, IndexError):
                factor = 0.5
        elif self.way == "caught by another function":
            try:
                x = x.masked_scatter(at[..., None], seen[shown == 1])
            except RuntimeError:
                factor = 0.5
        for block in self.blocks:
            x = block(x, shown) if isinstance(block, Chooses) else block(x).tanh()
            factor = factor * x.shape[1] / 12
        labels = labels[shown == 1] if len(x) < len(labels) else labels
        return factor * nn.functional.cross_entropy(self.head(x.mean(1)), labels)


class Chooses(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(8, 8), way

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        x = self.linear(x)
        if self.way == "in a block":
            return x[shown == 1]
        if self.way == "in a block by a number":
            return x[:, : 12 - int(shown.sum())]
        return x[shown.nonzero()[:, 0]] if self.way == "in a block by indices" else x


@pytest.mark.parametrize("partition", [(1, 5), (4, 2), (2, 2, 2)])
@pytest.mark.parametrize(
    "way",
    [
        "rows", "elements", "assigned", "scattered", "caught", "caught by another function", "caught type",
        "caught shape", "in a block", "in a block by indices", "in a block by a number",
    ],
)  # fmt: skip
def test_masks_of_the_calls_inputs_choose_rows(way: str, partition: tuple[int, ...]) -> None:
    """Every micro-batch has another number of them, so that shapes are others."""
    ids, images, labels = tokens(1, low=6), torch.randn(3, 8), tokens(3, 3, (3,), 0)
    ids[:, :2] = 5
    model = built(lambda: Chosen(way))
    split = Stages(model, partition, ((ids, images, torch.ones(3, dtype=torch.long), labels), {}))
    for shown in ([1, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 1]):
        call = (ids, images, torch.tensor(shown), labels)
        for stage in split.models:
            stage.model.zero_grad()
        wanted, gradients = pass_through(model, call, {})
        loss = split.forward(*call)
        assert torch.equal(loss, wanted), shown
        split.backward(loss)
        found = split.gradients()
        for name, value in gradients.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=0)
