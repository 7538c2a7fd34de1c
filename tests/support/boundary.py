"""Models whose stages hand each other everything a stage may, and an independent replay of their training."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

SIZE, CLASSES, RATE = 6, 3, 0.1

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


def seeded(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def micro_batch(index: int) -> tuple[Any, Any]:
    """Inputs of rows and width of their own for every micro-batch, a mask and None; labels with a number beside."""
    rows, width = 1 + index % 3, 2 + (index * 5) % 4
    mask = seeded(index + 50, rows, width) > -0.5
    labels = torch.randint(CLASSES, (rows,), generator=torch.Generator().manual_seed(index))
    return (seeded(index, rows, width, SIZE), [mask, None]), (labels, index)


def data(index: int = 0) -> Iterator[tuple[Any, Any]]:
    while True:
        yield micro_batch(index)
        index += 1


def criterion(scores: torch.Tensor, labels: tuple[torch.Tensor, int]) -> torch.Tensor:
    return nn.functional.cross_entropy(scores, labels[0]) * (1 + labels[1] % 2)


class Linear(nn.Linear):
    """A layer on the first tensor of a tree; what is beside it goes through."""

    def __init__(self, seed: int, outputs: int = SIZE, frozen: bool = False) -> None:
        super().__init__(SIZE, outputs)
        self.weight.data.copy_(seeded(seed, outputs, SIZE) / 2)
        self.bias.data.copy_(seeded(seed + 1, outputs) / 2)
        self.requires_grad_(not frozen)

    def forward(self, tree: Any) -> Any:
        first, *rest = tree if isinstance(tree, (tuple, list)) else (tree,)
        result = torch.tanh(super().forward(first.to(self.weight.dtype)))
        return (result, *rest) if rest else result


class Tokens(nn.Embedding):
    def __init__(self, seed: int) -> None:
        super().__init__(4, SIZE)
        self.weight.data.copy_(seeded(seed, 4, SIZE))


class Spread(nn.Module):
    """From ``(x, (mask, None))`` to a tree with every dtype, with and without grad, twice the same tensor, None."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(seeded(seed, SIZE))

    def forward(self, tree: Any) -> Any:
        x, (mask, nothing) = tree
        assert nothing is None
        y = x * self.weight
        constants = [torch.arange(x.shape[0] + 1).to(dtype) for dtype in DTYPES]
        real = [(y * (1 + place)).to(dtype) for place, dtype in enumerate(DTYPES) if dtype.is_floating_point]
        unwritten = x.new_empty(x.shape[0], 0, 2)
        return y, [mask, None, (constants, unwritten)], (y, real, torch.complex(y, 2 * y)), y.sum(), y.transpose(0, 1)


def gather(tree: Any) -> Any:
    """A plain function as a layer; complains if anything but the values has changed on the way."""
    y, beside, (same, real, imaginary), total, turned = tree
    mask, nothing, (constants, unwritten) = beside
    assert nothing is None
    assert isinstance(beside, list)
    assert unwritten.shape == (y.shape[0], 0, 2)
    assert mask.dtype == torch.bool
    for dtype, constant in zip(DTYPES, constants, strict=True):
        assert constant.dtype == dtype
        assert not constant.requires_grad
        assert torch.equal(constant, torch.arange(y.shape[0] + 1).to(dtype))
    y = y + same + turned.transpose(0, 1) + total + imaginary.real - imaginary.imag
    for value in real:
        y = y + value.to(y.dtype) / 8
    return torch.tanh(y), mask


def pool(tree: Any) -> torch.Tensor:
    x, mask = tree
    return (x * mask.unsqueeze(-1)).mean(1)


def keep_first(tree: Any) -> Any:
    x, (mask, _) = tree
    return x, mask


def every_dtype() -> list[Any]:
    return [Linear(1), Spread(2), Linear(3), gather, Linear(4), Linear(5), pool, Linear(6, CLASSES)]


def through_stages() -> list[Any]:
    """The tree crosses two stages that only look at its first tensor."""
    return [Spread(2), Linear(3), Linear(4), Linear(5), Linear(6), gather, pool, Linear(7, CLASSES)]


def frozen_start() -> list[Any]:
    """The first stage's output requires no gradient, the second is half frozen."""
    layers = [keep_first, Linear(1, frozen=True), Linear(2, frozen=True), Linear(3), Linear(4), Linear(5, frozen=True)]
    return [*layers, pool, Linear(6, CLASSES)]


def frozen_inside() -> list[Any]:
    layers = [keep_first, Linear(1), Linear(2, frozen=True), Linear(3, frozen=True), Linear(4), Linear(5)]
    return [*layers, pool, Linear(6, CLASSES, frozen=True)]


def only_the_last_learns() -> list[Any]:
    frozen = [Linear(seed, frozen=True) for seed in range(1, 6)]
    return [keep_first, *frozen, pool, Linear(6, CLASSES)]


def without_parameters() -> list[Any]:
    """The second stage has none, nor has the last."""
    return [keep_first, Linear(1), relu_first, nn.Identity(), Linear(2), Linear(3, CLASSES), pool, nn.Softmax(-1)]


def relu_first(tree: Any) -> Any:
    return torch.relu(tree[0]), *tree[1:]


def integers_between() -> list[Any]:
    """Nothing that could carry a gradient leaves the second stage, so the first two learn nothing."""
    return [keep_first, Linear(1), Linear(2), to_tokens, Tokens(8), nn.Tanh(), mean_of_rows, Linear(3, CLASSES)]


def to_tokens(tree: Any) -> torch.Tensor:
    return (tree[0].sum(-1) > 0).long() + 2 * tree[1].long()


def mean_of_rows(x: torch.Tensor) -> torch.Tensor:
    return x.mean(1)


def replay(
    layers: Sequence[Any], stages: int, micro_batches: int, batches: int, batch_at: Callable[[int], Any] = micro_batch
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """SGD in one process with the versions of the design; final parameters by layer and name, losses of the batches."""
    per_stage = len(layers) // stages
    history: list[list[dict[str, torch.Tensor]]] = [
        [dict(layer.named_parameters()) if isinstance(layer, nn.Module) else {} for layer in layers]
    ]
    history[0] = [{name: p.detach().clone() for name, p in weights.items()} for weights in history[0]]
    losses = []
    for batch in range(batches):
        newest = [{name: w.clone() for name, w in weights.items()} for weights in history[batch]]
        total = 0.0
        for j in range(batch * micro_batches, (batch + 1) * micro_batches):
            value, labels = batch_at(j)
            used = []
            for position, layer in enumerate(layers):
                depth = stages - 1 - position // per_stage
                weights = {
                    name: w.clone().requires_grad_(layer.get_parameter(name).requires_grad)
                    for name, w in history[max(0, j - depth) // micro_batches][position].items()
                }
                used.append(weights)
                value = functional_call(layer, weights, (value,)) if isinstance(layer, nn.Module) else layer(value)
            loss = criterion(value, labels)
            total += float(loss.detach())
            (loss / micro_batches).backward()
            for position, weights in enumerate(used):
                for name, weight in weights.items():
                    if weight.grad is not None:
                        newest[position][name] -= RATE * weight.grad
        losses.append(total / micro_batches)
        history.append(newest)
    final = {f"{at}.{name}": w for at, weights in enumerate(history[-1]) for name, w in weights.items()}
    return final, losses
