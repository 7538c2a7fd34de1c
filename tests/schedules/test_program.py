"""Whole programs of all ranks, drains and transfers included, in literals; what the engine is handed batch by batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from shapes import pipelines, trainings

from ds_vpipe.schedules.actions import Kind
from ds_vpipe.schedules.one_f_one_b import Exchanges, Progress
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import (
    Programs,
    Workload,
    after_batch,
    at_data_end,
    batch_actions,
    programs,
    rank_actions,
    rank_program,
)


def passes(all_programs: Programs) -> list[str]:
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.STEP, Kind.DROP_GRAD)
    return [" ".join(str(a) for a in program if a.kind in kinds) for program in all_programs]


@pytest.mark.parametrize(
    ("pipeline", "workload", "pictures"),
    [
        (
            Pipeline("asp", 2, 2),
            Workload(4, data_ends=(4,)),
            [
                "F0 F1 B0 F2 B1 STEP0 F3 B2 B3 STEP1 F4 F5 B4 F6 B5 STEP2 F7 B6 B7 STEP3",
                "F0 B0 F1 B1 STEP0 F2 B2 F3 B3 STEP1 F4 B4 F5 B5 STEP2 F6 B6 F7 B7 STEP3",
            ],
        ),
        (
            Pipeline("asp", 2, 2, (2, 0)),
            Workload(4, data_ends=(5,)),
            [
                "F0 F1 F2 B0 F3 B1 STEP0 F4 B2 B3 STEP1 DROP_GRAD4 F4 F5 F6 B4 F7 B5 STEP2 B6 B7 STEP3",
                "F0 B0 F1 B1 STEP0 F2 B2 F3 B3 STEP1 F4 B4 F4 B4 F5 B5 STEP2 F6 B6 F7 B7 STEP3",
            ],
        ),
        (
            Pipeline("asp", 4, 4, (6, 4, 2, 0)),
            Workload(2, data_ends=(7, 8)),
            [
                "F0 F1 F2 F3 F4 F5 F6 B0 B1 B2 B3 STEP0 F4 F5 F6 F7 B4 B5 B6 B7 STEP1",
                "F0 F1 F2 F3 F4 B0 F5 B1 F6 B2 B3 STEP0 DROP_GRAD4 F4 F5 F6 F7 B4 B5 B6 B7 STEP1",
                "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 STEP0 F6 B4 DROP_GRAD5 DROP_GRAD6 F4 F5 F6 B4 F7 B5 B6 B7 STEP1",
                "F0 B0 F1 B1 F2 B2 F3 B3 STEP0 F4 B4 F5 B5 F6 B6 F4 B4 F5 B5 F6 B6 F7 B7 STEP1",
            ],
        ),
        (
            Pipeline("asp", 2, 3),
            Workload(1, data_ends=(2, 5)),
            [
                "F0 F1 B0 DROP_GRAD1 F0 F1 B0 F2 B1 F3 B2 STEP0 F4 B3 DROP_GRAD4",
                "F0 B0 F1 B1 F0 B0 F1 B1 F2 B2 STEP0 F3 B3 F4 B4",
            ],
        ),
        (
            Pipeline("1f1b", 2, 3),
            Workload(1, data_ends=(2, 5)),
            [
                "F0 F1 B0 DROP_GRAD1 F0 F1 B0 F2 B1 B2 STEP0 F3 F4 B3 DROP_GRAD4",
                "F0 B0 F1 B1 F0 B0 F1 B1 F2 B2 STEP0 F3 B3 F4 B4",
            ],
        ),
        (Pipeline("gpipe", 2, 3), Workload(1, data_ends=(5,)), ["F0 F1 F2 B0 B1 B2 STEP0 F3 F4"] * 2),
        (
            Pipeline("asp", 2, 1, (3, 0)),
            Workload(4),
            ["F0 F1 F2 F3 B0 STEP0 B1 STEP1 B2 STEP2 B3 STEP3", "F0 B0 STEP0 F1 B1 STEP1 F2 B2 STEP2 F3 B3 STEP3"],
        ),
        (
            Pipeline("1f1b", 3, 3),
            Workload(2),
            [
                "F0 F1 F2 B0 B1 B2 STEP0 F3 F4 F5 B3 B4 B5 STEP1",
                "F0 F1 B0 F2 B1 B2 STEP0 F3 F4 B3 F5 B4 B5 STEP1",
                "F0 B0 F1 B1 F2 B2 STEP0 F3 B3 F4 B4 F5 B5 STEP1",
            ],
        ),
        (
            Pipeline("gpipe", 2, 3),
            Workload(2),
            ["F0 F1 F2 B0 B1 B2 STEP0 F3 F4 F5 B3 B4 B5 STEP1"] * 2,
        ),
        (Pipeline("1f1b", 3, 1), Workload(2), ["F0 B0 STEP0 F1 B1 STEP1"] * 3),
        (Pipeline("gpipe", 1, 2), Workload(1), ["F0 F1 B0 B1 STEP0"]),
        (
            Pipeline("interleaved", 2, 2, virtual_stages=2),
            Workload(2),
            [
                "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1 STEP0 0F2 0F3 2F2 2F3 2B2 2B3 0B2 0B3 STEP1",
                "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 STEP0 1F2 1F3 3F2 3B2 3F3 3B3 1B2 1B3 STEP1",
            ],
        ),
    ],
)
def test_passes(pipeline: Pipeline, workload: Workload, pictures: list[str]) -> None:
    assert passes(programs(pipeline, workload)) == pictures


@pytest.mark.parametrize(
    ("rank", "picture"),
    [
        (
            0,
            "0LOAD0 0F0 0SEND_ACT0 2RECV_ACT0 2F0 2SEND_ACT0 2RECV_GRAD0 2B0 2SEND_GRAD0 0RECV_GRAD0 0B0 REDUCE0 STEP0",
        ),
        (
            1,
            "1RECV_ACT0 1F0 1SEND_ACT0 3RECV_ACT0 3LOAD0 3F0 3B0 3SEND_GRAD0 1RECV_GRAD0 1B0 1SEND_GRAD0 REDUCE0 STEP0",
        ),
    ],
)
def test_transfers_between_parts(rank: int, picture: str) -> None:
    """The last rank's part sends to the first rank's next one, and the gradient comes back the same way."""
    pipeline = Pipeline("interleaved", 2, 1, virtual_stages=2)
    assert " ".join(map(str, rank_program(pipeline, rank, Workload(1)))) == picture


def test_exchanges_of_every_rank() -> None:
    peers = Exchanges(peers=True)
    first, last = programs(Pipeline("asp", 2, 1), Workload(1), [peers, peers])
    assert " ".join(map(str, first)).endswith("B0 REDUCE0 RECV_PEERS0 STEP0")
    assert " ".join(map(str, last)).endswith("B0 SEND_GRAD0 REDUCE0 STEP0 SEND_PEERS0")


@given(trainings())
def test_the_engine_is_handed_the_same_actions(training: tuple[Pipeline, Workload]) -> None:
    """What the generator gives to a rank that finds the end of the data where it wants a micro-batch."""
    pipeline, workload = training
    if pipeline.schedule == "interleaved":
        return
    size = pipeline.micro_batches
    for rank, program in enumerate(programs(pipeline, workload)):
        actions = []
        for start, end, _ in workload.fillings(pipeline):
            progress = Progress(start, start, None, start)
            drained = False
            while not drained:
                drained = progress.completed == progress.limit
                for action in rank_actions(pipeline, rank, progress):
                    if action.kind in (Kind.LOAD, Kind.RECV_ACT) and action.index == end:
                        progress = at_data_end(pipeline, rank, progress, end - end % size, end)
                        break
                    actions.append(action)
                    if action.kind is Kind.FORWARD:
                        progress = progress._replace(forwarded=action.index + 1)
                    elif action.kind is Kind.BACKWARD:
                        progress = progress._replace(completed=action.index + 1)
        assert tuple(actions) == program


@given(pipelines(), st.booleans())
def test_progress_after_a_batch(pipeline: Pipeline, ends: bool) -> None:
    for rank in range(pipeline.num_stages):
        progress = Progress(limit=2 * pipeline.micro_batches if ends and not pipeline.synchronous else None)
        for _ in range(2):
            actions = list(batch_actions(pipeline, rank, progress))
            progress = after_batch(pipeline, rank, progress)
            assert progress.completed == 1 + max(a.index for a in actions if a.kind is Kind.BACKWARD)
            forwards = [a.index for a in actions if a.kind is Kind.FORWARD]
            assert not forwards or progress.forwarded == 1 + max(forwards)


def test_the_rest_of_a_batch() -> None:
    pipeline = Pipeline("asp", 2, 2)
    rest = rank_actions(pipeline, 0, Progress(forwarded=2, completed=1, limit=2))
    assert " ".join(map(str, rest)) == "RECV_GRAD1 B1 REDUCE0 STEP0"
    interleaved = Pipeline("interleaved", 2, 2, virtual_stages=2)
    assert list(rank_actions(interleaved, 0, Progress(4, 4, limit=4))) == []
    assert str(next(rank_actions(interleaved, 0, Progress(4, 4, limit=6)))) == "0LOAD4"
    with pytest.raises(ValueError, match="expected the start of a batch and nothing in flight"):
        batch_actions(interleaved, 0, Progress(5, 4))
