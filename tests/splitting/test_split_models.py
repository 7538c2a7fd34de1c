"""Models in pieces compute what they compute whole, and have the same weights."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext
from functools import cache
from typing import Any

import deepspeed
import pytest
import torch
from split_models import (
    CASES,
    GRAPHS,
    OWN,
    SAMPLES,
    Perceptron,
    Stages,
    Writing,
    built,
    padding,
    pass_through,
    tokens,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    MixtralConfig,
    MixtralForCausalLM,
    VisionEncoderDecoderConfig,
    VisionEncoderDecoderModel,
    ViTConfig,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
)

from ds_vpipe.planning.profiler import profile_layers
from ds_vpipe.splitting import checkpointed
from ds_vpipe.splitting.meta_tensor import MetaTensor, SplitError
from ds_vpipe.splitting.split import split_in_process

ALL = {**CASES, **OWN, **GRAPHS}
GRAPH_PARTITIONS = {"perceptron": {2: (2, 3), 3: (1, 3, 1)}, "convolutions": {2: (4, 2), 3: (1, 3, 2)}}


def check(model: nn.Module, stages: Stages, args: Any, kwargs: Any) -> None:
    """Same loss, bit for bit; same gradients, those of tied weights up to the order of addition."""
    torch.manual_seed(11)
    wanted, gradients = pass_through(model, args, kwargs)
    torch.manual_seed(11)
    loss = stages.forward(*args, **kwargs)
    assert torch.equal(loss, wanted)
    stages.backward(loss)
    found = stages.gradients()
    assert found.keys() == gradients.keys()
    tied = stages.models[0].ties()
    for name, value in gradients.items():
        if name in tied:
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)
        else:
            assert torch.equal(found[name], value), name


# Between them, these are cut at every place.
@pytest.mark.parametrize(("attention", "partition"), [("eager", (1, 3, 2)), ("sdpa", (2, 1, 2, 1))])
@pytest.mark.parametrize("name", CASES)
def test_hugging_face(name: str, partition: tuple[int, ...], attention: str) -> None:
    build, args, kwargs = CASES[name]
    model = build(attention=attention)
    check(model, Stages(model, partition), args, kwargs)


def mixtral() -> nn.Module:
    config = MixtralConfig(
        vocab_size=83, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True,
    )  # fmt: skip
    return built(lambda: MixtralForCausalLM(config))


def image_captions() -> nn.Module:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "num_hidden_layers": 2}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = ViTConfig(**sizes, **rates, image_size=32, patch_size=8)
    decoder = BertConfig(**sizes, **rates, vocab_size=83, is_decoder=True, add_cross_attention=True)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    return built(lambda: VisionEncoderDecoderModel(config=config))


@pytest.mark.parametrize("partition", [(2, 3), (1, 3, 1)], ids=str)
def test_experts_of_one_stage(partition: tuple[int, ...]) -> None:
    """Which of them a token goes to is looked at in their block; their balance is a part of the loss."""
    ids = tokens(1)
    check(model := mixtral(), Stages(model, partition), (), {"input_ids": ids, "labels": ids})


@pytest.mark.parametrize("partition", [(2, 4), (3, 3), (4, 2)], ids=str)
def test_an_encoder_of_images_with_a_decoder(partition: tuple[int, ...]) -> None:
    """Cut on either side of what is between the two."""
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    check(model := image_captions(), Stages(model, partition), (), {"pixel_values": images, "labels": tokens(2)[:2]})


def test_an_encoder_of_sound_with_a_norm_behind_its_layers() -> None:
    """What is behind the layers is found without an example."""
    rates = ("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout")
    config = Wav2Vec2Config(
        vocab_size=83, hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        conv_dim=(8, 8), conv_stride=(5, 4), conv_kernel=(10, 4), num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2, feat_extract_norm="layer", do_stable_layer_norm=True, layerdrop=0.0,
        apply_spec_augment=False, **dict.fromkeys(rates, 0.0),
    )  # fmt: skip
    model = built(lambda: Wav2Vec2ForCTC(config))
    sound = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    check(model, Stages(model, (2, 3)), (), {"input_values": sound, "labels": tokens(2)[:2]})


@pytest.mark.parametrize("partition", [(1, 3, 2), (5, 1), (1, 1, 1, 1, 1, 1), (6,)], ids=str)
@pytest.mark.parametrize("name", OWN)
def test_models_of_ones_own(name: str, partition: tuple[int, ...]) -> None:
    build, args, kwargs = OWN[name]
    model = build()
    check(model, Stages(model, partition), args, kwargs)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", GRAPHS)
def test_models_without_blocks(name: str, stages: int) -> None:
    build, args, kwargs = GRAPHS[name]
    model = build()
    split = Stages(model, GRAPH_PARTITIONS[name][stages], example=(args, kwargs))
    check(model, split, args, kwargs)


@pytest.mark.parametrize("ratio", [0.5, 1.0])
@pytest.mark.parametrize("name", ["BertForPreTraining", "GPT2LMHeadModel", "perceptron"])
def test_recomputation_with_dropout(name: str, ratio: float) -> None:
    build, args, kwargs = ALL[name]
    model = build(dropout=0.3)
    partition = GRAPH_PARTITIONS[name][2] if name in GRAPHS else (3, 3)
    check(model, Stages(model, partition, example=(args, kwargs), recompute_ratio=ratio), args, kwargs)


@pytest.mark.parametrize("name", ["BertForPreTraining", "RobertaForMaskedLM", "GPT2LMHeadModel", "perceptron"])
def test_dropout_draws_the_same_numbers(name: str) -> None:
    build, args, kwargs = ALL[name]
    model = build(dropout=0.3)
    partition = GRAPH_PARTITIONS[name][3] if name in GRAPHS else (1, 3, 2)
    check(model, Stages(model, partition, example=(args, kwargs)), args, kwargs)


@cache
def in_three(name: str) -> tuple[nn.Module, Stages]:
    """A model, and in three stages."""
    build, args, kwargs = ALL[name]
    model = build()
    partition = GRAPH_PARTITIONS[name][3] if name in GRAPHS else (1, 3, 2)
    return model, Stages(model, partition, example=(args, kwargs))


@pytest.mark.parametrize("name", ALL)
def test_the_stages_states_are_the_models(name: str) -> None:
    model, split = in_three(name)
    found, wanted = split.state(), model.state_dict()
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", ALL)
def test_a_stage_has_its_own_parameters_only(name: str) -> None:
    model, split = in_three(name)
    tied = {alias for uses in split.models[0].ties().values() for alias in uses.values()}
    seen: set[str] = set()
    for stage in split.models:
        names = {n for n, _ in stage.model.named_parameters()}
        assert {id(p) for p in stage.model.parameters()} == {
            id(p) for piece in stage.pieces for p in piece.parameters()
        }
        assert not (names & seen) - tied
        seen |= names
    everything = sum(p.numel() for p in model.parameters())
    assert all(sum(p.numel() for p in stage.model.parameters()) < everything for stage in split.models)
    assert {n for n, _ in model.named_parameters()} <= seen


def test_parameters_that_a_script_keeps_in_lists_cost_no_memory() -> None:
    model = ALL["BertForMaskedLM"][0]()
    kept = list(model.named_parameters())
    stage = split_in_process(model, 2)
    stage.keep(range(2))
    stage.release()
    own = {id(parameter) for parameter in stage.model.parameters()}
    assert 0 < len(own) < len(kept)
    for name, parameter in kept:
        assert parameter.is_meta == (id(parameter) not in own), name


@pytest.mark.parametrize("name", ["BertForMaskedLM", "GPT2LMHeadModel", "old BERT", "perceptron"])
def test_evaluation_gives_the_whole_output(name: str) -> None:
    build, args, kwargs = ALL[name]
    model = build().eval()
    split = Stages(model, GRAPH_PARTITIONS[name][2] if name in GRAPHS else (2, 4), example=(args, kwargs))
    for stage in split.models:
        stage.model.train(False)
    with torch.no_grad():
        wanted = model(*args, **kwargs)
        loss = split.forward(*args, **kwargs)
    output = split.models[-1].take_output()
    wanted_loss = wanted[0] if isinstance(wanted, tuple) else wanted["loss"]
    assert torch.equal(loss, wanted_loss)
    assert type(output) is type(wanted)
    if name == "BertForMaskedLM":
        assert torch.equal(output.logits, wanted.logits)
    assert split.models[-1].take_output() is None


def test_evaluation_without_labels_and_other_shapes() -> None:
    build, _, kwargs = CASES["BertForMaskedLM"]
    model = build()
    split = Stages(model, (1, 3, 2))
    check(model, split, (), kwargs)
    shorter = {key: value[:2, :7].contiguous() for key, value in kwargs.items()}
    model.zero_grad()
    for stage in split.models:
        stage.model.zero_grad()
    check(model, split, (), shorter)
    del shorter["labels"]
    with torch.no_grad():
        assert split.forward(**shorter) is None
        assert torch.equal(split.models[-1].take_output().logits, model(**shorter).logits)


def test_collected_hidden_states_are_counted_on_every_stage() -> None:
    """Without gradients, in training mode too, the last stage has all of them."""
    build, _, kwargs = CASES["BertForMaskedLM"]
    model = build()
    split = Stages(model, (1, 3, 2))
    for training in (True, False, True):
        with torch.set_grad_enabled(training):
            split.forward(**kwargs, output_hidden_states=True)
            wanted = model(**kwargs, output_hidden_states=True).hidden_states
        found = split.models[-1].take_output().hidden_states
        assert len(found) == len(wanted)
        assert torch.equal(found[-1], wanted[-1])
        if training:
            with pytest.raises(SplitError):
                found[1].sum().item()
        else:
            assert torch.equal(found[1], wanted[1])


def test_blocks_that_checkpoint_themselves() -> None:
    build, args, kwargs = CASES["GPT2LMHeadModel"]
    model: Any = build(dropout=0.3)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    check(model, Stages(model, (2, 4)), args, kwargs)


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_blocks_in_checkpointed_functions(chunks: int) -> None:
    """Also where a cut is in the midst of one."""
    build, args, _ = OWN["old BERT"]
    model = build()
    check(model, Stages(model, (2, 1, 3)), args, {"chunks": chunks})
    check(model, Stages(model, (2, 1, 3)), args, {})


class Drawing(nn.Module):
    """A block that draws random numbers, and says where it runs."""

    def __init__(self, ran: list[int], number: int) -> None:
        super().__init__()
        self.inner, self.ran, self.number = nn.Linear(12, 12), ran, number

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        if not isinstance(x, MetaTensor) and not x.is_meta:
            self.ran.append(self.number)
        return x + nn.functional.dropout(torch.tanh(self.inner(x)), 0.3) * scale


class Checkpointing(nn.Module):
    """Checkpoints its blocks, what is before and behind them, and in one function both of the last blocks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.ran: list[int] = []
        self.first = nn.Linear(12, 12)
        self.blocks = nn.ModuleList([Drawing(self.ran, number) for number in range(4)])
        self.last = nn.Linear(12, 5)
        self.how = how

    def checkpointed(self, function: Any, *args: Any) -> Any:
        if self.how == "deepspeed":
            return deepspeed.checkpointing.checkpoint(function, *args)
        return checkpoint(function, *args, use_reentrant=self.how == "reentrant")

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x, scale = self.checkpointed(lambda x: (torch.tanh(self.first(x)), x.mean()), x.clone().requires_grad_())
        for block in self.blocks[:2]:
            x = 2 * self.checkpointed(lambda x, s, block=block: block(x, scale=s), x, scale)
        x = self.checkpointed(lambda x, s: self.blocks[3](self.blocks[2](x, scale=s), scale=s), x, scale)
        return self.checkpointed(lambda x: nn.functional.cross_entropy(self.last(x), labels), x)


