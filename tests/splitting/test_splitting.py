"""Parts of splitting: calls as tuples, absent tensors, chains, pieces, parameters, models on the meta device."""

from __future__ import annotations

import abc
import copy
import math
import pickle
import random
import struct
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy
import pytest
import torch
from split_models import (
    CASES,
    OWN,
    OldBert,
    Perceptron,
    Stages,
    Wrapped,
    bert,
    built,
    gpt2,
    padding,
    pass_through,
    tokens,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import ModernBertConfig, ModernBertForMaskedLM, T5Config, T5ForConditionalGeneration

from ds_vpipe.splitting.blocks import all_modules, block_choices
from ds_vpipe.splitting.call import CallForms, find_loss, loss_of
from ds_vpipe.splitting.guards import drawn_between, random_states
from ds_vpipe.splitting.meta_tensor import AccessLog, MetaTensor, SplitError
from ds_vpipe.splitting.output_specs import OutputSpecs
from ds_vpipe.splitting.split import as_call, from_data, guesses, split_in_process


class Batch(UserDict[str, Any]):
    """As tokenizers return them."""


def test_a_call_survives_packing() -> None:
    forms = CallForms()
    one, two, three = torch.ones(2), torch.zeros(3, dtype=torch.int64), torch.tensor(True)
    args, kwargs = ([one, (two, None)], 3), {"z": Batch(a=three), "flag": True, "name": "x"}
    packed, form = forms.pack(args, kwargs)
    assert len(packed) == 6
    assert packed[0] is not None
    assert packed[0].numel() == 0
    found_args, found_kwargs = forms.form_of(packed).rebuild(packed[1:])
    assert found_args[0][0] is one
    assert found_args[0][1][0] is two
    assert (found_args[0][1][1], found_args[1]) == (None, 3)
    assert type(found_kwargs["z"]) is Batch
    assert found_kwargs["z"]["a"] is three
    assert (found_kwargs["flag"], found_kwargs["name"]) == (True, "x")
    assert forms.pack(args, dict(reversed(kwargs.items())))[1] is form


def test_numbers_travel() -> None:
    """A number that is another one in every call, or on every rank, is no other form; the first stage's is used."""
    first, second = CallForms(), CallForms()
    _, own = second.pack((torch.ones(2), -1), {"rate": 1e-3})
    for number, rate in [(0, 0.1), (-(2**63), -0.0), (2**63 - 1, math.inf), (1, numpy.float64(0.25))]:
        packed, _ = first.pack((torch.ones(2), number), {"rate": rate})
        form = second.form_of(packed)
        args, kwargs = form.rebuild(packed[1:])
        assert form is own
        assert (args[1], type(args[1])) == (number, int)
        assert type(kwargs["rate"]) is float
        assert struct.pack("<d", kwargs["rate"]) == struct.pack("<d", rate)
    assert first.pack((2**63,), {})[1] is not first.pack((2**63 + 1,), {})[1]
    assert first.pack((2**63,), {})[1].rebuild(())[0] == (2**63,)


def test_every_rank_has_its_own_device() -> None:
    """Its number makes no other form, and a rank builds the call with its own."""
    ranks = CallForms(), CallForms()
    calls = [forms.pack((torch.ones(2),), {"device": torch.device("cuda", i)}) for i, forms in enumerate(ranks)]
    packed, _ = calls[0]
    for number, forms in enumerate(ranks):
        _, kwargs = forms.form_of(packed).rebuild(packed[1:])
        assert kwargs["device"] == torch.device("cuda", number)
    for other in (torch.device("cpu"), "cuda", "cuda:0"):
        assert ranks[0].pack((torch.ones(2),), {"device": other})[1] is not calls[0][1]


def test_the_loss_among_what_forward_returns() -> None:
    loss, other = torch.tensor(1.0, requires_grad=True), torch.tensor(2.0, requires_grad=True)
    logits, accuracy = torch.zeros(2, 3, requires_grad=True), torch.tensor(0.5)
    for output in [loss, (loss, logits), (logits, loss), [logits, None, loss], (accuracy, loss), (loss, other)]:
        assert find_loss(output) is loss
    for output in [(logits, loss, other), {"first": loss, "second": other}, {"all": [accuracy, loss]}]:
        assert find_loss(output) is loss
    for output in [{"loss": loss}, SimpleNamespace(loss=loss, logits=logits)]:
        assert find_loss(output) is loss
    assert find_loss((accuracy, logits)) is accuracy  # without gradients
    for output in [(logits, 3), (), {"loss": None, "other": other}, SimpleNamespace(loss=None, other=other)]:
        assert find_loss(output) is None
    with pytest.raises(SplitError, match=r"returned a tuple without a loss, .* or in a tuple or dict; pass the labels"):
        loss_of((logits, 3), "Model")


def test_calls_that_differ_have_other_fingerprints() -> None:
    calls: list[Any] = [
        ((torch.ones(2),), {}), ((torch.ones(2), None), {}), ((torch.ones(2), 1), {}), ((torch.ones(2), True), {}),
        ((torch.ones(2), 1.0), {}), ((torch.ones(2), "1"), {}), ((), {"x": torch.ones(2)}), ((), {"y": torch.ones(2)}),
        (([torch.ones(2)],), {}), (((torch.ones(2),),), {}),
    ]  # fmt: skip
    forms = CallForms()
    assert len({forms.pack(*call)[1].fingerprint for call in calls}) == len(calls)
    assert forms.pack((torch.zeros(5, 5),), {})[1] is forms.pack((torch.ones(2),), {})[1]


def absent(*shape: int, dtype: torch.dtype = torch.float32) -> MetaTensor:
    return MetaTensor(
        torch.empty(shape, dtype=dtype, device="meta"), torch.device("cpu"), AccessLog(), "parameter w", "w"
    )


def test_absent_tensors_are_copied_to_other_ranks_as_shapes() -> None:
    found = pickle.loads(pickle.dumps((absent(4, 6, dtype=torch.float16), 3)))
    assert (found[0].device.type, found[0].shape, found[0].dtype, found[1]) == ("meta", (4, 6), torch.float16, 3)


def test_absent_tensors_have_all_but_values() -> None:
    weight = absent(4, 6)
    made = nn.functional.linear(torch.ones(2, 6), weight)
    assert isinstance(made, MetaTensor)
    assert (made.shape, made.dtype, made.device.type, made.is_meta) == ((2, 4), torch.float32, "cpu", False)
    assert weight.to(torch.bfloat16).dtype == torch.bfloat16
    assert isinstance(torch.nn.functional.dropout(made, 0.5, True), MetaTensor)
    ones = torch.ones_like(made)
    assert not isinstance(ones, MetaTensor)
    assert torch.equal(ones, torch.ones(2, 4))
    assert isinstance(copy.deepcopy(weight), MetaTensor)
    assert "parameter w" in repr(weight)


def test_absent_dropout_draws_nothing() -> None:
    before = torch.get_rng_state()
    nn.functional.dropout(absent(4, 6), 0.5, True)
    assert torch.equal(before, torch.get_rng_state())


def test_absent_tensors_refuse_to_become_values() -> None:
    weight = absent(4, 6)
    with pytest.raises(
        SplitError, match=r"test_splitting\.py:\d+: .*looks at the value of what is computed from parameter w"
    ):
        weight.sum().item()
    with pytest.raises(SplitError, match="looks at the value"):
        weight.nonzero()
    with pytest.raises(SplitError, match="writes"):
        torch.zeros(4, 6).add_(weight)
    weight.access_log.forward_pass = SimpleNamespace(
        piece=0, start=0, holder="this stage", note_refusal=lambda error: None
    )
    assert isinstance(weight + weight, MetaTensor)
    with pytest.raises(SplitError, match="needs parameter w"):
        torch.ones(6) + weight


def test_the_largest_list_is_the_first() -> None:
    assert [blocks.name for blocks in block_choices(bert())] == ["bert.encoder.layer"]
    assert next(block_choices(gpt2())).name == "transformer.h"
    assert list(block_choices(Perceptron())) == []
    assert all_modules(Perceptron()).names == ("first", "second", "third", "norm", "last")


def test_examples() -> None:
    data = TensorDataset(torch.arange(6).view(3, 2), torch.arange(3))
    found = from_data(data)
    assert found is not None
    assert torch.equal(found[0][0], torch.tensor([[0, 1], [2, 3]]))
    assert found[1] == {}
    assert from_data(iter([1])) is None
    assert as_call({"a": 1}) == ((), {"a": 1})
    lengths = from_data([torch.arange(3), torch.arange(2)])
    assert lengths is not None
    assert torch.equal(lengths[0][0], torch.tensor([[0, 1, 2]]))
    assert [len(args) for args, _ in guesses(Wrapped(False))] == [3]
    assert [len(args[0]) for args, _ in guesses(OldBert())] == [2, 2, 3, 4, 5, 6, 7, 8]  # the first is a tensor


@pytest.mark.parametrize(
    ("size", "sides"), [(32, (32, 32)), ([32, 48], (32, 48)), (None, (224, 224)), ({"height": 32}, (224, 224))]
)
def test_guesses_of_images(size: Any, sides: tuple[int, int]) -> None:
    class Images(nn.Module):
        config = SimpleNamespace(image_size=size)

        def forward(self, pixel_values: Tensor) -> Tensor:
            return pixel_values.mean()

    assert next(guesses(Images()))[1]["pixel_values"].shape == (2, 3, *sides)


def test_an_example_draws_no_numbers_of_the_script() -> None:
    class Crops:
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.randint(9, (2,)) + random.randint(0, 9) + numpy.random.randint(9)

    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) + torch.randint(9, (1,))

    before = random_states()
    first, again = from_data(Crops(), collate), from_data(Crops(), collate)
    assert not drawn_between(before, random_states())
    assert first is not None
    assert again is not None
    assert torch.equal(first[0][0], again[0][0])


