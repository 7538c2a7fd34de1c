"""Drain intervals early in a training."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_vpipe.config.staleness import Staleness
from ds_vpipe.schedules.one_f_one_b import default_depths, version_used
from ds_vpipe.staleness.delay_warmup import DelayWarmup


def warmup_of(synchronous: int, warmup: int, delay: int) -> DelayWarmup:
    return DelayWarmup.of(Staleness(synchronous_updates=synchronous, delay_warmup_updates=warmup), delay)


def delay_of(warmup: DelayWarmup, batch: int, largest: int) -> int:
    """Largest delay in updates within the interval around a batch."""
    start, end = warmup.drain_interval(batch)
    return largest if end is None else min(largest, end - start - 1)


def intervals(warmup: DelayWarmup, batches: int) -> list[tuple[int, int | None]]:
    return [warmup.drain_interval(batch) for batch in range(batches)]


def test_nothing_asked_for() -> None:
    for warmup in (DelayWarmup.of(None, 3), DelayWarmup.of(Staleness(nadam={}), 3), warmup_of(0, 9, delay=0)):
        assert intervals(warmup, 3) == [(0, None)] * 3
        assert [delay_of(warmup, batch, 3) for batch in range(3)] == [3, 3, 3]


def test_synchronous_updates() -> None:
    warmup = warmup_of(2, 0, delay=3)
    assert intervals(warmup, 5) == [(0, 1), (1, 2), (2, None), (2, None), (2, None)]
    assert [delay_of(warmup, batch, 3) for batch in range(4)] == [0, 0, 3, 3]


def test_intervals_become_longer() -> None:
    """2 + floor(3 r / 6) batches: 2 at r = 0, 3 at 2, 4 at 5."""
    warmup = warmup_of(1, 6, delay=3)
    assert (warmup.synchronous, warmup.starts) == (1, (1, 3, 6, 10))
    assert [delay_of(warmup, batch, 3) for batch in (0, 1, 2, 3, 5, 6, 9, 10)] == [0, 1, 1, 2, 2, 3, 3, 3]
    assert [delay_of(warmup, batch, 1) for batch in (0, 1, 6, 10)] == [0, 1, 1, 1], "of a stage further back"


@given(st.integers(0, 40), st.integers(0, 200), st.integers(0, 30))
def test_the_delay_grows_by_one_at_a_time_to_all_of_it(synchronous: int, growing: int, delay: int) -> None:
    warmup = warmup_of(synchronous, growing, delay)
    batches = synchronous + growing + delay + 2
    found = [delay_of(warmup, batch, delay) for batch in range(batches)]
    assert found[-1] == delay
    assert found[:synchronous] == [0] * min(synchronous, batches)
    jumps = [after - before for before, after in pairwise(found)]
    assert min(jumps) >= 0
    if growing >= delay * (delay + 1):  # long enough for an interval of each length
        assert max(jumps) <= 1
    for batch, (start, end) in enumerate(intervals(warmup, batches)):
        assert start <= batch < (math.inf if end is None else end)
        assert end is None or warmup.drain_interval(end)[0] == end


@pytest.mark.parametrize("stages", [2, 4, 7])
def test_the_delay_is_that_of_the_versions(stages: int) -> None:
    """By the rule of versions, with a batch of one micro-batch: the largest of every interval."""
    depths = default_depths(stages)
    warmup = warmup_of(3, 20, delay=depths[0])
    batches = range(60)
    for depth in depths:
        late = [batch - version_used(batch, depth, 1, warmup.drain_interval(batch)[0]) for batch in batches]
        for batch in batches:
            start, end = warmup.drain_interval(batch)
            within = late[start : min(end or 60, 60)]
            assert max(within) == delay_of(warmup, batch, depth)
