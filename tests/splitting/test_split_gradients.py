"""Forwards that ask whether there are gradients: the dry run sees what the real one sees, or it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from split_models import Stages, built, padding, pass_through, tokens
from test_split_values import FREE, Reversed, check
from torch import Tensor, nn

from ds_vpipe.splitting.meta_tensor import MetaTensor, SplitError
from ds_vpipe.splitting.split import split_in_process


class View(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


class Asking(nn.Module):
    """Blocks, and between them code that depends on gradients."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.words, self.way, self.head = nn.Embedding(83, 8), way, nn.Linear(8, 3)
        self.blocks = nn.ModuleList([Inner(way) for _ in range(4)])
        if way == "frozen front":
            self.words.requires_grad_(False)

    def between(self, x: Tensor) -> Tensor:
        way, wanted = self.way, x.requires_grad
        if way in ("reversal", "frozen front"):
            return Reversed.apply(x) if wanted else x
        if way == "reversal as a view":
            return View.apply(x) if wanted else x
        if way == "grad mode":
            return Reversed.apply(x) if torch.is_grad_enabled() else x
        if way == "hook" or (way == "hook if wanted" and wanted):
            x.register_hook(lambda gradient: 2 * gradient)
        elif way == "detached copy":
            return x + (x.detach() if wanted else 0 * x)
        elif way == "detached in evaluation":
            return x if self.training and wanted else x.detach()
        elif way == "retained":
            x.retain_grad()
        elif way == "leaves" and x.grad_fn is not None and not x.is_leaf:
            return Reversed.apply(x)
        elif way == "in place on a view" and wanted:
            x = x * 2
            x[:, 0] = 0
        return x

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        if self.way == "mapped":  # a function whose operations call others
            x = x * torch.vmap(lambda _: torch.full((8,), 0.5))(ids)[:, None]
        kept = x = self.between(x)
        frozen = nn.functional.relu(x)
        for number, block in enumerate(self.blocks):
            if self.way in ("no_grad around blocks", "past a no_grad region") and number < 2:
                with torch.no_grad():
                    x = block(x)
            elif self.way == "enable_grad in no_grad" and number == 1:
                with torch.no_grad():
                    shift = torch.tanh(x)
                    with torch.enable_grad():
                        x = block(x) + shift
            else:
                x = block(x)
            if number % 2:
                x = self.between(x)
        if not self.way.startswith("no_grad"):
            x = x + (kept if self.way in ("hook", "hook if wanted", "retained") else self.between(kept)) + frozen
        if self.way == "late hook":
            kept.register_hook(lambda gradient: 2 * gradient)
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels)


class Inner(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(8, 8), way

    def forward(self, x: Tensor) -> Tensor:
        if self.way == "inside a block" and x.requires_grad:
            x = Reversed.apply(x)
        return x + torch.tanh(self.linear(x))


CALL = tokens(1), padding(), tokens(1, 3, (3,), 0)
WAYS = [
    "reversal", "reversal as a view", "grad mode", "hook", "hook if wanted", "detached copy", "detached in evaluation",
    "retained", "leaves", "in place on a view", "frozen front", "no_grad around blocks", "past a no_grad region",
    "enable_grad in no_grad", "inside a block", "mapped",
]  # fmt: skip


@pytest.mark.parametrize("stages", [3, 6])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_of_the_whole_model(way: str, stages: int) -> None:
    check(lambda: Asking(way), CALL, {}, stages=stages)


def test_a_hook_that_would_see_a_part_of_the_gradient() -> None:
    with pytest.raises(SplitError, match=r"puts a hook on .* piece 0 has used.*allowed"):
        split_in_process(built(lambda: Asking("late hook")), 3, (CALL, {}))


@pytest.mark.parametrize("way", ["reversal", "detached in evaluation"])
def test_each_mode_has_a_trial_of_its_own(way: str) -> None:
    """Evaluation, evaluation mode with gradients, and training without them between calls that train."""
    model = built(lambda: Asking(way))
    split = Stages(model, (2, 1, 1, 2))
    for training, enabled in ((True, True), (False, False), (False, True), (True, False), (True, True)):
        for module in (model, *(stage.model for stage in split.models)):
            module.train(training)
            module.zero_grad()
        if not enabled:
            with torch.no_grad():
                assert torch.equal(split.forward(*CALL), model(*CALL))
            continue
        wanted, gradients = pass_through(model, CALL, {})
        loss = split.forward(*CALL)
        assert torch.equal(loss, wanted)
        split.backward(loss)
        found = split.gradients()
        assert {name: torch.equal(found[name], value) for name, value in gradients.items()} == dict.fromkeys(
            gradients, True
        )


def test_a_call_in_a_mode_that_was_not_packed() -> None:
    """An iterator may be read without gradients."""
    model = built(lambda: Asking("reversal"))
    split = Stages(model, (3, 3))
    with torch.no_grad():
        packed = next(iter([stage.pack(CALL, {}) for stage in split.models]))
    crossing = split.models[0].run(packed, 0, 3)
    arrived = tuple(value.detach().requires_grad_(value.requires_grad) for value in crossing)
    loss = split.models[1].run(arrived, 3, 6)
    assert torch.equal(loss, model(*CALL))


class Lists(nn.Module):
    """Not what a trial can see: code that asks for the class of a tensor."""

    def __init__(self, listed: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)]) if listed else None
        self.first, self.second, self.third, self.last = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers or (self.first, self.second, self.third):
            x = layer(x)
            if type(x) is Tensor:
                x = Reversed.apply(x)
        return nn.functional.cross_entropy(self.last(x), y)


