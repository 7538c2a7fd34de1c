"""The report: everything on one page, nothing from elsewhere; its script on a page of its own where node is."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from timelines import TWO_PARTS, TWO_STAGES

from ds_vpipe.pictures import html_report as html_report_module
from ds_vpipe.pictures.charts import loss_chart, memory_chart, share_chart, staleness_chart
from ds_vpipe.pictures.html_report import html_report, save_html_report
from ds_vpipe.pictures.palette import COLOURS
from ds_vpipe.pictures.picture import Box, Curve, Label, Rule, text_width
from ds_vpipe.pictures.timeline_layout import left_margin
from ds_vpipe.timelines.span_category import Category
from ds_vpipe.timelines.timeline import MemorySample, Span, Timeline
from ds_vpipe.timelines.timeline_summary import summarize


class Page(HTMLParser):
    """Collects tags that are open, attributes and texts of headings and cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, key, value or "") for key, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.setdefault(self.open[-1], []).append(data)


@pytest.fixture(scope="module")
def page() -> str:
    return html_report([TWO_PARTS, TWO_STAGES], "a <report>")


def test_page_needs_nothing_else(page: str) -> None:
    parsed = Page(page)
    assert parsed.open == []
    assert not [attribute for attribute in parsed.attributes if attribute[1] in ("src", "href", "xlink:href", "data")]
    without_namespace = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttpRequest|import\(", without_namespace)


def test_page_has_every_part_of_every_timeline(page: str) -> None:
    parsed = Page(page)
    assert parsed.texts["h1"] == ["a <report>"]
    assert parsed.texts["h2"] == ["plan: two parts per rank", "recording: two <stages> & all", "Loss"]
    assert parsed.texts["h3"] == ["Use of time", "Use of time", "Staleness, in updates"]
    labels = [value for tag, key, value in parsed.attributes if tag == "svg" and key == "aria-label"]
    assert labels == [
        "two parts per rank",
        "two parts per rank: shares of time",
        "two <stages> & all",
        "two <stages> & all: memory",
        "two <stages> & all: shares of time",
        "two <stages> & all: staleness",
        "loss",
    ]


def test_comparison(page: str) -> None:
    cells = Page(page).texts["td"]
    assert cells[cells.index("throughput, micro-batches") + 1 :][:2] == [
        "0.1667 per unit of time (forward passes)",
        "0.1176 per s",
    ]
    assert cells[cells.index("bubble, all of it") + 1 :][:2] == ["50.0%", "52.9%"]
    assert cells[cells.index("most memory of a rank") + 1 :][:2] == ["not known", "300 B"]
    assert cells[cells.index("largest staleness") + 1 :][:2] == ["not known", "1"]
    assert "RECV_GRAD 4 s" in cells


def test_timelines_in_the_same_unit_have_the_same_scale() -> None:
    half = replace(TWO_STAGES, spans=tuple(span for span in TWO_STAGES.spans if span.end <= 4.5))
    parsed = Page(html_report([TWO_STAGES, half, TWO_PARTS]))
    roots = [float(value) for tag, key, value in parsed.attributes if tag == "svg" and key == "data-width"]
    ends = [float(value) for tag, key, value in parsed.attributes if tag == "svg" and key == "data-end"]
    assert len(roots) == 5  # two with memory charts
    assert roots[0] / ends[0] == pytest.approx(roots[2] / ends[2], rel=1e-4)
    scales = [value for _, key, value in parsed.attributes if key == "data-scale"]
    assert scales == ["s", "s", "forward passes"]


def test_a_window_is_drawn_and_numbers_are_of_all() -> None:
    page = html_report([TWO_STAGES], window=(2.0, 4.0))
    assert "Drawn: 2 to 4 of 8.5 s." in page
    assert page.count('class="bar"') == 3  # two waits and a backward pass
    assert "0.1176 per s" in page
    chart = memory_chart(TWO_STAGES, 100.0, window=(2.0, 4.0))
    first = next(shape for shape in chart.shapes if isinstance(shape, Curve))
    assert {y for _, y in first.points} == {30.0, 2.0}  # 300 bytes all the time


def test_as_much_is_drawn_as_browsers_bear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html_report_module, "_MOST_BARS", 20)
    spans = tuple(Span(0, f"F{i}", i, i + 1, 0) for i in range(100))
    page = html_report([Timeline("long", "recording", 1, 1, spans)])
    assert page.count('class="bar"') == 20
    assert "Drawn: 0 to 20 of 100 s" in page


