"""Pipelines of all schedules and sizes, and workloads for them, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from ds_vpipe.schedules.moves import Move, earliest_cut_over, moved
from ds_vpipe.schedules.one_f_one_b import default_depths
from ds_vpipe.schedules.pipeline import SCHEDULES, Pipeline, WeightSync
from ds_vpipe.schedules.program import Workload

SYNCS: tuple[WeightSync, ...] = ("stash", "vertical")


@st.composite
def pipelines(draw: st.DrawFn, most_stages: int = 8, most_micro_batches: int = 12) -> Pipeline:
    """Any schedule; asp with any depth map, vertical or not."""
    schedule = draw(st.sampled_from(SCHEDULES))
    num_stages = draw(st.integers(1, most_stages))
    micro_batches = draw(st.integers(1, most_micro_batches))
    if schedule == "interleaved":
        num_stages = max(2, num_stages)
        return Pipeline(schedule, num_stages, micro_batches, virtual_stages=draw(st.integers(2, 4)))
    if schedule != "asp":
        return Pipeline(schedule, num_stages, micro_batches)
    drawn = st.lists(st.integers(0, 12), min_size=num_stages - 1, max_size=num_stages - 1)
    depths = drawn.map(lambda values: (*sorted(values, reverse=True), 0))
    depth_map = draw(st.none() | st.just(default_depths(num_stages)) | depths)
    return Pipeline(schedule, num_stages, micro_batches, depth_map, weight_sync=draw(st.sampled_from(SYNCS)))


@st.composite
def trainings(draw: st.DrawFn, most_stages: int = 8, most_micro_batches: int = 12) -> tuple[Pipeline, Workload]:
    """A pipeline and up to five batches for it, with data ends anywhere, in batches and between them."""
    pipeline, batches = draw(pipelines(most_stages, most_micro_batches)), draw(st.integers(1, 5))
    end = (batches + 1) * pipeline.micro_batches - 1
    ends = draw(st.lists(st.integers(1, end), max_size=4)) if end else []
    return pipeline, Workload(batches, tuple(sorted(ends)))


@st.composite
def move_chains(draw: st.DrawFn) -> tuple[Pipeline, tuple[Move, ...]]:
    """A pipeline and up to four moves that it can carry out, one after the other; some go there and back."""
    num_stages, micro_batches = draw(st.integers(2, 6)), draw(st.integers(1, 4))
    if draw(st.booleans()):
        drawn = st.lists(st.integers(0, 8), min_size=num_stages - 1, max_size=num_stages - 1)
        depths = (*sorted(draw(drawn), reverse=True), 0)
        pipeline = Pipeline("asp", num_stages, micro_batches, depths, weight_sync=draw(st.sampled_from(SYNCS)))
    else:
        pipeline = Pipeline(draw(st.sampled_from(["asp", "1f1b", "gpipe"])), num_stages, micro_batches)
    partition: tuple[int, ...] = (3,) * num_stages
    moves: list[Move] = []
    for _ in range(draw(st.integers(0, 4))):
        source, down = draw(st.integers(0, num_stages - 1)), draw(st.booleans())
        target = source + (1 if down else -1)
        if moves and draw(st.booleans()):
            source, target = moves[-1].target, moves[-1].source
        if not 0 <= target < num_stages or partition[source] < 2:
            continue
        layer = sum(partition[:source]) + (partition[source] - 1 if target > source else 0)
        updates = moves[-1].settled_batch(pipeline) if moves else 0
        cut_over = earliest_cut_over(pipeline, source, target, updates) + draw(st.integers(0, 3)) * micro_batches
        moves.append(Move(layer, source, target, cut_over))
        partition = moved(partition, moves[-1])
    return pipeline, tuple(moves)
