"""Stages that take longer than before, beside others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ds_vpipe.planning.stragglers import Stragglers


def named(*looks: Sequence[float]) -> list[tuple[int, int, bool]]:
    """Number of the look, stage, and whether it is one now."""
    stragglers = Stragglers()
    return [(number, found.stage, found.slow) for number, one in enumerate(looks) for found in stragglers.add(one)]


EVEN = (0.02, 0.03, 0.02, 0.01)


def test_a_stage_that_becomes_slow_is_named_once_and_when_it_is_over() -> None:
    slow = (0.02, 0.06, 0.02, 0.01)
    assert named(EVEN, EVEN, slow, slow, EVEN, slow) == [(2, 1, True), (4, 1, False), (5, 1, True)]


def test_between_two_stages_the_one_that_has_changed() -> None:
    assert named((0.02, 0.01), (0.02, 0.02)) == [(1, 1, True)]
    assert named((0.02, 0.01), (0.01, 0.01)) == []  # the other one has become faster


@pytest.mark.parametrize(
    "later",
    [
        (0.04, 0.06, 0.04, 0.02),
        (0.02, 0.036, 0.02, 0.01),
        (0.02, 0.03, 0.02, 0.0109),
        (0.01, 0.03, 0.02, 0.01),
        (0.0, 0.0, 0.0, 0.0),
    ],
)
def test_longer_sequences_noise_and_frozen_layers_make_none(later: tuple[float, ...]) -> None:
    assert named(EVEN, later, later) == []


def test_a_slow_start_is_no_past() -> None:
    """First batches take longer; the least so far counts."""
    assert named((0.2, 0.3, 0.2, 0.1), EVEN, (0.02, 0.03, 0.04, 0.01)) == [(2, 2, True)]


def test_less_than_a_millisecond_does_not_count() -> None:
    assert named((0.001, 0.001, 0.001), (0.001, 0.0019, 0.001)) == []


def test_a_slow_drift_adds_up() -> None:
    drift = [(0.02, 0.03, 0.02 * 1.05**step, 0.01) for step in range(6)]
    assert named(*drift) == [(5, 2, True)]


def test_the_line() -> None:
    stragglers = Stragglers()
    list(stragglers.add(EVEN))
    [found] = stragglers.add((0.02, 0.06, 0.02, 0.01))
    assert found.factor == pytest.approx(2.0)
    assert found.line(96) == (
        "stage 1 is a straggler at update 96: its own passes take 60.00 ms per micro-batch, 30.00 ms at best"
    )
