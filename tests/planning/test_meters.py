"""Bytes counted from the records of torch's CPU allocator."""

from __future__ import annotations

import pytest
import torch
from allocations import Allocations, count_allocations, watched


def test_what_is_alive_inside_the_watched_part() -> None:
    def work() -> None:
        torch.empty(10_000)  # before: does not count
        kept = torch.empty(250)
        with watched():
            torch.empty(500)
            torch.empty(750)
        torch.empty(20_000)
        with watched():
            kept += 1
        results.append(kept)

    results: list[torch.Tensor] = []
    assert count_allocations(work) == Allocations(peak=4 * (250 + 750), kept=4 * 250)


def test_operators_own_temporaries_count() -> None:
    values = torch.ones(1000)

    def work() -> None:
        with watched():
            values.to(torch.float64).sort().values.sum()

    assert count_allocations(work).peak > 8 * 1000 + 2 * 8 * 1000  # the copy, values and positions, and sort's own


def test_nothing_allocated() -> None:
    def work() -> None:
        with watched():
            pass

    assert count_allocations(work) == Allocations(0, 0)


def test_nothing_watched() -> None:
    with pytest.raises(ValueError, match="at least one"):
        count_allocations(lambda: None)