def test_data_of_which_the_script_passes_on_a_part() -> None:
    """The forward does not take all of it: the model's own example tells what is where."""

    class Masked(OldBert):
        def forward(self, batch: Any, keep: bool = False) -> Any:  # type: ignore[override]
            return super().forward(batch) if keep is False or keep else None

    model, batch = Masked(), OWN["old BERT"][1][0]
    model.dummy_inputs = (batch,)
    sample = (batch, torch.ones(2, dtype=torch.bool))
    with pytest.raises(RuntimeError, match="ambiguous"):
        model(*sample)
    with pytest.warns(UserWarning, match="RuntimeError: Boolean.*with the first batch of training_data"):
        found = split_in_process(model, 2, (sample, {}))
    assert found.ties() == split_in_process(model, 2).ties() != {}


def test_pieces_without_any_example_that_works() -> None:
    class Picky(OldBert):
        def forward(self, batch: Any) -> Any:  # type: ignore[override]
            return super().forward(batch["data"])

    model = Picky()
    nn.init.normal_(model.bias)
    batch = {"data": OWN["old BERT"][1][0]}
    split = Stages(model, (3, 3))
    assert split.models[0].ties().keys() == {"embeddings.words.weight", "bias"}  # it cannot know who uses the bias
    loss, gradients = pass_through(model, (batch,), {})
    found = split.forward(batch)
    split.backward(found)
    assert torch.equal(found, loss)
    assert split.gradients().keys() == gradients.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(split.gradients()[name], value)


