"""Pictures of faults, in literals."""

from __future__ import annotations

from ds_vpipe.schedules.actions import Action
from ds_vpipe.schedules.check import check_programs, dead_locks
from ds_vpipe.schedules.fault_grid import fault_grid
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Programs, Workload, programs


def grid(pipeline: Pipeline, wrong: Programs, workload: Workload) -> list[str]:
    return fault_grid(pipeline, wrong, check_programs(pipeline, wrong, workload)).splitlines()


def test_the_picture_of_the_docstring() -> None:
    pipeline, workload = Pipeline("asp", 3, 1), Workload(6)
    first, second, third = programs(pipeline, workload)
    wrong = first, second, tuple(action for action in third if str(action) != "SEND_GRAD2")
    assert grid(pipeline, wrong, workload) == [
        "rank 0 |F0 F1 F2 .  .  B0 F3 B1 F4        .  .  B2 |",
        "rank 1 |.  F0 F1 .  B0 F2 B1 F3 .         .  B2 F4 |",
        "rank 2 |.  .  F0 B0 F1 B1 F2 B2 !REDUCE2! .  .  .  |",
        "rank 2, position 18, REDUCE2: SEND_GRAD2 has to come before it",
    ]


def test_a_dead_lock() -> None:
    pipeline, workload = Pipeline("1f1b", 3, 2), Workload(1)
    first, second, third = programs(pipeline, workload)
    early = Action.parse("RECV_GRAD0")
    wrong = first, (early, *(action for action in second if action != early)), third
    assert grid(pipeline, wrong, workload) == [
        "rank 0 |F0           F1 !RECV_GRAD0! .  .  .  |",
        "rank 1 |!RECV_GRAD0! .  .            .  .  .  |",
        "rank 2 |!RECV_ACT0!  .  .            .  .  .  |",
        "rank 0, position 6, RECV_GRAD0: it waits for ever for rank 1 to send it, which stands at RECV_GRAD0",
        "rank 1, position 0, RECV_GRAD0: it waits for ever for rank 2 to send it, which stands at RECV_ACT0",
        "rank 2, position 0, RECV_ACT0: it waits for ever for rank 1 to send it, which stands at RECV_GRAD0",
    ]


def test_a_missing_end_late_in_a_run() -> None:
    pipeline, workload = Pipeline("interleaved", 2, 2, virtual_stages=2), Workload(3)
    first, second = programs(pipeline, workload)
    lines = grid(pipeline, (first[:-2], second), workload)
    assert lines[0].startswith("rank 0 |")
    assert "0B5 !end! " in lines[0]
    assert "0F0" not in lines[0]
    assert lines[-1].endswith("end: STEP2 is missing")


def test_nothing_to_mark() -> None:
    pipeline = Pipeline("gpipe", 2, 2)
    lines = fault_grid(pipeline, programs(pipeline, Workload(1)), []).splitlines()
    assert lines[0].startswith("rank 0 |F0 F1 .  .  B0 B1")
    assert len(lines) == 2
    assert dead_locks(programs(pipeline, Workload(1)), pipeline) == []
