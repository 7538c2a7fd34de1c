"""What cannot be split, or cannot be run in pieces, is refused in one line that says what, where and what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.distributed as dist
from split_models import OWN, OldBert, Perceptron, Stages, bert, built, gpt2, padding, tokens
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.nn.functional import all_gather as all_gather_with_graph
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import BertModel, DynamicCache, EncoderDecoderCache

from ds_vpipe.config import VPipeConfig
from ds_vpipe.engine.modules.split_module import pipeline_from_module
from ds_vpipe.splitting.meta_tensor import SplitError
from ds_vpipe.splitting.split import split_in_process

BATCH = (tokens(1), tokens(2, 2, low=0), padding(), tokens(3, 2, (3,), 0), tokens(4))


def refusal(*words: str) -> Any:
    class Refused:
        def __enter__(self) -> None:
            self.context = pytest.raises(SplitError)
            self.caught = self.context.__enter__()

        def __exit__(self, *error: Any) -> bool:
            done = bool(self.context.__exit__(*error))
            message = str(self.caught.value)
            assert "\n" not in message
            assert "allowed" in message
            for word in words:
                assert word in message, message
            return done

    return Refused()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Small(nn.Module):
    """Blocks of one class, and a forward that can do all that a pipeline cannot."""

    def __init__(self, way: str = "plain") -> None:
        super().__init__()
        self.words, self.head, self.way = nn.Embedding(83, 8), nn.Linear(8, 3), way
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.register_buffer("table", torch.zeros(2, 8))

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        x = self.words(tokens)
        if self.way == "noise":
            tokens = torch.where(torch.rand(tokens.shape) < 0.5, tokens, 0)
        if self.way == "in place":
            tokens = torch.where(torch.empty(tokens.shape).uniform_() < 0.5, tokens, 0)
        if self.way == "branch" and x.sum() > 0:
            x = -x
        if self.way == "write":
            self.table[:1] = x[:1, 0]
        first = x
        for block in self.blocks:
            if self.way == "drop" and torch.rand([]) < 0.1:
                continue
            x = block(x)
        if self.way == "twice":
            x = self.blocks[0](x)
        if self.way == "skip":
            x = x + first
        if self.way == "reversed":
            x = self.blocks[1](self.blocks[2](x))
        logits = self.head(x.mean(1))
        return logits if labels is None else nn.functional.cross_entropy(logits, labels)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("in place", ("test_split_refusals.py:", "aten.uniform_", "random numbers")),
        ("branch", ("test_split_refusals.py:", "looks at the value", "words.weight")),
        ("write", ("test_split_refusals.py:", "writes", "words.weight")),
        ("drop", ("test_split_refusals.py:", "random number between 0 and 1")),
    ],
)
def test_forwards_that_do_not_run_in_pieces(way: str, words: tuple[str, ...]) -> None:
    with refusal(*words):
        split_in_process(Small(way), 2)


def test_what_is_compiled_around_blocks() -> None:
    model = Small()
    model.forward = torch.compile(model.forward, backend="eager")  # type: ignore[method-assign]
    with refusal("Small: got a compiled module or function around blocks", "call engine.compile() after initialize()"):
        split_in_process(model, 2)


def exchange(x: Tensor) -> None:
    dist.send(x, 1)
    dist.isend(x, 1)
    dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1), dist.P2POp(dist.irecv, x, 1)])


COLLECTIVES: dict[str, Callable[[Tensor], Any]] = {
    "c10d.allreduce_": dist.all_reduce,
    "c10d.barrier": lambda _: dist.barrier(),
    "c10d.broadcast_": lambda x: dist.broadcast_object_list([1], src=0),
    "c10d.allgather_": all_gather_with_graph,
    "c10d_functional.all_reduce": lambda x: all_reduce(x, "sum", dist.group.WORLD) + 1,
}


WHERE = ["in a block", "of activations", "before the blocks", "behind the blocks"]


class OfRows(nn.Module):
    """Takes rows of four numbers, so that no made-up call gets through its blocks."""

    def __init__(self, *order: int) -> None:
        super().__init__()
        self.blocks, self.order = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), order

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        for index in self.order:
            x = self.blocks[index](x)
        return nn.functional.cross_entropy(x, labels)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((0, 2, 1), ("test_split_refusals.py:", "calls blocks.2 where blocks.1 is next")),
        ((0, 1), ("blocks: forward called 2 of 3 blocks",)),
    ],
)
def test_blocks_in_another_order_than_registered(order: tuple[int, ...], words: tuple[str, ...]) -> None:
    """The cause is that there was no example. With one they are split."""
    call = torch.randn(3, 4), tokens(3, 2, (3,), 0)
    stages = Stages(OfRows(*order), (2, 3)).models
    for stage in stages:
        with refusal(*words, "every one once, in the order in which they are registered", "training_data"):
            stage.pack(call, {})
    stage = split_in_process(OfRows(*order), 2, (call, {}))
    stage.pack(call, {})
    stage.model.eval().order = 1, 0
    with refusal("the same ones in the same order in every call", "give the model dummy_inputs like the batches"):
        stage.pack(call, {})


class Collective(Small):
    """Does something with other ranks, such as to divide its loss by the labels of all, as for object detection."""

    def __init__(self, call: Callable[[Tensor], Any], where: str) -> None:
        super().__init__()
        module = {"before the blocks": self.words, "behind the blocks": self.head}.get(where, self.blocks[1].linear)
        self.calls = 0

        def after(_: nn.Module, __: Any, result: Tensor) -> None:
            self.calls += 1
            call(result.detach().clone() if where == "of activations" else torch.ones(2))

        module.register_forward_hook(after)


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Of which the other one does not exist: nothing waits for it."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("where", WHERE)
def test_collectives_of_all_ranks(where: str) -> None:
    """A stage that comes to one would wait for the others for good. A try-out they all come to."""
    arguments = tokens(1), tokens(2, 3, (3,), 0)
    for name, call in COLLECTIVES.items():
        for stage in Stages(Collective(call, where), (2, 3)).models:
            with refusal("test_split_refusals.py:", name, "ranks of one stage"):
                stage.pack(arguments, {})
        Stages(Collective(call, where), (5,), recompute_ratio=0.5).forward(*arguments)  # the only stage, two portions


@pytest.mark.usefixtures("two_ranks")
def test_collectives_whose_refusal_the_forward_catches() -> None:
    def call(x: Tensor) -> None:
        with suppress(Exception):
            dist.all_reduce(x)

    stage = Stages(Collective(call, "before the blocks"), (2, 3)).models[0]
    with refusal("Collective: its forward catches this error", "c10d.allreduce_"):
        stage.pack((tokens(1), tokens(2, 3, (3,), 0)), {})


@pytest.mark.usefixtures("two_ranks")
@pytest.mark.parametrize("where", WHERE)
def test_groups_of_one_stage_and_exchanges_of_two_ranks(where: str) -> None:
    """They are run, and may be of one stage's ranks."""
    mine = dist.new_group([0])
    calls = (lambda x: dist.all_reduce(x, group=mine), lambda x: all_reduce(x, "sum", mine) + 1, exchange)
    for call in calls:
        model = Collective(call, where)  # whose hook its copies share
        stages = Stages(model, (2, 3))
        before = model.calls
        stages.forward(tokens(1), tokens(2, 3, (3,), 0))
        assert model.calls > before + len(stages.models), "in the try-out of each, and afterwards"


