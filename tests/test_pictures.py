"""Layout, SVG and PNG: places of bars, labels that fit, and nothing on top of anything else."""

from __future__ import annotations

import struct
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from timelines import TWO_PARTS, TWO_STAGES

from ds_vpipe.commands.inputs import planned_timeline
from ds_vpipe.pictures.palette import COLOURS, INK, PAPER, ink_on, paler
from ds_vpipe.pictures.picture import BAR_FONT, Box, Curve, Label, Picture, Rule, text_width
from ds_vpipe.pictures.png import save_png
from ds_vpipe.pictures.svg import save_svg, svg
from ds_vpipe.pictures.time_axis import TimeAxis, round_step, unit_for, write_number
from ds_vpipe.pictures.timeline_layout import left_margin, timeline_picture
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.schedules.programs import Workload
from ds_vpipe.timelines.span_category import Category
from ds_vpipe.timelines.timeline import Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def bars(picture: Picture) -> list[Box]:
    return [shape for shape in picture.shapes if isinstance(shape, Box) and shape.role == "bar"]


def many_ranks(stages: int) -> Timeline:
    return planned_timeline(Pipeline("1f1b", stages, 2 * stages), Workload(1), transfer=0.25, update=0.5)


# Layout


def test_places_of_bars() -> None:
    picture = timeline_picture(TWO_STAGES, width=850.0)  # a hundred pixels per second
    left = left_margin(TWO_STAGES)
    first = {bar.tooltip.split(",")[0].removeprefix("stage "): bar for bar in bars(picture)}
    forward, update = first["0: F0 forward pass"], first["0: STEP0 update"]
    assert (forward.x, forward.width) == pytest.approx((left, 100.0))
    assert (update.x, update.width) == pytest.approx((left + 800.0, 50.0))
    assert (forward.label, forward.fill, forward.label_colour) == ("0", "#0072b2", PAPER)
    below = first["1: F0 forward pass"]
    assert below.y > forward.y + forward.height
    transfer = first["0: SEND_ACT0"]
    assert forward.y + forward.height < transfer.y < transfer.y + transfer.height < below.y


def test_a_backward_pass_is_seen_after_its_recomputation() -> None:
    picture = timeline_picture(TWO_STAGES, width=850.0)
    left = left_margin(TWO_STAGES)
    found = [(bar.x - left, bar.width) for bar in bars(picture) if bar.fill == COLOURS[Category.BACKWARD]]
    assert found == [(pytest.approx(600.0), pytest.approx(200.0)), (pytest.approx(250.0), pytest.approx(200.0))]


def test_tooltips_say_everything() -> None:
    tips = [bar.tooltip for bar in bars(timeline_picture(TWO_STAGES))]
    assert "stage 0: B0 backward pass, 5 to 8 s (3), weights of version 0" in tips
    assert "stage 0: waits for RECV_GRAD0, 1 to 5 s (4)" in tips
    tips = [bar.tooltip for bar in bars(timeline_picture(TWO_PARTS))]
    assert "rank 0: 2F0 forward pass of part 2, 2 to 3 forward passes (1)" in tips


def test_later_parts_are_paler() -> None:
    fills = [bar.fill for bar in bars(timeline_picture(TWO_PARTS)) if bar.tooltip.startswith("rank 0")]
    assert fills == ["#0072b2", paler("#0072b2", 1)]
    notes = [s.text for s in timeline_picture(TWO_PARTS).shapes if isinstance(s, Label)]
    assert "paler: later parts of the model on the same rank" in notes


def test_a_window_cuts_bars() -> None:
    picture = timeline_picture(TWO_STAGES, 400.0, (5.0, 9.0))
    left = left_margin(TWO_STAGES)
    assert all(left <= bar.x and bar.x + bar.width <= left + 400.01 for bar in bars(picture))
    assert len(bars(picture)) == 3  # recomputation, the rest of the backward pass, update


def test_bars_below_a_pixel_are_thinned_out() -> None:
    spans = tuple(Span(0, f"F{i}", i, i + 1, 0) for i in range(20_000))
    assert len(bars(timeline_picture(Timeline("t", "recording", 1, 1, spans), 700.0))) <= 701


