"""Figures: places and colours of bars, numbers that fit, the same drawing as SVG and PNG."""

from __future__ import annotations

import io
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from timelines import TWO_PARTS, TWO_STAGES, span

from ds_vpipe.commands.arguments import planned_timeline
from ds_vpipe.schedules.actions import Category
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.program import Workload
from ds_vpipe.timelines.figure import (
    COLOURS,
    Curve,
    colour_of,
    draw,
    ink_on,
    loss_svg,
    save_figure,
    timeline_figure,
    unit_for,
)
from ds_vpipe.timelines.timeline import Timeline

SVG = "{http://www.w3.org/2000/svg}"


def many_ranks(stages: int) -> Timeline:
    return planned_timeline(Pipeline("1f1b", stages, 2 * stages), Workload(1), transfer=0.25, update=0.5)


def bars(figure: Any) -> list[tuple[float, float, float, float]]:
    """Left, right, top and bottom of each bar, in units of the axes."""
    (collection,) = figure.axes[0].collections
    return [(*path.vertices[:2, 0], *path.vertices[1:3, 1]) for path in collection.get_paths()]


def texts(path: Path) -> list[str]:
    return ["".join(text.itertext()) for text in ElementTree.parse(path).iter(f"{SVG}text")]


def test_places_of_bars() -> None:
    figure = timeline_figure(TWO_STAGES, width=850.0)  # a hundred pixels per second
    found = bars(figure)
    assert (0.0, 1.0, 0.0, 20.0) in found  # F0 of stage 0
    assert (8.0, 8.5, 0.0, 20.0) in found  # its update
    assert (1.0, 1.5, 21.0, 25.0) in found  # its transfer, a strip below
    assert (1.5, 2.5, 32.0, 52.0) in found  # F0 of stage 1
    assert len(found) == len(TWO_STAGES.spans)


def test_a_window_cuts_bars() -> None:
    found = bars(timeline_figure(TWO_STAGES, 400.0, (5.5, 9.0)))
    assert found == [(5.5, pytest.approx(8.0), 0.0, 20.0), (pytest.approx(8.0), pytest.approx(8.5), 0.0, 20.0)]


def test_bars_below_a_pixel_are_thinned_out() -> None:
    spans = tuple(span(0, f"F{i}", i, i + 1) for i in range(20_000))
    assert len(bars(timeline_figure(Timeline("t", "recording", 1, 1, spans), 700.0))) <= 701


@pytest.mark.parametrize("timeline", [TWO_STAGES, TWO_PARTS, many_ranks(4), many_ranks(40)])
def test_texts_lie_inside_and_on_nothing_else(timeline: Timeline) -> None:
    figure = timeline_figure(timeline)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    outside = [*figure.texts, axes.xaxis.label, *axes.get_yticklabels(), *figure.legends[0].get_texts()]
    boxes = [text.get_window_extent() for text in outside]
    for box in (*boxes, *(text.get_window_extent() for text in axes.texts)):
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1
    for index, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:index]), outside[index]


@pytest.mark.parametrize(("width", "least"), [(None, 0.9 * 2 * 16 * 32), (1000.0, 1)])
def test_numbers_are_inside_their_bars_and_most_passes_carry_one(width: float | None, least: float) -> None:
    figure = timeline_figure(many_ranks(16), width)
    figure.draw_without_rendering()
    axes = figure.axes[0]
    edges = [axes.transData.transform([(left, top), (right, bottom)]) for left, right, top, bottom in bars(figure)]
    numbers = [text.get_window_extent() for text in axes.texts]
    assert len(numbers) > least
    for box in numbers[::10]:
        assert any(left <= box.x0 and box.x1 <= right for (left, _), (right, _) in edges)


