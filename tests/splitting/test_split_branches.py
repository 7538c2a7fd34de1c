"""Forwards that branch on the call's own inputs: each micro-batch goes its own way, also when it is run again."""

from __future__ import annotations

import copy

import pytest
import torch
from split_models import Stages, built, tokens
from torch import Tensor, nn

from ds_vpipe.splitting.meta_tensor import SplitError


class Branching(nn.Module):
    """Branches on the sign of the first input, outside the blocks."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.front, self.head, self.way, self.calls = nn.Linear(8, 8), nn.Linear(8, 5), way, 0
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        positive = bool(x[0, 0, 0] > 0)
        self.calls += 1
        h = self.front(x)
        one, other, kept = torch.sin(h), torch.cos(h), h
        for number, block in enumerate(self.blocks):
            h = block(h)
            if number == 1 and self.way == "another function":
                kept = h * 2 if positive else h + 3
            elif number == 1 and self.way == "another number of values":
                kept = h.exp() if positive else x
            elif number == 4 and self.way == "another value":
                kept = one if positive else other
        return nn.functional.cross_entropy(self.head((h + kept).mean(1)), y) * (1 + 0.1 * self.calls)


def batch(positive: bool, seed: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(seed))
    x[0, 0, 0] = 1.0 if positive else -1.0
    return x, tokens(seed, 5, (3,), 0)


def whole_gradients(model: Branching, batches: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], dict[str, Tensor]]:
    model = copy.deepcopy(model)
    losses = [model(*given) for given in batches]
    for loss in losses:
        loss.backward()
    return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


WAYS = ["another function", "another number of values", "another value"]


@pytest.mark.parametrize("partition", [(2, 4, 2), (4, 4)], ids=str)
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("way", WAYS)
def test_micro_batches_in_flight_go_their_own_ways(way: str, ratio: float, partition: tuple[int, ...]) -> None:
    model = built(lambda: Branching(way))
    batches = [batch(number in (0, 3), number) for number in range(5)]
    split = Stages(model, partition, (batches[1], {}), recompute_ratio=ratio)
    losses, flights = [], []
    for given in batches:
        losses.append(split.forward(*given))
        flights.append(split.flights)
    for loss, split.flights in zip(losses, flights, strict=True):
        split.backward(loss)
    wanted, gradients = whole_gradients(model, batches)
    assert [loss.item() for loss in losses] == [loss.item() for loss in wanted]
    found = split.gradients()
    assert found.keys() == gradients.keys()
    for name, value in gradients.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
    if ratio == 0.0:  # else the engine sees to it
        assert [stage.model.calls for stage in split.models] == [len(batches)] * len(partition)


class Switched(Branching):
    """Its way is that of the class: a recomputation does not find what it was."""

    now = "another function"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.way = type(self).now
        return super().forward(x, y)


def test_a_recomputation_that_goes_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not look for a way of its own, since what it saves would take others' places."""
    split = Stages(built(lambda: Switched("")), (2, 4, 2), (batch(True, 0), {}), recompute_ratio=1.0)
    loss = split.forward(*batch(True, 0))
    monkeypatch.setattr(Switched, "now", "another value")
    with pytest.raises(SplitError, match=r"does not go as it did before, when it is run again.*allowed is") as refused:
        split.backward(loss)
    assert "\n" not in str(refused.value)


def test_a_way_that_is_known_is_not_tried_out_again() -> None:
    model = built(lambda: Branching("another number of values"))
    split = Stages(model, (2, 4, 2), (batch(True, 0), {}))
    for number in range(2):
        split.forward(*batch(number == 0, number))
    for stage in split.models:
        stage._try_out = None  # type: ignore[assignment,method-assign]
    for number in range(4):
        split.forward(*batch(number % 2 == 0, number))


class Named(Branching):
    """Branches on the first letter of the first sample's name, outside the blocks."""

    def forward(self, x: Tensor, names: list[str]) -> Tensor:  # type: ignore[override]
        h = self.front(x)
        for number, block in enumerate(self.blocks):
            h = block(h)
            if number == 1:
                h = h * 2 if names[0].startswith("a") else h.exp().tanh()
        return self.head(h).mean()


def test_calls_with_other_strings_each_time_are_tried_out_a_few_times() -> None:
    """As batches are that hold the names of their samples. A branch on one is still followed."""
    model = built(lambda: Named(""))
    split = Stages(model, (4, 4), ((batch(True, 0)[0], ["a"] * 3), {}))
    for number in range(14):
        x, _ = batch(True, number)
        names = [f"{'ab'[number % 3 == 2]}{number}{sample}" for sample in range(3)]
        assert torch.equal(split.forward(x, names), model(x, names))
        if number == 8:
            for stage in split.models:
                stage._try_out = None  # type: ignore[assignment,method-assign]


class CountsPositives(Branching):
    def __init__(self) -> None:
        super().__init__("another function")
        self.positives, self.many = torch.zeros(()), torch.zeros(2**19)  # tensors that are no buffers

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if x[0, 0, 0] > 0:
            self.positives += 1
            self.many += 1
        return super().forward(x, y)


def test_tensors_of_one_way_alone_count_once() -> None:
    split = Stages(built(CountsPositives), (4, 4), (batch(True, 0), {}))
    for number in range(8):
        split.forward(*batch(number % 2 == 0, number))
    for part in split.models:
        assert (float(part.model.positives), float(part.model.many[0])) == (4, 4)


class Scheduled(nn.Module):
    """Goes another way from the third step on, which a number or a flag tells."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.other, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor, y: Tensor, step: int = 0, late: bool = False) -> Tensor:
        h = self.front(x)
        skip = self.other(h) if late or step > 2 else h
        for block in self.blocks:
            h = torch.tanh(block(h))
        return nn.functional.cross_entropy(self.head((h * skip).mean(1)), y)


def test_a_branch_on_a_number_of_the_call_is_refused_with_the_way_out() -> None:
    model = built(Scheduled)
    split = Stages(model, (3, 3), (batch(True, 0), {}))
    for late in (False, True):
        assert torch.equal(split.forward(*batch(True, 0), late=late), model(*batch(True, 0), late=late))
    split.forward(*batch(True, 0), step=2)
    with pytest.raises(SplitError, match=r"or branch on a flag of the call \(True or False\), which is tried out"):
        split.forward(*batch(True, 0), step=3)