class Writing(Small):
    """Writes into weights."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.write = way
        if way == "tied":
            self.blocks[2].linear.weight = self.blocks[0].linear.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        weight, scale = self.head.weight, nn.functional.normalize
        with torch.no_grad():
            if self.write == "in place":
                weight.copy_(scale(weight))
            elif self.write == "data":
                weight.data = scale(weight.data)
            elif self.write == "view":
                weight.data.view(-1)[:4].clamp_(max=0.1)
            elif self.write == "list":
                torch._foreach_mul_([weight, self.head.bias], 0.5)
            elif self.write == "block":
                self.blocks[2].linear.bias.zero_()
            elif self.write == "tied":
                self.blocks[0].linear.weight.mul_(0.5)
            elif self.write == "later" and len(tokens) < 3:
                weight.data.mul_(0.5)
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        with torch.no_grad():
            if self.write == "tail":
                self.head.weight.data = scale(self.head.weight.data)
            elif self.write == "behind":
                self.words.weight.mul_(0.5)
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("in place", ("aten.copy_", "head.weight in front (piece 0)", "tail (piece 4)")),
        ("data", (".data", "head.weight in front (piece 0)", "tail (piece 4)")),
        ("view", ("aten.clamp_", "head.weight in front (piece 0)")),
        ("list", ("aten._foreach_mul_", "head.weight in front (piece 0)")),
        ("block", ("aten.zero_", "blocks.2.linear.bias", "blocks.2 (piece 3)")),
        ("tied", ("aten.mul_", "blocks.0.linear.weight", "blocks.2 (piece 3)")),
        ("behind", ("aten.mul_", "words.weight in tail (piece 4)", "front (piece 0)")),
    ],
)
def test_writes_into_weights_of_another_stage(way: str, words: tuple[str, ...]) -> None:
    split = Stages(Writing(way), (2, 3))
    with refusal("test_split_refusals.py:", *words):
        split.forward(tokens(1), tokens(2, 3, (3,), 0))


def test_writes_into_weights_that_begin_in_a_later_call() -> None:
    split = Stages(Writing("later"), (2, 3))
    split.forward(tokens(1), tokens(2, 3, (3,), 0))
    with refusal("aten.mul_", "head.weight in front (piece 0)", "tail (piece 4)"):
        split.forward(tokens(1)[:2], tokens(2, 3, (2,), 0))


@pytest.mark.parametrize(
    ("way", "partition"), [("tail", (2, 3)), ("block", (4, 1)), ("in place", (5,)), ("tied", (5,))]
)
def test_writes_into_weights_of_the_stage_itself(way: str, partition: tuple[int, ...]) -> None:
    model = built(lambda: Writing(way))
    split = Stages(model, partition)
    arguments = tokens(1), tokens(2, 3, (3,), 0)
    for _ in range(2):
        assert torch.equal(split.forward(*arguments), model(*arguments))
    torch.testing.assert_close(split.state(), dict(model.state_dict()), rtol=0, atol=0)


def tied_tensors(way: str) -> Small:
    """Weights and buffers of several blocks that belong together."""
    model = Small()
    first, _, third = (block.linear for block in model.blocks)
    if "hook" in way:
        third.weight = first.weight
        if way == "hook":
            first.weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
        else:
            first.weight.register_post_accumulate_grad_hook(lambda weight: None)
    elif way == "memory":
        third.weight = nn.Parameter(first.weight.data)
    elif way == "part of memory":
        rows = model.words.weight.data
        first.weight, third.weight = nn.Parameter(rows[8:16]), nn.Parameter(rows[75:])
    elif way == "norm":
        model.words.max_norm = 1.0
        model.head = nn.Linear(8, 83, bias=False)
        model.head.weight = model.words.weight
    else:
        model.blocks = nn.ModuleList([Counted() for _ in range(3)])
        model.blocks[2].steps = model.blocks[0].steps
        if way == "part of a buffer":
            steps = torch.zeros(9)
            model.blocks[0].steps, model.blocks[2].steps = steps[1:], steps[:8]
    return model


class Counted(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        return super().forward(x) * self.steps


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("hook", ("blocks.0.linear.weight", "hook", "stages 0, 1")),
        ("hook on what has been added", ("blocks.0.linear.weight", "hook", "stages 0, 1")),
        ("memory", ("blocks.2.linear.weight", "memory of blocks.0.linear.weight", "model.blocks.2.linear.weight = ")),
        ("norm", ("aten.embedding_renorm_", "words.weight in front (piece 0)", "tail (piece 4)")),
        ("part of memory", ("blocks.2.linear.weight", "memory of words.weight")),
        ("buffer", ("blocks.0.steps", "blocks.2.steps")),
        ("part of a buffer", ("blocks.0.steps", "blocks.2.steps")),
    ],
)
def test_what_modules_of_several_stages_have_in_common(way: str, words: tuple[str, ...]) -> None:
    arguments = tokens(1), tokens(2, 3, (3,), 0)
    whole, half = (split_in_process(tied_tensors(way), 2) for _ in range(2))  # no copies, which have none of this
    for parameter in half.model.parameters():
        vars(parameter)["stride"] = 1  # in the place of the method, as layers of Megatron's mark them
    whole.keep(range(5), lambda piece: 0)
    whole.release()
    whole.pack(arguments, {})
    half.keep([0, 1], lambda piece: int(piece > 1))
    with refusal(*words):
        half.release()
        half.pack(arguments, {})


def test_the_same_forward_without_those_ways_is_split() -> None:
    Stages(Small(), (2, 3)).forward(tokens(1), tokens(2, 3, (3,), 0))


def test_a_head_that_is_switched_to_all_hidden_states_later() -> None:
    split = Stages(OldBert(), (2, 4))
    split.forward(list(BATCH))
    for stage in split.models:
        stage.model.head = "early"
    with refusal("split_models.py:", "needs", "relation.weight"):
        split.forward(list(BATCH))
    for stage in split.models:
        stage.model.head = "all"
    with refusal("split_models.py:", "needs"):  # no new form of a call, so it is the run itself that sees it
        split.forward(list(BATCH))


def test_collected_hidden_states_are_not_silently_incomplete() -> None:
    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert(BertModel)

        def forward(self, input_ids: Tensor) -> Tensor:
            states = self.bert(input_ids, output_hidden_states=True).hidden_states
            return torch.stack([state.mean() for state in states[1:-1]]).sum()

    model = Collecting()
    assert torch.equal(Stages(model, (2, 4)).forward(tokens(1)), model(tokens(1)))


def test_without_a_loss() -> None:
    split = Stages(bert(BertModel), (2, 4))
    with refusal("BertModel", "without a loss", "labels"):
        split.forward(input_ids=tokens(1))
    split = Stages(bert(), (2, 4))
    with refusal("BertForPreTraining", "prediction_logits", "without a loss"):
        split.forward(input_ids=tokens(1))


def test_too_many_stages() -> None:
    with refusal("7 stages", "1 to 6", "encoder.layer"):
        split_in_process(bert(), 7)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if hidden.sum() > 0:
            hidden = -hidden
        return self.second(hidden).mean()


def test_no_blocks_and_no_example() -> None:
    with refusal("Branching", "no list of two or more layers", "training_data, or the model dummy_inputs"):
        split_in_process(Branching(), 2)


def test_an_example_for_a_class_that_has_one_of_its_own() -> None:
    """As Hugging Face's classes, whose property cannot be set."""

    class Inherited(Perceptron):
        @property
        def dummy_inputs(self) -> dict[str, Tensor]:
            return {"input_ids": tokens(1)}

    model = built(Inherited)
    with refusal("Inherited", "or the model's class dummy_inputs (type(model).dummy_inputs = ...)"):
        split_in_process(model, 2)
    type(model).dummy_inputs = {"x": torch.randn(3, 12), "y": tokens(2, 5, (3,), 0)}  # type: ignore[assignment]
    assert len(split_in_process(model, 2).pieces) == 5


