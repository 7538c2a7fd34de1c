"""Checks of programs: everything the generators make is right, and everything that is damaged is found where it is."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from shapes import pipelines, trainings

from ds_vpipe.errors import PipelineProtocolError
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.check import ScheduleFault, check_pipeline, check_programs, typical_workload
from ds_vpipe.schedules.one_f_one_b import Exchanges, exchanges_by_rank
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Programs, Workload, programs

ASP = Pipeline("asp", 3, 2)
THREE = Workload(3)


def text(program: tuple[Action, ...]) -> list[str]:
    return [str(action) for action in program]


def damaged(original: Programs, rank: int, change: Callable[[list[str]], None]) -> Programs:
    """``original`` with the program of one rank changed as a list of texts."""
    names = text(original[rank])
    change(names)
    program = tuple(Action.parse(name) for name in names)
    return (*original[:rank], program, *original[rank + 1 :])


def without(*missing: str) -> Callable[[list[str]], None]:
    def change(names: list[str]) -> None:
        for name in missing:
            names.remove(name)

    return change


def twice(name: str) -> Callable[[list[str]], None]:
    return lambda names: names.insert(names.index(name), name)


def swapped(one: str, other: str) -> Callable[[list[str]], None]:
    def change(names: list[str]) -> None:
        i, j = names.index(one), names.index(other)
        names[i], names[j] = names[j], names[i]

    return change


def inserted(name: str, before: str) -> Callable[[list[str]], None]:
    return lambda names: names.insert(names.index(before), name)


def moved(name: str, before: str) -> Callable[[list[str]], None]:
    def change(names: list[str]) -> None:
        names.remove(name)
        names.insert(names.index(before), name)

    return change


# Right programs


@given(trainings(most_stages=6, most_micro_batches=10))
@settings(max_examples=300)
def test_generated_programs_are_right(training: tuple[Pipeline, Workload]) -> None:
    pipeline, workload = training
    assert check_programs(pipeline, programs(pipeline, workload), workload) == []


@pytest.mark.parametrize("depth_map", [(2, 0), (4, 0), (3, 2, 1, 0), (6, 4, 2, 0), (9, 6, 3, 0), (5, 5, 0)])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4, 7])
def test_data_of_every_length(depth_map: tuple[int, ...], micro_batches: int) -> None:
    pipeline = Pipeline("asp", len(depth_map), micro_batches, depth_map)
    exchanges = exchanges_by_rank(pipeline.num_stages, [(0, pipeline.num_stages - 1)], peers=True)
    for length in range(1, 3 * micro_batches + depth_map[0] + 2):
        workload = Workload(length // micro_batches + 1, (length,))
        assert check_programs(pipeline, programs(pipeline, workload, exchanges), workload, exchanges) == [], length


@given(trainings())
@settings(max_examples=300)
def test_peer_updates_make_nobody_wait_for_ever(training: tuple[Pipeline, Workload]) -> None:
    pipeline, workload = training
    exchanges = exchanges_by_rank(pipeline.num_stages, peers=True)
    assert check_programs(pipeline, programs(pipeline, workload, exchanges), workload, exchanges) == []


@given(pipelines(most_stages=10, most_micro_batches=60))
@settings(max_examples=100)
def test_any_pipeline_may_start(pipeline: Pipeline) -> None:
    check_pipeline(pipeline)


@pytest.mark.parametrize(
    ("pipeline", "seconds"),
    [
        (Pipeline("asp", 4, 1), 0.05),
        (Pipeline("interleaved", 4, 8, virtual_stages=4), 0.1),
        (Pipeline("asp", 64, 1), 2.0),
        (Pipeline("1f1b", 64, 1024), 2.0),
    ],
)
def test_the_check_at_start_is_fast(pipeline: Pipeline, seconds: float) -> None:
    check_pipeline(pipeline)
    begin = time.process_time()
    check_pipeline(pipeline)
    assert time.process_time() - begin < seconds


@pytest.mark.parametrize("micro_batches", [1, 2, 3, 64, 200])
@pytest.mark.parametrize("depth_map", [None, (70, 3, 0), (5, 5, 0)])
def test_the_typical_workload_uses_updated_weights(micro_batches: int, depth_map: tuple[int, ...] | None) -> None:
    pipeline = Pipeline("asp", 3, micro_batches, depth_map)
    workload = typical_workload(pipeline)
    built = programs(pipeline, workload)
    program = text(built[0])
    assert program.index("STEP0") < program.index(f"F{workload.data_ends[0] - 1}")
    assert workload.data_ends[0] % micro_batches == 0, "one at the end of a batch"
    assert {end % micro_batches for end in workload.data_ends} >= {0, 1 % micro_batches, micro_batches - 1}
    assert (micro_batches > 1) == any(action.kind is Kind.DROP_GRAD for program in built for action in program)


# Damaged programs of one rank


@pytest.mark.parametrize(
    ("rank", "change", "at", "reason"),
    [
        (1, without("F2"), "SEND_ACT2", "F2 has to come before it"),
        (1, without("RECV_ACT2"), "F2", "RECV_ACT2 has to come before it"),
        (1, without("RECV_GRAD2"), "B2", "RECV_GRAD2 has to come before it"),
        (1, without("SEND_ACT2"), "B1", "SEND_ACT2 has to come before it"),
        (1, without("SEND_GRAD1"), "REDUCE0", "SEND_GRAD1 has to come before it"),
        (1, without("B2"), "SEND_GRAD2", "B2 has to come before it"),
        (2, without("LOAD3"), "F3", "LOAD3 has to come before it"),
        (1, without("REDUCE1"), "STEP1", "REDUCE1 is next"),
        (1, without("STEP0"), "RECV_ACT3", "STEP0 has to come before it"),
        (1, without("REDUCE0", "STEP0"), "F3", "it would run under version 0 of the weights, 1 is due"),
        (2, without("REDUCE1", "STEP1"), "F4", "it would run under version 1 of the weights, 2 is due"),
        (0, without("STEP2"), None, "STEP2 is missing"),
        (0, without("B5"), "REDUCE2", "B5 has to come before it"),
        (1, without("SEND_GRAD5"), "REDUCE2", "SEND_GRAD5 has to come before it"),
        (0, without("REDUCE1", "STEP1"), "B4", "STEP1 has to come before it"),
        (0, lambda names: names.append("LOAD6"), "LOAD6", "the data end before it, at 6"),
        (1, lambda names: names.append("RECV_ACT6"), "RECV_ACT6", "the data end before it, at 6"),
        (1, lambda names: names.append("RECV_GRAD6"), "RECV_GRAD6", "the data end before it, at 6"),
        (1, twice("F2"), "SEND_ACT2", None),
        (1, twice("RECV_ACT2"), "RECV_ACT2", "RECV_ACT3 is next"),
        (1, twice("SEND_ACT2"), "SEND_ACT2", "SEND_ACT3 is next"),
        (1, twice("B2"), "B2", "SEND_GRAD2 has to come before it"),
        (1, twice("STEP1"), "STEP1", "REDUCE2 is next"),
        (1, twice("REDUCE1"), "REDUCE1", "STEP1 is next"),
        (1, swapped("F2", "F3"), "F3", "F2 is next"),
        (1, swapped("RECV_ACT2", "RECV_ACT3"), "RECV_ACT3", "RECV_ACT2 is next"),
        (1, swapped("SEND_ACT2", "SEND_ACT3"), "SEND_ACT3", "SEND_ACT2 has to come before it"),
        (1, swapped("B1", "B2"), "B2", "B1 is next"),
        (2, swapped("F2", "B2"), "B2", "F2 has to come before it"),
        (1, moved("STEP0", before="RECV_ACT4"), "RECV_ACT3", "STEP0 has to come before it"),
        (1, moved("F3", before="RECV_GRAD1"), "F3", "RECV_ACT3 has to come before it"),
        (0, lambda names: names.insert(0, "0F0"), "0F0", "rank 0 does nothing of that kind with that part"),
        (0, lambda names: names.insert(3, "RECV_ACT0"), "RECV_ACT0", "rank 0 does nothing of that kind with that part"),
        (2, lambda names: names.insert(0, "SEND_ACT0"), "SEND_ACT0", "rank 2 does nothing of that kind with that part"),
        (1, lambda names: names.insert(0, "LOAD0"), "LOAD0", "rank 1 does nothing of that kind with that part"),
    ],
)
def test_damage_to_one_rank(rank: int, change: Callable[[list[str]], None], at: str | None, reason: str | None) -> None:
    right = programs(ASP, THREE)
    wrong = damaged(right, rank, change)
    faults = check_programs(ASP, wrong, THREE)
    if reason is None:  # the second of two equal passes
        at, reason = "F2", "SEND_ACT2 has to come before it"
    assert [(fault.rank, fault.reason) for fault in faults] == [(rank, reason)]
    fault = faults[0]
    assert (None if fault.action is None else str(fault.action)) == at
    program = wrong[rank]
    assert fault.position == len(program) if at is None else program[fault.position] == fault.action
    changed = next((i for i, pair in enumerate(zip(right[rank], program, strict=False)) if pair[0] != pair[1]), 10**9)
    assert fault.position >= min(changed, len(right[rank]), len(program))


@given(trainings(most_stages=5, most_micro_batches=5), st.data())
@settings(max_examples=300)
def test_no_action_is_superfluous_or_free_to_repeat(training: tuple[Pipeline, Workload], data: st.DataObject) -> None:
    """Every action taken away, and every action repeated, is found, on the rank where it was and not before it."""
    pipeline, workload = training
    right = programs(pipeline, workload)
    rank = data.draw(st.integers(0, pipeline.num_stages - 1))
    position = data.draw(st.integers(0, len(right[rank]) - 1))
    repeat = data.draw(st.booleans())
    names = text(right[rank])
    names[position : position + 1] = names[position : position + 1] * (2 if repeat else 0)
    wrong = (*right[:rank], tuple(map(Action.parse, names)), *right[rank + 1 :])
    faults = check_programs(pipeline, wrong, workload)
    assert [fault.rank for fault in faults] == [rank]
    assert faults[0].position >= position


@given(trainings(most_stages=5, most_micro_batches=5), st.data())
@settings(max_examples=300)
def test_passes_and_updates_cannot_change_places(training: tuple[Pipeline, Workload], data: st.DataObject) -> None:
    pipeline, workload = training
    assume(pipeline.num_stages > 1)  # a rank by itself has other right orders
    right = programs(pipeline, workload)
    rank = data.draw(st.integers(0, pipeline.num_stages - 1))
    kinds = (Kind.FORWARD, Kind.BACKWARD, Kind.STEP)
    places = [i for i, action in enumerate(right[rank]) if action.kind in kinds]
    which = data.draw(st.integers(0, len(places) - 2))
    i, j = places[which], places[which + 1]
    names = text(right[rank])
    assume(names[i] != names[j])  # the first micro-batch of two iterators in succession
    names[i], names[j] = names[j], names[i]
    wrong = (*right[:rank], tuple(map(Action.parse, names)), *right[rank + 1 :])
    faults = check_programs(pipeline, wrong, workload)
    assert [fault.rank for fault in faults] == [rank]
    assert i <= faults[0].position <= len(names)


def test_versions_and_buffers() -> None:
    """A rank that runs ahead further than its depth, and one that runs behind, under other versions than are due."""
    deeper = programs(Pipeline("asp", 3, 2, (4, 1, 0)), THREE)
    faults = check_programs(ASP, deeper, THREE)
    assert list(map(str, faults)) == [
        "rank 0, position 10, F3: 3 micro-batches are in flight, which is the most for rank 0"
    ]
    flat = programs(Pipeline("asp", 3, 2, (0, 0, 0)), THREE)
    assert [str(fault) for fault in check_programs(ASP, flat, THREE)] == [
        "rank 0, position 13, F2: it would run under version 1 of the weights, 0 is due",
        "rank 1, position 15, F2: it would run under version 1 of the weights, 0 is due",
    ]
    gpipe = programs(Pipeline("gpipe", 3, 4), Workload(1))
    assert [fault.rank for fault in check_programs(Pipeline("1f1b", 3, 4), gpipe, Workload(1))] == [0, 1, 2]


# Damaged links


def test_an_order_that_the_next_rank_does_not_expect() -> None:
    pipeline = Pipeline("interleaved", 2, 4, virtual_stages=2)
    one = Workload(1)
    right = programs(pipeline, one)

    def change(names: list[str]) -> None:
        """The whole first part before the second, as a schedule of its own right would."""
        names[:] = " ".join(
            [f"0LOAD{i} 0F{i} 0SEND_ACT{i}" for i in (0, 1, 2)]
            + [f"2RECV_ACT{i} 2F{i} 2SEND_ACT{i}" for i in (0, 1)]
            + [name for name in names[names.index("2RECV_GRAD0") :] if name not in ("0LOAD2", "0F2", "0SEND_ACT2")]
        ).split()

    faults = check_programs(pipeline, damaged(right, 0, change), one)
    assert [str(fault) for fault in faults] == [
        "rank 1, position 6, 3RECV_ACT0: what comes next of activations from rank 0 to rank 1 is 0SEND_ACT2, "
        "at position 8 there"
    ]


def test_ranks_that_do_not_train_the_same() -> None:
    """A rank with a program of its own for fewer batches is found; so is one that is not sent to."""
    pipeline = Pipeline("asp", 2, 1)
    two, three = programs(pipeline, Workload(2)), programs(pipeline, Workload(3))
    assert [str(fault) for fault in check_programs(pipeline, (two[0], three[1]), Workload(3))] == [
        f"rank 0, position {len(two[0])}, end: LOAD2 is missing"
    ]


EXCHANGES = exchanges_by_rank(3, [(0, 1, 2), (1, 2)], peers=True)


@pytest.mark.parametrize(
    ("rank", "change", "reason"),
    [
        (0, without("RECV_PEERS0"), "STEP0: RECV_PEERS0 is next"),
        (1, without("SEND_PEERS0"), "RECV_ACT3: SEND_PEERS0 has to come before it"),
        (2, twice("SEND_PEERS1"), "SEND_PEERS1: SEND_TIED_GRAD2 is next"),
        (1, moved("SEND_PEERS1", before="STEP1"), "SEND_PEERS1: STEP1 is next"),
        (0, moved("SEND_TIED0", before="STEP0"), "SEND_TIED0: STEP0 is next"),
        (0, moved("REDUCE1", before="RECV_TIED_GRAD1"), "REDUCE1: RECV_TIED_GRAD1 is next"),
        (1, moved("RECV_TIED_GRAD1", before="SEND_TIED_GRAD1"), "RECV_TIED_GRAD1: SEND_TIED_GRAD1 is next"),
        (2, moved("RECV_TIED1", before="REDUCE1"), "RECV_TIED1: REDUCE1 is next"),
        (
            0,
            inserted("SEND_TIED_GRAD0", before="STEP0"),
            "SEND_TIED_GRAD0: rank 0 has nothing of that kind to exchange",
        ),
    ],
)
def test_exchanges_out_of_place(rank: int, change: Callable[[list[str]], None], reason: str) -> None:
    three = Workload(3)
    right = programs(ASP, three, EXCHANGES)
    assert check_programs(ASP, right, three, EXCHANGES) == []
    (fault, *_) = check_programs(ASP, damaged(right, rank, change), three, EXCHANGES)
    assert fault.rank == rank
    assert str(fault).endswith(reason)


def test_peer_updates_that_nobody_sends_or_receives() -> None:
    """Every rank does what its own exchanges say, but those differ."""
    pipeline, one = Pipeline("asp", 2, 1), Workload(1)
    peers, none = Exchanges(peers=True), Exchanges()
    assert [str(f) for f in check_programs(pipeline, programs(pipeline, one, [none, peers]), one, [none, peers])] == [
        "rank 1, position 7, SEND_PEERS0: rank 0 never receives it"
    ]
    assert [str(f) for f in check_programs(pipeline, programs(pipeline, one, [peers, none]), one, [peers, none])] == [
        "rank 0, position 6, RECV_PEERS0: it waits for ever for rank 1 to send it, which is done"
    ]


@pytest.mark.parametrize("schedule", ["asp", "1f1b"])
def test_a_receive_too_early_is_a_dead_lock(schedule: str) -> None:
    """Each rank is right by itself and every receive has its send, but both wait."""
    pipeline = Pipeline(schedule, 2, 2)  # type: ignore[arg-type]
    one = Workload(1)
    wrong = damaged(programs(pipeline, one), 0, moved("RECV_GRAD0", before="LOAD0"))
    assert [str(fault) for fault in check_programs(pipeline, wrong, one)] == [
        "rank 0, position 0, RECV_GRAD0: it waits for ever for rank 1 to send it, which stands at RECV_ACT0",
        "rank 1, position 0, RECV_ACT0: it waits for ever for rank 0 to send it, which stands at RECV_GRAD0",
    ]


def test_the_check_at_start_names_the_first_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = ScheduleFault(1, 5, Action(Kind.FORWARD, 2), "its input has not been received")
    monkeypatch.setattr("ds_vpipe.schedules.check.check_programs", lambda *_: [fault, fault])
    with pytest.raises(PipelineProtocolError) as error:
        check_pipeline(ASP)
    assert "rank 1, position 5, F2: its input has not been received (and 1 more)" in str(error.value)
    assert "\n" not in str(error.value)
