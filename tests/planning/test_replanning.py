"""Decisions of a pipeline that balances itself, on measurements that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_vpipe.config.replan import Replan
from ds_vpipe.partition import bounds
from ds_vpipe.planning.devices import Devices
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile
from ds_vpipe.planning.planner import predict
from ds_vpipe.planning.replanning import Decision, Work, decide, in_steps, joined, separated
from ds_vpipe.schedules.moves import moved
from ds_vpipe.schedules.pipeline import Pipeline

LAYERS = 16


def profile(seconds: Sequence[float], kept: int = 0) -> ModelProfile:
    layers = tuple(LayerProfile("Layer", s / 3, 2 * s / 3, 1000, kept, 10) for s in seconds)
    return ModelProfile(layers, 10, 1, "cpu", "float32", "measured")


def measured(work: Sequence[float], counts: Sequence[int], slowness: Sequence[float]) -> ModelProfile:
    owners = [stage for stage, count in enumerate(counts) for _ in range(count)]
    return profile([w * slowness[stage] for w, stage in zip(work, owners, strict=True)])


def decided(work: Work, counts: Sequence[int], ratios: Sequence[float] = (0,) * 4, **options: object) -> Decision:
    pipeline = Pipeline("asp", 4, 1, partition=tuple(counts), recompute_ratio=tuple(ratios))
    given: dict[str, object] = {
        "devices": Devices(),
        "settings": Replan(every=20, threshold=options.pop("threshold", 0.03)),
        "update": 20,
        "chooses_ratio": False,
        "move_s": 0.1,
        **options,
    }
    return decide(work, pipeline, **given)  # type: ignore[arg-type]


def test_the_worst_split_moves_to_the_best() -> None:
    counts = (13, 1, 1, 1)
    decision = decided(separated(profile([0.006] * LAYERS), counts, None), counts)
    assert decision.better_partition == (4, 4, 4, 4)
    assert decision.stays == ""
    assert decision.gain == pytest.approx(9 / 13)
    assert decision.line() == (
        "replan at update 20: [13, 1, 1, 1] -> [4, 4, 4, 4], 78.00 -> 24.00 ms per micro-batch expected; moves"
    )


@pytest.mark.parametrize(
    ("counts", "options", "why"),
    [
        ((4, 4, 4, 4), {}, "no split is faster"),
        ((5, 4, 4, 3), {"threshold": 0.25}, "it would save 20.0%, threshold 25.0%"),
        ((5, 4, 4, 3), {"move_s": 60.0}, "a move of 60.10 s would not pay within 200 updates"),
        ((5, 4, 4, 3), {"devices": Devices(budget=10)}, "no split fits the memory"),
    ],
)
def test_layers_stay(counts: tuple[int, ...], options: dict[str, object], why: str) -> None:
    decision = decided(separated(profile([0.006] * LAYERS), counts, None), counts, **options)
    assert decision.stays.startswith(why)
    assert f"stays: {why}" in decision.line()


def test_a_split_that_only_has_a_better_pace_is_not_faster() -> None:
    """Where every batch is waited for, the planner's split may have the longer batch."""
    work = separated(profile([0.001, 0.02, 0.005, 0.001]), (1, 3), None)
    pipeline = Pipeline("1f1b", 2, 1, partition=(1, 3), recompute_ratio=(0, 0))
    decision = decide(work, pipeline, Devices(), Replan(every=20), update=20, chooses_ratio=False)
    assert (decision.stays, decision.better_partition) == ("no split is faster", (1, 3))


def test_the_way_back_has_to_save_more() -> None:
    """Whatever the threshold: else two splits that are about as fast would alternate."""
    counts = (5, 4, 4, 3)
    work = separated(profile([0.0051] * 5 + [0.006] * 8 + [0.0054] * 3), counts, None)
    found = decided(work, counts, threshold=0.0, move_s=0.0)
    assert found.stays == ""
    assert 0 < found.gain < 0.06
    back = decided(work, counts, threshold=0.0, move_s=0.0, abandoned={found.better_partition})
    assert back.stays == f"it would save {found.gain:.1%}, threshold 6.0%"


def test_memory_that_does_not_fit_now_needs_no_gain() -> None:
    """Nothing is faster, but the present split is over the budget."""
    counts = (4, 4, 4, 4)
    work = separated(profile([0.006] * LAYERS, kept=1000), counts, None)
    needs_recompute = decided(work, counts, devices=Devices(budget=24_000), chooses_ratio=True)
    assert needs_recompute.stays == ""
    assert needs_recompute.better_seconds > needs_recompute.seconds
    assert max(needs_recompute.better_ratio) > 0
    assert "recompute_ratio" in needs_recompute.line()


def followed(slowness: Sequence[float], counts: tuple[int, ...], before: Work | None = None) -> list[tuple[int, ...]]:
    """Splits that come of looks at devices that are this slow, until layers stay."""
    splits = [counts]
    for _ in range(8):
        before = separated(measured([0.006] * LAYERS, splits[-1], slowness), splits[-1], before)
        decision = decided(before, splits[-1])
        if decision.stays:
            return splits
        splits.append(decision.better_partition)
    raise AssertionError(f"no end: {splits}")


def test_a_stage_that_slows_down_is_seen_and_relieved() -> None:
    counts = (4, 4, 4, 4)
    before = separated(profile([0.006] * LAYERS), counts, None)
    now = separated(measured([0.006] * LAYERS, counts, (1, 2, 1, 1)), counts, before)
    assert now.slowness == pytest.approx((1, 2, 1, 1))
    assert [layer.forward_s for layer in now.profile.layers] == pytest.approx([0.002] * LAYERS)
    splits = followed((1, 2, 1, 1), counts, before)
    assert len(splits) == 2
    assert max(count * slow for count, slow in zip(splits[-1], (1, 2, 1, 1), strict=True)) == 5


