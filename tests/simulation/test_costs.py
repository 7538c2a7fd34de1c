"""Costs out of a recording: what was put into it comes out, and simulating with it gives its pace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from timelines import span

from ds_vpipe.__main__ import main
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.schedules.actions import Kind
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload
from ds_vpipe.simulation.costs import StageCost, recorded_costs
from ds_vpipe.simulation.simulator import simulate
from ds_vpipe.timelines.timeline import Recording, Span, Timeline

HOST, GAP, TRANSFER = 0.25, 0.125, 0.5
BATCHES = 5


def recording(forward: tuple[float, ...] = (1.0, 2.0), batches: int = BATCHES, slow: float = 0.0) -> Timeline:
    """Two stages, one micro-batch per batch, backward passes of twice the seconds, an update of 0.5 and 0.75.

    Every action is followed by ``GAP`` until the rank goes on. The first pass of each stage takes ``slow`` more.
    """
    spans: list[Span] = []
    clock = [0.0, 0.0]

    def run(rank: int, action: str, seconds: float) -> float:
        spans.append(span(rank, action, clock[rank], clock[rank] + seconds))
        clock[rank] += seconds + GAP
        return clock[rank] - GAP

    def receive(rank: int, action: str, sent: float) -> None:
        run(rank, action, max(0.0, sent + TRANSFER - clock[rank]) + HOST + GAP)

    for batch in range(batches):
        extra = slow if batch == 0 else 0.0
        run(0, f"LOAD{batch}", 0.0)
        run(0, f"F{batch}", forward[0] + extra)
        sent = run(0, f"SEND_ACT{batch}", HOST)
        receive(1, f"RECV_ACT{batch}", sent)
        run(1, f"F{batch}", forward[1] + extra)
        run(1, f"B{batch}", 2 * forward[1])
        sent = run(1, f"SEND_GRAD{batch}", HOST)
        receive(0, f"RECV_GRAD{batch}", sent)
        for rank in (0, 1):
            if rank == 0:
                run(0, f"B{batch}", 2 * forward[0])
            run(rank, f"REDUCE{batch}", 0.25)
            run(rank, f"STEP{batch}", 0.25 * (rank + 1))
    return Timeline("test", "recording", 2, 1, tuple(spans))


def test_what_was_put_in_comes_out() -> None:
    """The gap after an action counts with it: a message takes HOST + GAP of each end's time."""
    found = recorded_costs(recording(slow=9.0), 2)
    expected = [
        StageCost(1.0 + 2 * GAP, 2.0 + GAP, TRANSFER, TRANSFER, 0.5 + 2 * GAP, host_s=HOST + GAP),
        StageCost(2.0 + GAP, 4.0 + GAP, TRANSFER, TRANSFER, 0.75 + 2 * GAP, host_s=HOST + GAP),
    ]
    for cost, wanted in zip(found, expected, strict=True):
        for name in ("forward_s", "backward_s", "update_s", "host_s"):
            assert getattr(cost, name) == pytest.approx(getattr(wanted, name)), name
        for name in ("send_activation_s", "send_gradient_s"):  # seen from the end of the send to that of the receive
            assert getattr(cost, name) == pytest.approx(getattr(wanted, name)), name


def test_simulating_with_them_gives_the_pace_of_the_recording() -> None:
    timeline = recording(batches=12)
    simulation = simulate(Pipeline("1f1b", 2, 1), recorded_costs(timeline, 2), Workload(12))
    ends = [one.end for one in timeline.by_rank()[0] if one.kind is Kind.STEP]
    assert simulation.throughput == pytest.approx(11 / (ends[-1] - ends[0]), rel=0.02)


def test_host_time_of_a_message_is_spent_at_both_ends() -> None:
    costs = [StageCost(1.0, 1.0, host_s=0.5)] * 2
    simulation = simulate(Pipeline("1f1b", 2, 1), costs, Workload(3))
    assert 1 / simulation.throughput == pytest.approx(4 * 1.0 + 4 * 0.5)


def test_refusals() -> None:
    with pytest.raises(VPipeConfigError, match='got "a simulation"; allowed: the recording of a run'):
        recorded_costs(replace(recording(), source="simulation"), 2)
    with pytest.raises(VPipeConfigError, match=r'those of parts .0, 1."; allowed: backward passes of the parts 0 to 3'):
        recorded_costs(recording(), 4)
    whole = recording()
    without = replace(
        whole, spans=tuple(s for s in whole.spans if s.rank == 0 or s.kind not in (Kind.STEP, Kind.REDUCE))
    )
    with pytest.raises(VPipeConfigError, match="no update of rank 1"):
        recorded_costs(without, 2)


def test_the_command_simulates_another_schedule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, row in enumerate(recording().by_rank()):
        Recording("test", "recording", 2, 1, row, rank=rank, clock="one").save(tmp_path / f"rank{rank}.json")
    argv = ["simulate", "--micro-batches", "1", "--recording", str(tmp_path), "--json"]
    assert main([*argv, "--schedule", "asp"]) == 0
    asynchronous = json.loads(capsys.readouterr().out)["throughput"]
    assert main([*argv, "--schedule", "1f1b"]) == 0
    synchronous = json.loads(capsys.readouterr().out)["throughput"]
    slowest = recorded_costs(recording(), 2)[1]
    assert asynchronous > 1.3 * synchronous
    assert asynchronous <= 1 / (slowest.forward_s + slowest.backward_s + slowest.update_s)


def test_messages_that_nobody_waited_for_say_nothing_of_transfers() -> None:
    whole = recording()
    late = []
    for index in range(90, 94):
        start = 9.0 * index
        late.append(span(0, f"SEND_ACT{index}", start, start + HOST))
        late.append(span(0, f"RECV_PEERS{index}", start + HOST + GAP, start + 8.0))
        late.append(span(1, f"RECV_ACT{index}", start + 5.0, start + 5.5))
    found = recorded_costs(replace(whole, spans=(*whole.spans, *late)), 2)
    sent = found[0].send_activation_s + found[0].host_s
    assert sent == pytest.approx(TRANSFER + HOST + GAP)


def test_parts_of_an_interleaved_recording() -> None:
    """Parts 0 and 2 are on rank 0, which takes 0.1 to send and 0.4 to update and tell; rank 1 takes twice as long."""
    spans: list[Span] = []
    clock = [0.0, 0.0]
    for batch in range(4):
        for part in (0, 2, 1, 3):
            rank = part % 2
            pace = rank + 1.0
            for kind, seconds in (("F", 1.0 + part), ("SEND_ACT", 0.1 * pace), ("B", 2.0 + part)):
                spans.append(span(rank, f"{part}{kind}{batch}", clock[rank], clock[rank] + seconds))
                clock[rank] += seconds
            for kind, seconds in (("STEP", 0.3 * pace), ("SEND_PEERS", 0.1 * pace)) if part >= 2 else ():
                spans.append(span(rank, f"{kind}{batch}", clock[rank], clock[rank] + seconds))
                clock[rank] += seconds
    found = recorded_costs(Timeline("test", "recording", 2, 1, tuple(spans)), 4)
    assert [cost.forward_s for cost in found] == pytest.approx([1.0, 2.0, 3.0, 4.0])
    assert [cost.backward_s for cost in found] == pytest.approx([2.0, 3.0, 4.0, 5.0])
    assert [cost.host_s for cost in found] == pytest.approx([0.1, 0.2, 0.1, 0.2])
    assert [cost.update_s for cost in found] == pytest.approx([0.2, 0.4, 0.2, 0.4]), "both parts of a rank together"
