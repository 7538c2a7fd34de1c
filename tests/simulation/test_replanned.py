"""A pipeline that balances itself, on paper: when it looks, what it decides, what that gains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import pytest
from move_checks import check_moves

from ds_vpipe.config.deepspeed_json import DeepSpeedJson
from ds_vpipe.config.replan import Replan
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.planning.devices import Devices, optimizer_bytes
from ds_vpipe.planning.layer_profile import LayerProfile, ModelProfile
from ds_vpipe.planning.pace import LinkCost
from ds_vpipe.planning.replanning import Looks
from ds_vpipe.schedules.moves import moved
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import programs
from ds_vpipe.simulation.replanning import Conditions, Course, Freezing, Slowdown, replanned

ANY = Devices()


def profile(count: int) -> ModelProfile:
    layers = tuple(LayerProfile("Layer", 0.002, 0.004, 10**6, 1000, 10) for _ in range(count))
    return ModelProfile(layers, 10, 1, "cpu", "float32", "measured")


def course(
    counts: Sequence[int],
    *changes: Slowdown | Freezing,
    micro_batches: int = 2,
    batches: int = 100,
    schedule: str = "asp",
    devices: Devices = ANY,
    **settings: object,
) -> Course:
    slow = [change for change in changes if isinstance(change, Slowdown)]
    frozen = [change for change in changes if isinstance(change, Freezing)]
    ratios = (0.0,) * len(counts)
    pipeline = Pipeline(schedule, len(counts), micro_batches, partition=tuple(counts), recompute_ratio=ratios)  # type: ignore[arg-type]
    conditions = Conditions(profile(sum(counts)), len(counts), slow, frozen)
    return replanned(conditions, pipeline, devices, Replan.model_validate({"every": 20, **settings}), batches)


def moved_at(found: Course) -> list[tuple[int, tuple[int, ...]]]:
    return [(one.update, one.better_partition) for one in found.decisions if not one.stays]


def test_ranks_read_what_they_have_written_when_all_have() -> None:
    looks = Looks.of(Pipeline("asp", 4, 2), every=20)
    found = [(update, due) for update in range(1, 50) if (due := looks.due(update))]
    assert found == [(20, "write"), (22, "read"), (40, "write"), (42, "read")]
    assert Looks.of(Pipeline("asp", 4, 1), every=64).stride == 4
    assert Looks.of(Pipeline("asp", 4, 1), every=64).delay == 4
    late = Looks.of(Pipeline("1f1b", 4, 8), every=64, since=62)
    assert [update for update in range(63, 140) if late.due(update)] == [128, 129]  # 64 is too soon to have measured


def test_a_stage_slows_down_and_is_relieved() -> None:
    found = course((4, 4, 4, 4), Slowdown(1, 2.0, 30))
    [(update, counts)] = moved_at(found)
    assert update == 42  # measured at 40, of which half of the samples are slow
    assert counts[1] in (1, 2)
    assert [stretch.updates for stretch in found.stretches] == [range(30), range(30, 42), range(42, 100)]
    before, after = found.stretches[1:]
    assert after.best_s == before.best_s == pytest.approx(0.030)
    moving, staying = found.seconds
    assert moving[50:] == pytest.approx([0.030] * 50)  # the planner's best
    assert staying[50:] == pytest.approx([0.048] * 50)
    assert moving[:40] == staying[:40]
    assert found.timeline.meta["events"][0][1] == found.decisions[0].line()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_layers_move_while_training_goes_on(micro_batches: int) -> None:
    """One by one, each when the one before has arrived; nothing drains, and no dead-lock."""
    slow = Slowdown(1, 2.0, 30)
    found = course((4, 4, 4, 4), slow, moves="live", micro_batches=micro_batches)
    empty = course((4, 4, 4, 4), slow, moves="drain", micro_batches=micro_batches)
    [(update, counts)] = moved_at(found)
    assert moved_at(empty) == [(update, counts)]
    workload = found.moving.workload
    assert workload.data_ends == ()
    decision = next(one for one in found.decisions if not one.stays)
    assert len(workload.moves) == len(decision.steps) > 1
    assert not check_moves(found.moving.pipeline, programs(found.moving.pipeline, workload), workload)
    partition = decision.partition
    for move in workload.moves:
        partition = moved(partition, move)
    assert partition == counts == found.stretches[-1].pipeline.partition
    arrived = workload.moves[-1].settled_batch(found.moving.pipeline)
    assert found.seconds[0][arrived + 1 :] == pytest.approx([0.030] * (99 - arrived))
    assert max(found.seconds[0][update:]) < 1.01 * 0.048 < max(empty.seconds[0][update:])
    assert next(one for one in found.decisions if one.update > update).update > arrived


@pytest.mark.parametrize("batches", [43, 44, 47, 50])
def test_training_may_end_before_layers_have_moved(batches: int) -> None:
    found = course((4, 4, 4, 4), Slowdown(1, 2.0, 30), moves="live", batches=batches)
    [(update, _)] = moved_at(found)
    moves = found.moving.workload.moves
    assert all(move.micro_batch < 2 * batches for move in moves)
    assert [one.updates.start for one in found.stretches][2:] == sorted(
        {m.micro_batch // 2 for m in moves[:1] + moves[-1:]}
    )
    assert update == 42
    assert len(found.seconds[0]) == batches


@pytest.mark.parametrize("moves", ["drain", "live"])
@pytest.mark.parametrize(
    ("counts", "change", "since", "updates"),
    [
        ((13, 1, 1, 1), Slowdown(1, 1.0, 1), 10, 190),  # once it is full; nothing changes
        ((4, 4, 4, 4), Slowdown(1, 2.0, 200), 200, 60),
        ((4, 4, 4, 4), Freezing(8, 100), 100, 60),
    ],
)
def test_the_new_optimum_is_reached(
    counts: tuple[int, ...], change: Slowdown | Freezing, since: int, updates: int, moves: str
) -> None:
    """Within 95 % after so many updates, none of which is twice as long as it would have been."""
    found = course(counts, change, moves=moves, batches=since + updates + 20)
    moving, staying = found.seconds
    share = found.stretches[-1].best_s / fmean(moving[-20:])
    longest = max(moving[since:]) / max(staying[since:])
    print(f"{counts}, {moves}: {share:.0%} of the best pace, longest update {longest:.2f} times the old pace")
    assert share >= 0.95
    assert longest < 2
    assert found.stretches[-1].best_s / fmean(staying[-20:]) < 0.8


def test_a_device_that_recovers_gets_its_layers_back() -> None:
    found = course((4, 4, 4, 4), Slowdown(1, 2.0, 20), Slowdown(1, 1.0, 50))
    assert [update for update, _ in moved_at(found)] == [42, 62]
    assert moved_at(found)[-1][1] == (4, 4, 4, 4)


def test_frozen_layers_have_no_update_to_make_room_for() -> None:
    layers = tuple(replace(layer, largest_weight_bytes=10**6) for layer in profile(4).layers)
    conditions = Conditions(replace(profile(4), layers=layers), 2, [], [Freezing(1, 3)])
    for update, most in ((2, [10**6] * 4), (3, [0, *[10**6] * 3])):
        assert [layer.largest_weight_bytes for layer in conditions.profile(update).layers] == most


def test_layers_freeze() -> None:
    found = course((4, 4, 4, 4), Freezing(8, 20), batches=80)
    _, counts = moved_at(found)[-1]
    assert counts[0] + counts[1] > 8
    assert found.seconds[0][-1] <= 1.05 * found.stretches[-1].best_s < found.seconds[1][-1]


@pytest.mark.parametrize("options", [{"dry_run": True}, {"threshold": 0.9}])
def test_nothing_moves_that_would_not_in_a_run(options: dict[str, object]) -> None:
    found = course((13, 1, 1, 1), batches=50, **options)
    assert len(found.decisions) == 2
    assert found.seconds[0] == found.seconds[1]
    assert [stretch.pipeline.partition for stretch in found.stretches] == [(13, 1, 1, 1)]


@pytest.mark.parametrize(("schedule", "update"), [("asp", 22), ("1f1b", 21)])
def test_a_move_takes_the_time_of_its_bytes(schedule: str, update: int) -> None:
    """Nine layers of 1 MB leave stage 0, each with two values of state per weight: 27 MB at 100 MB/s."""
    held = optimizer_bytes(DeepSpeedJson({}))
    free = course((13, 1, 1, 1), schedule=schedule, devices=Devices(optimizer=held), batches=40)
    slow = course((13, 1, 1, 1), schedule=schedule, devices=Devices(None, held, LinkCost(0.0, 1e8)), batches=40)
    assert moved_at(free) == moved_at(slow) == [(update, (4, 4, 4, 4))]
    took = [one.seconds[0][update] * 2 for one in (free, slow)]
    assert took[1] - took[0] == pytest.approx(0.27, abs=1e-4)  # messages of 10 bytes besides


def test_sixty_four_stages() -> None:
    found = course((2,) * 64, Slowdown(20, 2.0, 10), micro_batches=8, batches=30, every=10)
    [(update, counts)] = moved_at(found)
    assert update == 20 + 8  # the first stage is 64 micro-batches behind
    assert counts[20] == 1
    assert sum(counts) == 128
    assert found.stretches[-1].best_s == pytest.approx(0.018)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(VPipeConfigError, match=r"--slow: got 4; allowed: a stage from 0 to 3"):
        course((1, 1, 1, 1), Slowdown(4, 2.0, 1))
    with pytest.raises(VPipeConfigError, match=r"--freeze: got 4; allowed: fewer than all 4 layers"):
        course((1, 1, 1, 1), Freezing(4, 1))


def test_a_look_sees_the_median_of_its_batches() -> None:
    conditions = Conditions(profile(4), 2, [Slowdown(1, 3.0, 5)], [Freezing(1, 5)])
    early, late = conditions.measured([1, 2, 3, 4, 5], (2, 2)), conditions.measured([3, 4, 5, 6, 7], (1, 3))
    assert [layer.forward_s for layer in early.layers] == [0.002] * 4
    assert [layer.backward_s for layer in early.layers] == [0.004] * 4
    assert [layer.forward_s for layer in late.layers] == pytest.approx([0.002, *[0.006] * 3])
    assert late.layers[0] == replace(profile(4).layers[0], backward_s=0.0, frozen_bytes=10**6)
