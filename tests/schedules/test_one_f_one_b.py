"""The 1F1B order: its picture in literals, its versions by brute force, and all stages together without processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.one_f_one_b import (
    Progress,
    compute_actions,
    default_depths,
    update_delay,
    version_used,
    with_communication,
)


def text(actions: Iterator[Action]) -> str:
    return " ".join(str(action) for action in actions)


def after_batch(progress: Progress, depth: int, micro_batches: int) -> Progress:
    """Where a stage stands after an undisturbed batch."""
    completed = progress.completed + micro_batches
    ahead = completed + depth if progress.limit is None else min(completed + depth, progress.limit)
    return progress._replace(completed=completed, forwarded=max(progress.forwarded, ahead))


def batches_of(depth: int, micro_batches: int, count: int) -> Iterator[Action]:
    progress = Progress()
    for _ in range(count):
        yield from compute_actions(progress, depth, micro_batches)
        progress = after_batch(progress, depth, micro_batches)


# The order


@pytest.mark.parametrize(
    ("stage", "picture"),
    [(0, "F0 F1 F2 B0 F3 B1 F4 B2"), (1, "F0 F1 B0 F2 B1 F3 B2"), (2, "F0 B0 F1 B1 F2 B2")],
)
def test_picture_of_the_docstring(stage: int, picture: str) -> None:
    depth = default_depths(3)[stage]
    passes = (a for a in batches_of(depth, 1, 3) if a.kind in (Kind.FORWARD, Kind.BACKWARD))
    assert text(passes) == picture


@pytest.mark.parametrize(
    ("depth", "micro_batches", "picture"),
    [
        (0, 1, "F0 B0 REDUCE0 STEP0 F1 B1 REDUCE1 STEP1"),
        (1, 1, "F0 F1 B0 REDUCE0 STEP0 F2 B1 REDUCE1 STEP1"),
        (1, 2, "F0 F1 B0 F2 B1 REDUCE0 STEP0 F3 B2 F4 B3 REDUCE1 STEP1"),
        (3, 2, "F0 F1 F2 F3 B0 F4 B1 REDUCE0 STEP0 F5 B2 F6 B3 REDUCE1 STEP1"),
    ],
)
def test_two_batches(depth: int, micro_batches: int, picture: str) -> None:
    assert text(batches_of(depth, micro_batches, 2)) == picture


@pytest.mark.parametrize(
    ("progress", "picture"),
    [
        (Progress(limit=0), ""),
        (Progress(limit=2), "F0 F1 B0 B1 REDUCE0 STEP0"),
        (Progress(limit=4), "F0 F1 F2 F3 B0 B1 REDUCE0 STEP0"),
        (Progress(forwarded=4, completed=2, limit=4), "B2 B3 REDUCE1 STEP1"),
        (Progress(forwarded=5, completed=3, limit=6), "F5 B3 REDUCE1 STEP1"),
        (Progress(forwarded=5, completed=3), "F5 F6 B3 REDUCE1 STEP1"),
        (Progress(forwarded=4, completed=4, limit=4), ""),
    ],
)
def test_rest_of_a_batch_up_to_the_limit(progress: Progress, picture: str) -> None:
    assert text(compute_actions(progress, 3, 2)) == picture


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("stages", [1, 2, 4, 5])
def test_a_limit_at_every_batch_end_is_1f1b_with_flush(stages: int, micro_batches: int) -> None:
    for stage, depth in enumerate(default_depths(stages)):
        for batch in range(3):
            start, end = batch * micro_batches, (batch + 1) * micro_batches
            warmup = min(stages - 1 - stage, micro_batches)
            wanted = [f"F{start + i}" for i in range(warmup)]
            for i in range(micro_batches - warmup):
                wanted += [f"F{start + warmup + i}", f"B{start + i}"]
            wanted += [f"B{i}" for i in range(end - warmup, end)]
            wanted += [f"REDUCE{batch}", f"STEP{batch}"]
            progress = Progress(forwarded=start, completed=start, limit=end, filled_from=start)
            assert text(compute_actions(progress, depth, micro_batches)) == " ".join(wanted)


@pytest.mark.parametrize(
    ("stage", "picture"),
    [
        (0, "LOAD0 F0 SEND_ACT0 LOAD1 F1 SEND_ACT1 RECV_GRAD0 B0 REDUCE0 STEP0"),
        (1, "RECV_ACT0 F0 SEND_ACT0 RECV_ACT1 F1 SEND_ACT1 RECV_GRAD0 B0 SEND_GRAD0 REDUCE0 STEP0"),
        (2, "RECV_ACT0 LOAD0 F0 RECV_ACT1 LOAD1 F1 B0 SEND_GRAD0 REDUCE0 STEP0"),
    ],
)
def test_communication_of_a_stage(stage: int, picture: str) -> None:
    assert text(with_communication(compute_actions(Progress(), 1, 1), stage, 3)) == picture


def test_communication_of_a_single_stage() -> None:
    assert text(with_communication(compute_actions(Progress(), 0, 1), 0, 1)) == "LOAD0 F0 B0 REDUCE0 STEP0"
    assert text(with_communication([Action(Kind.BACKWARD, 3)], 0, 2)) == "RECV_GRAD3 B3"


def test_drained() -> None:
    assert Progress(3, 3).drained
    assert not Progress(4, 3).drained


# Versions, by counting updates


class Stage:
    """Executes what ``compute_actions`` says and counts updates.

    Attributes:
        used: version of the forward pass of each micro-batch, the last one if it was run twice.
        held: number of versions held at each update: the newest and those of micro-batches in flight.
        filled_from: for each micro-batch the first one since the pipeline had last drained.
    """

    def __init__(self, depth: int, micro_batches: int) -> None:
        self.depth, self.micro_batches = depth, micro_batches
        self.progress = Progress()
        self.updates = 0
        self.used: dict[int, int] = {}
        self.in_flight: dict[int, int] = {}
        self.held: list[int] = []
        self.filled_from: dict[int, int] = {}
        self.staleness: list[int] = []

    def run(self, end: int) -> None:
        """Train on micro-batches up to ``end``, where the data end; complete batches only, then drain."""
        done = self.progress.completed
        self.progress = Progress(done, done, None, done)
        while self.progress.completed != self.progress.limit:
            for action in compute_actions(self.progress, self.depth, self.micro_batches):
                if action.kind is Kind.FORWARD and action.index >= end:
                    self._end(end - end % self.micro_batches)
                    break
                self.execute(action)

    def _end(self, limit: int) -> None:
        assert self.progress.limit is None, "asked for data beyond the limit"
        for index in [index for index in self.in_flight if index >= limit]:
            del self.in_flight[index]
        self.progress = Progress(
            min(self.progress.forwarded, limit), min(self.progress.completed, limit), limit, self.progress.filled_from
        )

    def execute(self, action: Action) -> None:
        index = action.index
        if action.kind is Kind.FORWARD:
            assert index == self.progress.forwarded
            self.used[index] = self.in_flight[index] = self.updates
            self.filled_from[index] = self.progress.filled_from
            self.progress = self.progress._replace(forwarded=index + 1)
        elif action.kind is Kind.BACKWARD:
            assert index == self.progress.completed
            self.staleness.append(self.updates - self.in_flight.pop(index))
            self.progress = self.progress._replace(completed=index + 1)
        elif action.kind is Kind.STEP:
            assert index == self.updates
            assert self.progress.completed == (index + 1) * self.micro_batches
            self.updates += 1
            self.held.append(len({self.updates, *self.in_flight.values()}))


@given(depth=st.integers(0, 9), micro_batches=st.integers(1, 6), ends=st.lists(st.integers(0, 25), max_size=4))
def test_version_used_is_the_number_of_updates(depth: int, micro_batches: int, ends: list[int]) -> None:
    stage = Stage(depth, micro_batches)
    for length in [*ends, 30]:
        end = stage.progress.completed + length
        stage.run(end)
        assert stage.progress.drained
        assert stage.progress.completed == end - end % micro_batches == stage.updates * micro_batches
        assert not stage.in_flight
    for index, version in stage.used.items():
        assert version == version_used(index, depth, micro_batches, stage.filled_from[index]), index


@given(depth=st.integers(0, 12), micro_batches=st.integers(1, 8))
def test_versions_alive_in_steady_state(depth: int, micro_batches: int) -> None:
    stage = Stage(depth, micro_batches)
    for _ in range(30):
        for action in compute_actions(stage.progress, depth, micro_batches):
            stage.execute(action)
    assert set(stage.held[15:]) == {update_delay(depth, micro_batches) + 1}
    assert max(stage.held) == update_delay(depth, micro_batches) + 1
    assert max(stage.staleness) == update_delay(depth, micro_batches)


@pytest.mark.parametrize(
    ("depth", "micro_batches", "alive"), [(0, 1, 1), (3, 1, 4), (3, 2, 3), (3, 3, 2), (3, 4, 2), (3, 8, 2), (0, 8, 1)]
)
def test_versions_alive_in_numbers(depth: int, micro_batches: int, alive: int) -> None:
    assert update_delay(depth, micro_batches) + 1 == alive


# All stages together


def depth_maps(stages: int) -> st.SearchStrategy[tuple[int, ...]]:
    values = st.lists(st.integers(0, 8), min_size=stages - 1, max_size=stages - 1)
    return values.map(lambda depths: (*sorted(depths, reverse=True), 0))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int, int | None]:
    """Depths, micro-batches per batch, batches, and the limit in micro-batches."""
    depths = draw(st.integers(1, 6).flatmap(depth_maps) | st.integers(1, 6).map(default_depths))
    micro_batches, batches = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return depths, micro_batches, batches, draw(st.sampled_from([None, micro_batches * batches]))


class Link:
    """One direction between two stages. A send waits for a receive: one posted ahead or one that is waited for."""

    def __init__(self, posted: int) -> None:
        self.posted = posted
        self.sent: list[int] = []
        self.received: list[int] = []
        self.wanted = False

    def send(self, index: int) -> bool:
        """False while there is no receive for the message."""
        if len(self.sent) - len(self.received) == max(self.posted, int(self.wanted)):
            return False
        self.sent.append(index)
        return True

    def receive(self, index: int) -> bool:
        """False while there is nothing to receive."""
        self.wanted = len(self.sent) == len(self.received)
        if not self.wanted:
            self.received.append(index)
        return not self.wanted


def program(
    depths: Sequence[int], micro_batches: int, batches: int, limit: int | None, stage: int
) -> Iterator[tuple[Action, Progress]]:
    """All actions of a stage, with its progress at the start of the batch."""
    progress = Progress(limit=limit)
    for _ in range(batches):
        for action in with_communication(compute_actions(progress, depths[stage], micro_batches), stage, len(depths)):
            yield action, progress
        progress = after_batch(progress, depths[stage], micro_batches)


def dry_run(
    depths: Sequence[int], micro_batches: int, batches: int, limit: int | None, spare: int | None = 1
) -> tuple[list[str], list[Link]]:
    """Carry out all stages' actions in turn until none can go on.

    Args:
        spare: receives posted on a link beyond the difference of its stages' depths; None: none are posted.

    Returns:
        The action at which each stage that is not done stands, and the links, forward ones first.
    """
    stages = len(depths)
    posted = [0 if spare is None else depths[s] - depths[s + 1] + spare for s in range(stages - 1)]
    forward, backward = [Link(p) for p in posted], [Link(p) for p in posted]
    programs = [(a for a, _ in program(depths, micro_batches, batches, limit, s)) for s in range(stages)]
    waiting = [next(actions, None) for actions in programs]
    moved = True
    while moved:
        moved = False
        for stage in range(stages):
            while (action := waiting[stage]) is not None:
                done = True
                if action.kind is Kind.SEND_ACT:
                    done = forward[stage].send(action.index)
                elif action.kind is Kind.RECV_ACT:
                    done = forward[stage - 1].receive(action.index)
                elif action.kind is Kind.SEND_GRAD:
                    done = backward[stage - 1].send(action.index)
                elif action.kind is Kind.RECV_GRAD:
                    done = backward[stage].receive(action.index)
                if not done:
                    break
                waiting[stage], moved = next(programs[stage], None), True
    return [str(action) for action in waiting if action is not None], forward + backward


@given(pipelines())
def test_no_dead_lock_and_every_receive_matched(pipeline: tuple[tuple[int, ...], int, int, int | None]) -> None:
    depths, micro_batches, batches, limit = pipeline
    stuck, links = dry_run(depths, micro_batches, batches, limit)
    assert stuck == []
    for position, link in enumerate(links):
        assert link.received == link.sent[: len(link.received)]
        assert link.sent == list(range(len(link.sent)))
        if limit is not None:
            assert link.received == link.sent
        elif position < len(links) // 2:  # activations that the next stage will want in the next batch
            assert len(link.sent) - len(link.received) == depths[position] - depths[position + 1]


def test_dry_run_finds_a_dead_lock() -> None:
    """Without receives posted ahead neighbours meet sending to each other."""
    assert dry_run((2, 1, 0), 1, 3, None, spare=None)[0] == ["SEND_ACT2", "SEND_ACT1", "SEND_GRAD0"]


@given(pipelines())
def test_every_micro_batch_passes_once(pipeline: tuple[tuple[int, ...], int, int, int | None]) -> None:
    depths, micro_batches, batches, limit = pipeline
    for stage in range(len(depths)):
        actions = [a for a, _ in program(depths, micro_batches, batches, limit, stage)]
        for kind, ahead in ((Kind.FORWARD, depths[stage] if limit is None else 0), (Kind.BACKWARD, 0)):
            indices = [a.index for a in actions if a.kind is kind]
            assert indices == list(range(micro_batches * batches + ahead))
        assert [a.index for a in actions if a.kind is Kind.STEP] == list(range(batches))


@given(pipelines())
def test_vertical_version_exists_when_it_is_used(pipeline: tuple[tuple[int, ...], int, int, int | None]) -> None:
    """The version stage 0 used for a micro-batch is at every stage one that the stage has made already."""
    depths, micro_batches, batches, _ = pipeline
    for depth in depths:
        actions = islice(batches_of(depth, micro_batches, batches), 1000)
        updates = 0
        for action in actions:
            if action.kind is Kind.FORWARD:
                assert version_used(action.index, depths[0], micro_batches) <= updates
            updates += action.kind is Kind.STEP
