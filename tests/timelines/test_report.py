"""The report: everything on one page, nothing from elsewhere; its script draws, zooms and answers the pointer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from timelines import TWO_PARTS, TWO_STAGES, span

from ds_vpipe.timelines.report import html_report
from ds_vpipe.timelines.timeline import Timeline

NEEDS_NODE = pytest.mark.skipif(shutil.which("node") is None, reason="node runs the script")


class Page(HTMLParser):
    """Collects tags that are open, attributes and texts of headings and cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br"):
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


def data_of(page: str) -> Any:
    (text,) = re.findall(r'<script type="application/json" id="data">(.*)</script>', page)
    return json.loads(text)


def test_page_needs_nothing_else(page: str) -> None:
    parsed = Page(page)
    assert parsed.open == []
    loaded = [(key, value) for _, key, value in parsed.attributes if key in ("src", "href", "xlink:href", "data")]
    assert not [pair for pair in loaded if not pair[1].startswith("#")]
    without_namespaces = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)|fetch\(|XMLHttpRequest|import\(", without_namespaces)


def test_page_has_every_part_of_every_timeline(page: str) -> None:
    parsed = Page(page)
    assert parsed.texts["h1"] == ["a <report>"]
    assert parsed.texts["h2"] == ["plan: two parts per rank", "recording: two <stages> & all", "Loss"]
    assert [value for tag, key, value in parsed.attributes if key == "data-timeline"] == ["0", "1"]
    assert [tag for tag, key, _ in parsed.attributes if key == "viewbox"] == ["svg"]
    assert "not known" in parsed.texts["td"]
    titles = [value for tag, key, value in parsed.attributes if (tag, key) == ("i", "title")]
    assert "wait 47.1% of the time" in titles


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


def test_data_for_the_script(page: str) -> None:
    parts, stages = data_of(page)["timelines"]
    assert (parts["unit"], stages["unit"]) == ([1.0, "forward passes"], [1.0, "s"])
    first = stages["ranks"][0]
    assert first["name"] == "stage 0"
    assert first["spans"][:2] == [[0, 1, "F0", "0", "#0072b2", 0], [1, 5, "waits in RECV_GRAD0", "", "#d4d4d4", None]]
    assert first["transfers"] == [[1, 1.5, "SEND_ACT0", "", "#56b4e9", None]]
    assert (first["memory"], first["peak"]) == ([[0, 100], [1, 300], [8, 100]], "300 B")
    assert [bar[4] for bar in parts["ranks"][0]["spans"]] == ["#0072b2", "#61a8cf"], "later parts are paler"


def test_transfers_that_overlap_end_in_order() -> None:
    """The script searches for the first bar that has not ended."""
    spans = [(14.0, 17.0), (16.0, 16.25), (16.5, 18.0), (16.75, 18.0), (17.0, 19.0)]
    transfers = [span(0, f"SEND_ACT{index}", *times) for index, times in enumerate(spans)]
    data = data_of(html_report([replace(TWO_STAGES, spans=(*TWO_STAGES.spans, *transfers))]))
    found = data["timelines"][0]["ranks"][0]["transfers"]
    assert [bar[:3] for bar in found[1:]] == [[14, 17, "SEND_ACT0"], [16.5, 18, "SEND_ACT2"], [17, 19, "SEND_ACT4"]]


def test_titles_cannot_break_the_page() -> None:
    title = '</script><b a="{{data}}">{{body}}'
    page = html_report([replace(TWO_STAGES, title=title, meta={"time_unit": title})], title)
    assert Page(page).texts["h1"] == [title]
    assert Page(page).texts["h2"][0] == f"recording: {title}"
    assert len(data_of(page)["timelines"]) == 1


def test_events_have_a_table() -> None:
    assert "<th>event</th>" not in html_report([TWO_STAGES])
    events = [[1.5, "replan at update 2: [3, 1] -> [2, 2]; moves"]]
    page = html_report([replace(TWO_STAGES, meta={**TWO_STAGES.meta, "events": events})])
    assert re.search(r"<td>[\d.]+ \w+</td><td>replan at update 2: \[3, 1\] -&gt; \[2, 2\]; moves</td>", page)


def test_an_empty_timeline() -> None:
    assert html_report([Timeline("empty", "plan", 1, 1, ())]).startswith("<!DOCTYPE html>")


# The script, on a page that only notes what is drawn

DOM = """
const calls = [], listeners = {}, buttons = [];
const context = { measureText: (text) => ({ width: 6 * text.length }), setTransform() {},
  fillRect(...box) { calls.push([this.fillStyle, ...box]); }, fillText(text, x, y) { calls.push([text, x, y]); } };
const element = (name) => ({ style: {}, dataset: {}, offsetWidth: 0, listeners: {}, getContext: () => context,
  addEventListener(kind, what) { this.listeners[kind] = what; } });
const figures = DATA_OF_PAGE.timelines.map((_, number) => {
  const figure = { ...element(), dataset: { timeline: number }, clientWidth: 1092, children: [] };
  figure.append = (...nodes) => nodes.forEach((node) => { node.parentElement = figure; figure.children.push(node); });
  return figure;
});
const tip = element();
globalThis.window = { ...element(), devicePixelRatio: 1, innerWidth: 1200 };
globalThis.document = { createElement: element, querySelectorAll: () => figures,
  getElementById: (id) => (id === "tip" ? tip : { textContent: JSON.stringify(DATA_OF_PAGE) }) };
"""


def run_script(page: str, actions: str) -> Any:
    """The JSON that ``actions`` print after the script of the page has run."""
    script = page.rpartition("<script>")[2].partition("</script>")[0]
    code = f"const DATA_OF_PAGE = {json.dumps(data_of(page))};{DOM}\n{{{script}\n{actions}}}"
    done = subprocess.run(["node", "-e", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


BOXES = "console.log(JSON.stringify(calls.splice(0)))"
SHOW = "figures[0].children.at(-1).listeners.mousemove"


@NEEDS_NODE
def test_the_script_draws_bars_numbers_memory_and_axis() -> None:
    """The axis has 1000 pixels, of which 850 are 8.5 s with the passes as wide as they are."""
    page = html_report([replace(TWO_STAGES, memory=TWO_STAGES.memory[:3])], window=(0.0, 10.0))
    calls = run_script(page, BOXES)
    assert ["#0072b2", 76, 6, 99.3, 20] in calls  # F0 of stage 0, with a gap after it
    assert ["#56b4e9", 176, 27, 49.3, 4] in calls  # its transfer
    assert ["0", 126, 17] in calls
    assert ["10.0", 1076, 153] not in calls
    assert [call[0] for call in calls if len(call) == 3 and str(call[0]).isdigit() and call[2] > 140] == [
        *"0123456789",
        "10",
    ]
    assert ["time in s", 76, 168] in calls
    heights = {round(call[4], 2) for call in calls if call[0] == "#56b4e9" and call[3] == 1}
    assert heights == {-28, round(-28 / 3, 2), 0}


@NEEDS_NODE
def test_the_pointer_reads_a_bar() -> None:
    page = html_report([TWO_STAGES], window=(0.0, 10.0))
    read = f"""
      const said = [];
      for (const [x, y] of [[576, 10], [180, 10], [180, 28], [100, 28], [1000, 10], [20, 10]]) {{
        {SHOW}({{ buttons: 0, offsetX: x, offsetY: y, clientX: x, clientY: y }});
        said.push(tip.style.display === "none" ? null : tip.textContent);
      }}
      console.log(JSON.stringify(said));"""
    assert run_script(page, read) == [
        "stage 0: B0, 5.00 to 8.00 s (3.00), weights of version 0",
        "stage 0: waits in RECV_GRAD0, 1.00 to 5.00 s (4.00)",
        "stage 0: SEND_ACT0, 1.000 to 1.500 s (0.500)",
        None,
        None,
        None,
    ]


def test_units_follow_from_timelines_in_seconds() -> None:
    plan = replace(TWO_STAGES, source="plan", meta={"time_unit": "forward passes"})
    spans = tuple(span._replace(start=span.start / 1e3, end=span.end / 1e3) for span in TWO_STAGES.spans)
    data = data_of(html_report([plan, replace(TWO_STAGES, spans=spans)]))
    assert [timeline["unit"] for timeline in data["timelines"]] == [[1.0, "forward passes"], [1e-3, "ms"]]


@NEEDS_NODE
def test_timelines_in_the_same_unit_zoom_and_move_together() -> None:
    page = html_report([TWO_STAGES, TWO_STAGES, TWO_PARTS], window=(0.0, 10.0))
    zoom = """
      const forward = () => calls.splice(0).filter((call) => call[0] === "#0072b2" && call[2] === 6);
      const steps = [forward()];
      const wheel = figures[1].children.at(-1).listeners.wheel;
      wheel({ ctrlKey: false, deltaY: -1000, offsetX: 76 });
      wheel({ ctrlKey: true, deltaY: -Math.log(2) / Math.log(1.0015), offsetX: 76, preventDefault() {} });
      steps.push(forward());
      figures[0].children.at(-1).listeners.mousemove({ buttons: 1, movementX: -100, offsetX: 0, offsetY: 0 });
      steps.push(forward());
      figures[0].children[2].listeners.click();
      steps.push(forward());
      console.log(JSON.stringify(steps));"""
    start, zoomed, moved, fitted = run_script(page, zoom)
    assert len(start) == 3
    assert [box[1:4:2] for box in zoomed] == [[76, pytest.approx(199.3)]] * 2, "twice as wide, without those in passes"
    assert [box[1:4:2] for box in moved] == [[76, pytest.approx(99.3)]] * 2, "half of it has left"
    assert [box[3] for box in fitted] == [pytest.approx(1000 / 8.5 - 0.7)] * 2
