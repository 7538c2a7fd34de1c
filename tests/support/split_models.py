"""Small plain models with random weights, calls of them, and a model run in pieces in this process."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaForSequenceClassification,
    RobertaModel,
)

from ds_vpipe.engine.links.message import Message, Packer, Tree, unpack
from ds_vpipe.engine.modules.recompute import alias_free, recomputed_layers
from ds_vpipe.engine.stage import InFlight
from ds_vpipe.splitting.split import split_in_process
from ds_vpipe.splitting.stage_model import StageModel, call_now

VOCABULARY, SAMPLES, LENGTH, BLOCKS = 83, 3, 12, 4
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": BLOCKS, "num_attention_heads": 4}


def bert(kind: Any = BertForPreTraining, dropout: float = 0.0, attention: str = "sdpa", **changes: Any) -> nn.Module:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    config = BertConfig(**_SIZES, **rates, intermediate_size=48, max_position_embeddings=16, **changes)
    return built(lambda: kind._from_config(config, attn_implementation=attention))


def roberta_config(dropout: float = 0.0) -> RobertaConfig:
    rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    sizes = {"intermediate_size": 48, "max_position_embeddings": LENGTH + 2, "type_vocab_size": 1, "pad_token_id": 1}
    return RobertaConfig(**_SIZES, **rates, **sizes)


def roberta(kind: Any = RobertaForMaskedLM, dropout: float = 0.0, attention: str = "sdpa") -> nn.Module:
    return built(lambda: kind._from_config(roberta_config(dropout), attn_implementation=attention))


def gpt2(kind: Any = GPT2LMHeadModel, dropout: float = 0.0, attention: str = "sdpa") -> nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=BLOCKS, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    return built(lambda: kind._from_config(config, attn_implementation=attention))


class Wrapped(nn.Module):
    """An encoder with a head and a loss of the user's own."""

    def __init__(self, head_first: bool) -> None:
        super().__init__()
        head = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, VOCABULARY))
        if head_first:
            self.lm_head = head
        self.encoder = RobertaModel(roberta_config(), add_pooling_layer=False)
        if not head_first:
            self.lm_head = head

    def forward(self, src_tokens: Tensor, attention_mask: Tensor, tgt_tokens: Tensor) -> Tensor:
        features = self.encoder(input_ids=src_tokens, attention_mask=attention_mask, return_dict=False)[0]
        logits = self.lm_head(features)
        return nn.functional.cross_entropy(logits.view(-1, VOCABULARY), tgt_tokens.view(-1), ignore_index=0)


class Derived(Wrapped):
    """As one that derives from Hugging Face's base class: it inherits an example of another forward than its own."""

    def __init__(self) -> None:
        super().__init__(False)

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        return {"input_ids": tokens(1)}


class OldLayer(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 2 * hidden), nn.Linear(2 * hidden, hidden)
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(0.0)

    def forward(self, hidden: Tensor, mask: Tensor, want_attention: bool = False) -> tuple[Tensor, ...]:
        query, key, value = self.qkv(hidden).view(*hidden.shape[:2], 3, 4, -1).permute(2, 0, 3, 1, 4)
        weights = (query @ key.transpose(-1, -2) / math.sqrt(key.shape[-1]) + mask).softmax(-1)
        mixed = (self.dropout(weights) @ value).transpose(1, 2).reshape(hidden.shape)
        hidden = self.first(hidden + self.out(mixed))
        hidden = self.second(hidden + self.down(torch.tanh(self.up(hidden))))
        return (hidden, weights) if want_attention else (hidden,)


