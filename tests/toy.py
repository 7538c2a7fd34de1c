"""A small model with everything that treats weights differently in the backward pass, and data for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

VOCABULARY, HIDDEN, SEQUENCE, MICRO_BATCH, CLASSES = 11, 8, 5, 2, 3


def seeded(seed: int, build: Any) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
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
            torch.manual_seed(seed)
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