def test_own_parameters_keep_their_groups() -> None:
    model = bert()
    groups = [
        {"params": [p for n, p in model.named_parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for n, p in model.named_parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    stage = split_in_process(model, 2)
    stage.keep(range(2, 6))
    stage.release()
    own = stage.own_parameters(groups)
    assert [group["weight_decay"] for group in own] == [0.1, 0.0]
    assert {id(p) for group in own for p in group["params"]} == {id(p) for p in model.parameters()}
    assert [p.dim() > 1 for p in own[0]["params"]] == [True] * len(own[0]["params"])
    assert len(stage.own_parameters(model.parameters())) == len(list(model.parameters()))


@pytest.mark.parametrize("build", [bert, gpt2, OldBert])
def test_models_on_the_meta_device(build: Any) -> None:
    with torch.device("meta"):
        model = build()
    split = Stages(model, (2, 4))
    wanted = {name: value.shape for name, value in build().state_dict().items()}
    state = split.state()
    assert {name: value.shape for name, value in state.items()} == wanted
    for stage in split.models:
        assert not any(t.is_meta for t in (*stage.model.parameters(), *stage.model.buffers()))
        assert sum(p.numel() for p in stage.model.parameters()) < sum(p.numel() for p in model.parameters())
    whole = build()
    whole.load_state_dict({n: v.clone() for n, v in state.items()})
    tie = "embeddings.words.weight" if build is OldBert else next(iter(split.models[0].ties()))
    for stage in split.models:  # as the stages do at their start
        for name, parameter in stage.model.named_parameters():
            if name in split.models[0].ties()[tie].values():
                parameter.data.copy_(whole.get_parameter(tie))
    args, kwargs = (OWN["old BERT"] if build is OldBert else CASES["GPT2LMHeadModel"])[1:]
    if build is bert:
        args, kwargs = CASES["BertForPreTraining"][1:]
    loss = split.forward(*args, **kwargs)
    assert torch.equal(loss, pass_through(whole, args, kwargs)[0])
    spread = [v.std().item() for n, v in state.items() if v.dim() == 2 and v.is_floating_point()]
    assert min(spread) > 0.001  # initialised, not zeros


class Initialised(nn.Module):
    """Layers that the model around them initialises with its own values, after themselves."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.linear = nn.MultiheadAttention(8, 2), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.attention(x, x, x, need_weights=False)[0])

    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(9, 8), nn.ModuleList([self.Layer() for _ in range(2)])
        self.last = nn.Linear(8, 9, bias=False)
        self.last.weight = self.words.weight
        self.also = self.words
        for layer in self.layers:
            layer.register_buffer("places", torch.arange(3))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, self.Layer):
            next(module.parameters())
            nn.init.trunc_normal_(module.linear.weight)  # which looks at values
            nn.init.constant_(module.linear.weight, 7)
        elif isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 3)
        elif isinstance(module, nn.Embedding):
            nn.init.constant_(module.weight, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x).mean()


@pytest.mark.parametrize("partition", [(4,), (2, 2)])
def test_outer_modules_initialise_after_inner_ones_and_ties_as_their_first_module(partition: tuple[int, ...]) -> None:
    with torch.device("meta"):
        model = Initialised()
    state = Stages(model, partition).state()
    assert state["words.weight"].unique().tolist() == [1]
    for layer in ("layers.0", "layers.1"):
        assert state[f"{layer}.linear.weight"].unique().tolist() == [7]
        assert state[f"{layer}.attention.out_proj.weight"].unique().tolist() == [3]
        assert not state[f"{layer}.attention.out_proj.bias"].any()
        assert state[f"{layer}.attention.in_proj_weight"].std() > 0.1


def test_what_has_values_keeps_them_where_a_part_is_built_on_meta() -> None:
    model = Initialised()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5)
    with torch.device("meta"):
        model.layers[1].attention = nn.MultiheadAttention(8, 2)
    state = Stages(model, (4,)).state()
    assert all(
        value.unique().tolist() == [5] for name, value in state.items() if name.startswith(("words", "layers.0.l"))
    )
    assert state["layers.1.linear.weight"].unique().tolist() == [5]
    assert state["layers.1.attention.out_proj.weight"].unique().tolist() == [3]


def test_one_stage_begins_as_on_the_cpu_bit_for_bit() -> None:
    def built() -> nn.Module:
        model = nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 9))
        model[3].weight = model[0].weight
        return model

    with torch.device("meta"):
        model = built()
    example = ((torch.zeros(2, 3, dtype=torch.int64),), {})
    pieces = len(split_in_process(built(), 2, example).trained_sizes())
    torch.manual_seed(3)
    state = Stages(model, (pieces,), example).state()
    torch.manual_seed(3)
    for name, value in built().named_parameters():
        assert torch.equal(state[name], value), name


def test_an_initialiser_that_needs_weights_of_another_stage_is_refused() -> None:
    class Copies(Initialised):
        def _init_weights(self, module: nn.Module) -> None:
            super()._init_weights(module)
            if isinstance(module, Copies):
                module.layers[1].linear.weight.copy_(module.layers[0].linear.weight)

    with torch.device("meta"):
        model = Copies()
    with pytest.raises(SplitError, match=r"^Copies: its initialisation by _init_weights\(module\) needs values of"):
        Stages(model, (2, 2))


def small_t5() -> nn.Module:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=100, decoder_start_token_id=0, **sizes))


def small_modernbert() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = dict.fromkeys(("pad_token_id", "eos_token_id", "bos_token_id", "cls_token_id", "sep_token_id"), 0)
    return ModernBertForMaskedLM(ModernBertConfig(vocab_size=100, **sizes, **tokens))


@pytest.mark.parametrize("build", [small_t5, small_modernbert])
def test_hugging_face_models_on_the_meta_device_begin_as_elsewhere(build: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        model = build()
    pieces = len(split_in_process(build(), 2).trained_sizes())
    state = Stages(model, (pieces // 2, pieces - pieces // 2)).state()
    for name, wanted in build().named_parameters():
        if wanted.numel() > 500:
            assert 0.7 < state[name].std() / wanted.std() < 1.4, name


def test_a_warning_names_what_nothing_initialises() -> None:
    class Scaled(Initialised):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))
            self.register_buffer("count", torch.ones((), dtype=torch.int64))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.scale

    with torch.device("meta"):
        model = Scaled()
    with pytest.warns(UserWarning, match=r"^ds_vpipe: scale: got weights .* so that they are NaN; "):
        state = Stages(model, (2, 2)).state()
    assert state["scale"].isnan()


def test_no_class_is_told_of_subclasses_that_the_script_has_not_made() -> None:
    class Registered(nn.Linear):
        names: ClassVar[list[str]] = []

        def __init_subclass__(cls, *, name: str) -> None:
            cls.names.append(name)

    class Layer(abc.ABC, Registered, name="layer"):
        pass

    split = Stages(nn.Sequential(*(Layer(4, 4) for _ in range(3)), nn.Flatten(0), nn.Linear(8, 1)), (2, 3))
    split.forward(torch.ones(2, 4))
    assert Registered.names == ["layer"]


def test_a_module_that_cannot_initialise_itself() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.blocks = nn.Embedding(9, 8), nn.ModuleList([Scale() for _ in range(2)])

        def forward(self, x: Tensor) -> Tensor:
            x = self.words(x)
            for block in self.blocks:
                x = block(x)
            return x.mean()

    with torch.device("meta"):
        model = Model()
    stage = split_in_process(model, 2)
    stage.keep([0])
    stage.release()  # the embedding can
    with torch.device("meta"):
        stage = split_in_process(Model(), 2)
    stage.keep([1, 2, 3])
    with pytest.raises(SplitError, match=r"blocks\.0\.scale: .*Scale has no reset_parameters"):
        stage.release()


def test_a_run_leaves_the_model_as_it_was() -> None:
    build, args, kwargs = OWN["head before"]
    split = Stages(build(), (1, 3, 2))
    before = [[(n, id(p)) for n, p in stage.model.named_parameters()] for stage in split.models]
    hooks = [[len(m._forward_pre_hooks) for m in stage.model.modules()] for stage in split.models]
    split.forward(*args, **kwargs)
    assert before == [[(n, id(p)) for n, p in stage.model.named_parameters()] for stage in split.models]
    assert hooks == [[len(m._forward_pre_hooks) for m in stage.model.modules()] for stage in split.models]


def test_blocks_that_hand_a_mask_on() -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
            hidden, mask = pair
            return hidden + torch.tanh(self.linear(hidden)) * mask, mask

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.steps, self.last = (
                nn.Embedding(83, 8),
                nn.Sequential(*[Step() for _ in range(3)]),
                nn.Linear(8, 1),
            )

        def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
            hidden, mask = self.steps((self.words(ids), mask.unsqueeze(-1).float()))
            return (self.last(hidden) * mask).mean()

    model = Model()
    split = Stages(model, (1, 2, 2))
    for seed in (1, 2):  # other values of the same shapes
        arguments = tokens(seed), padding().roll(seed, 0)
        assert torch.equal(split.forward(*arguments), model(*arguments))
        split.backward(split.forward(*arguments))


def test_blocks_that_return_one_tensor_twice() -> None:
    class Twice(nn.Linear):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x = x + torch.tanh(super().forward(x))
            return x, x

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.last = nn.Embedding(83, 8), nn.Linear(8, 1)
            self.blocks = nn.ModuleList([Twice(8, 8) for _ in range(3)])

        def forward(self, ids: Tensor) -> Tensor:
            x, first = self.blocks[0](self.words(ids))
            for block in self.blocks[1:]:
                x, _ = block(x)
            return self.last(x + first).mean()

    model = built(Model)
    split = Stages(model, (2, 3))
    for seed in (1, 2):  # the second time from known specs
        assert torch.equal(split.forward(tokens(seed)), model(tokens(seed)))


def test_specs_of_a_skipped_block_depend_on_the_type_of_a_number_and_on_its_mode() -> None:
    class Scale(nn.Module):
        def forward(self, x: torch.Tensor, by: float) -> torch.Tensor:
            return x * by if self.training else (x * by).double()

    log, block = AccessLog(), Scale()
    specs, x = OutputSpecs(log), MetaTensor.like(torch.ones(3, dtype=torch.int64), log, "input")
    found = [specs.outputs(block, (x, by), {}, False, "result").dtype for by in (1, 1.0, 1, True)]
    assert found == [torch.int64, torch.float32, torch.int64, torch.int64]
    assert specs.outputs(block.eval(), (x, 1), {}, False, "result").dtype == torch.float64
