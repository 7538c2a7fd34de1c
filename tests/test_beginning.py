"""Where a pipeline drains at the beginning of a training."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_vpipe.schedules.schedule import default_depths, version_used
from ds_vpipe.staleness.beginning import Beginning, beginning
from ds_vpipe.staleness.settings import Staleness


def begun(synchronous: int, warmup: int, delay: int) -> Beginning:
    return beginning(Staleness(synchronous_updates=synchronous, delay_warmup_updates=warmup), delay)


def fillings(begin: Beginning, batches: int) -> list[tuple[int, int | None]]:
    return [begin.filling(batch) for batch in range(batches)]


def test_nothing_asked_for() -> None:
    for begin in (beginning(None, 3), beginning(Staleness(nadam={}), 3), begun(0, 9, delay=0)):
        assert fillings(begin, 3) == [(0, None)] * 3
        assert [begin.delay(batch, 3) for batch in range(3)] == [3, 3, 3]


def test_synchronous_updates() -> None:
    begin = begun(2, 0, delay=3)
    assert fillings(begin, 5) == [(0, 1), (1, 2), (2, None), (2, None), (2, None)]
    assert [begin.delay(batch, 3) for batch in range(4)] == [0, 0, 3, 3]


def test_fillings_become_longer() -> None:
    """2 + floor(3 r / 6) batches: 2 at r = 0, 3 at 2, 4 at 5."""
    begin = begun(1, 6, delay=3)
    assert (begin.synchronous, begin.starts) == (1, (1, 3, 6, 10))
    assert [begin.delay(batch, 3) for batch in (0, 1, 2, 3, 5, 6, 9, 10)] == [0, 1, 1, 2, 2, 3, 3, 3]
    assert [begin.delay(batch, 1) for batch in (0, 1, 6, 10)] == [0, 1, 1, 1], "of a stage further back"


@given(st.integers(0, 40), st.integers(0, 200), st.integers(0, 30))
def test_the_delay_grows_by_one_at_a_time_to_all_of_it(synchronous: int, warmup: int, delay: int) -> None:
    begin = begun(synchronous, warmup, delay)
    batches = synchronous + warmup + delay + 2
    found = [begin.delay(batch, delay) for batch in range(batches)]
    assert found[-1] == delay
    assert found[:synchronous] == [0] * min(synchronous, batches)
    jumps = [after - before for before, after in pairwise(found)]
    assert min(jumps) >= 0
    if warmup >= delay * (delay + 1):  # long enough for a filling of each length
        assert max(jumps) <= 1
    for batch, (start, end) in enumerate(fillings(begin, batches)):
        assert start <= batch < (math.inf if end is None else end)
        assert end is None or begin.filling(end)[0] == end


@pytest.mark.parametrize("stages", [2, 4, 7])
def test_the_delay_is_that_of_the_versions(stages: int) -> None:
    """By the rule of versions, with a batch of one micro-batch: the largest of every filling."""
    depths = default_depths(stages)
    begin = begun(3, 20, delay=depths[0])
    batches = range(60)
    for depth in depths:
        late = [batch - version_used(batch, depth, 1, begin.filling(batch)[0]) for batch in batches]
        for batch in batches:
            start, end = begin.filling(batch)
            within = late[start : min(end or 60, 60)]
            assert max(within) == begin.delay(batch, depth)
