"""Decisions on depths, on measured passes that are made up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_vpipe.planning.depth_changes import DepthChoice, DepthDecision, Passes, varied_pace
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile
from ds_vpipe.planning.pace import pace
from ds_vpipe.planning.replanning import Work
from ds_vpipe.schedules.pipeline import Pipeline

FIRST = (3, 2, 1, 0)
PROFILE = ModelProfile((LayerProfile("Layer", 0.01, 0.02, 1000, 100, 10),) * 4, 10, 1, "cpu", "float32", "measured")
WORK = Work(PROFILE, (1, 1, 1, 1), (1.0,) * 4)


def passes(sigma: float, count: int = 16, seed: int = 0) -> list[tuple[int, Passes]]:
    """Of stages that take 30 ms in the mean."""
    found = random.Random(seed)

    def varied(seconds: float) -> float:
        return seconds * found.lognormvariate(-(sigma**2) / 2, sigma)

    return [(stage, [(varied(0.01), varied(0.02)) for _ in range(count)]) for stage in range(4)]


def choice(most_late: int = 9, first: Sequence[int] = FIRST) -> DepthChoice:
    return DepthChoice(tuple(first), most_late, 31, 0.03)


def decided(
    made: DepthChoice,
    measured: list[tuple[int, Passes]],
    depths: Sequence[int] = FIRST,
    measured_s: float = 0.036,
    micro_batches: int = 1,
    devices: Devices | None = None,
) -> DepthDecision:
    pipeline = Pipeline("asp", 4, micro_batches, tuple(depths), partition=(1, 1, 1, 1), recompute_ratio=(0.0,) * 4)
    return made.decide(pipeline, WORK, devices or Devices(), measured, update=20, measured_s=measured_s)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_passes_that_do_not_vary_have_the_pace_of_the_formula(data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, 5))
    seconds = data.draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages))
    trips = data.draw(st.lists(st.sampled_from([0.0, 1.0, 6.0]), min_size=stages - 1, max_size=stages - 1))
    falls = data.draw(st.lists(st.integers(0, 3), min_size=stages - 1, max_size=stages - 1))
    depths = [sum(falls[stage:]) for stage in range(stages)]
    found = varied_pace([[(1.0, float(one))] for one in seconds], trips, depths)
    assert found == pytest.approx(pace([1.0 + one for one in seconds], trips, depths), rel=0.02)


def test_a_link_carries_one_transfer_at_a_time() -> None:
    assert varied_pace([[(1.0, 1.0)]] * 2, [6.0], [3, 0]) == pytest.approx(3, rel=0.02)


def test_stages_run_further_ahead_the_more_their_passes_vary() -> None:
    found = [decided(choice(), passes(sigma)).better_depths for sigma in (0.0, 0.1, 0.3, 0.6)]
    assert found[0] == FIRST
    assert found == sorted(found)
    assert len(set(found)) > 2
    decision = decided(choice(), passes(0.3))
    assert decision.stays == ""
    assert f"[3, 2, 1, 0] -> {list(decision.better_depths)}, " in decision.line()
    assert "of the time" in decision.line()


def test_depths_stay_where_stages_do_not_wait() -> None:
    """Whatever their passes say: the pace is measured."""
    busiest = max(sum(map(sum, these)) / len(these) for _, these in passes(0.3))
    decision = decided(choice(), passes(0.3), measured_s=1.01 * busiest)
    assert decision.stays == "they would save 1.0%, threshold 3.0%"
    assert decided(choice(), passes(0.3, count=7)).stays == "7 micro-batches were measured, 8 are needed"
    assert decided(choice(), passes(0.3, count=0)).stays == "nothing was measured"


def test_limits_of_staleness_links_and_memory() -> None:
    free = decided(choice(), passes(0.5)).better_depths
    assert free[0] > 5
    for most_late, micro_batches in ((3, 1), (2, 2), (5, 1), (1, 3)):
        found = decided(choice(most_late), passes(0.5), micro_batches=micro_batches)
        assert -(-found.better_depths[0] // micro_batches) <= most_late
    assert decided(choice(3), passes(0.5)).stays == "no others are allowed"
    near = replace(choice(), most_apart=1)
    assert decided(near, passes(0.5)).better_depths == FIRST
    small = Devices(budget=10_000)  # activations, and versions of the weights, of the first stage
    assert decided(choice(), passes(0.5), devices=small).better_depths < free
    assert decided(choice(), passes(0.5), devices=Devices(budget=1)).better_depths == FIRST


def test_what_brings_nothing_is_left_and_not_tried_again() -> None:
    made, measured = choice(), passes(0.3)
    deeper = decided(made, measured, measured_s=0.036).better_depths
    back = decided(made, measured, deeper, measured_s=0.0359)
    assert (back.better_depths, back.stays) == (FIRST, "")
    assert "measured before" in back.line()
    assert decided(made, measured, measured_s=0.036).better_depths not in (deeper, back.depths)


def test_depths_that_are_too_deep_for_smaller_batches_end() -> None:
    """The script may have changed the size, by which a gradient is more updates late."""
    deeper = decided(choice(most_late=2), passes(0.5), micro_batches=4).better_depths
    assert 2 < deeper[0] <= 8
    assert decided(choice(most_late=2), passes(0.5), deeper, micro_batches=1).better_depths == FIRST


def test_what_was_measured_before_counts_for_what_was_to_run_alone() -> None:
    """Not where the script has changed depths or the size meanwhile."""
    for depths, micro_batches in (((7, 5, 3, 0), 1), (None, 2)):
        made, measured = choice(), passes(0.3)
        deeper = decided(made, measured, measured_s=0.036).better_depths
        found = decided(made, measured, depths or deeper, measured_s=0.0359, micro_batches=micro_batches)
        assert not found.brought_nothing


@pytest.mark.parametrize("sigma", [0.05, 0.1, 0.2, 0.3, 0.5])
def test_depths_do_not_swing(sigma: float) -> None:
    """Though measurements are never the same, around a threshold too."""
    made, depths, changes = choice(), FIRST, []
    long = [these for _, these in passes(sigma, count=400)]
    for look in range(60):
        pace_s = varied_pace(long, [0.0] * 3, depths)
        found = decided(made, passes(sigma, seed=look), depths, measured_s=pace_s)
        if not found.stays:
            depths = found.better_depths
            changes.append(depths)
    assert len(changes) <= 3, changes
    assert sigma < 0.1 or depths > FIRST


def test_fewer_once_passes_vary_no_more() -> None:
    made = choice()
    deeper = decided(made, passes(0.3)).better_depths
    first = decided(made, passes(0.0), deeper, measured_s=0.0301)
    assert (first.better_depths, first.stays) == (FIRST, "one look is not enough for fewer")
    assert decided(made, passes(0.3), deeper, measured_s=0.031).better_depths == deeper
    assert decided(made, passes(0.0), deeper, measured_s=0.0301).stays
    assert not decided(made, passes(0.0), deeper, measured_s=0.0301).stays


def test_of_replicas_the_slowest_counts() -> None:
    slow = [(stage, [(2 * f, 2 * b) for f, b in these]) for stage, these in passes(0.3, seed=1)]
    for others in (passes(0.3), passes(0.3, count=64), passes(0.3, count=0)):  # whatever number was measured
        assert decided(choice(), others + slow, measured_s=0.08) == decided(choice(), slow, measured_s=0.08)