class OldEncoder(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        layer = OldLayer(hidden)
        self.layer = nn.ModuleList([copy.deepcopy(layer) for _ in range(BLOCKS)])

    def forward(self, hidden: Tensor, mask: Tensor, all_layers: bool, chunks: int, want: bool) -> Any:
        states = []
        if chunks:

            def several(start: int) -> Callable[[Tensor], Tensor]:
                def run(value: Tensor) -> Tensor:
                    for layer in self.layer[start : start + chunks]:
                        value = layer(value, mask)[0]
                    return value

                return run

            for start in range(0, BLOCKS, chunks):
                hidden = checkpoint(several(start), hidden, use_reentrant=False)
        else:
            for layer in self.layer:
                states.append(hidden)
                hidden = layer(hidden, mask, want)[0]
        return [*states, hidden] if all_layers else [hidden]


class OldEmbeddings(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, hidden, padding_idx=0)
        self.positions, self.types = nn.Embedding(16, hidden), nn.Embedding(2, hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        positions = torch.arange(ids.size(1), dtype=torch.long, device=ids.device).unsqueeze(0).expand_as(ids)
        return self.norm(self.words(ids) + self.positions(positions) + self.types(types))


class OldBert(nn.Module):
    """BERT as pre-training examples write it: tuples, masks of additions, a tied decoder, the loss in forward."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.embeddings, self.encoder = OldEmbeddings(hidden), OldEncoder(hidden)
        self.pooler, self.relation = nn.Linear(hidden, hidden), nn.Linear(hidden, 2)
        self.transform, self.norm = nn.Linear(hidden, hidden), nn.LayerNorm(hidden)
        self.decoder = nn.Linear(hidden, VOCABULARY, bias=False)
        self.decoder.weight = self.embeddings.words.weight
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))
        self.head = "last"
        self.register_buffer("seen", torch.ones(2))
        self.register_buffer("unsaved", torch.ones(2), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(
        self, batch: Any, ids: Any = None, types: Any = None, mask: Any = None, labels: Any = None, follows: Any = None,
        chunks: int = 0, want: bool = False,
    ) -> Any:  # fmt: skip
        if batch is not None:
            ids, types, mask, follows, labels = batch
        extended = mask.unsqueeze(1).unsqueeze(2).to(dtype=next(self.parameters()).dtype)
        extended = (1.0 - extended) * -10000.0
        embedded = self.embeddings(ids, types)
        if self.head == "early":
            embedded = embedded + self.relation.weight[0]
        everything = self.head == "all"
        layers = self.encoder(embedded, extended, everything, chunks, want)
        hidden = torch.stack(layers).mean(0) if everything else layers[-1]
        if self.head == "embedded":
            hidden = hidden + embedded
        pooled = torch.tanh(self.pooler(hidden[:, 0]))
        words = nn.functional.linear(self.norm(torch.tanh(self.transform(hidden))), self.decoder.weight) + self.bias
        if labels is None:
            return words, self.relation(pooled)
        loss = nn.functional.cross_entropy(words.view(-1, VOCABULARY), labels.view(-1), ignore_index=-1)
        return (loss + nn.functional.cross_entropy(self.relation(pooled), follows.view(-1)),)


class NormedEncoder(OldEncoder):
    """With a norm behind the blocks that is registered before them."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden)
        layer = self._modules.pop("layer")
        self.last = nn.LayerNorm(hidden)
        self.layer = layer

    def forward(self, *args: Any) -> Any:
        *states, hidden = super().forward(*args)
        return [*states, self.last(hidden)]


class Writing(OldBert):
    """Writes into its arguments: before the blocks, and into the labels behind them. May look at values there."""

    looks = False

    def forward(self, batch: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        ids, types, mask, follows, labels = batch
        ids.add_(1)
        hidden = self.encoder(self.embeddings(ids, types), (mask[:, None, None] - 1.0) * 10000.0, False, 0, False)[-1]
        if self.looks and hidden.isnan().any():
            raise FloatingPointError
        labels.sub_(2).clamp_(0, VOCABULARY)
        words = nn.functional.linear(self.norm(torch.tanh(self.transform(hidden))), self.decoder.weight) + self.bias
        pooled = self.relation(torch.tanh(self.pooler(hidden[:, 0])))
        loss = nn.functional.cross_entropy(words.view(-1, VOCABULARY), labels.view(-1))
        return loss + nn.functional.cross_entropy(pooled, follows)


class PreNorm(OldBert):
    """Takes a batch whose labels nobody could make up: a guess runs through the blocks, but its loss fails."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = NormedEncoder(32)


class Perceptron(nn.Module):
    """A model without a list of blocks."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 5)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, y: Tensor | None = None, scale: float = 1.0) -> Any:
        hidden = torch.relu(self.first(x))
        hidden = hidden + self.dropout(torch.relu(self.second(hidden)))
        hidden = self.norm(self.third(hidden)) * scale
        logits = self.last(hidden)
        return logits if y is None else {"loss": nn.functional.cross_entropy(logits, y), "logits": logits}


class Convolutions(nn.Module):
    """Normalisation with running statistics, sizes taken from activations, weights used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.between, self.last = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.Linear(4 * 4 * 4, 5)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        hidden = nn.functional.max_pool2d(torch.relu(self.norm(self.first(image))), 2)
        hidden = torch.relu(self.between(self.second(hidden)))
        hidden = torch.relu(self.second(hidden))
        logits = self.last(hidden.reshape(hidden.size(0), -1))
        return nn.functional.cross_entropy(logits, label)


class Noted(torch.autograd.Function):
    """Notes the strides of values and of their gradients."""

    values: ClassVar[list[Any]] = []
    gradients: ClassVar[list[Any]] = []

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        Noted.values.append(value.stride())
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        Noted.gradients.append(gradients[0].stride())
        return gradients[0]


class LayoutBlock(nn.Module):
    """Adds a value and its gradient in one of the layouts that tensors have in models."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.scale = way, nn.Parameter(torch.linspace(0.5, 1.5, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = Noted.apply(x) * self.scale
        if self.way == "transposed":
            return x.transpose(0, 2).contiguous().transpose(0, 2)
        if self.way == "one sample":
            return x[:1].transpose(1, 2).contiguous().transpose(1, 2)
        if self.way == "gaps":
            return torch.cat((x, x, x), -1)[..., 5:10]
        if self.way == "expanded":
            return x.mean(1, keepdim=True).expand(x.shape)
        return nn.functional.pad(x.transpose(1, 2).reshape(3, 1, 20)[..., :8], (0, 0)).unfold(2, 5, 1)[:, 0]


class Layouts(nn.Module):
    """Blocks whose values have strides of their own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([LayoutBlock(way) for _ in range(4)])
        self.front = nn.Parameter(torch.ones(4, 5))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.front
        for block in self.blocks:
            x = block(x)
        return (x * torch.arange(5.0)).square().sum()


LAYOUT_INPUT = torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(1))


def tokens(seed: int, high: int = VOCABULARY, shape: tuple[int, ...] = (SAMPLES, LENGTH), low: int = 2) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def padding(length: int = LENGTH) -> Tensor:
    return (torch.arange(length) < torch.tensor([length, length - 5, length - 2])[:, None]).long()


_TEXT = {"input_ids": tokens(1), "attention_mask": padding()}
_CLASS = {"labels": tokens(3, 2, (SAMPLES,), 0)}
_OLD = (tokens(1), tokens(2, 2, low=0), padding(), tokens(3, 2, (SAMPLES,), 0), tokens(4))
CASES: dict[str, tuple[Callable[..., nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "BertForPreTraining": (bert, (), {**_TEXT, "labels": tokens(2), "next_sentence_label": _CLASS["labels"]}),
    "BertForMaskedLM": (lambda **k: bert(BertForMaskedLM, **k), (), {**_TEXT, "labels": tokens(2)}),
    "BertForSequenceClassification": (lambda **k: bert(BertForSequenceClassification, **k), (), {**_TEXT, **_CLASS}),
    "BertForQuestionAnswering": (
        lambda **k: bert(BertForQuestionAnswering, **k),
        (tokens(1), padding()),
        {"start_positions": tokens(2, LENGTH, (SAMPLES,), 0), "end_positions": tokens(3, LENGTH, (SAMPLES,), 0)},
    ),
    "RobertaForMaskedLM": (roberta, (), {**_TEXT, "labels": tokens(2)}),
    "RobertaForSequenceClassification": (
        lambda **k: roberta(RobertaForSequenceClassification, **k), (), {**_TEXT, **_CLASS},
    ),
    "GPT2LMHeadModel": (gpt2, (), {**_TEXT, "labels": tokens(1)}),
    "GPT2ForSequenceClassification": (lambda **k: gpt2(GPT2ForSequenceClassification, **k), (), {**_TEXT, **_CLASS}),
}  # fmt: skip
OWN: dict[str, tuple[Callable[..., nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "head behind": (lambda: built(lambda: Wrapped(False)), (tokens(1), padding(), tokens(2)), {}),
    "head before": (
        lambda: built(lambda: Wrapped(True)), (tokens(1),), {"attention_mask": padding(), "tgt_tokens": tokens(2)},
    ),
    "old BERT": (lambda: built(OldBert), (list(_OLD),), {}),
    "norm registered first": (lambda: built(PreNorm), (_OLD,), {}),
    "inherited example": (lambda: built(Derived), (tokens(1), padding(), tokens(2)), {}),
}  # fmt: skip
GRAPHS: dict[str, tuple[Callable[..., nn.Module], tuple[Any, ...], dict[str, Any]]] = {
    "perceptron": (
        lambda dropout=0.0: built(lambda: Perceptron(dropout)),
        (torch.randn(SAMPLES, 12, generator=torch.Generator().manual_seed(1)),),
        {"y": tokens(2, 5, (SAMPLES,), 0)},
    ),
    "convolutions": (
        lambda: built(Convolutions),
        (torch.randn(SAMPLES, 1, 8, 8, generator=torch.Generator().manual_seed(1)), tokens(2, 5, (SAMPLES,), 0)),
        {},
    ),
}


def built(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build().train()
        for name, parameter in model.named_parameters():  # no zero biases, no unit scales: every weight must arrive
            if parameter.dim() == 1 and not name.endswith("norm.running_var"):
                nn.init.normal_(parameter, 1.0 if name.endswith("weight") else 0.0, 0.2)
    return model


def sent(tree: Tree) -> Tree:
    """A tree after its way over a link."""
    return unpack(Packer().pack(Message.ACTIVATION, 0, tree).data).tree


class Stages:
    """All stages of a model, each made from a copy of it as on a rank of its own."""

    def __init__(
        self, model: nn.Module, partition: Sequence[int], example: Any = None, recompute_ratio: float = 0.0
    ) -> None:
        self.bounds = [0]
        for count in partition:
            self.bounds.append(self.bounds[-1] + count)
        self.ratio = recompute_ratio
        self.models: list[StageModel] = []
        for start, stop in pairwise(self.bounds):
            made = split_in_process(copy.deepcopy(model), len(partition), example)
            made.keep(range(start, stop), self.stage_of)
            made.release()
            self.models.append(made)

    def stage_of(self, piece: int) -> int:
        return next(stage for stage, stop in enumerate(self.bounds[1:]) if piece < stop)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The last stage's result; activations are leaves of their own on every stage, as after a transfer."""
        packed = [model.pack(args, kwargs) for model in self.models]
        value, self.flights = packed[0], []
        for model, (start, stop) in zip(self.models, pairwise(self.bounds), strict=True):
            flight = InFlight(0, value if start == 0 else sent(value))
            value = self._run(model, flight.enter(keep_strides=True), start, stop)
            flight.keep_output(value)
            self.flights.append(flight)
        return value

    def _run(self, model: StageModel, value: Any, start: int, stop: int) -> Any:
        middle = stop - recomputed_layers(self.ratio, stop - start)
        portions = [portion for portion in ((start, middle), (middle, stop)) if portion[0] < portion[1]]
        for number in model.in_portions(portions):
            caller = self._checkpointed if portions[number][0] == middle else call_now
            value = model.run(value, *portions[number], caller=caller)
        return value

    @staticmethod
    def _checkpointed(function: Callable[[Any], Any], value: Any) -> Any:
        return checkpoint(lambda value: function(alias_free(value)), value, use_reentrant=False)

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        for before, after in reversed(list(pairwise(self.flights))):
            gradients = sent(after.input_gradients())
            pairs = [(o, g) for o, g in zip(before.outputs, gradients, strict=True) if g is not None]
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])

    def gradients(self) -> dict[str, Tensor]:
        """By the model's names; of tied parameters the sum over stages, at the first name."""
        found: dict[str, Tensor] = {}
        first = {alias: name for name, uses in self.models[0].ties().items() for alias in uses.values()}
        for model in reversed(self.models):  # as a backward pass through the whole model would add them
            for name, parameter in model.model.named_parameters():
                if parameter.grad is not None:
                    name = first.get(name, name)
                    found[name] = found[name] + parameter.grad if name in found else parameter.grad
        return found

    def state(self) -> dict[str, Tensor]:
        """What the pieces save, together."""
        found: dict[str, Tensor] = {}
        for model, (start, stop) in zip(self.models, pairwise(self.bounds), strict=True):
            for piece in model.pieces[start:stop]:
                found |= piece.state_dict()
        return found


def pass_through(model: nn.Module, args: Any, kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of the unsplit model."""
    model = copy.deepcopy(model)
    output = model(*args, **kwargs)
    loss = output if isinstance(output, Tensor) else output["loss"] if hasattr(output, "keys") else output[0]
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
