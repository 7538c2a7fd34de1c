"""What the convergence benchmark makes of its runs: which rate to try next, gaps, times."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    import bench_convergence

    return bench_convergence


def climbed(bench: Any, rates: list[float], loss_of: Any) -> list[float]:
    losses: dict[float, float] = {}
    while (rate := bench.next_rate(losses, rates)) is not None:
        losses[rate] = loss_of(rate)
    return list(losses)


def test_rates_are_tried_until_the_best_has_worse_neighbours(bench: Any) -> None:
    rates = [1.0, 2.0, 3.0, 4.0, 5.0]
    assert climbed(bench, rates, lambda rate: abs(rate - 3)) == [3, 2, 4]
    assert climbed(bench, rates, lambda rate: rate) == [3, 2, 1]
    assert climbed(bench, rates, lambda rate: -rate) == [3, 2, 4, 5]
    assert climbed(bench, rates, lambda rate: math.inf if rate > 2 else -rate) == [3, 2, 1]
    assert climbed(bench, [7.0], lambda rate: rate) == [7]


def run(curve: list[tuple[int, float]]) -> dict[str, Any]:
    return {"curve": curve, "rate": 1e-3, "updates": curve[-1][0]}


def test_table_compares_with_the_better_synchronous_arm(bench: Any) -> None:
    arm = bench.Arm
    chosen = {
        arm(1, 1, "adamw"): [run([(10, 3.0), (20, 2.0)]), run([(10, 3.0), (20, 2.0)])],
        arm(1, 1, "nadam"): [run([(10, 3.0), (20, 2.5)])] * 2,
        arm(4, 1, "none"): [run([(20, 2.4), (30, 2.1)]), run([(20, 2.2), (30, 2.0)])],
        arm(4, 1, "nadam"): [run([(20, 2.1), (30, 1.9)]), run([(20, 2.1), (30, 1.7)])],
    }
    lines = bench.table(chosen, 20, {(4, 1): 4.0})[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == ["synchronous adamw", "0.001", "2.0000", "2.0000 .. 2.0000", "+0.00%", "", "", ""]
    assert cells[1][4] == "+25.00%"
    assert cells[2][2:] == ["2.3000", "2.2000 .. 2.4000", "+15.00%", "", "not by every seed in 30", ""]
    # Down to 2.0 after 25 and 22.5 updates, each of which takes a quarter of the time.
    assert cells[3][2:] == ["2.1000", "2.1000 .. 2.1000", "+5.00%", "67%", "24", "30%"]


def test_speeds_are_those_of_fast_links_and_emulated_work(bench: Any, tmp_path: Path) -> None:
    common = {"stages": 4, "micro_batches": 1, "work": "emulated", "link": 0.0}
    rows = [
        {**common, "arm": "stock", "rate": 10.0},
        {**common, "arm": "asp-deeper", "rate": 39.0},
        {**common, "arm": "asp-deeper", "rate": 1.0, "link": 0.5},
        {**common, "arm": "asp-deeper", "rate": 2.0, "work": "real"},
        {**common, "arm": "asp-deeper", "rate": 3.0, "micro_batches": 8},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert bench.speeds(path) == {(4, 1): pytest.approx(3.9)}
    assert bench.speeds(None) == {}
