"""What the convergence benchmark makes of its runs: which rate to try next, gaps, times."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def bench() -> Any:
    import convergence

    return convergence


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


def test_what_is_recommended_depends_on_how_late_gradients_are(bench: Any) -> None:
    wanted = {
        "nadam": [(2, 1), (4, 4), (16, 16), (4, 8)],
        "nadam+sync20%": [(4, 1), (3, 1), (8, 4)],
        "nadam+sync20%+warmup20%": [(5, 1), (8, 1), (16, 4)],
        "nadam+sync20%+warmup40%": [(16, 1), (9, 1), (32, 1)],
    }
    for method, sizes in wanted.items():
        chosen = [bench.named(["recommended", "none", method], *size) for size in sizes]
        assert chosen == [[method, "none"]] * len(sizes)


def row(bench: Any, arm: Any, rate: float, seed: int, curve: list[tuple[int, float]]) -> dict[str, Any]:
    return {**asdict(arm), "rate": rate, "seed": seed, "curve": curve}


def cells_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def test_table_compares_with_the_better_synchronous_arm(bench: Any) -> None:
    arm = bench.Arm
    curves = {
        arm(1, 1, "adamw", 20): [[(10, 3.0), (20, 2.0)]] * 2,
        arm(1, 1, "nadam", 20): [[(10, 3.0), (20, 2.5)]],
        arm(4, 1, "none", 20): [[(20, 2.4)], [(20, 2.2)]],
        arm(4, 1, "nadam+sync20%", 20): [[(10, 2.5), (20, 2.1)], [(10, 2.4), (20, 1.9)]],
        arm(4, 1, "nadam+sync20%", 30): [[(10, 2.5), (30, 1.5)], [(10, 2.5), (30, 1.5)]],
    }
    chosen = {arm: [row(bench, arm, 1e-3, *seed) for seed in enumerate(each)] for arm, each in curves.items()}
    cells = cells_of(bench.table(chosen, 20, {(4, 1): bench.Pace(0.25, 0.75)}))
    first = ["synchronous adamw", "20", "0.001", "2", "2.0000", "2.0000 .. 2.0000", "+0.00%", "", "", ""]
    assert cells[0] == first
    assert cells[1][6] == "+25.00%"
    assert cells[2][4:] == ["2.3000", "2.2000 .. 2.4000", "+15.00%", "", "25%", "0 of 2"]
    # Twenty updates and four drains, (20 x 0.25 + 4 x 0.75) / 20; 2.0 is reached by the second seed alone.
    assert cells[3][4:] == ["2.0000", "1.9000 .. 2.1000", "+0.00%", "100%", "40%", "1 of 2"]
    # 2.0 after 20 of the 30 updates.
    assert cells[4][4:] == ["1.5000", "1.5000 .. 1.5000", "-25.00%", "267%", "52%", "40%"]


def test_time_counts_every_drain(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fillings of 1, 1, 2, 3 and 4 batches (2 + floor(3 r / 6)), then none that ends."""
    monkeypatch.setitem(bench.METHODS, "both", {"synchronous_updates": 0.1, "delay_warmup_updates": 0.3})
    arm, pace = bench.Arm(4, 1, "both", 20), bench.Pace(0.25, 0.75)
    times = [bench.time_of(arm, updates, 20, pace) * 20 for updates in (1, 2, 3.5, 4, 7, 11, 20)]
    assert times == pytest.approx([1, 2, 2.375, 3.25, 4.75, 6.5, 8.75])


def test_rate_of_an_arm_is_the_best_of_those_with_most_seeds(bench: Any) -> None:
    arm, other = bench.Arm(4, 1, "none", 20), bench.Arm(1, 1, "adamw", 20)
    rows = [
        row(bench, arm, 5e-4, 0, [(20, math.nan)]),
        row(bench, arm, 1e-3, 0, [(20, 3.0)]),
        row(bench, arm, 2e-3, 0, [(20, 2.0)]),
        row(bench, arm, 2e-3, 1, [(20, 9.0)]),
        row(bench, arm, 3e-3, 0, [(20, 1.5)]),
        row(bench, arm, 3e-3, 1, [(20, 9.9)]),
        row(bench, other, 1e-3, 0, [(20, 3.0)]),
        row(bench, other, 2e-3, 0, [(20, 4.0)]),
        row(bench, other, 5e-4, 0, [(20, math.nan)]),
        row(bench, bench.Arm(8, 1, "none", 20), 1e-3, 1, [(20, 1.0)]),
    ]
    chosen = bench.choose(rows)
    assert list(chosen) == [other, arm]
    assert [(each["rate"], each["seed"]) for each in chosen[arm]] == [(2e-3, 0), (2e-3, 1)]
    assert [each["rate"] for each in chosen[other]] == [1e-3]


def test_paces_are_those_of_fast_links_and_emulated_work(bench: Any, tmp_path: Path) -> None:
    common = {"stages": 4, "micro_batches": 1, "work": "emulated", "link": 0.0}
    rows = [
        {**common, "arm": "stock", "rate": 10.0},
        {**common, "arm": "bsp", "rate": 8.0},
        {**common, "arm": "asp", "rate": 40.0},
        {**common, "arm": "asp-deeper", "rate": 50.0},
        {**common, "arm": "asp", "rate": 1.0, "link": 0.5},
        {**common, "arm": "asp", "rate": 2.0, "work": "real"},
        {**common, "arm": "asp", "rate": 3.0, "micro_batches": 8},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert bench.paces(path) == {(4, 1): bench.Pace(0.25, 1.0)}
    assert bench.paces(None) == {}


def killed(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_whose_process_is_killed_is_named(bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It left the pool waiting without end."""
    run = bench.Run(8, 1, "soap", 20, 1e-3, 1, "small")
    monkeypatch.setattr(bench, "work", killed)
    options = bench.parse(["--output", str(tmp_path / "runs.jsonl")])
    with pytest.raises(SystemExit, match=r"K=8 M=1 soap, 20 updates, rate 0.001, seed 1: its process ended without a"):
        bench.compute([run], options)


def test_the_table_of_the_document_is_that_of_the_data(bench: Any) -> None:
    import convergence_summary

    page = (convergence_summary.DOCS / "convergence.md").read_text(encoding="utf-8")
    assert convergence_summary.Results(convergence_summary.DOCS / "data").table() in page