class Catching(Small):
    """Catches errors of its own, and then goes on with something else."""

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
        x, factor = self.words(tokens), 1.0
        try:
            if self.way == "bool" and x.isnan().any():
                factor = 0.0
            if self.way == "number":
                factor = 1.0 + x.sum().item() * 0
            if self.way == "numpy":
                factor = 1.0 + x.detach().numpy().sum() * 0
            if self.way == "memory":
                x.storage()
            if self.way == "write":
                self.table[:1] = x[:1, 0].detach()
            if self.way == "other error" and x.isnan().any():
                factor = 0.0
        except Exception as error:
            if self.way == "other error":
                raise ValueError("no sample") from error
            factor = 0.0
        first = x
        for number, block in enumerate(self.blocks):
            if self.way == "hook" and number == 2:
                with suppress(Exception):
                    first.register_hook(lambda gradient: 3 * gradient)
            x = block(x + first)
        logits = self.head(x.mean(1))
        try:
            factor += 0 * logits.sum().item()
        except Exception:
            factor = 2.0
        return logits if labels is None else factor * nn.functional.cross_entropy(logits, labels)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("bool", ("aten._local_scalar_dense.default looks at the value",)),
        ("number", ("aten._local_scalar_dense.default looks at the value",)),
        ("numpy", ("numpy() looks at the value",)),
        ("memory", ("asks for the memory of what is computed from parameter words.weight",)),
        ("hook", ("puts a hook on what is computed from parameter words.weight",)),
        ("write", ("writes what is computed from parameter words.weight into a tensor",)),
        ("other error", ("aten._local_scalar_dense.default looks at the value",)),
    ],
)
def test_refusals_that_the_forward_catches(way: str, words: tuple[str, ...]) -> None:
    """A stage without the value would go another way than the one that has it, here with a loss of zero."""
    with refusal("Catching: its forward catches this error", "test_split_refusals.py:", *words):
        Stages(built(lambda: Catching(way)), (2, 3)).forward(tokens(1), tokens(2, 3, (3,), 0))