def test_no_timeline_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        html_report([])


def test_file(tmp_path: Path) -> None:
    save_html_report([Timeline("empty", "plan", 1, 1, ())], tmp_path / "r.html")
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")


@pytest.mark.skipif(shutil.which("node") is None, reason="node checks the syntax of the script")
def test_script_is_correct_javascript() -> None:
    script = Path(__file__).parents[1] / "ds_vpipe" / "pictures" / "report.js"
    assert script.read_text(encoding="utf-8").count("\n") < 200
    subprocess.run(["node", "--check", str(script)], check=True, timeout=300)


# Charts


def test_shares_of_time() -> None:
    picture = share_chart(TWO_STAGES, summarize(TWO_STAGES), width=850.0)
    first = [(s.fill, round(s.width)) for s in picture.shapes if isinstance(s, Box) and s.y < 20][1:]
    kinds = (Category.FORWARD, Category.BACKWARD, Category.RECOMPUTE, Category.UPDATE, Category.WAIT)
    assert first == list(zip((COLOURS[kind] for kind in kinds), (100, 200, 100, 50, 400), strict=True))
    assert "53% busy" in [shape.text for shape in picture.shapes if isinstance(shape, Label)]


def test_memory_is_a_step_curve() -> None:
    picture = memory_chart(TWO_STAGES, 850.0)
    first, second = (shape for shape in picture.shapes if isinstance(shape, Curve))
    left, base, top = left_margin(TWO_STAGES), 30.0, 2.0
    low = base - (base - top) / 3
    assert first.points == (
        (left, base), (left, pytest.approx(low)), (left + 100, pytest.approx(low)), (left + 100, top),
        (left + 800, top), (left + 800, pytest.approx(low)), (left + 850, pytest.approx(low)), (left + 850, base),
    )  # fmt: skip
    assert second.tooltip == "stage 1: at most 50 B"


def test_staleness_has_a_bar_for_the_mean_and_a_mark_for_the_most() -> None:
    timeline = replace(TWO_STAGES, staleness=((1.5, 2), (0.0, 0)))
    picture = staleness_chart(timeline, width=200.0)
    left = left_margin(timeline)
    widths = [s.width for s in picture.shapes if isinstance(s, Box) and s.fill == COLOURS[Category.RECOMPUTE]]
    assert widths == [150.0, 0.0]
    assert [s.x1 - left for s in picture.shapes if isinstance(s, Rule)] == pytest.approx([200.0, 0.0])
    assert "mean 1.5, at most 2" in [s.text for s in picture.shapes if isinstance(s, Label)]


@pytest.mark.parametrize("losses", [((0, 6.5), (1, 6.25)), ((7, 3.0),), ((0, 1.0), (100, 1.0))])
def test_losses_lie_between_the_numbers_of_their_axis(losses: tuple[tuple[int, float], ...]) -> None:
    picture = loss_chart([replace(TWO_STAGES, losses=losses)])
    rules = [s.y1 for s in picture.shapes if isinstance(s, Rule) and s.x2 - s.x1 > 100]
    (curve,) = (s for s in picture.shapes if isinstance(s, Curve))
    assert len(curve.points) == len(losses)
    assert all(min(rules) <= y <= max(rules) for _, y in curve.points)
    numbers = [s for s in picture.shapes if isinstance(s, Label) and s.anchor == "end"]
    assert len({label.text for label in numbers}) == len(numbers)
    assert all(label.x >= text_width(label.text, label.size) for label in numbers)


def test_the_highest_sample_of_a_pixel_is_drawn() -> None:
    samples = (MemorySample(0, 1.0, 10), MemorySample(0, 1.0001, 40), MemorySample(0, 1.0002, 20))
    picture = memory_chart(replace(TWO_STAGES, memory=samples), 850.0)
    (curve,) = (shape for shape in picture.shapes if isinstance(shape, Curve))
    assert min(y for _, y in curve.points) == 2.0
