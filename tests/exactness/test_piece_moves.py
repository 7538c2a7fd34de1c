"""Pieces of a plain module that move between stages while a script trains: the same training, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import cases
import loops
import pytest
import torch
import toy
from test_exactness import OPTIMIZERS, difference
from torch import nn
from torch.func import functional_call
from worlds import Worlds

from ds_vpipe.schedules.one_f_one_b import default_depths

pytestmark = pytest.mark.mp

STAGES, SIZE, UPDATES = 3, 2, 8
SPLITS = {0: [10, 1, 1], 2: [2, 3, 7], 3: [5, 6, 1], 6: [1, 1, 10]}  # 10 layers, with a front and a tail


def engine(ds_config: dict[str, Any], whole: nn.Module) -> Any:
    import ds_vpipe

    return ds_vpipe.initialize(model=whole, config=ds_config)[0]


def plain(kind: str, ds_config: dict[str, Any], splits: Mapping[int, list[int]], moves: bool = True) -> dict[str, Any]:
    """Train a plain model with these splits from these updates on, or drain in the place of each."""
    torch.manual_seed(7)
    block = {"partition": splits[0], **ds_config["vpipe"]}
    whole = KINDS[kind]()
    trained = engine({**ds_config, "vpipe": block}, whole)
    losses = []
    for update in range(UPDATES):
        if update in splits and update and moves:
            trained.repartition(splits[update])
        elif update in splits and update:
            trained.quiesce()
        losses += loops.rounds(trained, update * SIZE, SIZE)
        if update == 4:
            whole.eval()
            tokens, labels = toy.micro_batch(10_000)
            losses.append(float(trained(tokens=tokens, labels=labels)))
            whole.train()
    trained.drain()
    state = {name: value.clone() for name, value in trained.full_state_dict().items()}
    own = sorted(name for name, _ in whole.named_parameters())
    report = {"state": state, "losses": losses, "own": own, "parts": list(trained.module.parts)}
    cases.end(trained)
    return report


class Tied(nn.Module):
    """Embeddings tied to the head, blocks with buffers, and a buffer beside them that all blocks read."""

    def __init__(self) -> None:
        super().__init__()
        self.words = toy.seeded(1, lambda: nn.Embedding(toy.VOCABULARY, toy.HIDDEN))
        self.blocks = nn.ModuleList(toy.seeded(10 + n, Block) for n in range(10))
        self.head = nn.Linear(toy.HIDDEN, toy.VOCABULARY, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("scale", torch.full((), 0.5))

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = x + self.scale * block(x)
        return nn.functional.cross_entropy(self.head(x).mean(1), labels)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(toy.HIDDEN, toy.HIDDEN)
        self.norm = nn.BatchNorm1d(toy.HIDDEN)
        self.register_buffer("passes", torch.ones(1), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.passes += 1
            self.calls += 1
        x = x / self.passes.clone() * (1 + 0.1 * (self.calls % 7))
        return torch.tanh(self.norm(self.linear(x).flatten(0, -2)).view(x.shape))


KINDS = {"layers": loops.Whole, "tied": Tied}


def with_and_without(runs: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    return [plain(kind, ds_config, SPLITS, moves) for kind, ds_config in runs for moves in (True, False)]


def test_bsp_and_vertical_do_not_depend_on_moves(worlds: Worlds) -> None:
    adamw, bsp = OPTIMIZERS["AdamW"][0], {"sync_mode": "bsp"}
    runs = [
        ("layers", cases.config(SIZE, adamw, bsp)),
        ("tied", cases.config(SIZE, adamw, {**bsp, "recompute_ratio": 0.5})),
        ("tied", cases.config(SIZE, adamw, {"weight_sync": "vertical"})),
        ("layers", cases.config(SIZE, adamw, bsp, bf16={"enabled": True}, zero_optimization={"stage": 1})),
    ]
    by_run = list(zip(*worlds.run(STAGES, with_and_without, runs), strict=True))
    for moved, stayed in zip(by_run[::2], by_run[1::2], strict=True):
        for one, other in zip(moved, stayed, strict=True):
            assert one["parts"] == [0, 1, 2, 12]
            assert one["own"] != other["own"] or not one["own"]
            assert one["losses"] == other["losses"]
            assert one["state"].keys() == other["state"].keys()
            assert [name for name in one["state"] if not torch.equal(one["state"][name], other["state"][name])] == []


def replayed(shift: int = 0) -> dict[str, torch.Tensor]:
    """The same updates without an engine; with ``shift`` a layer's stage is found by another split on purpose."""
    whole = loops.Whole()
    optimizer = OPTIMIZERS["SGD"][1](list(whole.parameters()))
    depths, versions = default_depths(STAGES), [_copy(whole)]
    filled_from, split = 0, SPLITS[0]
    for update in range(UPDATES):
        if update in SPLITS:
            filled_from, split = update * SIZE, SPLITS[update - shift if update - shift in SPLITS else update]
        stage_of = [stage for stage, count in enumerate(split) for _ in range(count)]
        if update == 5:  # an evaluation drains
            filled_from = update * SIZE
        optimizer.zero_grad()
        for j in range(update * SIZE, (update + 1) * SIZE):
            used = {}
            for name in versions[0]:
                depth = depths[stage_of[1 + int(name.split(".")[1])]]
                used[name] = versions[max(filled_from, j - depth) // SIZE][name].clone().requires_grad_()
            (functional_call(whole, used, toy.micro_batch(j)) / SIZE).backward()
            for name, parameter in whole.named_parameters():
                gradient = used[name].grad
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        optimizer.step()
        versions.append(_copy(whole))
    return versions[-1]


def _copy(whole: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in whole.named_parameters()}


def test_asp_is_the_replay_of_its_splits(worlds: Worlds) -> None:
    reports = worlds.run(STAGES, plain, "layers", cases.config(SIZE, OPTIMIZERS["SGD"][0], {}), SPLITS)
    for report in reports:
        assert difference(report["state"], replayed()) == 0
    assert difference(reports[0]["state"], replayed(shift=1)) > 0