@pytest.mark.parametrize("how", ["torch", "reentrant", "deepspeed"])
@pytest.mark.parametrize("partition", [(2, 4), (4, 2), (2, 2, 2)], ids=str)
def test_blocks_are_checkpointed_in_the_place_of_functions_with_them(partition: tuple[int, ...], how: str) -> None:
    """They are run again in the backward pass, with the same random numbers, in the stage that has them."""
    model = built(lambda: Checkpointing(how))
    args = torch.randn(3, 12, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 4])
    split = Stages(model, partition)
    check(model, split, args, {})
    ran: list[int] = []
    for stage in split.models:
        for block in stage.model.blocks:
            block.ran = ran
    loss = split.forward(*args)
    assert ran == [0, 1, 2, 3]
    split.backward(loss)
    assert sorted(ran) == [0, 0, 1, 1, 2, 2, 3, 3]


def checkpointed_by(how: str, function: Any, x: Tensor) -> Any:
    if not how:
        return function(x)
    if how == "deepspeed":
        return deepspeed.checkpointing.checkpoint(function, x)
    if how == "reentrant":
        return checkpoint(function, x, use_reentrant=True)
    own = {"context_fn": lambda: (nullcontext(), nullcontext())} if how == "own contexts" else {}
    return checkpoint(function, x, use_reentrant=False, **own)


