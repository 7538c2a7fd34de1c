"""Links of a stage to its neighbours: which there are, and what an action waits for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_vpipe.engine.links.groups import Peer
from ds_vpipe.engine.links.stage_links import LossLinks, StageLinks
from ds_vpipe.errors import PipelineProtocolError
from ds_vpipe.schedules.actions import Kind
from ds_vpipe.schedules.pipeline import Pipeline

FORWARD, BACKWARD = ("forward from 1", 2), ("backward to 0", 0)


def links_of(stage: int) -> StageLinks:
    """Links of a stage of three, whose ends are the names of the links and the stages at their other ends."""
    grid: Any = SimpleNamespace(stage_to_global=lambda number: number)

    def end(name: str, peer: Peer, *_: Any, **__: Any) -> tuple[str, int]:
        return name, peer.stage

    wiring: Any = SimpleNamespace(sender=end, receiver=end)
    return StageLinks(grid, Pipeline("asp", 3, 1), Peer(stage, stage), wiring)


def test_an_action_waits_for_copies_of_what_it_may_change() -> None:
    """Layers may write into what they have put out or taken in, and an update into the former."""
    assert links_of(1).copied_before == {Kind.FORWARD: [FORWARD, BACKWARD], Kind.STEP: [FORWARD]}
    assert links_of(1).training_senders == [FORWARD, BACKWARD]
    assert links_of(1).senders == [FORWARD, BACKWARD, FORWARD, BACKWARD]  # the latter ones are of evaluation


def test_stages_at_the_ends_have_one_neighbour() -> None:
    first, last = links_of(0), links_of(2)
    assert (first.next.activations, last.previous.gradients) == (("forward from 0", 1), ("backward to 1", 1))
    with pytest.raises(PipelineProtocolError, match=r"stage 0 \(rank 0\) has no stage before it"):
        _ = first.previous
    with pytest.raises(PipelineProtocolError, match=r"stage 2 \(rank 2\) has no stage after it"):
        _ = last.next


def test_losses_that_have_been_received_are_let_go_of() -> None:
    """A loop of synchronous updates sends each of them, and may run for weeks."""
    kept = dict[int, list[int]]()

    def end(_: str, peer: Peer, *__: Any, **___: Any) -> Any:
        sent = kept[peer.stage] = list[int]()
        return SimpleNamespace(
            send=lambda _, micro_batch, __: sent.append(micro_batch),
            throttle=lambda under_way: sent.__delitem__(slice(0, max(0, len(sent) - under_way))),
        )

    grid: Any = SimpleNamespace(stage_to_global=lambda number: number, pipe_parallel_size=3)
    wiring: Any = SimpleNamespace(sender=end)
    losses = LossLinks(grid, Peer(2, 2), wiring)
    for micro_batch in range(100):
        losses.send(micro_batch, None, [0, 1])
    assert {stage: sent[-1] for stage, sent in kept.items()} == {0: 99, 1: 99}
    assert all(len(sent) <= 8 for sent in kept.values())
