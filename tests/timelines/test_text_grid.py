"""Text grids in literals."""

from __future__ import annotations

from dataclasses import replace
from textwrap import dedent

import pytest
from timelines import TWO_PARTS, TWO_STAGES, span

from ds_vpipe.commands.arguments import planned_timeline
from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload
from ds_vpipe.timelines.text import default_unit, text_grid
from ds_vpipe.timelines.timeline import Timeline


def picture(text: str) -> str:
    return dedent(text).strip("\n")


def test_synchronous_picture_of_the_readme() -> None:
    timeline = planned_timeline(Pipeline("1f1b", 4, 2), Workload(3))
    assert text_grid(timeline, window=(0, 28)) == picture("""
        stage 0 |F0 F1 .  .  .  .  .  .  .  .  B0 -- .  B1 -- F2 F3 .  .  .  .  .  .  .  .  B2 -- .  |
        stage 1 |.  F0 F1 .  .  .  .  .  B0 -- .  B1 -- .  .  .  F2 F3 .  .  .  .  .  B2 -- .  B3 -- |
        stage 2 |.  .  F0 F1 .  .  B0 -- .  B1 -- .  .  .  .  .  .  F2 F3 .  .  B2 -- .  B3 -- .  .  |
        stage 3 |.  .  .  F0 B0 -- F1 B1 -- .  .  .  .  .  .  .  .  .  F2 B2 -- F3 B3 -- .  .  .  .  |
    """)


def test_asynchronous_picture_of_the_readme() -> None:
    timeline = planned_timeline(Pipeline("asp", 4, 2), Workload(5))
    assert text_grid(timeline, window=(0, 28)) == picture("""
        stage 0 |F0 F1 F2 F3 .  .  .  .  .  .  B0 -- F4 B1 -- F5 B2 -- F6 B3 -- F7 B4 -- F8 B5 -- F9 |
        stage 1 |.  F0 F1 F2 .  .  .  .  B0 -- F3 B1 -- F4 B2 -- F5 B3 -- F6 B4 -- F7 B5 -- F8 B6 -- |
        stage 2 |.  .  F0 F1 .  .  B0 -- F2 B1 -- F3 B2 -- F4 B3 -- F5 B4 -- F6 B5 -- F7 B6 -- F8 B7 |
        stage 3 |.  .  .  F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 -- F4 B4 -- F5 B5 -- F6 B6 -- F7 B7 -- F8 |
    """)


def test_parts_are_named_where_a_rank_has_several() -> None:
    assert text_grid(TWO_PARTS) == picture("""
        rank 0 |0F0 .   2F0 .   .   .   |
        rank 1 |.   1F0 .   3F0 3B0 --  |
    """)


def test_updates() -> None:
    assert text_grid(TWO_STAGES, unit=0.5) == picture("""
        stage 0 |F0 -- .  .  .  .  .  .  .  .  B0 -- -- -- -- -- S0 |
        stage 1 |.  .  .  F0 -- B0 -- -- -- S0 .  .  .  .  .  .  .  |
    """)


def test_a_window_begins_anywhere() -> None:
    assert text_grid(TWO_STAGES, 1.0, (4.0, 7.0)) == picture("""
        stage 0 |.  B0 -- |
        stage 1 |B0 .  .  |
    """)


def test_long_lines_go_on_below() -> None:
    assert text_grid(TWO_STAGES, 1.0, line_width=24) == picture("""
        stage 0 |F0 .  .  .  |
        stage 1 |.  F0 -- B0 |

        stage 0 |.  B0 -- -- |
        stage 1 |-- .  .  .  |

        stage 0 |S0 |
        stage 1 |.  |
    """)


def test_a_column_shows_what_fills_half_of_it() -> None:
    spans = (span(0, "F0", 0, 0.45), span(0, "F1", 0.45, 1.0), span(0, "F2", 1.0, 1.45))
    assert text_grid(Timeline("t", "recording", 1, 1, spans), 1.0) == "stage 0 |F1 .  |"


def test_names_of_many_ranks_are_aligned() -> None:
    timeline = replace(TWO_STAGES, num_ranks=11)
    assert [line[:10] for line in text_grid(timeline, 4.0).splitlines()][9:] == ["stage 9  |", "stage 10 |"]


def test_no_pass_of_an_irregular_timeline_vanishes() -> None:
    passes = tuple(span(0, f"F{i}", i * 1.37, i * 1.37 + 1) for i in range(40))
    timeline = Timeline("t", "recording", 1, 1, passes)
    assert default_unit(timeline) == pytest.approx(1 / 1.5)
    grid = text_grid(timeline)
    assert [f"F{i} " in grid for i in range(40)] == [True] * 40


def test_default_unit_of_regular_timelines() -> None:
    assert default_unit(planned_timeline(Pipeline("gpipe", 2, 2), Workload(1))) == 1.0
    with pytest.raises(VPipeConfigError, match="unit"):
        default_unit(Timeline("t", "plan", 1, 1, ()))


def test_too_many_columns_are_refused() -> None:
    with pytest.raises(VPipeConfigError, match="take 8500 columns; allowed: at most 2000"):
        text_grid(TWO_STAGES, 0.001)


def test_a_long_timeline_is_drawn_as_far_as_it_goes() -> None:
    *rows, _, last = text_grid(planned_timeline(Pipeline("gpipe", 2, 2), Workload(500))).splitlines()
    assert all(len(row) > 2000 for row in rows)
    assert last == "until 2000 s of 4500 s; --window A:B draws other seconds"
