"""Closed forms of the bubble, against published numbers."""

from __future__ import annotations

import pytest

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.schedules.bubble import bubble_share, optimal_microbatches


@pytest.mark.parametrize(
    ("num_stages", "micro_batches", "virtual_stages", "percent"),
    [(4, 8, 1, 27), (4, 16, 1, 16), (8, 16, 1, 30), (4, 1, 1, 75), (4, 4, 1, 43), (1, 5, 1, 0), (4, 8, 2, 16)],
)
def test_share(num_stages: int, micro_batches: int, virtual_stages: int, percent: int) -> None:
    assert round(100 * bubble_share(num_stages, micro_batches, virtual_stages)) == percent


@pytest.mark.parametrize(("num_stages", "fewest"), [(1, 1), (2, 9), (4, 27), (8, 63), (16, 135)])
def test_fewest_micro_batches_for_a_tenth(num_stages: int, fewest: int) -> None:
    assert optimal_microbatches(num_stages, 0.1) == fewest


@pytest.mark.parametrize("share", [0.03, 0.07, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("virtual_stages", [1, 2, 3])
def test_one_less_is_too_few(share: float, virtual_stages: int) -> None:
    for num_stages in range(2, 20):
        fewest = optimal_microbatches(num_stages, share, virtual_stages)
        assert bubble_share(num_stages, fewest, virtual_stages) <= share + 1e-12
        assert fewest == 1 or bubble_share(num_stages, fewest - 1, virtual_stages) > share


@pytest.mark.parametrize("share", [0, 1, -0.1, 10])
def test_refused(share: float) -> None:
    with pytest.raises(VPipeConfigError, match=r"^share: got .*; allowed: a number between 0 and 1"):
        optimal_microbatches(4, share)