def test_refusals_that_the_forward_catches_in_a_later_call() -> None:
    split, call = Stages(built(Catching), (2, 3)), (tokens(1), tokens(2, 3, (3,), 0))
    split.forward(*call)
    for stage in split.models:
        stage.model.way = "numpy"
    with refusal("Catching: its forward catches this error", "the stage with pieces 2 to 4 does not have"):
        split.forward(*call)


def test_what_the_forward_catches_behind_the_blocks_has_values() -> None:
    model, call = built(Catching), (tokens(1), tokens(2, 3, (3,), 0))
    assert torch.equal(Stages(model, (2, 3)).forward(*call), model(*call))


class TwoParts(nn.Module):
    """A small list of blocks, a branch on what they return, and a large list."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.small = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.between, self.large = nn.Linear(8, width), nn.ModuleList([nn.Linear(width, width) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.small:
            x = layer(x)
        x = self.between(x)
        if x.sum() > 0:
            x = -x
        for layer in self.large:
            x = layer(x).tanh()
        return x.mean()


@pytest.mark.parametrize("width", [5, 32])
def test_a_large_list_that_cannot_be_split_is_said(width: int) -> None:
    """Not where those that are split have most of the parameters nevertheless."""
    stage = split_in_process(TwoParts(width), 2, ((torch.randn(2, 8),), {}))
    assert stage.piece_names == ["front", "small.0", "small.1", "tail"]
    if width == 5:
        assert stage.remark is None
    else:
        assert stage.remark is not None
        assert stage.remark.startswith(
            "TwoParts: is split between the blocks of small, which have 4% of its parameters, as it cannot be split "
            "between those of large and small: splitting/test_split_refusals.py:"
        )
        assert "looks at the value" in stage.remark
    assert split_in_process(TwoParts(width), 1, ((torch.randn(2, 8),), {})).remark is None


def test_a_batch_that_the_forward_does_not_take() -> None:
    """As where the script computes the loss itself; a model with a list of blocks is called with made-up indices."""
    pair = (torch.randn(3, 4), torch.zeros(3))
    with refusal("Branching", "2 by position", "forward(x: ", "wrap the model"):
        split_in_process(Branching(), 2, (pair, {}))
    with refusal("Branching", "with the values labels, x for forward"):
        split_in_process(Branching(), 2, ((), {"x": pair[0], "labels": pair[1]}))
    assert len(split_in_process(Small(), 2, ((*pair, *pair), {})).pieces) == 5


def test_control_flow_on_data_without_blocks() -> None:
    with refusal("looks at the value", "test_split_refusals.py"):
        split_in_process(Branching(), 2, ((torch.randn(3, 4),), {}))


def test_a_part_of_the_model_is_called() -> None:
    """As ``generate()`` of PEFT calls the model inside; nothing in that forward is to change."""
    first = Stages(gpt2(), (2, 4)).models[0].model
    with refusal("test_split_refusals.py", "outside a call of the whole model", "no part of it"), torch.no_grad():
        first.transformer(tokens(1)).last_hidden_state.sum().item()


def test_arguments_that_do_not_travel() -> None:
    with refusal("type object", "tensors, numbers"):
        Stages(OldBert(), (2, 4)).forward(list(BATCH), chunks=object())


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.eye(3).to_sparse(), ("torch.sparse_coo", "indices and values")),
        (torch.eye(3).to_sparse_csr(), ("torch.sparse_csr", "indices and values")),
        (DynamicCache(), ("DynamicCache", "use_cache=False")),
        (EncoderDecoderCache(DynamicCache(), DynamicCache()), ("EncoderDecoderCache", "in one process")),
    ],
)
def test_arguments_in_other_forms(value: Any, words: tuple[str, ...]) -> None:
    with refusal("argument", *words):
        Stages(OldBert(), (2, 4)).forward(list(BATCH), chunks=value)


def test_scripted_modules() -> None:
    model = Small()
    model.blocks[1] = torch.jit.script(model.blocks[1])
    with refusal("blocks.1", "torch.jit", "made from"):
        split_in_process(model, 2)


def test_packed_sequences_in_blocks() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([12, 7, 3]), batch_first=True)
            output, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], True, total_length=x.shape[1])
            return x + output

    model = Small()
    model.blocks = nn.ModuleList([Recurrent() for _ in range(3)])
    with refusal("test_split_refusals.py:", "packed sequence", "mask"):
        split_in_process(model, 2, ((tokens(1), tokens(2, 3, (3,), 0)), {}))


def test_values_that_a_block_keeps_and_computes_from_what_it_looks_at() -> None:
    class Routed(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            if x.sum() > 0:
                x = 2 * x
            self.kept = x.mean()
            return x

    class Keeping(Small):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Routed() for _ in range(3)])

        def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
            return super().forward(tokens, labels) + sum(block.kept for block in self.blocks)

    with refusal("blocks.0 keeps a value", "return it from the block"):
        Stages(built(Keeping), (2, 3)).forward(tokens(1), tokens(2, 3, (3,), 0))


@pytest.mark.parametrize("leaf", [True, False])
def test_arguments_that_would_need_a_gradient(leaf: bool) -> None:
    """As of a prompt encoder outside the model; in evaluation and without gradients nothing is lost."""

    class Prompted(Small):
        def forward(self, prompt: Tensor, labels: Tensor) -> Any:
            for block in self.blocks:
                prompt = block(prompt)
            return nn.functional.cross_entropy(self.head(prompt.mean(1)), labels)

    prompt = torch.zeros(3, 5, 8, requires_grad=True)
    arguments = prompt if leaf else 2 * prompt, tokens(2, 3, (3,), 0)
    split = Stages(Prompted(), (2, 3), example=((prompt.detach(), arguments[1]), {}))
    with refusal("[3, 5, 8] with requires_grad=True", "compute it inside the model's forward"):
        split.forward(*arguments)
    with torch.no_grad():
        split.forward(*arguments)
    split.forward(prompt.detach(), arguments[1])


class Growing(nn.Module):
    """Calls its first block on both sides of the other; the first one keeps what it has seen, as it is told."""

    class Block(nn.Linear):
        def __init__(self, keeps: str) -> None:
            super().__init__(4, 4)
            self.keeps, self.seen, self.sum = keeps, [1.0] * (1001 if keeps == "much" else 1), torch.ones(())

        def forward(self, x: Tensor) -> Tensor:
            if self.keeps in ("little", "much"):
                self.seen.append(1.0)
            elif self.keeps == "a tensor":
                self.sum.add_(1.0)
            return torch.tanh(super().forward(x)) * len(self.seen) * self.sum

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.Block(keeps), self.Block("nothing")])

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 0):
            x = self.blocks[number](x)
        return x.mean()


@pytest.mark.parametrize("keeps", ["nothing", "little", "much", "a tensor"])
def test_what_changes_where_a_block_is_called_on_both_sides_of_a_cut(keeps: str) -> None:
    """A part of a stage skips the first call, which another part has made: it would count twice."""
    model, x = built(lambda: Growing(keeps)), torch.ones(2, 4)
    stage = split_in_process(model, 1, ((x,), {}))
    value = stage.pack((x,), {})

    def run() -> Any:
        output = value
        # Where the first block is not called, more than 1,000 entries are refused in any case.
        portions = [(0, 2), (2, 5)] if keeps == "much" else [(0, 2), (2, 3), (3, 5)]
        for portion in stage.in_portions(portions):
            output = stage.run(output, *portions[portion])
        return output

    if keeps == "nothing":
        assert torch.equal(run(), model(x))
        return
    name = "sum" if keeps == "a tensor" else "seen"
    with refusal(f"blocks.0.{name}: changes in every call of a block", "write 0 or 1 for the stage's ratio"):
        run()


def test_other_calls_on_other_ranks() -> None:
    split = Stages(Small(), (2, 3))
    arguments = tokens(1), tokens(2, 3, (3,), 0)
    value = split.models[0].run(split.models[0].pack(arguments, {}), 0, 2)
    split.models[1].pack(arguments[:1], {})
    with refusal("from the first stage", "same call on every rank"):
        split.models[1].run(value, 2, 5)
    with refusal("pack()"):
        split.models[0].run(arguments, 0, 2)


def test_a_parameter_whose_use_the_example_did_not_show() -> None:
    class Late(Small):
        def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Any:
            logits = super().forward(tokens)
            if labels is None:
                return logits
            return nn.functional.cross_entropy(logits + self.words.weight[:3, :3].sum(), labels)

    split = Stages(Late(), (2, 3), example=((tokens(1),), {}))
    with refusal("words.weight", "tail", "training_data"):
        split.forward(tokens(1), tokens(2, 3, (3,), 0))
    assert Stages(Late(), (2, 3), example=((tokens(1), tokens(2, 3, (3,), 0)), {})).models[0].ties()


def test_a_forward_that_is_put_back_in_its_first_call() -> None:
    """As Lightning's Trainer has ``training_step`` called; the runs of other pieces would get another function."""
    model, labels = Small(), tokens(2, 3, (3,), 0)
    split, forward = Stages(model, (2, 3), example=((tokens(1), labels), {})), Small.forward
    whole = split.models[0].model

    def once(*args: Any) -> Any:
        vars(whole).pop("forward")
        return forward(whole, *args)

    vars(whole)["forward"] = once
    with torch.no_grad(), refusal("a forward that puts another one in its place", "call the model itself in a loop"):
        split.models[0].pack((tokens(1), labels), {})


