"""The dry run: how far ranks come, and how many receives have to be posted."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from shapes import pipelines

from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.dry_run import (
    Link,
    dry_run,
    link_ends,
    meets,
    posted_receives,
    receive_link,
    received_as,
    send_link,
)
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Programs, Workload, programs


def read(*rows: str) -> Programs:
    return tuple(tuple(map(Action.parse, row.split())) for row in rows)


def test_positions_and_messages() -> None:
    rows = "F0 SEND_ACT0 F1 SEND_ACT1 RECV_GRAD0 B0", "RECV_ACT0 F0 B0 SEND_GRAD0 RECV_ACT2"
    run = dry_run(read(*rows), lambda _: 1)
    assert run.positions == (6, 4), "the next message is that of micro-batch 1"
    messages = run.links[Link("activations", 0, 1)]
    assert [(at, str(action)) for at, action in messages.sent] == [(1, "SEND_ACT0"), (3, "SEND_ACT1")]
    assert messages.received == 1


def test_time_is_linear_in_the_number_of_ranks() -> None:
    ranks, begin = 20_000, time.process_time()
    inner = read("RECV_ACT0 SEND_ACT0") * (ranks - 2)
    assert dry_run((*read("SEND_ACT0"), *inner, *read("RECV_ACT0")), lambda _: 1).positions[0] == 1
    assert time.process_time() - begin < 6  # more than three times as long as it takes


@pytest.mark.parametrize(
    ("posted", "positions"),
    [(1, (3, 5)), (2, (6, 5))],
)
def test_a_send_waits_for_a_posted_receive(posted: int, positions: tuple[int, int]) -> None:
    rows = "F0 SEND_ACT0 SEND_ACT1 SEND_ACT2 RECV_GRAD0 B0", "F0 F1 SEND_GRAD0 RECV_ACT0 F1"
    assert dry_run(read(*rows), lambda _: posted).positions == positions


def test_links_of_a_ring() -> None:
    assert link_ends(send_link, 2, 3) == {
        Kind.SEND_ACT: Link("activations", 2, 0),
        Kind.SEND_GRAD: Link("gradients", 2, 1),
        Kind.SEND_PEERS: Link("gradients", 2, 1),
        Kind.SEND_LAYER_DOWN: Link("activations", 2, 0),
        Kind.SEND_LAYER_GRAD_DOWN: Link("activations", 2, 0),
        Kind.SEND_LAYER_UP: Link("gradients", 2, 1),
        Kind.SEND_LAYER_GRAD_UP: Link("gradients", 2, 1),
    }
    assert link_ends(receive_link, 0, 3) == {
        Kind.RECV_ACT: Link("activations", 2, 0),
        Kind.RECV_GRAD: Link("gradients", 1, 0),
        Kind.DROP_GRAD: Link("gradients", 1, 0),
        Kind.RECV_PEERS: Link("gradients", 1, 0),
        Kind.RECV_LAYER_DOWN: Link("activations", 2, 0),
        Kind.RECV_LAYER_GRAD_DOWN: Link("activations", 2, 0),
        Kind.RECV_LAYER_UP: Link("gradients", 1, 0),
        Kind.RECV_LAYER_GRAD_UP: Link("gradients", 1, 0),
    }
    assert str(received_as(Action.parse("5SEND_ACT7"))) == "6RECV_ACT7"
    assert str(received_as(Action.parse("5SEND_GRAD7"))) == "4RECV_GRAD7"
    assert str(received_as(Action.parse("SEND_PEERS7"))) == "RECV_PEERS7"
    assert meets(Action.parse("SEND_GRAD7"), Action.parse("DROP_GRAD7"))
    assert not meets(Action.parse("SEND_GRAD7"), Action.parse("DROP_GRAD8"))
    assert not meets(Action.parse("SEND_PEERS7"), Action.parse("DROP_GRAD7"))


@pytest.mark.parametrize(
    ("pipeline", "posted"),
    [
        (Pipeline("asp", 3, 1), (2, 2)),
        (Pipeline("asp", 3, 1, (9, 4, 0)), (6, 5)),
        (Pipeline("1f1b", 3, 5), (2, 2)),
        (Pipeline("gpipe", 3, 5), (1, 1)),
        (Pipeline("interleaved", 3, 6, virtual_stages=2), (2, 2)),
        (Pipeline("interleaved", 3, 5, virtual_stages=2), (4, 4)),
    ],
)
def test_posted_receives(pipeline: Pipeline, posted: tuple[int, ...]) -> None:
    for rank, count in enumerate(posted):
        assert posted_receives(pipeline, Link("activations", rank, rank + 1)) == count
        assert posted_receives(pipeline, Link("gradients", rank + 1, rank)) == count


@pytest.mark.parametrize(("num_stages", "micro_batches"), [(4, 11), (6, 17), (8, 23)])
def test_the_interleaved_order_needs_what_its_groups_say(num_stages: int, micro_batches: int) -> None:
    """One message is to spare: with one receive less nobody waits for ever, with two less somebody does."""
    pipeline = Pipeline("interleaved", num_stages, micro_batches, virtual_stages=2)
    built = programs(pipeline, Workload(1))

    def done(fewer: int) -> bool:
        run = dry_run(built, lambda link: posted_receives(pipeline, link) - fewer)
        return run.positions == tuple(map(len, built))

    assert done(0)
    assert done(1)
    assert not done(2)


@given(pipelines())
@settings(max_examples=300)
def test_more_posted_receives_hold_nobody_up(pipeline: Pipeline) -> None:
    built = programs(pipeline, Workload(3))
    for more in (0, 1, 5, 10**6):
        assert dry_run(built, lambda link, m=more: posted_receives(pipeline, link) + m).positions == tuple(
            map(len, built)
        )
