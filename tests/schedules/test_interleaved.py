"""The interleaved order: the paper's picture in literals."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_vpipe.schedules.actions import Kind
from ds_vpipe.schedules.interleaved import group_sizes, interleaved_actions, warm_up


def text(rank: int, num_stages: int, micro_batches: int, virtual_stages: int, batch: int = 0) -> str:
    return " ".join(map(str, interleaved_actions(batch, rank, num_stages, micro_batches, virtual_stages)))


@pytest.mark.parametrize(
    ("rank", "picture"),
    [
        (0, "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3 REDUCE0 STEP0"),
        (1, "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 REDUCE0 STEP0"),
    ],
)
def test_two_ranks_with_two_parts(rank: int, picture: str) -> None:
    assert text(rank, 2, 4, 2) == picture


def test_forward_order_of_the_paper() -> None:
    """Figure 4 of the paper: four ranks, eight micro-batches, two parts each; warm-up of the first and last rank."""
    forwards = [str(action) for action in interleaved_actions(0, 0, 4, 8, 2) if action.kind is Kind.FORWARD]
    assert " ".join(forwards) == "0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 0F7 4F4 4F5 4F6 4F7"
    assert text(0, 4, 8, 2).startswith("0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3 0F4 0F5 0F6 4B0 0F7 4B1 4F4")
    assert text(3, 4, 8, 2).startswith("3F0 3F1 3F2 3F3 7F0 7B0 7F1 7B1")


def test_a_later_batch_counts_on() -> None:
    assert text(1, 2, 2, 2, batch=3) == "1F6 1F7 3F6 3B6 3F7 3B7 1B6 1B7 REDUCE3 STEP3"


@pytest.mark.parametrize(
    ("num_stages", "micro_batches", "sizes"),
    [(4, 8, (4, 4)), (4, 9, (5, 4)), (4, 7, (7,)), (4, 3, (3,)), (4, 11, (6, 5)), (1, 3, (1, 1, 1))],
)
def test_groups(num_stages: int, micro_batches: int, sizes: tuple[int, ...]) -> None:
    assert group_sizes(num_stages, micro_batches) == sizes


@given(st.integers(1, 9), st.integers(1, 30), st.integers(2, 5), st.data())
def test_every_pass_once_and_the_warm_up(
    num_stages: int, micro_batches: int, virtual: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, num_stages - 1))
    order = list(interleaved_actions(0, rank, num_stages, micro_batches, virtual))[:-2]
    parts = range(rank, num_stages * virtual, num_stages)
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for part in parts:
            assert [action.index for action in order if (action.kind, action.part) == (kind, part)] == list(
                range(micro_batches)
            )
    assert len(order) == 2 * virtual * micro_batches
    first_backward = next(position for position, action in enumerate(order) if action.kind is Kind.BACKWARD)
    ahead = warm_up(rank, num_stages, micro_batches, virtual)
    assert first_backward == min(ahead + 1, virtual * micro_batches)