@pytest.mark.parametrize(
    ("factors", "end"),
    [
        ([1.1**look for look in range(9)], 1.1**8),  # never by more than a tenth from one look to the next
        ([1, 1.2, 1.1, 1], 1),
        ([1, 1.2, 1.1, 1] * 4, 1),
        ([1, 1.1, 1.2, 1.1], 1.2),  # the last difference is too small to count
    ],
)
def test_slowness_follows_from_how_slow_a_device_is_and_not_from_the_steps_there(
    factors: Sequence[float], end: float
) -> None:
    counts, work = (4, 4, 4, 4), None
    for factor in factors:
        work = separated(measured([0.006] * LAYERS, counts, (1, factor, 1, 1)), counts, work)
    assert work is not None
    assert work.slowness[0] == work.slowness[2] == 1
    assert 1 / 1.15 < work.slowness[1] / end < 1.15
    if factors[-1] == 1:
        assert work.slowness[1] == pytest.approx(1)


@pytest.mark.parametrize("slowness", [(1, 2, 1, 1), (2, 1, 1, 1), (1, 1, 1, 3), (1, 2, 2, 1), (1, 1.5, 1, 1.5)])
def test_devices_that_differ_from_the_start_are_found_by_moves(slowness: tuple[float, ...]) -> None:
    splits = followed(slowness, (4, 4, 4, 4))
    slowest = max(count * slow for count, slow in zip(splits[-1], slowness, strict=True))
    best = min(
        max(count * slow for count, slow in zip((a, b, c, LAYERS - a - b - c), slowness, strict=True))
        for a in range(1, 14)
        for b in range(1, 15 - a)
        for c in range(1, 16 - a - b)
    )
    assert slowest <= best + max(slowness)  # at most one layer from the best
    assert len(splits) <= 4


def test_frozen_layers_and_longer_sequences_are_no_slow_devices() -> None:
    counts = (4, 4, 4, 4)
    before = separated(profile([0.006] * LAYERS), counts, None)
    full = profile([0.009] * LAYERS)  # every stage takes longer
    frozen = tuple(replace(one, backward_s=0.0) if number < 8 else one for number, one in enumerate(full.layers))
    now = separated(replace(full, layers=frozen), counts, before)
    assert now.slowness == (1, 1, 1, 1)
    assert decided(now, counts).better_partition[0] > 4


def test_the_slowest_replica_of_a_stage_counts() -> None:
    parts = [(1, profile([1.0, 2.0])), (0, profile([1.0, 1.0])), (1, profile([3.0, 1.0]))]
    whole = joined(parts)
    assert [layer.forward_s for layer in whole.layers] == pytest.approx([1 / 3, 1 / 3, 1, 2 / 3])


def stepped(work: Work, counts: Sequence[int], goal: Sequence[int], **options: object) -> Decision:
    """A decision for ``goal``, with its steps."""
    decision = replace(decided(work, counts), better_partition=tuple(goal))
    pipeline = Pipeline("asp", 4, 1, partition=tuple(counts), recompute_ratio=(0,) * 4)
    return in_steps(decision, work, pipeline, options.get("devices", Devices()), None)  # type: ignore[arg-type]


def splits_of(decision: Decision) -> list[tuple[int, ...]]:
    splits = [decision.partition]
    for step in decision.steps:
        start = sum(splits[-1][: step.source])
        assert step.layer == (start + splits[-1][step.source] - 1 if step.down else start)
        assert splits[-1][step.source] > 1
        splits.append(moved(splits[-1], step))
    return splits


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 15), min_size=6, max_size=6, unique=True), st.data())
def test_steps_lead_from_any_split_to_any_other(cuts: list[int], data: st.DataObject) -> None:
    splits = [tuple(b - a for a, b in pairwise([0, *sorted(found), LAYERS])) for found in (cuts[:3], cuts[3:])]
    seconds = [data.draw(st.sampled_from([0.001, 0.006, 0.02])) for _ in range(LAYERS)]
    decision = stepped(separated(profile(seconds), splits[0], None), *splits)
    assert splits_of(decision)[-1] == splits[1]
    assert len(decision.steps) == sum(abs(a - b) for a, b in zip(bounds(splits[0]), bounds(splits[1]), strict=True))


def test_no_step_makes_the_slowest_stage_slower_than_it_was() -> None:
    counts = (13, 1, 1, 1)
    decision = stepped(separated(profile([0.006] * LAYERS), counts, None), counts, (4, 4, 4, 4))
    slowest = [max(split) for split in splits_of(decision)]
    assert slowest == sorted(slowest, reverse=True)
    assert decision.line().endswith("ms per micro-batch expected; moves in 18 steps")


def test_a_layer_needs_memory_on_both_stages() -> None:
    counts = (5, 4, 4, 3)
    work = separated(profile([0.006] * LAYERS, kept=1000), counts, None)
    tight = max(
        stage.memory.total
        for stage in predict(
            work.profile, Pipeline("asp", 4, 1, partition=counts, recompute_ratio=(0,) * 4), Devices()
        ).stages
    )
    decision = stepped(work, counts, (4, 4, 4, 4), devices=Devices(budget=tight - 1))
    assert decision.steps == ()
    assert decision.empties == "from [5, 3, 4, 4] no layer can go on by itself, with its memory on two stages"
    assert "moves in an empty pipeline: from [5, 3, 4, 4]" in replace(decision, stays="").line()
