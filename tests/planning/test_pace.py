"""The pace of a pipeline against an event-by-event walk, and depths against brute force."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_vpipe.planning.pace import LinkCost, batch_seconds, hiding_depths, micro_batches_for, pace
from ds_vpipe.planning.plan import ratio_for

eighths = st.integers(1, 24).map(lambda n: n / 8)


def walk(
    forward: list[float], backward: list[float], trips: list[float], depths: list[int], count: int
) -> list[list[float]]:
    """When each stage ends its first ``count`` backward passes, from the order of passes and transfers alone."""
    stages = len(forward)
    ends: dict[tuple[str, int, int], float] = {}
    arrives: dict[tuple[str, int, int], float] = {}
    link_free = dict.fromkeys(product("FB", range(stages)), 0.0)

    def order(stage: int) -> list[tuple[str, int]]:
        passes = [("F", j) for j in range(depths[stage])]
        return passes + [one for i in range(count) for one in (("F", i + depths[stage]), ("B", i))]

    queues = [order(stage) for stage in range(stages)]
    free = [0.0] * stages
    while queues[0]:
        for stage in range(stages):
            while queues[stage]:
                kind, index = queues[stage][0]
                there = stage - 1 if kind == "F" else stage + 1
                ready = 0.0
                if 0 <= there < stages:
                    if (kind, there, index) not in ends:
                        break
                    ready = arrives[kind, there, index]
                free[stage] = max(free[stage], ready) + (forward if kind == "F" else backward)[stage]
                ends[kind, stage, index] = free[stage]
                trip = trips[min(stage, stage + 1 if kind == "F" else stage - 1)] / 2
                arrives[kind, stage, index] = link_free[kind, stage] = max(free[stage], link_free[kind, stage]) + trip
                queues[stage].pop(0)
    return [[ends["B", stage, index] for index in range(count)] for stage in range(stages)]


@settings(max_examples=60)
@given(data=st.data(), stages=st.integers(1, 4))
def test_pace_is_that_of_the_schedule(data: st.DataObject, stages: int) -> None:
    some = st.lists(eighths, min_size=stages, max_size=stages)
    forward, backward, trips = data.draw(some), data.draw(some), data.draw(some)
    trips = [data.draw(st.sampled_from([1, 1, 8])) * trip for trip in trips]
    ahead = data.draw(st.lists(st.integers(0, 3), min_size=stages - 1, max_size=stages - 1))
    check_pace(forward, backward, trips, [sum(ahead[stage:]) for stage in range(stages)])


def test_pace_that_settles_late() -> None:
    """The first stage has run ahead of the last, a lead that it loses slowly."""
    forward, backward, trips, depths = [3.0, 1.0, 1.0], [0.125, 2.125, 2.25], [0.125] * 3, [6, 3, 0]
    ends, *_ = walk(forward, backward, trips, depths, 120)
    assert (ends[119] - ends[59]) / 60 < 3.25
    check_pace(forward, backward, trips, depths)


def check_pace(forward: list[float], backward: list[float], trips: list[float], depths: list[int]) -> None:
    """Whether no slower pace would do and none faster is reached, without waiting for the pace to settle.

    That may take thousands of micro-batches, where cycles of passes are almost equally slow. But no cycle of the
    schedule loses time against the pace, so that the largest delay behind it has been seen after as many
    micro-batches as paths without a cycle advance by (60 are enough here); and the slowest cycle never gains any.
    """
    compute = [one + other for one, other in zip(forward, backward, strict=True)]
    expected = pace(compute, trips[:-1], depths)
    by_stage = walk(forward, backward, trips, depths, 120)
    behind = [end - expected * index for index, end in enumerate(by_stage[0])]
    assert max(behind[60:]) <= max(behind[:60]) + 1e-6
    steps = [
        min(after - before for before, after in zip(ends, ends[advance:], strict=False)) / advance
        for ends in by_stage
        for advance in range(1, depths[0] + 2)
    ]
    assert max(steps) >= expected - 1e-6


@pytest.mark.parametrize(("stages", "micro_batches", "bubble"), [(4, 8, 3 / 11), (4, 16, 3 / 19), (8, 16, 7 / 23)])
def test_bubble(stages: int, micro_batches: int, bubble: float) -> None:
    for depths in (None, range(stages - 1, -1, -1)):
        seconds = batch_seconds([1.0] * stages, [2.0] * stages, [0.0] * (stages - 1), depths, micro_batches)
        assert 1 - 3 * micro_batches / seconds == pytest.approx(bubble)


def test_gpipe_batches_are_two_flow_shops() -> None:
    # M = 3. Forward passes take 1 and 3: 1 + 3 x 3. Then backward passes, which take 1 and 2: 1 + 3 x 2.
    assert batch_seconds([1, 3], [2, 1], [0], None, 3) == (1 + 3 * 3) + (1 + 3 * 2)
    # Between them transfers of 4, one after the other: 1 + 3 x 4 + 3, and 1 + 3 x 4 + 2.
    assert batch_seconds([1, 3], [2, 1], [8], None, 3) == (1 + 3 * 4 + 3) + (1 + 3 * 4 + 2)


@given(data=st.data(), stages=st.integers(1, 4))
def test_hiding_depths_are_smallest(data: st.DataObject, stages: int) -> None:
    compute = data.draw(st.lists(eighths, min_size=stages, max_size=stages))
    trips = data.draw(st.lists(st.integers(0, 24).map(lambda n: n / 8), min_size=stages - 1, max_size=stages - 1))
    limit = max(*compute, (sum(compute) + sum(trips)) / 6, *(trip / 2 for trip in trips))
    compute[data.draw(st.integers(0, stages - 1))] = limit
    if trips and data.draw(st.booleans()):  # a link that is slower than every stage
        limit *= 1.25
        trips[0] = 2 * limit
    depths = hiding_depths(compute, trips)
    assert pace(compute, trips, depths) == pytest.approx(limit)
    for ahead in product(range(1, 8), repeat=stages - 1):
        other = [sum(ahead[stage:]) for stage in range(stages)]
        if pace(compute, trips, other) <= limit * (1 + 1e-9):
            assert all(mine <= there for mine, there in zip(depths, other, strict=True))


def test_links() -> None:
    link = LinkCost(latency_s=0.5, bytes_per_s=10)
    assert link.seconds(20) == 2.5
    assert link.round_trip(40) == 9


@given(num_layers=st.integers(1, 300), data=st.data())
def test_ratios_mean_their_layers(num_layers: int, data: st.DataObject) -> None:
    recomputed = data.draw(st.integers(0, num_layers))
    ratio = ratio_for(recomputed, num_layers)
    assert 0 <= ratio <= 1
    assert int(ratio * num_layers) == recomputed


def test_ratios() -> None:
    assert [ratio_for(count, 12) for count in (0, 3, 4, 12)] == [0, 0.3, 0.4, 1]
    assert (int(0.29 * 100), ratio_for(29, 100)) == (28, 0.291)  # 29 / 100 is rounded


@pytest.mark.parametrize(("num_stages", "fewest"), [(1, 1), (2, 9), (4, 27), (8, 63), (16, 135)])
def test_fewest_micro_batches_for_a_tenth(num_stages: int, fewest: int) -> None:
    assert micro_batches_for(num_stages, 0.1) == fewest


@pytest.mark.parametrize("idle", [0.03, 0.07, 0.1, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("virtual_stages", [1, 2, 3])
def test_one_less_is_too_few(idle: float, virtual_stages: int) -> None:
    for num_stages in range(2, 20):
        fewest, fill = micro_batches_for(num_stages, idle, virtual_stages), (num_stages - 1) / virtual_stages
        least = num_stages if virtual_stages > 1 else 1  # with fewer the interleaved order waits more
        assert fill / (fewest + fill) <= idle + 1e-12
        assert fewest >= least
        assert fewest == least or fill / (fewest - 1 + fill) > idle
