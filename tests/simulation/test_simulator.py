"""Simulated time and memory: closed forms, literals, and a naive simulation that watches the clock."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import trainings

from ds_vpipe.schedules.actions import Action, Category, Kind
from ds_vpipe.schedules.counts import kept_states, updates_apart
from ds_vpipe.schedules.dry_run import Link, posted_receives, receive_link, send_link
from ds_vpipe.schedules.one_f_one_b import update_delay
from ds_vpipe.schedules.pipeline import SCHEDULES, Pipeline, Schedule
from ds_vpipe.schedules.program import Workload, programs
from ds_vpipe.simulation.costs import StageCost
from ds_vpipe.simulation.simulator import Phase, SimulatedRank, Simulation, simulate
from ds_vpipe.timelines.timeline import Timeline

CLOSE = 1e-9


def even(pipeline: Pipeline, batches: int, cost: StageCost) -> Simulation:
    return simulate(pipeline, [cost] * pipeline.num_parts, Workload(batches))


def each(simulation: Simulation, name: str) -> tuple[int, ...]:
    return tuple(getattr(rank, name) for rank in simulation.ranks)


def spans_of(rank: SimulatedRank, *categories: Category) -> list[tuple[str, float, float]]:
    return [(str(span.action), span.start, span.end) for span in rank.spans if span.category in categories]


def versions_of(rank: SimulatedRank) -> list[tuple[str, int | None]]:
    return [(str(span.action), span.version) for span in rank.spans if span.version is not None]


# Closed forms


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "micro_batches", "percent"), [(4, 8, 27), (4, 16, 16), (8, 16, 30)])
def test_published_bubbles(schedule: Schedule, num_stages: int, micro_batches: int, percent: int) -> None:
    simulation = even(Pipeline(schedule, num_stages, micro_batches), 2, StageCost(1.0, 2.0))
    assert [round(100 * share) for share in simulation.bubble] == [percent] * num_stages


@given(
    st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    st.integers(1, 8),
    st.integers(1, 24),
    st.integers(2, 4),
    st.floats(0.1, 5),
    st.integers(1, 3),
)
@settings(max_examples=300)
def test_bubble_of_synchronous_pipelines(
    schedule: Schedule, num_stages: int, micro_batches: int, virtual: int, backward_s: float, batches: int
) -> None:
    virtual_stages = virtual if schedule == "interleaved" else 1
    if schedule == "interleaved":
        num_stages = max(2, num_stages)
        micro_batches = max(micro_batches, num_stages)
    pipeline = Pipeline(schedule, num_stages, micro_batches, virtual_stages=virtual_stages)
    simulation = even(pipeline, batches, StageCost(1.0, backward_s))
    fill = (num_stages - 1) / virtual_stages
    wanted = fill / (micro_batches + fill)  # Huang et al., "GPipe"; Narayanan et al., SC 2021
    assert simulation.bubble == pytest.approx([wanted] * num_stages, abs=CLOSE)
    assert simulation.steady_bubble == pytest.approx(simulation.bubble, abs=CLOSE)
    assert simulation.throughput == pytest.approx(simulation.overall_throughput)
    assert simulation.throughput == pytest.approx((1 - wanted) / (virtual_stages * (1 + backward_s)))


@given(st.integers(1, 8), st.integers(1, 6), st.floats(0.1, 5), st.booleans())
@settings(max_examples=100)
def test_no_bubble_in_the_steady_state_of_asp(
    num_stages: int, micro_batches: int, backward_s: float, vertical: bool
) -> None:
    pipeline = Pipeline("asp", num_stages, micro_batches, weight_sync="vertical" if vertical else "stash")
    simulation = even(pipeline, 30, StageCost(1.0, backward_s, update_s=0.5))
    assert simulation.steady_bubble == pytest.approx([0.0] * num_stages, abs=CLOSE)
    assert simulation.throughput == pytest.approx(1 / (1 + backward_s + 0.5 / micro_batches))
    assert simulation.overall_throughput < simulation.throughput or num_stages == 1
    most = pipeline.depths[0] if vertical else None
    alive = [(update_delay(depth if most is None else most, micro_batches) + 1) for depth in pipeline.depths]
    assert [rank.versions for rank in simulation.ranks] == alive
    assert [most for _, most in simulation.staleness] == [count - 1 for count in alive]


@given(st.data(), st.sampled_from(SCHEDULES), st.integers(2, 6), st.integers(1, 8))
@settings(max_examples=100)
def test_stages_are_no_more_updates_apart(
    data: st.DataObject, schedule: Schedule, num_stages: int, micro_batches: int
) -> None:
    pipeline = Pipeline(schedule, num_stages, micro_batches, virtual_stages=2 if schedule == "interleaved" else 1)
    seconds = st.sampled_from([0.01, 1.0, 10.0])
    costs = [StageCost(*(data.draw(seconds) for _ in range(5))) for _ in range(pipeline.num_parts)]
    ends = [[end for end, _ in rank.updates] for rank in simulate(pipeline, costs, Workload(12)).ranks]
    apart = updates_apart(pipeline)
    for ahead, behind in product(ends, ends):
        assert all(early <= late for early, late in zip(behind, ahead[apart:], strict=False))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_batches_that_drain_keep_stages_together(schedule: Schedule) -> None:
    pipeline = Pipeline(schedule, 8, 1, virtual_stages=2 if schedule == "interleaved" else 1)
    assert updates_apart(pipeline) == 1
    assert [kept_states(pipeline, stage, 1) for stage in (0, 7)] == [(3, 3)] * 2


def test_micro_batches_in_flight_one_per_rank_against_all_of_a_batch() -> None:
    cost = StageCost(1.0, 2.0, activation_bytes=7)
    assert each(even(Pipeline("1f1b", 4, 16), 1, cost), "in_flight") == (4, 3, 2, 1)
    assert each(even(Pipeline("gpipe", 4, 16), 1, cost), "in_flight") == (16,) * 4
    assert each(even(Pipeline("gpipe", 4, 16), 1, cost), "peak_bytes") == (112,) * 4
    assert each(even(Pipeline("interleaved", 4, 16, virtual_stages=2), 1, cost), "in_flight") == (11, 9, 7, 5)


def test_the_slowest_stage_sets_the_pace() -> None:
    costs = [StageCost(1.0, 2.0), StageCost(2.0, 3.0), StageCost(0.5, 0.5)]
    simulation = simulate(Pipeline("asp", 3, 1), costs, Workload(60))
    assert simulation.throughput == pytest.approx(1 / 5)
    assert simulation.steady_bubble == pytest.approx([2 / 5, 0.0, 4 / 5])


@pytest.mark.parametrize("batches", [6, 8, 9, 14, 41])
def test_the_steady_state_is_whole_convoys(batches: int) -> None:
    """Two micro-batches go round in 5 s, one 2 s behind the other: even few batches show 2.5 s."""
    costs = [StageCost(1.0, 1.0, 0.5, 0.5)] * 2
    assert simulate(Pipeline("asp", 2, 1), costs, Workload(batches)).throughput == pytest.approx(1 / 2.5)


# Transfers


@pytest.mark.parametrize(("depth_map", "throughput"), [((1, 0), 1 / 2.5), ((2, 0), 1 / 2), ((3, 0), 1 / 2)])
def test_an_extra_forward_pass_hides_transfers(depth_map: tuple[int, ...], throughput: float) -> None:
    """Two micro-batches share a round trip of 2 x 2 s of passes and 2 x 0.5 s of transfers; three hide it."""
    costs = [StageCost(1.0, 1.0, 0.5, 0.5)] * 2
    simulation = simulate(Pipeline("asp", 2, 1, depth_map), costs, Workload(40))
    assert simulation.throughput == pytest.approx(throughput)


def test_transfers_of_one_link_follow_each_other() -> None:
    """The first of two stages computes twice as fast as the link carries; receives are posted one ahead."""
    simulation = simulate(
        Pipeline("gpipe", 2, 4), [StageCost(1.0, 1.0, 2.0, 0.0), StageCost(1.0, 1.0, 0.0, 0.0)], Workload(1)
    )
    assert spans_of(simulation.ranks[0], Category.TRANSFER) == [
        ("SEND_ACT0", 1.0, 3.0),
        ("SEND_ACT1", 3.0, 5.0),
        ("SEND_ACT2", 5.0, 7.0),
        ("SEND_ACT3", 7.0, 9.0),
    ]
    assert spans_of(simulation.ranks[1], Category.FORWARD, Category.BACKWARD)[:5] == [
        ("F0", 3.0, 4.0),
        ("F1", 5.0, 6.0),
        ("F2", 7.0, 8.0),
        ("F3", 9.0, 10.0),
        ("B0", 10.0, 11.0),
    ]


def test_a_transfer_waits_for_a_posted_receive() -> None:
    """The receiver computes slowly and keeps one receive posted: the third message moves when the second is taken."""
    costs = [StageCost(1.0, 1.0, 1.0, 0.0), StageCost(5.0, 1.0)]
    simulation = simulate(Pipeline("gpipe", 2, 4), costs, Workload(1))
    assert spans_of(simulation.ranks[0], Category.TRANSFER) == [
        ("SEND_ACT0", 1.0, 2.0),
        ("SEND_ACT1", 2.0, 3.0),
        ("SEND_ACT2", 7.0, 8.0),
        ("SEND_ACT3", 12.0, 13.0),
    ]


def naive_ends(
    pipeline: Pipeline, costs: Sequence[StageCost], workload: Workload, later: Sequence[Phase] = ()
) -> list[float]:
    """When each rank is done, found by going from one moment to the next and asking who can do what. Whole seconds."""
    size = pipeline.micro_batches
    pauses = {phase.start: int(phase.pause_s) for phase in later}

    def costs_at(action: Action) -> Sequence[StageCost]:
        first = action.index * size if action.kind.per_batch else action.index
        return [costs, *(phase.costs for phase in later if phase.start <= first)][-1]

    built = programs(pipeline, workload)
    num_ranks = pipeline.num_stages
    position, busy_until, ends = [0] * num_ranks, [0] * num_ranks, [0.0] * num_ranks
    queued: dict[Link, list[int]] = {}
    moving: dict[Link, int] = {}
    arrived: dict[Link, int] = {}
    taken: dict[Link, int] = {}
    now = 0
    while any(position[rank] < len(built[rank]) for rank in range(num_ranks)):
        moved = True
        while moved:
            moved = False
            for link in [link for link, end in moving.items() if end <= now]:
                del moving[link]
                arrived[link] = arrived.get(link, 0) + 1
                moved = True
            for link, seconds in queued.items():
                ahead = arrived.get(link, 0) - taken.get(link, 0)
                if seconds and link not in moving and ahead < posted_receives(pipeline, link):
                    moving[link] = now + seconds.pop(0)
                    moved = True
            for rank in range(num_ranks):
                if position[rank] == len(built[rank]) or busy_until[rank] > now:
                    continue
                action = built[rank][position[rank]]
                cost = costs_at(action)[rank if action.part is None else action.part]
                into, out = receive_link(action.kind, rank, num_ranks), send_link(action.kind, rank, num_ranks)
                if into is not None:
                    if arrived.get(into, 0) == taken.get(into, 0):
                        continue
                    taken[into] = taken.get(into, 0) + 1
                elif out is not None:
                    sent = cost.send_activation_s if action.kind is Kind.SEND_ACT else cost.send_gradient_s
                    queued.setdefault(out, []).append(int(sent))
                elif action.kind is Kind.FORWARD:
                    pause = pauses.pop(action.index, 0) if rank == 0 and action.part in (None, 0) else 0
                    busy_until[rank] = now + pause + int(cost.forward_s)
                elif action.kind is Kind.BACKWARD:
                    busy_until[rank] = now + int(cost.backward_s)
                elif action.kind is Kind.STEP:
                    busy_until[rank] = now + int(
                        sum(costs_at(action)[part].update_s for part in pipeline.parts_of(rank))
                    )
                ends[rank] = busy_until[rank]
                position[rank] += 1
                moved = True
        now += 1
    return ends


SECONDS = st.integers(0, 6)
COSTS = st.builds(StageCost, st.integers(1, 6), st.integers(1, 6), SECONDS, SECONDS, SECONDS)


@given(trainings(most_stages=4, most_micro_batches=6), st.data())
@settings(max_examples=200)
def test_against_a_naive_simulation(training: tuple[Pipeline, Workload], data: st.DataObject) -> None:
    pipeline, workload = training
    costs = data.draw(st.lists(COSTS, min_size=pipeline.num_parts, max_size=pipeline.num_parts))
    simulation = simulate(pipeline, costs, workload)
    assert [rank.end_s for rank in simulation.ranks] == naive_ends(pipeline, costs, workload)


@given(trainings(most_stages=4, most_micro_batches=6), st.data())
@settings(max_examples=100)
def test_costs_that_change_against_a_naive_simulation(training: tuple[Pipeline, Workload], data: st.DataObject) -> None:
    pipeline, workload = training
    each = st.lists(COSTS, min_size=pipeline.num_parts, max_size=pipeline.num_parts)
    batches = data.draw(st.lists(st.integers(1, max(1, workload.batches - 1)), unique=True, max_size=3))
    later = [Phase(b * pipeline.micro_batches, data.draw(each), data.draw(SECONDS)) for b in sorted(batches)]
    later = [phase for phase in later if phase.start < workload.batches * pipeline.micro_batches]
    costs = data.draw(each)
    simulation = simulate(pipeline, costs, workload, later)
    assert [rank.end_s for rank in simulation.ranks] == naive_ends(pipeline, costs, workload, later)


# Memory


def test_memory_of_stages_that_change_at_a_data_end() -> None:
    costs = StageCost(1.0, 1.0, activation_bytes=10, static_bytes=1000, version_bytes=100)
    larger = StageCost(2.0, 2.0, activation_bytes=20, static_bytes=2000, version_bytes=200)
    simulation = simulate(Pipeline("asp", 2, 1), [costs] * 2, Workload(4, (2,)), [Phase(2, [larger] * 2, 5.0)])
    first = simulation.ranks[0]
    assert [(span.start, str(span.action)) for span in first.spans if str(span.action) in ("F2", "F3")] == [
        (11.0, "F2"),  # B1 ends at 6
        (13.0, "F3"),
    ]
    assert max(sample.bytes for sample in first.memory if sample.time < 6) == 1110
    assert first.peak_bytes == 2220
    assert first.memory[-1].bytes == 2000


def test_memory_of_a_stage() -> None:
    cost = StageCost(1.0, 1.0, activation_bytes=10, static_bytes=1000, version_bytes=100, recompute_bytes=5)
    simulation = even(Pipeline("asp", 2, 1), 3, cost)
    assert [(sample.time, sample.bytes) for sample in simulation.ranks[0].memory] == [
        (0.0, 1000),
        (0.0, 1010),  # F0
        (1.0, 1020),  # F1
        (3.0, 1025),  # B0 recomputes
        (4.0, 1010),
        (4.0, 1110),  # STEP0: version 0 is kept for micro-batch 1
        (4.0, 1120),  # F2
        (5.0, 1125),  # B1 recomputes
        (6.0, 1010),  # nobody uses version 0 any more
        (6.0, 1110),  # STEP1: version 1 is kept for micro-batch 2
        (7.0, 1115),  # B2 recomputes
        (8.0, 1000),
    ]
    assert each(simulation, "peak_bytes") == (1125, 1015)
    assert each(simulation, "versions") == (2, 1)


@given(trainings(), st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=200)
def test_peak_from_counts(training: tuple[Pipeline, Workload], activation: int, version: int) -> None:
    """No more than the most in flight and the most versions, and exactly that if only one of the two counts."""
    pipeline, workload = training
    cost = StageCost(1.0, 2.0, activation_bytes=activation, version_bytes=version, static_bytes=3)
    simulation = simulate(pipeline, [cost] * pipeline.num_parts, workload)
    parts = pipeline.virtual_stages
    for rank in range(pipeline.num_stages):
        assert simulation.ranks[rank].in_flight <= pipeline.in_flight(rank)
        depth = 0 if pipeline.synchronous else pipeline.depths[0 if pipeline.vertical else rank]
        assert simulation.ranks[rank].versions <= (update_delay(depth, pipeline.micro_batches) + 1)
        most = (
            3 * parts
            + activation * simulation.ranks[rank].in_flight
            + version * parts * (simulation.ranks[rank].versions - 1)
        )
        assert simulation.ranks[rank].peak_bytes <= most
        if activation == 0 or version == 0:
            assert simulation.ranks[rank].peak_bytes == most
        if not pipeline.vertical:  # which lets go of a version with the next forward pass
            assert simulation.ranks[rank].memory[-1].bytes == 3 * parts


# Outcome


def test_timeline_of_a_batch() -> None:
    cost = StageCost(1.0, 2.0, 0.5, 0.25, update_s=0.5)
    timeline = even(Pipeline("1f1b", 2, 1), 1, cost).timeline
    assert [[(str(s.action), s.start, s.end, s.part, s.version) for s in row] for row in timeline.by_rank()] == [
        [
            ("F0", 0.0, 1.0, 0, 0),
            ("SEND_ACT0", 1.0, 1.5, 0, None),
            ("RECV_GRAD0", 1.0, 4.75, 0, None),
            ("B0", 4.75, 6.75, 0, 0),
            ("STEP0", 6.75, 7.25, 0, None),
        ],
        [
            ("RECV_ACT0", 0.0, 1.5, 1, None),
            ("F0", 1.5, 2.5, 1, 0),
            ("B0", 2.5, 4.5, 1, 0),
            ("SEND_GRAD0", 4.5, 4.75, 1, None),
            ("STEP0", 4.5, 5.0, 1, None),
        ],
    ]
    assert timeline.source == "simulation"
    assert timeline.staleness == ((0.0, 0), (0.0, 0))
    timeline.check()
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_timeline_of_parts() -> None:
    timeline = even(Pipeline("interleaved", 2, 2, virtual_stages=2), 1, StageCost(1.0, 2.0)).timeline
    assert {span.part for span in timeline.spans if span.rank == 1} == {1, 3}
    assert str(timeline.by_rank()[0][3].action) == "2F0"
    assert timeline.by_rank()[0][3].part == 2
    timeline.check()


def test_without_stashing_one_version_is_held() -> None:
    costs = StageCost(1.0, 2.0, static_bytes=7, version_bytes=100)
    simulation = even(Pipeline("asp", 4, 1, weight_sync="none"), 8, costs)
    backward = [span for span in simulation.ranks[0].spans if span.category is Category.BACKWARD]
    assert [span.version for span in backward] == list(range(8)), "the newest, not those of the forward pass"
    assert simulation.staleness[0][1] == 3
    assert [(rank.versions, rank.peak_bytes) for rank in simulation.ranks] == [(1, 7)] * 4


def test_versions_of_passes() -> None:
    simulation = even(Pipeline("asp", 2, 1), 3, StageCost(1.0, 1.0))
    by_rank = [versions_of(rank) for rank in simulation.ranks]
    assert by_rank == [
        [("F0", 0), ("F1", 0), ("B0", 0), ("F2", 1), ("B1", 0), ("B2", 1)],
        [("F0", 0), ("B0", 0), ("F1", 1), ("B1", 1), ("F2", 2), ("B2", 2)],
    ]
    vertical = even(Pipeline("asp", 2, 1, weight_sync="vertical"), 3, StageCost(1.0, 1.0))
    assert versions_of(vertical.ranks[1]) == [
        ("F0", 0),
        ("B0", 0),
        ("F1", 0),
        ("B1", 0),
        ("F2", 1),
        ("B2", 1),
    ]


def test_a_data_end_costs_a_drain() -> None:
    pipeline, costs = Pipeline("asp", 4, 1), [StageCost(1.0, 2.0)] * 4
    whole = simulate(pipeline, costs, Workload(60))
    broken = simulate(pipeline, costs, Workload(60, data_ends=(20,)))
    assert broken.steady_batches == (40, 56)
    assert broken.throughput == pytest.approx(whole.throughput)
    assert broken.makespan_s == pytest.approx(whole.makespan_s + 3 * 3.0)


def test_too_few_batches_for_a_steady_state() -> None:
    simulation = even(Pipeline("asp", 4, 1), 3, StageCost(1.0, 2.0))
    assert simulation.steady_batches is None
    assert simulation.throughput == simulation.overall_throughput
    assert simulation.steady_bubble == simulation.bubble


def test_a_large_pipeline() -> None:
    simulation = even(Pipeline("asp", 128, 1), 300, StageCost(1.0, 2.0, 0.1, 0.1, activation_bytes=1))
    assert each(simulation, "in_flight") == tuple(range(128, 0, -1))