class ScaledBlock(nn.Module):
    """Checkpoints itself, with what it has been given as an attribute and as a buffer."""

    def __init__(self, how: str, nested: bool) -> None:
        super().__init__()
        self.inner, self.how, self.nested = nn.Linear(12, 12), how, nested
        self.register_buffer("shift", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        def outer(x: Tensor) -> Tensor:
            return checkpointed_by(self.how, self.inside, torch.tanh(x))

        return checkpointed_by(self.how, outer if self.nested else self.inside, x)

    def inside(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x)) * self.scale * self.shift


class Scaling(nn.Module):
    """Sets an attribute of each block before the call, and one of its own for a checkpointed function at the front."""

    def __init__(self, how: str, nested: bool, outside: bool) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(12, 12), nn.ModuleList([ScaledBlock(how, nested) for _ in range(4)])
        self.last, self.outside = nn.Linear(12, 5), outside

    def front(self, x: Tensor) -> Tensor:
        return torch.tanh(self.first(x)) * self.scale

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        x = x.to(self.first.weight.dtype)  # which the last stage has no values of
        return self.scale * nn.functional.cross_entropy(self.last(x), labels)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        self.scale = x[0, 0]
        x = checkpoint(self.front, x, use_reentrant=False) if self.outside else self.front(x)
        for number, block in enumerate(self.blocks):
            block.scale, block.shift = number + labels[0], x.new_tensor(1.0 + len(x))
            x = block(x)
        return checkpoint(self.loss, x, labels, use_reentrant=False) if self.outside else self.loss(x, labels)