@pytest.mark.parametrize("timeline", [TWO_STAGES, TWO_PARTS, many_ranks(4), many_ranks(16), many_ranks(64)])
def test_no_text_lies_on_other_text_or_outside(timeline: Timeline) -> None:
    picture = timeline_picture(timeline)
    areas = []
    for shape in picture.shapes:
        if isinstance(shape, Label):
            width = text_width(shape.text, shape.size)
            x = shape.x - {"start": 0.0, "middle": width / 2, "end": width}[shape.anchor]
            areas.append((x, shape.y - shape.size / 2, width, shape.size))
        elif isinstance(shape, Box) and shape.shows_label:
            width = text_width(shape.label, BAR_FONT)
            assert width <= shape.width
            middle_x, middle_y = shape.x + shape.width / 2, shape.y + shape.height / 2
            areas.append((middle_x - width / 2, middle_y - BAR_FONT / 2, width, BAR_FONT))
    for x, y, width, height in areas:
        assert -0.01 <= x <= x + width <= picture.width + 0.01
        assert 0 <= y <= y + height <= picture.height
    by_row: dict[int, list[tuple[float, float, float, float]]] = {}
    for area in areas:  # only texts that begin at about the same height can meet
        for row in {int(area[1] // 20), int((area[1] + area[3]) // 20)}:
            by_row.setdefault(row, []).append(area)
    for row_areas in by_row.values():
        for (x, y, width, height), (x2, y2, width2, height2) in combinations(row_areas, 2):
            apart = x + width <= x2 or x2 + width2 <= x or y + height <= y2 or y2 + height2 <= y
            assert apart, (x, y, width, height, x2, y2, width2, height2)


def test_most_passes_carry_their_number() -> None:
    for stages in (4, 16):
        passes = [bar for bar in bars(timeline_picture(many_ranks(stages))) if bar.label]
        assert sum(bar.shows_label for bar in passes) > 0.9 * len(passes)


def test_empty_timelines_can_be_drawn() -> None:
    picture = timeline_picture(Timeline("nothing", "plan", 2, 1, ()))
    assert bars(picture) == []
    ElementTree.fromstring(svg(picture))


# Time axis


@pytest.mark.parametrize(("least", "step"), [(0.03, 0.05), (1, 1), (1.1, 2), (2.5, 5), (7, 10), (123, 200)])
def test_round_steps(least: float, step: float) -> None:
    assert round_step(least) == pytest.approx(step)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (1.5, "1.5"), (0.1 + 0.2, "0.3"), (1234.5678, "1235"), (0.00123456, "0.001235")]
)
def test_numbers(value: float, text: str) -> None:
    assert write_number(value) == text


def test_units() -> None:
    assert unit_for(TWO_STAGES, 8.5) == (1.0, "s")
    assert unit_for(TWO_STAGES, 0.5) == (1e-3, "ms")
    assert unit_for(TWO_STAGES, 1e-4) == (1e-6, "µs")
    assert unit_for(TWO_PARTS, 0.5) == (1.0, "forward passes")


def test_ticks() -> None:
    axis = TimeAxis.of(TWO_STAGES, (1.0, 1.5), 50.0, 500.0)
    assert list(axis.ticks())[:3] == [(50.0, "1000"), (pytest.approx(150.0), "1100"), (pytest.approx(250.0), "1200")]


def test_instants_late_in_a_long_run_are_told_apart() -> None:
    axis = TimeAxis.of(TWO_STAGES, (1234.5, 1234.52), 0.0, 400.0, (1.0, "s"))
    assert [text for _, text in axis.ticks()] == ["1234.5", "1234.505", "1234.51", "1234.515", "1234.52"]
    late = Timeline("t", "recording", 1, 1, (Span(0, "F0", 1234.5001, 1234.5023, 0),))
    assert bars(timeline_picture(late))[0].tooltip == "stage 0: F0 forward pass, 1234.5001 to 1234.5023 s (0.0022)"


