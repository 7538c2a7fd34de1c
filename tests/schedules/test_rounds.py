"""Programs in the portions in which a looping script asks for them: nothing is lost, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from script_losses import loss_known
from shapes import pipelines

from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.dry_run import receive_link, received_as, send_link
from ds_vpipe.schedules.one_f_one_b import Exchanges, Progress
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload, rank_program
from ds_vpipe.schedules.rounds import (
    Round,
    drain_actions,
    next_round,
    waits_for_loss,
)

looped = pipelines(most_stages=5, most_micro_batches=5).filter(lambda pipeline: pipeline.virtual_stages == 1)
EXCHANGES = Exchanges(peers=True)


def after_round(progress: Progress, done: Round) -> Progress:
    """Where the rank stands after a round."""
    passes = sum(action.kind is Kind.BACKWARD for action in done.backward)
    return progress._replace(forwarded=progress.forwarded + 1, completed=progress.completed + passes)


def text(actions: Iterable[Action]) -> str:
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.STEP)
    return " ".join(str(action) for action in actions if action.kind in kinds)


def rounds_of(
    pipeline: Pipeline, rank: int, count: int, progress: Progress | None = None
) -> tuple[list[Round], Progress]:
    done, progress = [], progress or Progress()
    for _ in range(count):
        done.append(next_round(pipeline, rank, progress, EXCHANGES))
        progress = after_round(progress, done[-1])
    return done, progress


def picture(pipeline: Pipeline, rank: int, count: int) -> str:
    done, _ = rounds_of(pipeline, rank, count)
    return " | ".join(" / ".join(text(portion) for portion in (r.forward, r.backward, r.step)) for r in done)


def test_rounds_in_literals() -> None:
    asp = Pipeline("asp", 3, 1)
    assert picture(asp, 0, 4) == "F0 /  /  | F1 /  /  | F2 / B0 / STEP0 | F3 / B1 / STEP1"
    assert picture(asp, 1, 3) == "F0 /  /  | F1 / B0 / STEP0 | F2 / B1 / STEP1"
    assert picture(asp, 2, 2) == "F0 / B0 / STEP0 | F1 / B1 / STEP1"
    bsp = Pipeline("1f1b", 3, 2)
    assert picture(bsp, 0, 3) == "F0 /  /  | F1 / B0 B1 / STEP0 | F2 /  / "
    assert picture(bsp, 1, 3) == "F0 /  /  | F1 / B0 B1 / STEP0 | F2 /  / "
    assert picture(bsp, 2, 3) == "F0 / B0 /  | F1 / B1 / STEP0 | F2 / B2 / "


@pytest.mark.parametrize(
    ("pipeline", "rank", "known"),
    [
        (Pipeline("asp", 4, 1), 0, [0, 1, 2, 2, 2, 2, 3, 4]),
        (Pipeline("asp", 4, 4), 2, [0, 0, 1, 2, 3, 4, 5, 6]),
        (Pipeline("asp", 4, 2), 3, [0, 1, 2, 3, 4, 5, 6, 7]),
        (Pipeline("asp", 3, 1, (2, 2, 0)), 0, [0, 1, 2, 2, 2, 2, 3, 4]),
        (Pipeline("1f1b", 4, 2), 0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (Pipeline("1f1b", 2, 4), 0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (Pipeline("gpipe", 2, 3), 0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (Pipeline("gpipe", 2, 3), 1, [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_losses_known_in_literals(pipeline: Pipeline, rank: int, known: list[int]) -> None:
    assert [loss_known(pipeline, rank, Progress(handed, handed)) for handed in range(8)] == known


def test_losses_known_after_a_drain() -> None:
    pipeline = Pipeline("asp", 3, 2)
    known = [loss_known(pipeline, 0, Progress(handed, 5, None, filled_from=5)) for handed in range(5, 10)]
    assert known == [5, 6, 6, 6, 7]


@given(looped, st.integers(1, 4))
def test_portions_are_the_program(pipeline: Pipeline, batches: int) -> None:
    count = batches * pipeline.micro_batches
    for rank in range(pipeline.num_stages):
        done, progress = rounds_of(pipeline, rank, count)
        got = [a for r in done for portion in (r.forward, r.backward, r.step) for a in portion]
        got += drain_actions(pipeline, rank, progress, EXCHANGES)
        assert got == list(rank_program(pipeline, rank, Workload(batches), EXCHANGES))


@given(looped, st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_every_pass_runs_once_whatever_is_drained(pipeline: Pipeline, counts: list[int]) -> None:
    """Also where drains come in the middle of batches; updates belong to complete batches only."""
    for rank in range(pipeline.num_stages):
        passes, progress = Counter[str](), Progress()
        for count in counts:
            done, progress = rounds_of(pipeline, rank, count, progress)
            ran = [a for r in done for portion in (r.forward, r.backward, r.step) for a in portion]
            ran += drain_actions(pipeline, rank, progress, EXCHANGES)
            passes.update(text(ran).split())
            handed = progress.forwarded
            progress = Progress(handed, handed, None, filled_from=handed)
        updates = progress.forwarded // pipeline.micro_batches
        wanted = [f"{kind}{index}" for index in range(progress.forwarded) for kind in "FB"]
        assert passes == Counter([*wanted, *(f"STEP{batch}" for batch in range(updates))])


class Lockstep:
    """All ranks of a script in which every call is followed by a barrier; sends never block."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline, self.ranks = pipeline, range(pipeline.num_stages)
        self.progress = [Progress() for _ in self.ranks]
        self.sent: set[tuple[int, Action]] = set()  # to whom, and the action that receives it
        self.losses: dict[int, set[int]] = {rank: set() for rank in self.ranks}

    def portion(self, programs: list[list[Action]]) -> None:
        """Run one portion on every rank to its end."""
        todo = [list(program) for program in programs]
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                while todo[rank] and self.can(rank, todo[rank][0]):
                    self.do(rank, todo[rank].pop(0))
                    moved = True
        assert not any(todo), f"ranks wait for ever at {[str(rest[0]) if rest else '-' for rest in todo]}"

    def can(self, rank: int, action: Action) -> bool:
        waits = receive_link(action.kind, rank, self.pipeline.num_stages) is not None
        return not waits or (rank, action) in self.sent

    def do(self, rank: int, action: Action) -> None:
        link = send_link(action.kind, rank, self.pipeline.num_stages)
        if link is not None:
            self.sent.add((link.target, received_as(action)))
        if action.kind is Kind.RECV_GRAD:
            self.losses[rank].add(action.index)
        if action.kind is Kind.FORWARD and rank == self.ranks[-1]:
            self.losses[rank].add(action.index)

    def round(self) -> None:
        done = [next_round(self.pipeline, rank, self.progress[rank], EXCHANGES) for rank in self.ranks]
        self.portion([list(r.forward) for r in done])
        for rank in self.ranks:
            before = self.progress[rank]
            if waits_for_loss(self.pipeline, rank, before):
                assert before.forwarded in self.losses[self.ranks[-1]]  # has been computed in this portion
                self.losses[rank].add(before.forwarded)
            assert max(self.losses[rank]) == loss_known(self.pipeline, rank, before)
        self.portion([list(r.backward) for r in done])
        self.portion([list(r.step) for r in done])
        self.progress = [after_round(*pair) for pair in zip(self.progress, done, strict=True)]

    def drain(self) -> None:
        self.portion([list(drain_actions(self.pipeline, r, self.progress[r], EXCHANGES)) for r in self.ranks])
        handed = {progress.forwarded for progress in self.progress}.pop()
        self.progress = [Progress(handed, handed, None, filled_from=handed) for _ in self.ranks]


@given(looped, st.lists(st.integers(0, 9), min_size=1, max_size=3))
def test_scripts_may_wait_for_each_other_between_any_two_calls(pipeline: Pipeline, counts: list[int]) -> None:
    script = Lockstep(pipeline)
    for count in counts:
        for _ in range(count):
            script.round()
        script.drain()