@pytest.mark.parametrize(("nested", "outside"), [(False, True), (False, False), (True, False)])
@pytest.mark.parametrize("how", ["torch", "own contexts", "reentrant", "deepspeed"])
def test_what_is_checkpointed_runs_again_with_attributes_of_its_own_micro_batch(
    how: str, nested: bool, outside: bool
) -> None:
    """Backward passes come behind forward passes of other micro-batches, as on the first stages of a pipeline."""
    model = built(lambda: Scaling(how, nested, outside))
    draws = torch.Generator().manual_seed(0)
    batches = [(torch.randn(n, 12, generator=draws), torch.tensor([n, 1, 4, 0][:n])) for n in (3, 2)]
    split = Stages(model, (2, 4))
    blocks = [block for stage in split.models for block in stage.model.blocks]
    for way in (how,) if nested or outside else ("", how):  # a script may switch it on after its first calls
        for block in blocks:
            block.how = way
        split.forward(*batches[0])
    under_way = [(split.forward(*batch), split.flights) for batch in batches]
    for loss, split.flights in under_way:
        split.backward(loss)
    for batch in batches:
        model(*batch).backward()
    found = split.gradients()
    for name, parameter in model.named_parameters():
        assert torch.allclose(found[name], parameter.grad, atol=1e-6), name


