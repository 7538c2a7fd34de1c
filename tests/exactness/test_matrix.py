"""Every combination of docs/compatibility.md: equal to the replay, or refused in one line."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import cases
import matrix
import pytest
import reference
import torch
import toy
from test_exactness import LAYERS, difference, sgd
from worlds import Worlds

from ds_vpipe.partition import uniform_partition
from ds_vpipe.schedules.one_f_one_b import default_depths

ROOT = Path(__file__).resolve().parents[2]
RUN = [row for row in matrix.rows() if all(cell.refusal() is None for cell in matrix.cells(*row))]
REFUSED = [row for row in matrix.rows() if row not in RUN]
DTYPES = {"bf16": torch.bfloat16, "fp16, dynamic scale": torch.float16, "fp16, static scale": torch.float16}


def name_of(row: tuple[str, int, int]) -> str:
    return f"{row[0]}, ZeRO-{row[1]}, {row[2]} replicas"


@cache
def replayed(
    precision: str, zero: int, replicas: int, clipping: str, tied: bool, micro_batches: int, newest: bool = False
) -> dict[str, torch.Tensor]:
    scalers = {
        "fp16, dynamic scale": reference.Scaler(2.0**18, window=2),
        "fp16, static scale": reference.Scaler(64.0, dynamic=False),
    }
    options: dict[str, Any] = {"layers": toy.built_tied_layers(), "ties": toy.TIES[:1]} if tied else {}
    run = reference.Replay(
        uniform_partition(LAYERS, matrix.STAGES),
        default_depths(matrix.STAGES),
        micro_batches,
        sgd,
        replicas=replicas,
        clip=0.0 if clipping == "none" else matrix.CLIP,
        scope=clipping,
        dtype=DTYPES.get(precision, torch.float32),
        autocast=precision == "bf16 autocast",
        zero=zero == 1,
        reduces_linear_in=torch.bfloat16 if precision == "bf16 autocast" and zero == 1 else None,
        scaler=scalers.get(precision),
        criterion=toy.mean_over_positions if tied else toy.float_cross_entropy,
        newest=newest,
        **options,
    )
    return run.run(matrix.BATCHES).parameters()


def train_cells(cells: list[matrix.Cell]) -> list[dict[str, Any]]:
    """Train every cell and return parameters by layer."""
    reports = []
    for number, cell in enumerate(cells, 1):
        model: dict[str, Any] = {"loss_fn": toy.float_cross_entropy}
        if cell.tied:
            model = {"loss_fn": toy.mean_over_positions, "specs": toy.words_tied_specs}
        reports.append(cases.train(cell.ds_config(), matrix.STAGES, matrix.BATCHES, **model))
        if number % 4 == 0:
            cases.close_groups()
    return reports


def by_layer(reports: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    named = {}
    for report in reports:
        for name, value in report["parameters"].items():
            place = name.replace("other.tied_modules.words", "0" if report["stage"] == 0 else "9")
            named[place] = value
    return named


@pytest.mark.mp
@pytest.mark.parametrize("row", RUN, ids=name_of)
def test_equal_to_the_replay(worlds: Worlds, row: tuple[str, int, int]) -> None:
    precision, zero, replicas = row
    cells = matrix.cells(*row)
    ranks = worlds.run(matrix.STAGES * replicas, train_cells, cells)
    for position, cell in enumerate(cells):
        # Ranks of a stage are neighbours.
        pipelines = [by_layer([ranks[s * replicas + r][position] for s in range(2)]) for r in range(replicas)]
        wanted = replayed(precision, zero, replicas, cell.clipping, cell.tied, cell.micro_batches)
        for pipeline in pipelines:
            assert difference(pipeline, pipelines[0]) == 0, cell
        off = difference(pipelines[0], wanted)
        assert off <= matrix.TOLERANCES[precision], f"{cell}: {off:.1e}"


@pytest.mark.parametrize("precision", matrix.TOLERANCES)
@pytest.mark.parametrize("tied", matrix.TIED)
@pytest.mark.parametrize("micro_batches", matrix.MICRO_BATCHES)
def test_tolerance_would_notice_newest_weights(precision: str, tied: bool, micro_batches: int) -> None:
    right = replayed(precision, 0, 1, "none", tied, micro_batches)
    wrong = replayed(precision, 0, 1, "none", tied, micro_batches, newest=True)
    assert difference(right, wrong) > 2 * matrix.TOLERANCES[precision]


@pytest.mark.parametrize("row", REFUSED, ids=name_of)
def test_refused_in_one_line(row: tuple[str, int, int]) -> None:
    for cell in matrix.cells(*row):
        line = cell.refusal()
        assert line is not None
        assert "\n" not in line