def test_a_second_split_after_release() -> None:
    split = Stages(gpt2(), (2, 4))
    with refusal("after training has begun"):
        split.models[0].keep([0])


def test_what_others_wrote_is_untouched_by_a_refusal() -> None:
    build, args, kwargs = OWN["old BERT"]
    split = Stages(build(), (2, 4))
    names = [[n for n, _ in stage.model.named_parameters()] for stage in split.models]
    kinds = [[type(m) for m in stage.model.modules()] for stage in split.models]
    for stage in split.models:
        stage.model.head = "early"
    with refusal("relation.weight", "training_data"):
        split.forward(*args, **kwargs)
    assert [[n for n, _ in stage.model.named_parameters()] for stage in split.models] == names
    assert [[type(m) for m in stage.model.modules()] for stage in split.models] == kinds


class Wrapped(nn.parallel.DistributedDataParallel):
    """As torch's, without a process group."""

    def __init__(self, module: nn.Module) -> None:
        nn.Module.__init__(self)
        self.module = module


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: Wrapped(Small()), "model: got a DistributedDataParallel, allowed is a plain module; pass its .module"),
        (
            lambda: nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(3)),
            "model: got a lazy module, whose 1.weight has no shape yet, allowed are modules that have been called; "
            "call the model once before initialize()",
        ),
    ],
)
def test_modules_that_are_no_plain_ones(make: Callable[[], nn.Module], line: str) -> None:
    with pytest.raises(SplitError) as refused:
        pipeline_from_module(make(), {"pipeline": {"stages": 2}}, VPipeConfig(), None, None)
    assert str(refused.value) == line


@pytest.mark.parametrize("looks", [True, False])
def test_hooks_that_look_at_values_of_skipped_blocks_are_warned_of(looks: bool) -> None:
    """They find zeros there."""
    model, seen = Small(), list[float]()
    model.blocks[1].register_forward_hook(lambda _, __, output: seen.append(output.mean().item()) if looks else None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        split_in_process(model, 2)
    found = [str(one.message) for one in caught if "forward hooks" in str(one.message)]
    assert bool(found) == looks