def test_a_checkpointed_block_runs_again_as_it_ran() -> None:
    """With what the script has set on it, and DeepSpeed's tracker of random numbers; neither changes for others."""
    tracker = deepspeed.checkpointing.get_cuda_rng_tracker()
    tracker.set_states({"test": torch.get_rng_state()})

    class Block(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch.set_rng_state(tracker.states_["test"])
            drawn = torch.rand(4)
            tracker.states_["test"] = torch.get_rng_state()
            self.calls += 1
            return super().forward(x) * self.scale * drawn

    def checkpointing(block: nn.Module, x: Tensor, reentrant: bool) -> Tensor:
        with checkpointed.followed(lambda own: nullcontext(block.modules())):
            return checkpoint(block, x.requires_grad_(), use_reentrant=reentrant)

    def gradient(call: Any) -> Tensor:
        torch.manual_seed(0)
        tracker.set_states({"test": torch.get_rng_state()})
        block = built(lambda: Block(4, 4))
        block.calls, block.scale = 0, torch.tensor(2.0)
        output = call(block, torch.ones(2, 4))
        state, block.scale = tracker.get_states()["test"], torch.tensor(5.0)
        output.sum().backward()
        assert (block.calls, block.scale) == (1, 5.0)
        assert torch.equal(tracker.get_states()["test"], state)
        assert block.weight.grad is not None
        return block.weight.grad

    try:
        wanted = gradient(lambda block, x: block(x))
        for reentrant in (False, True):
            assert torch.equal(gradient(lambda block, x, how=reentrant: checkpointing(block, x, how)), wanted)
    finally:
        tracker.reset()


def test_a_function_may_have_two_backward_passes() -> None:
    """Of results that have no graph in common; torch runs a function that is not reentrant again in each."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

        def forward(self, x: Tensor) -> list[Tensor]:
            return [torch.tanh(part(x)) * self.scale for part in self.parts]

    model = built(Two)
    model.scale = torch.tensor(2.0)
    wanted = torch.autograd.grad(sum(y.sum() for y in model(torch.ones(2, 4))), list(model.parameters()))
    with checkpointed.followed(lambda own: nullcontext(model.modules())):
        outputs = checkpoint(model, torch.ones(2, 4), use_reentrant=False)
    model.scale = torch.tensor(5.0)
    for output in outputs:
        output.sum().backward()
    for parameter, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.equal(parameter.grad, gradient)


def test_graphs_of_what_is_checkpointed_end() -> None:
    """A block that keeps what a reentrant function has returned does not keep all of those before."""

    class Keeping(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.last = checkpoint(super().forward, x, use_reentrant=True)
            made.append(weakref.ref(self.last))
            return self.last

    made: list[Any] = []
    block = Keeping(4, 4)
    for _ in range(5):
        with checkpointed.followed(lambda own: nullcontext([block])):
            block(torch.ones(2, 4, requires_grad=True)).sum().backward()
    gc.collect()
    assert sum(ref() is not None for ref in made) == 1


class Choosing(nn.Module):
    """Checkpoints its blocks where samples are long."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks, self.last = nn.ModuleList([nn.Linear(12, 12) for _ in range(num_blocks)]), nn.Linear(12, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if x.shape[1] > 4 else block(x)
        return nn.functional.cross_entropy(self.last(x).mean(1), labels)


@pytest.mark.parametrize("lengths", [(3, 7), (7, 3)])
def test_checkpointing_by_the_length_of_samples(lengths: tuple[int, int]) -> None:
    model = built(lambda: Choosing(4))
    split = Stages(model, (3, 3))
    first, second = ((torch.randn(2, length, 12), torch.tensor([0, 4])) for length in lengths)
    split.forward(*first)
    check(model, split, second, {})


def test_checkpointed_functions_are_found_at_once() -> None:
    tried = []
    for num_blocks in (3, 9):
        split = Stages(built(lambda: Choosing(num_blocks)), (2, num_blocks))  # noqa: B023
        split.forward(torch.randn(2, 7, 12), torch.tensor([0, 4]))
        tried.append(split.models[0]._split.layout.log.dry_runs)
    assert tried[0] == tried[1]


class Wandering(Choosing):
    """Calls its blocks in one or the other of two checkpointed functions, as what is kept outside the model says."""

    def __init__(self) -> None:
        super().__init__(3)
        self.turns = iter(range(20))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        turn = next(self.turns)
        for number in range(2):
            function = nn.Sequential(*self.blocks) if number == turn % 2 else torch.tanh
            x = checkpoint(function, x, use_reentrant=False)
        return nn.functional.cross_entropy(self.last(x).mean(1), labels)


def test_trials_of_checkpointed_functions_end() -> None:
    with pytest.raises(SplitError, match="called inside a function with its own backward, or one that is checkpointed"):
        Stages(built(Wandering), (2, 3)).forward(torch.randn(2, 7, 12), torch.tensor([0, 4]))


def test_pieces_are_profiled_like_layers() -> None:
    build, args, kwargs = CASES["BertForPreTraining"]
    stage = split_in_process(build(), 2)
    value = stage.pack(args, kwargs)
    for piece in stage.pieces:
        value = piece(value)
    profile = profile_layers(stage.pieces, stage.pack(args, kwargs), micro_batches=1, warm_up=0)
    assert [layer.name for layer in profile.layers] == ["Piece"] * 6
    sizes = [layer.parameter_bytes - layer.frozen_bytes for layer in profile.layers]
    assert sizes == [4 * size for size in stage.trained_sizes()]
    assert all(layer.forward_s > 0 and layer.backward_s > 0 for layer in profile.layers)


def test_shapes_may_change_without_blocks() -> None:
    build, args, kwargs = GRAPHS["perceptron"]
    model = build()
    split = Stages(model, (1, 3, 1), example=(args, kwargs))
    check(model, split, (torch.randn(5, 12),), {"y": torch.tensor([0, 1, 2, 3, 4])})


def test_random_numbers_of_inputs_are_drawn_once() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            noisy = nn.functional.dropout(x, 0.5)
            return (self.second(torch.relu(self.first(noisy))) + noisy).mean()

    model, arguments = Noisy(), (torch.randn(3, 12),)
    check(model, Stages(model, (1, 1), example=(arguments, {})), arguments, {})


def test_running_statistics_are_those_of_the_whole_model() -> None:
    build, args, kwargs = GRAPHS["convolutions"]
    model = build()
    split = Stages(model, (1, 3, 2), example=(args, kwargs))
    split.forward(*args)
    model(*args)
    for key, value in model.state_dict().items():
        assert torch.equal(split.state()[key], value), key


class Averaging(Perceptron):
    """Puts another buffer in the place of one, outside of its modules."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("passing", torch.ones(()), persistent=False)

    def forward(self, x: Tensor, y: Tensor | None = None, scale: float = 1.0) -> Any:
        output = super().forward(x, y, scale)
        self.mean = 0.9 * self.mean + 0.1 * output["loss"].detach()
        return output


def test_buffers_that_a_forward_replaces_are_saved_and_loaded() -> None:
    _, args, kwargs = GRAPHS["perceptron"]
    model = built(Averaging)
    split = Stages(model, (2, 3), example=(args, kwargs))
    for _ in range(2):
        split.forward(*args, **kwargs)
        model(*args, **kwargs)
    state = split.state()
    assert state.keys() == model.state_dict().keys()
    assert torch.equal(state["mean"], model.mean)
    (piece,) = (piece for piece in split.models[1].pieces if "mean" in piece.state_dict())
    piece.load_state_dict({**piece.state_dict(), "mean": torch.tensor(5.0)})
    assert split.models[1].model.mean == 5


@pytest.mark.parametrize(
    ("partition", "ratio", "looks"), [((2, 2, 2), 0.0, False), ((2, 2, 2), 0.5, False), ((6,), 0.0, True)]
)
def test_forwards_that_write_into_their_arguments(partition: tuple[int, ...], ratio: float, looks: bool) -> None:
    """Every stage, every recomputation and the first call, which is tried out, begin with what the script gave. What
    arrives in one message is in one buffer, so that all of it is taken for changed where a part of it is."""
    model: Any = built(Writing)
    model.looks = looks
    batch = (tokens(1, 80), tokens(2, 2, low=0), padding(), tokens(3, 2, (SAMPLES,), 0), tokens(4))
    torch.manual_seed(11)
    wanted, gradients = pass_through(model, (copy.deepcopy(batch),), {})
    stages = Stages(model, partition, recompute_ratio=ratio)
    for _ in range(2):
        given = copy.deepcopy(batch)
        loss = stages.forward(given)
        assert torch.equal(loss, wanted)
        assert all(torch.equal(one, other) for one, other in zip(given, batch, strict=True))
    stages.backward(loss)
    for name, value in stages.gradients().items():
        torch.testing.assert_close(value, gradients[name], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("way", ["apply", "data"])
def test_half_precision_reaches_what_is_absent(way: str) -> None:
    """Both as ``Module.bfloat16()`` does it and as DeepSpeed does, which sets the data of each parameter that is there;
    the mask has the type of the first parameter, which only the first stage has."""
    build, args, kwargs = OWN["old BERT"]
    model = build().to(torch.bfloat16)
    split = Stages(build(), (1, 3, 2))
    for stage in split.models:
        if way == "apply":
            stage.apply(Tensor.bfloat16)
        else:
            for parameter in stage.model.parameters():
                parameter.data = parameter.data.bfloat16()
    assert {p.dtype for stage in split.models for p in stage.model.parameters()} == {torch.bfloat16}
    check(model, split, args, kwargs)