@pytest.mark.parametrize("listed", [True, False])
def test_the_first_micro_batch_goes_the_way_of_the_trial(listed: bool) -> None:
    split = Stages(built(lambda: Lists(listed)), (1, 2, 1), example=None if listed else (FREE, {}))
    with pytest.raises(SplitError, match=r"piece \d .*calls clone.*, allowed is") as refused:
        split.forward(*FREE)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("way", "message"), [("plain", "requires_grad=False.*before initialize"), ("reversal", "frozen after initialize")]
)
def test_parameters_that_are_frozen_on_one_stage_only(way: str, message: str) -> None:
    split = Stages(built(lambda: Asking(way)), (1, 2, 3))
    split.models[0].model.words.requires_grad_(False)
    with pytest.raises(SplitError, match=message):
        split.forward(*CALL)


def test_names_of_tensors_methods_are_not_taken() -> None:
    """What a tensor without values knows of itself hides no method of torch's."""
    taken = set(MetaTensor.__annotations__) & set(dir(Tensor))
    assert not taken


class Scaling(torch.autograd.Function):
    """Saves tensors and returns two, one of which travels on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, scale)
        return x * scale, x.mean()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradients[0] * scale + gradients[1] / x.numel(), (gradients[0] * x).sum((0, 1))


class Descending(nn.Module):
    """A block that differentiates in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            given = x if x.requires_grad else x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.linear(given).tanh().sum(), given, create_graph=True)
        return x - 0.1 * gradient


class Recomputed(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.words, self.head, self.scale = nn.Embedding(83, 8), nn.Linear(8, 3), nn.Parameter(torch.ones(8))
        self.way = way
        self.blocks = nn.ModuleList([Descending() if way == "grad in a block" else Inner("") for _ in range(4)])

    def forward(self, ids: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
        x, total = self.words(ids) * self.scale, torch.zeros(())
        for block in self.blocks:
            x = block(x)
            if self.way == "function between blocks":
                x, mean = Scaling.apply(x, self.scale)
                total = total + mean
        return nn.functional.cross_entropy(self.head(x.mean(1)), labels) + total


@pytest.mark.parametrize("ratio", [0.5, 1.0])
@pytest.mark.parametrize("way", ["function between blocks", "grad in a block"])
def test_recomputed_pieces_whose_forward_saves_tensors(way: str, ratio: float) -> None:
    """Hooks of the recomputation call functions where the forward saves tensors itself, and one that differentiates
    is run again inside of itself."""
    model = built(lambda: Recomputed(way))
    split = Stages(model, (2, 2, 2), recompute_ratio=ratio)
    for _ in range(2):
        model.zero_grad()
        for stage in split.models:
            stage.model.zero_grad()
        wanted, gradients = pass_through(model, CALL, {})
        loss = split.forward(*CALL)
        assert torch.equal(loss, wanted)
        split.backward(loss)
        found = split.gradients()
        assert found.keys() == gradients.keys()
        for name, value in gradients.items():
            torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)
