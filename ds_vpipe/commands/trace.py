"""Trace of timelines for https://ui.perfetto.dev or chrome://tracing.

It has a process per timeline, a thread per rank, arrows from sends to receives, memory as counters. Recordings of all
ranks are merged, clocks of different machines brought together from the messages between ranks.

examples:
  python -m ds_vpipe trace runs/timeline -o trace.json
  python -m ds_vpipe trace ds_config.json runs/timeline --stages 4 -o trace.json    plan and recording together
  python -m ds_vpipe trace runs/timeline --json                                     for scripts: numbers per rank
"""

import argparse
import json
from pathlib import Path

from ds_vpipe.commands.argument_types import output
from ds_vpipe.commands.arguments import Answer, add_input_arguments, summaries, timelines_from
from ds_vpipe.errors import Refusal
from ds_vpipe.timelines.chrome_trace import chrome_trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    group = parser.add_argument_group("output")
    group.add_argument("-o", "--output", type=output, metavar="FILE", default="trace.json", help="default trace.json")


def run(arguments: argparse.Namespace) -> Answer:
    if not arguments.output.endswith(".json"):
        why = "a trace is JSON; pictures are drawn by python -m ds_vpipe show"
        raise Refusal("--output", arguments.output, "a name that ends in .json", "rename it", why).error()
    timelines = timelines_from(arguments)
    text = json.dumps(chrome_trace(timelines), separators=(",", ":"))
    Path(arguments.output).write_text(f"{text}\n", encoding="utf-8")
    return Answer(
        data=lambda: {"output": arguments.output, "timelines": summaries(timelines)},
        text=lambda: f"{arguments.output}: open it in https://ui.perfetto.dev",
    )
