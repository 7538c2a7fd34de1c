"""The partition file and the stage maps beside a vPipe YAML."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from vpipe_runs import MAPS

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.migration.vpipe_files import read_split, read_stage_maps


def file(tmp_path: Path, content: Any) -> Path:
    path = tmp_path / "f.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_splits(tmp_path: Path) -> None:
    split = read_split(file(tmp_path, {"partition": [12, 13, 13, 11], "recompute_ratio": [0.3, 0, 0, 0]}))
    assert (split.partition, split.recompute_ratio) == ((12, 13, 13, 11), (0.3, 0, 0, 0))
    assert read_split(file(tmp_path, {"partition": [26, 23]})).partition == (26, 23)


def test_stage_maps(tmp_path: Path) -> None:
    found = read_stage_maps(file(tmp_path, MAPS))
    assert (found.modules, found.ranks, found.depth) == ([1, 1, 1, 1], [[0], [1], [2], [3]], None)
    maps = {
        "module_to_stage_map": [0, 0, 1, 1, 1],
        "stage_to_rank_map": {"1": [2, 3], "0": [0, 1]},
        "stage_to_depth_map": {"0": 2, "1": 0},
        "mp_size": 4,
    }
    found = read_stage_maps(file(tmp_path, maps))
    assert (found.modules, found.ranks, found.depth) == ([2, 2], [[0, 1], [2, 3]], [2, 0])
    assert found.model_extra == {"mp_size": 4}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "it is not JSON"),
        ([1], "it holds no object"),
        ({"partitions": [1]}, 'unknown key "partitions", did you mean "partition"?'),
        ({}, 'the file has no key "partition"'),
        ({"partition": [1, 0]}, "f.json, key partition[1]): got 0; allowed: an int > 0"),
        ({"partition": [1, True]}, "f.json, key partition[1]): got true; allowed: an int > 0"),
        ({"partition": [1, 1], "recompute_ratio": [1]}, "got [1.0]; partition has 2 entries and this has 1"),
        ({"partition": [1, 1], "swap_ratio": [1]}, "f.json: swap_ratio: got [1.0]; partition has 2 entries and this"),
        ({"partition": [1, 1], "recompute_ratio": [0, 1.5]}, "key recompute_ratio[1]): got 1.5; allowed: a number"),
    ],
)  # fmt: skip
def test_wrong_splits_are_refused_in_one_line(tmp_path: Path, content: Any, says: str) -> None:
    with pytest.raises(VPipeConfigError) as caught:
        read_split(file(tmp_path, content))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"module_to_stage_map": None}, "module_to_stage_map: got null"),
        ({"module_to_stage_map": [0, 1, 0, 2, 3, 3]}, "0 follows 1; allowed: the stage of every module"),
        ({"module_to_stage_map": [1, 2, 2]}, "number the stages from 0"),
        ({"module_to_stage_map": [0, 1, 2, 3]}, "the criterion has a stage of its own"),
        ({"stage_to_rank_map": {"0": [0]}}, 'module_to_stage_map has 4 stages; allowed: the ranks of every stage'),
        ({"stage_to_rank_map": {"0": [0], "1": [1], "2": [2], "3": 3}}, "give a list of ranks per stage"),
        ({"stage_to_rank_map": {"0": [0], "1": [1], "2": [2], "3": [4]}}, "the ranks are not 0, 1, 2, ... once each"),
        (
            {"stage_to_rank_map": {"0": [0, 1], "1": [2], "2": [3], "3": [4]}},
            "stages have 2, 1, 1, 1 ranks, and uneven replication has no counterpart; allowed: the same number of "
            "ranks at every stage; give every stage 2 ranks, or one, and move layers instead",
        ),
        (
            {"stage_to_depth_map": {"0": 0, "1": 2, "2": 4, "3": 6}},
            'stage 0 runs furthest ahead; allowed: a depth per stage, falling to 0 at the last stage; write {"0": 3, '
            '"1": 2, "2": 1, "3": 0}',
        ),
        ({"stage_to_depth_map": {"0": 3, "1": 2, "2": 1, "3": 1}}, "stage_to_depth_map: got"),
        ({"stage_to_depth_map": {"0": 3, "1": 2.5, "2": 1, "3": 0}}, "give whole numbers >= 0"),
    ],
)  # fmt: skip
def test_wrong_maps_are_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(VPipeConfigError) as caught:
        read_stage_maps(file(tmp_path, {**MAPS, **changes}))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
