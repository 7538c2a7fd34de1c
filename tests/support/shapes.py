"""Pipelines of all schedules and sizes, and workloads for them, for property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from ds_vpipe.schedules.one_f_one_b import default_depths
from ds_vpipe.schedules.pipeline import SCHEDULES, Pipeline
from ds_vpipe.schedules.program import Workload


@st.composite
def pipelines(draw: st.DrawFn, most_stages: int = 8, most_micro_batches: int = 12) -> Pipeline:
    """Any schedule; asp with any depth map, vertical or not."""
    schedule = draw(st.sampled_from(SCHEDULES))
    num_stages = draw(st.integers(1, most_stages))
    micro_batches = draw(st.integers(1, most_micro_batches))
    if schedule == "interleaved":
        return Pipeline(schedule, num_stages, micro_batches, virtual_stages=draw(st.integers(2, 4)))
    if schedule != "asp":
        return Pipeline(schedule, num_stages, micro_batches)
    drawn = st.lists(st.integers(0, 12), min_size=num_stages - 1, max_size=num_stages - 1)
    depths = drawn.map(lambda values: (*sorted(values, reverse=True), 0))
    depth_map = draw(st.none() | st.just(default_depths(num_stages)) | depths)
    return Pipeline(
        schedule, num_stages, micro_batches, depth_map, weight_sync=draw(st.sampled_from(["stash", "vertical"]))
    )


@st.composite
def trainings(draw: st.DrawFn, most_stages: int = 8, most_micro_batches: int = 12) -> tuple[Pipeline, Workload]:
    """A pipeline and up to five batches for it, with data ends anywhere, in batches and between them."""
    pipeline, batches = draw(pipelines(most_stages, most_micro_batches)), draw(st.integers(1, 5))
    end = (batches + 1) * pipeline.micro_batches - 1
    ends = draw(st.lists(st.integers(1, end), max_size=4)) if end else []
    return pipeline, Workload(batches, tuple(sorted(ends)))