def test_words_of_a_figure(tmp_path: Path) -> None:
    save_figure(TWO_STAGES, tmp_path / "t.svg", width=850.0)
    found = texts(tmp_path / "t.svg")
    words = {"two <stages> & all", "stage 0", "stage 1", "time in s", "forward", "transfer", "wait", "idle", "8"}
    assert words <= set(found)
    assert "recording: 2 stages, 1 micro-batch per batch, 8.5 s" in found
    save_figure(TWO_PARTS, tmp_path / "p.svg")
    found = texts(tmp_path / "p.svg")
    assert {"rank 1", "time in forward passes"} <= set(found)
    assert any("paler: later parts" in text for text in found)


def test_the_same_timeline_gives_the_same_files(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg", "a.png", "b.png"):
        save_figure(TWO_STAGES, tmp_path / name, 400.0)
    for suffix in ("svg", "png"):
        assert (tmp_path / f"a.{suffix}").read_bytes() == (tmp_path / f"b.{suffix}").read_bytes()


def test_a_png_has_two_dots_per_pixel_and_the_colours(tmp_path: Path) -> None:
    from matplotlib.image import imread

    save_figure(TWO_STAGES, tmp_path / "t.png", 850.0)
    header = (tmp_path / "t.png").read_bytes()[:24]
    assert struct.unpack(">II", header[16:24]) == (2 * (80 + 850 + 16), 2 * (52 + 64 + 90))
    pixel = imread(tmp_path / "t.png")[2 * (52 + 4), 2 * (80 + 650), :3] * 255  # in B0 of stage 0, beside its number
    assert pixel == pytest.approx([0xE6, 0x9F, 0x00], abs=3)


def test_empty_timelines_and_titles_with_signs_can_be_drawn(tmp_path: Path) -> None:
    save_figure(Timeline("$x_ {} $", "plan", 2, 1, ()), tmp_path / "t.svg")
    assert "$x_ {} $" in texts(tmp_path / "t.svg")


def test_units() -> None:
    assert unit_for(TWO_STAGES, 8.5) == (1.0, "s")
    assert unit_for(TWO_STAGES, 0.5) == (1e-3, "ms")
    assert unit_for(TWO_STAGES, 1e-4) == (1e-6, "µs")
    assert unit_for(TWO_PARTS, 0.5) == (1.0, "forward passes")


def test_text_on_bars_is_legible() -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for action in ("F0", "B0", "STEP0", "RECV_ACT0"):
        for later in range(4):
            fill = colour_of(span(0, action, 0, 1), later)
            light, dark = sorted((luminance(fill), luminance(ink_on(fill))), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (fill, ink_on(fill))


def test_later_parts_are_paler() -> None:
    assert [colour_of(span(0, "F0", 0, 1), later) for later in (0, 1)] == [COLOURS[Category.FORWARD], "#61a8cf"]
    assert colour_of(span(0, "STEP0", 0, 1), 1) == COLOURS[Category.UPDATE]


@pytest.mark.parametrize("losses", [((0, 6.5), (1, 6.25)), ((7, 3.0),), ((0, 1.0), (100, 1.0))])
def test_losses(losses: tuple[tuple[int, float], ...]) -> None:
    text = loss_svg([replace(TWO_STAGES, losses=losses), TWO_PARTS])
    found = ["".join(one.itertext()) for one in ElementTree.fromstring(text).iter(f"{SVG}text")]
    assert {"batch", "mean loss", "recording: two <stages> & all"} <= set(found)
    assert "plan: two parts per rank" not in found


def test_labels_and_titles_of_curves_are_no_formulas() -> None:
    text = io.StringIO()
    draw(text, {"runs/$a$": [Curve("$b_c$", [(0, 1), (1, 2)])]}, "x", "y")
    assert all(word in text.getvalue() for word in ("runs/$a$", "$b_c$"))


def test_long_labels_of_curves_stay_inside() -> None:
    text = io.StringIO()
    draw(text, {"": [Curve(f"{name}, as it was told at some length", [(0, 1), (1, 2)]) for name in "abcd"]}, "x", "y")
    places = [float(found.get("x", 0)) for found in ElementTree.fromstring(text.getvalue()).iter(f"{SVG}text")]
    assert min(places) >= 0
