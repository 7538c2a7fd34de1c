"""``trace``: timelines and recordings for the trace viewers of Chrome and Perfetto."""

from __future__ import annotations

import argparse

from ds_vpipe.commands.inputs import add_input_arguments, print_json, timelines_from

DESCRIPTION = """\
Merge the recordings of all ranks and write them as a trace for https://ui.perfetto.dev or chrome://tracing: a process
per timeline, a thread per rank, arrows from sends to receives, memory as counters. Clocks of different machines are
brought together from the messages between ranks.
"""
EXAMPLES = """\
examples:
  python -m ds_vpipe trace runs/timeline -o trace.json
  python -m ds_vpipe trace ds_config.json runs/timeline --stages 4 -o trace.json    plan and recording together
  python -m ds_vpipe trace runs/timeline --save merged.json --json                  for scripts: numbers per rank
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    add_input_arguments(parser)
    group = parser.add_argument_group("output")
    group.add_argument("-o", "--output", metavar="FILE", help="write the trace; default trace.json")
    group.add_argument("--save", metavar="FILE", help="write the first timeline too, for other commands")
    group.add_argument("--json", action="store_true", help="print the numbers of all timelines as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Write the trace, and return the exit status."""
    from ds_vpipe.timelines.chrome_trace import save_chrome_trace
    from ds_vpipe.timelines.summary import summarize

    timelines = timelines_from(arguments)
    output = arguments.output or "trace.json"
    save_chrome_trace(timelines, output)
    if arguments.save is not None:
        timelines[0].save(arguments.save)
    if arguments.json:
        rows = [
            {"title": t.title, "source": t.source, "meta": dict(t.meta), **summarize(t).to_json()} for t in timelines
        ]
        print_json({"output": output, "timelines": rows})
    else:
        print(f"{output}: open it in https://ui.perfetto.dev")
    return 0
