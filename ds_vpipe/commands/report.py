"""One HTML page about timelines, which needs no network and no other file.

It has a table that compares all timelines, and for each its picture, which zooms, memory over time, shares of time,
staleness and the receives that ranks waited in, and the losses. Name a plan, its simulation and the recording together
to compare them.

examples:
  python -m ds_vpipe report runs/timeline -o report.html
  python -m ds_vpipe report simulation.json runs/timeline -o report.html --title "BERT-Large, 4 stages"
  python -m ds_vpipe report before.json after.json -o planned.html
"""

import argparse
from pathlib import Path

from ds_vpipe.commands.argument_types import output, window
from ds_vpipe.commands.arguments import Answer, add_input_arguments, summaries, timelines_from
from ds_vpipe.timelines.report import html_report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    group = parser.add_argument_group("output")
    group.add_argument("-o", "--output", type=output, default="report.html", metavar="FILE", help="default report.html")
    group.add_argument("--title", default="Pipeline report", help="heading of the page")
    group.add_argument("--window", type=window, metavar="A:B", help="seconds to begin with; default: what can be read")


def run(arguments: argparse.Namespace) -> Answer:
    timelines = timelines_from(arguments)
    page = html_report(timelines, arguments.title, arguments.window)
    Path(arguments.output).write_text(page, encoding="utf-8")
    return Answer(lambda: {"output": arguments.output, "timelines": summaries(timelines)}, lambda: arguments.output)
