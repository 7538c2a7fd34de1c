"""The replay with layers that move: which version each micro-batch uses, and what the partition must not change."""

from __future__ import annotations

from typing import Any

import pytest
import reference
import torch
from torch import nn

from ds_vpipe.schedules.moves import Move, earliest_cut_over, layer_version
from ds_vpipe.schedules.pipeline import Pipeline

COUNTS = (4, 3, 3)


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.3, momentum=0.9)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def train(depths: tuple[int, ...], micro_batches: int, batches: int, **options: Any) -> dict[str, torch.Tensor]:
    optimizer = options.pop("optimizer", sgd)
    return reference.replay(COUNTS, depths, micro_batches, batches, optimizer, **options)[0]


def chain(micro_batches: int, depths: tuple[int, ...] = (2, 1, 0)) -> list[Move]:
    """To the next stage, on to the last one, and back by one."""
    pipeline = Pipeline("asp", 3, micro_batches, depths)
    moves: list[Move] = []
    for layer, source, target in ((3, 0, 1), (6, 1, 2), (6, 2, 1), (3, 1, 0)):
        updates = moves[-1].settled_batch(pipeline) if moves else 0
        moves.append(Move(layer, source, target, earliest_cut_over(pipeline, source, target, updates)))
    return moves


def as_tuples(moves: list[Move]) -> list[tuple[int, int, int, int]]:
    return [(move.layer, move.source, move.target, move.micro_batch) for move in moves]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("depths", [(2, 1, 0), (5, 3, 0)])
def test_replay_and_schedules_name_the_same_versions(micro_batches: int, depths: tuple[int, ...]) -> None:
    moves = chain(micro_batches, depths)
    replay = reference.Replay(COUNTS, depths, micro_batches, sgd, moves=as_tuples(moves))
    pipeline = Pipeline("asp", 3, micro_batches, depths)
    for position, stage in ((3, 0), (6, 1)):
        mine = [move for move in moves if move.layer == position]
        for j in range(moves[-1].micro_batch + 10):
            used = max(0, j - replay.lag(position, j)) // micro_batches
            assert used == layer_version(pipeline, stage, mine, j), (position, j)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_with_vertical_sync_moves_change_nothing(micro_batches: int, optimizer: Any) -> None:
    moves = chain(micro_batches)
    batches = moves[-1].micro_batch // micro_batches + 4
    plain, moving = (
        train((2, 1, 0), micro_batches, batches, vertical=True, optimizer=optimizer, moves=given)
        for given in ((), as_tuples(moves))
    )
    assert difference(plain, moving) == 0


def test_with_stashing_every_cut_over_counts() -> None:
    moves = as_tuples(chain(1))
    batches = moves[-1][3] + 4
    wanted = train((2, 1, 0), 1, batches, moves=moves)
    assert difference(wanted, train((2, 1, 0), 1, batches)) > 1e-4
    for number, (layer, source, target, first) in enumerate(moves):
        early = [*moves[:number], (layer, source, target, first - 1), *moves[number + 1 :]]
        assert difference(wanted, train((2, 1, 0), 1, batches, moves=early)) > 1e-6, number


def test_a_move_that_begins_in_a_drain_is_complete_there() -> None:
    move = (3, 0, 1, 8)
    replay = reference.Replay(COUNTS, (2, 1, 0), 1, sgd, moves=[move], refills=(0, 8))
    assert [replay.lag(3, j) for j in (7, 8, 9)] == [2, 1, 1]