# Colours


def test_text_on_bars_is_legible() -> None:
    def luminance(colour: str) -> float:
        channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for colour in COLOURS.values():
        for steps in range(4):
            fill = paler(colour, steps)
            light, dark = sorted((luminance(fill), luminance(ink_on(fill))), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (fill, ink_on(fill))
    assert ink_on("#ffffff") == INK


# SVG


def test_svg_holds_the_layout() -> None:
    picture = timeline_picture(TWO_STAGES, width=850.0)
    root = ElementTree.fromstring(svg(picture))
    assert (root.tag, root.get("role"), root.get("aria-label")) == (f"{SVG}svg", "img", "two <stages> & all")
    drawn = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") == "bar"]
    assert len(drawn) == len(TWO_STAGES.spans)
    for rect, bar in zip(drawn, bars(picture), strict=True):
        assert float(rect.get("x", "")) == pytest.approx(bar.x, abs=0.01)
        assert float(rect.get("width", "")) == pytest.approx(bar.width, abs=0.01)
        assert rect.get("fill") == bar.fill
        assert rect.findtext(f"{SVG}title") == bar.tooltip
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"two <stages> & all", "stage 0", "stage 1", "time in s", "forward", "wait", "idle"} <= set(texts)
    assert (root.get("data-start"), root.get("data-end"), root.get("data-width")) == ("0.0", "8.5", "850")


def test_svg_in_literals() -> None:
    shapes = (
        Box(0, 1, 20, 14, "#0072b2", "7", "#ffffff", "a < b", "bar", "#ffffff"),
        Label(5, 6, "t", bold=True, anchor="end"),
        Rule(0, 0, 1, 2.345, "#dddddd", role="tick"),
        Curve(((0, 0), (1, 1.5)), "#e69f00"),
        Curve(((0, 0), (1, 1), (0, 1)), "#e69f00", filled=True, tooltip="area", role="area"),
    )
    assert svg(Picture(40, 20, shapes, 'a "b"', {"left": "5"}), standalone=False).splitlines()[1:] == [
        '<rect width="40" height="20" fill="#ffffff"/>',
        '<rect class="bar" x="0" y="1" width="20" height="14" fill="#0072b2" stroke="#ffffff" stroke-width="0.7"'
        ' data-label="7"><title>a &lt; b</title></rect>',
        '<text class="label" text-anchor="middle" dominant-baseline="central" pointer-events="none" x="10" y="8"'
        ' fill="#ffffff" font-size="11">7</text>',
        '<text x="5" y="6" fill="#222222" font-size="12" text-anchor="end" font-weight="bold"'
        ' dominant-baseline="central">t</text>',
        '<line class="tick" x1="0" y1="0" x2="1" y2="2.35" stroke="#dddddd" stroke-width="1"/>',
        '<polyline points="0,0 1,1.5" fill="none" stroke="#e69f00" stroke-width="1.5"></polyline>',
        '<polygon class="area" points="0,0 1,1 0,1" fill="#e69f00"><title>area</title></polygon>',
        "</svg>",
    ]


def test_svg_file(tmp_path: Path) -> None:
    save_svg(timeline_picture(TWO_STAGES), tmp_path / "t.svg")
    assert ElementTree.parse(tmp_path / "t.svg").getroot().tag == f"{SVG}svg"


# PNG


def test_png_is_drawn_from_the_same_layout(tmp_path: Path) -> None:
    from matplotlib.image import imread

    picture = timeline_picture(TWO_STAGES, width=850.0)
    save_png(picture, tmp_path / "t.png", scale=1.0)
    header = (tmp_path / "t.png").read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", header[16:24]) == (int(picture.width), int(picture.height))
    pixels = imread(tmp_path / "t.png")
    for bar in bars(picture):
        if bar.width > 10 and bar.height > 10:
            found = pixels[int(bar.y + 3), int(bar.x + 4), :3] * 255
            expected = [int(bar.fill[at : at + 2], 16) for at in (1, 3, 5)]
            assert found == pytest.approx(expected, abs=3), bar
