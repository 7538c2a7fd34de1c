"""What a model keeps from call to call outside its blocks: refused where a stage would not have it."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from split_models import Stages, built, tokens
from torch import Tensor, nn

from ds_vpipe.splitting.meta_tensor import SplitError
from ds_vpipe.splitting.split import split_in_process


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.own = nn.Linear(8, 8), torch.zeros(8)

    def forward(self, x: Tensor, state: Tensor | None = None) -> Any:
        y = torch.tanh(self.linear(x)) + self.own
        self.own = 0.5 * y.detach().mean((0, 1))
        return x + y if state is None else (x + y + state, y.detach().mean((0, 1)))


BETWEEN = ("between blocks", "between many blocks")
NUMBERED = ("number of the block that is running", "number of one of many blocks", "between many blocks")


class Keeping(nn.Module):
    """A model whose forward keeps something, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.words, self.head, self.way = nn.Embedding(83, 8), nn.Linear(8, 3), way
        self.blocks = nn.ModuleList([Block() for _ in range(16 if "many blocks" in way else 4)])
        self.states: list[Tensor] = [torch.ones(8) for _ in self.blocks]
        self.mean, self.scale, self.seen, self.past = torch.zeros(8), 1.0, 0, list[Tensor]()
        self.number, self.steps, self.begun, self.last = -1, 0, 0, torch.zeros(())
        if way == "hook of the model":
            self.register_forward_hook(lambda *_: setattr(self, "seen", self.seen + 1))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        try:
            return self._forward(tokens, labels)
        finally:
            self.seen += self.way == "counter in finally"

    def _forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        way, x, new = self.way, self.words(tokens), []
        if way == "call that goes on":
            if self.begun != self.steps:
                raise RuntimeError("the call before goes on")
            self.begun += 1
        elif way == "loss of the call before":
            x = x * (1 + float(self.last))
        self.seen += way == "counter at the beginning"
        if way != "counter at the end for a log":
            x = x * (1 + 0.1 * self.seen)
        if way in ("mean at the end", "beside a counter for a log"):
            x = x + self.mean
        if way == "beside a counter for a log":
            self.mean = x.detach().mean((0, 1))
        if way == "last one of a list":
            x = x + self.past[-1] if self.past else x
        elif way in ("number at the end", "number of the loss"):
            x = x * self.scale
        elif way == "state of the front":
            x = x + self.mean
            self.mean = x.detach().mean((0, 1))
        for number, block in enumerate(self.blocks):
            if way == "state of each block":
                x, self.states[number] = block(x, self.states[number])
            elif way == "states put together at the end":
                x, state = block(x, self.states[number])
                new.append(state)
            else:
                x = block(x)
            if way in NUMBERED:
                self.number = number
            if way in BETWEEN and number == 0:
                x = x + self.mean
            elif way in BETWEEN and number == 2:
                self.mean = x.detach().mean((0, 1))
        if way == "states put together at the end":
            self.states = new
        elif way == "mean at the end":
            self.mean = x.detach().mean((0, 1))
        elif way == "last one of a list":
            self.past.append(x.detach().mean((0, 1)))
        elif way == "state of the tail":
            x = x + self.mean * self.scale
            self.mean, self.scale = x.detach().mean((0, 1)), 0.9 * self.scale
        elif way == "number at the end":
            self.scale = 0.9 * self.scale
        self.steps += way in ("beside a counter for a log", "call that goes on")
        self.seen += way in ("counter at the end", "counter at the end for a log")
        loss = nn.functional.cross_entropy(self.head(x.mean(1)), labels)
        if way == "number of the loss":
            self.scale = 0.9 * self.scale + 0.1 * float(loss)
        elif way == "loss of the call before":
            self.last = loss.detach()
        return loss


REFUSED = {
    "states put together at the end": "states",
    "mean at the end": "mean",
    "last one of a list": "past",
    "between blocks": "mean",
    "between many blocks": "mean",
    "number at the end": "scale",
    "number of the loss": "scale",
    "counter at the end": "seen",
    "hook of the model": "seen",
    # The second call fails where a stage is alone, and where it is not.
    "call that goes on": "steps",
    "loss of the call before": "last",
}
CALLS = [(tokens(number), tokens(number + 20, 3, (3,), 0)) for number in range(3)]


@pytest.mark.parametrize("way", REFUSED)
def test_what_a_later_piece_keeps_for_an_earlier_one_is_refused(way: str) -> None:
    """In one line, which names it, when the call is tried out."""
    model = built(lambda: Keeping(way))
    before, hooks, states = {**vars(model)}, len(model._forward_hooks), [*model.states]
    generator = torch.get_rng_state()
    line = rf"Keeping\.{REFUSED[way]}.*: is kept in piece \d+ or later and read in an earlier one"
    with pytest.raises(SplitError, match=line) as found:
        split_in_process(model, 2, (CALLS[0], {}))
    assert "\n" not in str(found.value)
    assert torch.equal(torch.get_rng_state(), generator)
    assert len(model._forward_hooks) == hooks
    assert all(a is b for a, b in zip(model.states, states, strict=True))
    assert all(vars(model)[key] is value for key, value in before.items())
    assert not model.past


@pytest.mark.parametrize(
    "way",
    [
        "counter at the beginning",
        "counter in finally",
        "counter at the end for a log",
        "state of the front",
        "state of the tail",
        "beside a counter for a log",
        "number of the block that is running",
        "state of each block",  # which is kept before the next one is called, where pieces then begin
    ],
)
@pytest.mark.parametrize("stages", [2, 3])
def test_what_no_earlier_piece_reads_is_that_of_the_whole_model(way: str, stages: int) -> None:
    bounds = {2: (3, 3), 3: (1, 4, 1)}[stages]
    whole, example = built(lambda: Keeping(way)), (CALLS[0], {})
    split = Stages(built(lambda: Keeping(way)), bounds, example=example)
    for call in CALLS:
        assert torch.equal(split.forward(*call), whole(*call))


@pytest.mark.parametrize("way", ["number of one of many blocks", "counter at the end for a log"])
def test_code_around_the_blocks_is_run_a_few_times(way: str) -> None:
    """However many pieces change what is kept: it may have effects outside the model."""
    model, calls = built(lambda: Keeping(way)), list[nn.Module]()
    model.words.register_forward_pre_hook(lambda module, _: calls.append(module))
    split_in_process(model, 2, (CALLS[0], {}))
    assert len(calls) <= 6


def test_a_number_of_the_script_is_not_taken_for_one_that_is_kept() -> None:
    model, numbers = built(lambda: Keeping("counter at the end for a log")), count()
    model.words.register_forward_hook(lambda *arguments: arguments[-1] * (1 + next(numbers)))
    stage = split_in_process(model, 2, (CALLS[0], {}))
    assert stage.piece_names[0] == "front"  # else it was refused between its blocks
