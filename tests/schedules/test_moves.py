"""Moves of layers in programs: order, versions, absence of dead-locks, and what the checks find.

With ``DS_VPIPE_LONG_MOVES=1`` a move begins at every update until all are alike.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from move_checks import LAYER_KINDS, check_moves
from shapes import move_chains

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.dry_run import meets
from ds_vpipe.schedules.moves import Move, check_move, completed, earliest_cut_over, layer_version, moved
from ds_vpipe.schedules.one_f_one_b import exchanges_by_rank
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Programs, Workload, programs

SHORT = {Kind.FORWARD: "F", Kind.BACKWARD: "B", Kind.STEP: "S", Kind.STEP_LAYER: "s"}
EVERY = bool(os.environ.get("DS_VPIPE_LONG_MOVES"))
ASP = Pipeline("asp", 3, 1)
UP, DOWN = Move(4, 1, 0, 6), Move(3, 0, 1, 6)


def around_updates(program: tuple[Action, ...]) -> str:
    """Passes, updates and what moves: L for a layer, g for a gradient of it."""
    names = []
    for action in program:
        letter = SHORT.get(action.kind)
        if action.kind in LAYER_KINDS and letter is None:
            letter = "g" if "GRAD" in action.kind.name else "L"
        if letter is not None:
            names.append(f"{letter}{action.index}")
    return " ".join(names)


@pytest.mark.parametrize(
    ("move", "rank", "order"),
    [
        (UP, 1, "B3 L3 g3 S3 F5 B4 g4 S4 F6 B5 g5 S5 F7 B6 S6"),
        (UP, 0, "B3 L3 g3 S3 F6 B4 g4 S4 F7 B5 g5 S5 F8 B6 S6"),
        (DOWN, 0, "B3 S3 L4 F6 B4 g4 S4 F7 B5 g5 S5 F8 B6 S6"),
        (DOWN, 1, "B4 S4 L4 F6 B5 S5 g4 s4 F7 B6 S6 g5 s5 s6 F8 B7 S7"),
    ],
)
def test_order_around_a_move(move: Move, rank: int, order: str) -> None:
    program = programs(ASP, Workload(10, (), (move,)))[rank]
    assert f" {order} " in f" {around_updates(program)} "


def test_order_in_a_synchronous_batch() -> None:
    for move, ranks in (
        (Move(1, 1, 0, 4), ("B3 L1 g1 S1 F4", "B3 L1 g1 S1 F4")),
        (Move(1, 0, 1, 4), ("B3 S1 L2 F4", "B3 S1 L2 F4")),
    ):
        built = programs(Pipeline("1f1b", 2, 2), Workload(4, (), (move,)))
        for program, order in zip(built, ranks, strict=True):
            assert f" {order} " in f" {around_updates(program)} "


def test_a_move_adds_nothing_elsewhere() -> None:
    pipeline, workload = Pipeline("asp", 4, 2), Workload(12, (9,))
    plain = programs(pipeline, workload)
    built = programs(pipeline, replace(workload, moves=(Move(0, 1, 2, 12),)))
    for rank, program in enumerate(built):
        assert tuple(action for action in program if action.kind not in LAYER_KINDS) == plain[rank]
        assert any(action.kind in LAYER_KINDS for action in program) == (rank in (1, 2))


# Programs of all sizes


def depth_maps(num_stages: int) -> list[tuple[int, ...] | None]:
    most = num_stages - 1
    return [None, tuple(2 * (most - stage) for stage in range(num_stages)), (num_stages + 2,) * most + (0,)]


@pytest.mark.parametrize("num_stages", [2, 3, 4, 5, 6])
@pytest.mark.parametrize("micro_batches", [1, 2, 3, 4])
def test_every_move_is_sound(num_stages: int, micro_batches: int) -> None:
    kinds = [Pipeline("asp", num_stages, micro_batches, depths) for depths in depth_maps(num_stages)]
    kinds += [replace(kinds[0], weight_sync="vertical"), Pipeline("1f1b", num_stages, micro_batches)]
    kinds.append(Pipeline("gpipe", num_stages, micro_batches))
    for number, pipeline in enumerate(kinds):
        full = pipeline.depths[0] // micro_batches + 2  # from there on every batch is like the one before
        for source, target in ((s, t) for s in range(num_stages) for t in (s - 1, s + 1) if 0 <= t < num_stages):
            for updates in range(full) if EVERY else [(source + number) % 3]:
                move = Move(0, source, target, earliest_cut_over(pipeline, source, target, updates))
                workload = Workload(move.settled_batch(pipeline) + full, (), (move,))
                built = programs(pipeline, workload)
                assert check_moves(pipeline, built, workload) == [], (pipeline, move)
                assert max(map(last_batch_with_a_move, built)) == move.settled_batch(pipeline) - 1, (pipeline, move)


def last_batch_with_a_move(program: tuple[Action, ...]) -> int:
    """The last batch that has an action of a move, at its end or before."""
    updates, batch, found = 0, 0, -1
    for action in program:
        if action.kind in LAYER_KINDS:
            found = batch
        else:
            batch = updates
            updates += action.kind is Kind.STEP
    return found


@pytest.mark.parametrize("move", [Move(0, 0, 1, 12), Move(0, 1, 0, 12), Move(0, 1, 2, 12), Move(0, 2, 1, 12)])
@pytest.mark.parametrize("depths", [(2, 1, 0), (4, 4, 0), (6, 2, 0), (0, 0, 0)])
@pytest.mark.parametrize("sync", ["stash", "vertical"])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_data_end_anywhere_in_a_move(move: Move, depths: tuple[int, ...], sync: str, micro_batches: int) -> None:
    pipeline = Pipeline("asp", 3, micro_batches, depths, weight_sync=sync)  # type: ignore[arg-type]
    for end in range(1, 12 + 3 * micro_batches + depths[0]):
        workload = Workload(12 // micro_batches + 10, (end,), (move,))
        assert check_moves(pipeline, programs(pipeline, workload), workload) == [], end


@given(move_chains(), st.data())
@settings(max_examples=150, deadline=None)
def test_chains_of_moves_are_sound(chain: tuple[Pipeline, tuple[Move, ...]], data: st.DataObject) -> None:
    pipeline, moves = chain
    assume(moves)
    batches = moves[-1].settled_batch(pipeline) + 2
    ends = data.draw(st.lists(st.integers(1, batches * pipeline.micro_batches), max_size=2))
    workload = Workload(batches, tuple(sorted(ends)), moves)
    exchanges = exchanges_by_rank(pipeline.num_stages, peers=data.draw(st.booleans()))
    assert check_moves(pipeline, programs(pipeline, workload, exchanges), workload, exchanges) == []


# Versions


def known_backward_passes(pipeline: Pipeline, batches: int) -> dict[tuple[int, int], list[int]]:
    """Before each forward pass (rank, micro-batch): of every rank the backward passes that this one has heard of.

    Every message of the plain programs brings all that its sender knows. Nothing here knows of moves or versions.
    """
    built = programs(pipeline, Workload(batches))
    knows = [[0] * pipeline.num_stages for _ in built]
    found: dict[tuple[int, int], list[int]] = {}
    sent: dict[tuple[int, Action], list[int]] = {}
    positions = [0] * len(built)
    while any(position < len(program) for position, program in zip(positions, built, strict=True)):
        before = list(positions)
        for rank, program in enumerate(built):
            while positions[rank] < len(program):
                action = program[positions[rank]]
                if action.kind in (Kind.RECV_ACT, Kind.RECV_GRAD):
                    other = rank - 1 if action.kind is Kind.RECV_ACT else rank + 1
                    message = next((key for key in sent if key[0] == other and meets(key[1], action)), None)
                    if message is None:
                        break
                    knows[rank] = [max(pair) for pair in zip(knows[rank], sent.pop(message), strict=True)]
                elif action.kind in (Kind.SEND_ACT, Kind.SEND_GRAD):
                    sent[rank, action] = list(knows[rank])
                elif action.kind is Kind.FORWARD:
                    found[rank, action.index] = list(knows[rank])
                elif action.kind is Kind.BACKWARD:
                    knows[rank][rank] += 1
                positions[rank] += 1
        assert positions != before, "the programs stand"
    return found


def version_by_hearsay(stage: int, moves: list[Move], micro_batch: int, size: int, heard: list[int]) -> int:
    """Updates of a layer in order, as far as the owner of each batch is known to have its gradients."""
    version = 0
    while True:
        owner = stage
        for move in moves:
            if version * size >= move.micro_batch:
                owner = move.target
        if heard[owner] < (version + 1) * size:
            return version
        version += 1


@given(move_chains())
@settings(max_examples=150, deadline=None)
def test_versions_are_those_that_the_owner_can_know(chain: tuple[Pipeline, tuple[Move, ...]]) -> None:
    pipeline, moves = chain
    assume(moves)
    end = (moves[-1].settled_batch(pipeline) + 2) * pipeline.micro_batches
    heard = known_backward_passes(pipeline, end // pipeline.micro_batches)
    for layer in {move.layer for move in moves}:
        mine = [move for move in moves if move.layer == layer]
        for micro_batch in range(end):
            owner = mine[0].source
            for move in mine:
                if micro_batch >= move.micro_batch:
                    owner = move.target
            known = version_by_hearsay(
                mine[0].source, mine, micro_batch, pipeline.micro_batches, heard[owner, micro_batch]
            )
            due = layer_version(pipeline, mine[0].source, mine, micro_batch)
            assert due <= known if pipeline.vertical else due == known, (layer, micro_batch)


def test_versions_in_literals() -> None:
    pipeline = Pipeline("asp", 3, 1, (4, 2, 0))
    down, up = Move(0, 0, 1, 8), Move(0, 1, 0, 8)
    assert [layer_version(pipeline, 0, [down], j) for j in range(5, 15)] == [1, 2, 3, 4, 5, 6, 7, 10, 11, 12]
    assert [layer_version(pipeline, 1, [up], j) for j in range(5, 12)] == [3, 4, 5, 4, 5, 6, 7]
    vertical = replace(pipeline, weight_sync="vertical")
    assert [layer_version(vertical, 1, [up], j) for j in range(5, 12)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_drain_completes_what_has_begun() -> None:
    pipeline = Pipeline("asp", 3, 2, (4, 2, 0))
    move = Move(0, 0, 1, 16)  # sent after 6 updates
    assert completed(pipeline, [move], 10) == (move,)
    assert completed(pipeline, [move], 12) == (replace(move, micro_batch=12),)
    assert completed(pipeline, [move], 20) == (move,)
    drained = completed(pipeline, [move], 12)
    assert [layer_version(pipeline, 0, drained, j, 12) for j in (12, 14, 15, 16)] == [6, 6, 6, 7]


# What the checks find


def changed(built: Programs, rank: int, old: str, *new: str) -> Programs:
    names = [str(action) for action in built[rank]]
    position = names.index(old)
    names[position : position + 1] = new
    program = tuple(map(Action.parse, names))
    return (*built[:rank], program, *built[rank + 1 :])


@pytest.mark.parametrize(
    ("move", "rank", "old", "new", "reason"),
    [
        (UP, 0, "RECV_LAYER_GRAD_UP4", (), "layer 4 is there after 4 updates, 5 are due"),
        (UP, 0, "RECV_LAYER_UP3", (), "no layer's gradient of that batch is next"),
        (UP, 1, "SEND_LAYER_UP3", ("SEND_LAYER_UP2",), "layer 4 has had 3 updates here"),
        (UP, 1, "STEP4", ("STEP4", "SEND_LAYER_GRAD_UP5"), "REDUCE5 has to come before it, STEP5 after it"),
        (UP, 1, "SEND_LAYER_GRAD_UP5", (), "layer 4 or its gradients up to batch 5 have not been sent"),
        (DOWN, 1, "STEP_LAYER4", (), "layer 3 is there after 4 updates, 5 are due"),
        (DOWN, 1, "RECV_LAYER_DOWN4", (), "layer 3 is not there"),
        (DOWN, 1, "STEP_LAYER6", (), "layer 3 is there after 6 updates, 7 are due"),
        (DOWN, 1, "STEP_LAYER5", ("STEP_LAYER6", "STEP_LAYER5"), "no layer waits for update 6"),
        (DOWN, 0, "SEND_LAYER_GRAD_DOWN5", ("SEND_LAYER_GRAD_DOWN5",) * 2, "no layer's gradient of that batch is next"),
    ],
)
def test_faults_of_a_move(move: Move, rank: int, old: str, new: tuple[str, ...], reason: str) -> None:
    workload = Workload(12, (), (move,))
    built = programs(ASP, workload)
    assert check_moves(ASP, built, workload) == []
    first = check_moves(ASP, changed(built, rank, old, *new), workload)[0]
    assert first.rank == rank
    assert reason in first.reason


@pytest.mark.parametrize("move", [UP, DOWN])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_hand_over_one_update_early_is_found(move: Move, micro_batches: int) -> None:
    pipeline = Pipeline("asp", 3, micro_batches)
    due = replace(move, micro_batch=12)
    early = replace(due, micro_batch=due.micro_batch - micro_batches)
    built = programs(pipeline, Workload(24 // micro_batches, (), (early,)))
    assert check_moves(pipeline, built, Workload(24 // micro_batches, (), (early,))) == []
    faults = check_moves(pipeline, built, Workload(24 // micro_batches, (), (due,)))
    assert faults, "what the target has at the cut-over is older than what is due"


def test_a_receive_without_its_message_is_found() -> None:
    built = programs(ASP, Workload(12, (), (UP,)))
    plain = programs(ASP, Workload(12))
    (fault, *_) = check_moves(ASP, (built[0], plain[1], plain[2]), Workload(12, (), (UP,)))
    assert fault.rank == 1


# Which moves are possible


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_the_earliest_cut_over_begins_in_the_next_batch(micro_batches: int) -> None:
    for depths in ((2, 1, 0), (5, 3, 0), (4, 4, 0)):
        pipeline = Pipeline("asp", 3, micro_batches, depths)
        for source, target in ((0, 1), (1, 0), (1, 2), (2, 1)):
            for updates in (0, 1, 5):
                cut_over = earliest_cut_over(pipeline, source, target, updates)
                assert Move(0, source, target, cut_over).first_batch(pipeline) == updates
                before = Move(0, source, target, cut_over - micro_batches)
                assert before.first_batch(pipeline) < updates


@pytest.mark.parametrize(
    ("move", "message"),
    [
        (Move(3, 0, 2, 8), "from stage 0 to stage 2.*two neighbours"),
        (Move(3, 0, -1, 8), "from stage 0 to stage -1.*two neighbours"),
        (Move(3, -1, 0, 8), "from stage -1 to stage 0.*two neighbours"),
        (Move(6, 2, 3, 8), "from stage 2 to stage 3.*two neighbours"),
        (Move(6, 3, 2, 8), "from stage 3 to stage 2.*two neighbours"),
        (Move(2, 0, 1, 8), "layer 3, the last of two or more on stage 0"),
        (Move(5, 1, 0, 8), "layer 4, the first of two or more on stage 1"),
        (Move(6, 2, 1, 8), "of two or more on stage 2"),
        (Move(3, 0, 1, 9), "multiples of 2 from 8 on, after 2 updates"),
        (Move(3, 0, 1, 6), "multiples of 2 from 8 on, after 2 updates"),
    ],
)
def test_impossible_moves_are_refused_in_one_line(move: Move, message: str) -> None:
    with pytest.raises(VPipeConfigError, match=message) as refused:
        check_move(Pipeline("asp", 3, 2), (4, 2, 1), move, 2)
    assert "\n" not in str(refused.value)


def test_possible_moves() -> None:
    pipeline, first = Pipeline("asp", 3, 2), Move(3, 0, 1, 8)
    check_move(pipeline, (4, 2, 1), first, 2)
    partition = moved((4, 2, 1), first)
    assert partition == (3, 3, 1)
    back = Move(3, 1, 0, earliest_cut_over(pipeline, 1, 0, first.settled_batch(pipeline)))
    check_move(pipeline, partition, back, 3, first)
    with pytest.raises(VPipeConfigError, match="move it later"):
        check_move(pipeline, partition, replace(back, micro_batch=back.micro_batch - 2), 3, first)
    with pytest.raises(VPipeConfigError, match="after 99 updates"):
        check_move(pipeline, partition, back, 99, first)
    assert moved(partition, back) == (4, 2, 1)


@pytest.mark.parametrize(
    "pipeline", [Pipeline("interleaved", 2, 2, virtual_stages=2), Pipeline("asp", 2, 2, weight_sync="none")]
)
def test_schedules_without_moves(pipeline: Pipeline) -> None:
    with pytest.raises(VPipeConfigError, match="leave the partition as it is"):
        check_move(pipeline, (2, 2), Move(1, 0, 1, 100), 0)
