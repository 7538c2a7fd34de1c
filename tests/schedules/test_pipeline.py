"""Shapes of pipelines: what is derived from them and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.schedules.pipeline import Pipeline


@pytest.mark.parametrize(
    ("pipeline", "depths", "in_flight"),
    [
        (Pipeline("asp", 4, 1), (3, 2, 1, 0), (4, 3, 2, 1)),
        (Pipeline("asp", 3, 2, (9, 4, 0)), (9, 4, 0), (10, 5, 1)),
        (Pipeline("1f1b", 4, 8), (3, 2, 1, 0), (4, 3, 2, 1)),
        (Pipeline("1f1b", 4, 2), (3, 2, 1, 0), (2, 2, 2, 1)),
        (Pipeline("gpipe", 4, 8), (7, 7, 7, 7), (8, 8, 8, 8)),
        (Pipeline("interleaved", 4, 8, virtual_stages=2), (10, 8, 6, 4), (11, 9, 7, 5)),
        (Pipeline("interleaved", 2, 2, virtual_stages=2), (4, 2), (4, 3)),
        (Pipeline("asp", 1, 5), (0,), (1,)),
    ],
)
def test_depths_and_micro_batches_in_flight(
    pipeline: Pipeline, depths: tuple[int, ...], in_flight: tuple[int, ...]
) -> None:
    assert pipeline.depths == depths
    assert tuple(pipeline.in_flight(rank) for rank in range(pipeline.num_stages)) == in_flight


def test_parts() -> None:
    pipeline = Pipeline("interleaved", 3, 6, virtual_stages=2)
    assert pipeline.num_parts == 6
    assert [list(pipeline.parts_of(rank)) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    assert [pipeline.rank_of(part) for part in range(6)] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"micro_batches": 0}, "micro_batches: got 0; allowed: a whole number >= 1; change it"),
        ({"micro_batches": True}, "micro_batches: got true; allowed: a whole number >= 1; change it"),
        ({"virtual_stages": 2}, 'virtual_stages: got 2; schedule is "asp"; allowed: 2 or more with schedule'),
        ({"schedule": "interleaved"}, 'virtual_stages: got 1; schedule is "interleaved"; allowed: 2 or more'),
        ({"schedule": "1f1b", "depth_map": (2, 1, 0)}, 'depth_map: got [2, 1, 0]; schedule "1f1b" has depths of its'),
        ({"depth_map": (1, 0)}, "depth_map: got [1, 0]; allowed: 3 whole numbers >= 0, each no larger than the one"),
        ({"depth_map": (1, 2, 0)}, "depth_map: got [1, 2, 0]; allowed: 3 whole numbers"),
        ({"depth_map": (2, 1, 1)}, "depth_map: got [2, 1, 1]; allowed: 3 whole numbers"),
        ({"depth_map": (2, 1, -1)}, "depth_map: got [2, 1, -1]; allowed: 3 whole numbers"),
        ({"recompute_ratio": (0, 1)}, "recompute_ratio: got [0, 1]; allowed: 3 numbers in [0, 1]"),
    ],
)
def test_refused(arguments: dict[str, Any], line: str) -> None:
    with pytest.raises(VPipeConfigError) as error:
        Pipeline(**{"schedule": "asp", "num_stages": 3, "micro_batches": 2, **arguments})
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)
