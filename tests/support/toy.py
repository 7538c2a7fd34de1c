"""A small model with everything that treats weights differently in the backward pass, and data for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

VOCABULARY, HIDDEN, SEQUENCE, MICRO_BATCH, CLASSES = 11, 8, 5, 2, 3


def seeded(seed: int, build: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for five kinds of devices
        return build()


class Embed(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = seeded(seed, lambda: nn.Embedding(VOCABULARY, HIDDEN))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding(tokens)


class Scale(nn.Module):
    """A parameter that autograd saves itself, not as a view, beside one that it saves as a view."""

    def __init__(self, seed: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.linear = seeded(seed, lambda: nn.Linear(HIDDEN, HIDDEN))
        self.scale = seeded(seed + 1, lambda: nn.Parameter(torch.rand(HIDDEN) + 0.5))  # type: ignore[arg-type,return-value]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(torch.tanh(self.linear(x) * self.scale), self.dropout, self.training)


class Norm(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed looks for five kinds of devices
            nn.init.uniform_(self.norm.weight, 0.5, 1.5)
            nn.init.normal_(self.norm.bias, std=0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Attend(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.attention = seeded(seed, lambda: nn.MultiheadAttention(HIDDEN, 2, batch_first=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attention(x, x, x, need_weights=False)[0]


class Pool(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = seeded(seed, lambda: nn.Linear(HIDDEN, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mean(1))


LAYERS = (Embed, Scale, Norm, Attend, Scale, Attend, Norm, Scale, Attend, Pool)


def layer_specs(dropout: float = 0.0) -> list[Any]:
    from deepspeed.pipe import LayerSpec

    return [
        LayerSpec(kind, 100 + 10 * position, *([dropout] if kind is Scale else []))
        for position, kind in enumerate(LAYERS)
    ]


class Decode(nn.Module):
    """The embedding once more, as decoder; together they are what a model with tied word embeddings has."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.embedding = seeded(seed, lambda: nn.Embedding(VOCABULARY, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return decode(self, x)


def decode(module: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ module.embedding.weight.T


def mean_over_positions(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.float().mean(1), labels)


def float_cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs.float(), labels)


TIED_LAYERS = (Embed, Scale, Scale, Norm, Scale, Scale, Attend, Norm, Scale, Decode)
TIED_SEEDS = (100, 110, 120, 130, 120, 150, 160, 170, 150, 100)
TIES = (
    ((0, "embedding.weight"), (9, "embedding.weight")),
    ((2, "linear.weight"), (4, "linear.weight")),
    ((2, "scale"), (4, "scale")),
    ((5, "linear.weight"), (8, "linear.weight")),
)


def words_tied_specs() -> list[Any]:
    """Word embeddings tied to the decoder."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    specs: list[Any] = [LayerSpec(kind, seed) for kind, seed in zip(TIED_LAYERS, TIED_SEEDS, strict=True)]
    specs[0] = TiedLayerSpec("words", Embed, 100, tied_weight_attr="embedding.weight")
    specs[9] = TiedLayerSpec("words", Embed, 100, forward_fn=decode, tied_weight_attr="embedding.weight")
    return specs


def tied_specs() -> list[Any]:
    """Word embeddings tied to the decoder, and two more ties, one of them of two parameters."""
    from deepspeed.pipe import TiedLayerSpec

    specs = words_tied_specs()
    for position in (2, 4):
        specs[position] = TiedLayerSpec("scale", Scale, 120, tied_weight_attr=["linear.weight", "scale"])
    for position in (5, 8):
        specs[position] = TiedLayerSpec("linear", Scale, 150, tied_weight_attr=["linear.weight"])
    return specs


def built_tied_layers() -> list[nn.Module]:
    return [kind(seed) for kind, seed in zip(TIED_LAYERS, TIED_SEEDS, strict=True)]


def built_layers() -> list[nn.Module]:
    return [kind(100 + 10 * position) for position, kind in enumerate(LAYERS)]


def micro_batch(index: int, replica: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7919 * index + 31 * replica + 5)
    tokens = torch.randint(VOCABULARY, (MICRO_BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(CLASSES, (MICRO_BATCH,), generator=generator)
    return tokens, labels


def data(stop: int | None = None, start: int = 0, replica: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    index = start
    while stop is None or index < stop:
        yield micro_batch(index, replica)
        index += 1
