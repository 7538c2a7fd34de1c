"""Picture of what every rank does when: text, SVG or PNG.

The text has a row per rank and a column per unit of time: F forward, B backward, S update, each with its micro-batch
(updates: batch), -- for an action that goes on, . for none of these.

examples:
  python -m ds_vpipe show --stages 4 --micro-batches 8 --schedule gpipe
  python -m ds_vpipe show ds_config.json --stages 4 --batches 3
  python -m ds_vpipe show ds_config.json --stages 4 -o schedule.svg -o schedule.png
  python -m ds_vpipe show runs/timeline --window 1.5:2.0 --unit 0.01
  python -m ds_vpipe show runs/timeline -o merged.json      recordings of all ranks as one timeline, for other commands
  python -m ds_vpipe show --stages 2 --micro-batches 4 --schedule interleaved --virtual-stages 2 --json > plan.json
"""

import argparse
import shutil
import sys
from pathlib import Path

from ds_vpipe.commands.argument_types import output, pixels, rate, window
from ds_vpipe.commands.arguments import Answer, add_input_arguments, timelines_from
from ds_vpipe.errors import Refusal
from ds_vpipe.timelines.figure import save_figure
from ds_vpipe.timelines.text import text_grid

_SUFFIXES = (".txt", ".svg", ".png", ".json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_input_arguments(parser)
    group = parser.add_argument_group("the picture")
    what = f"write a {', '.join(_SUFFIXES)} file"
    group.add_argument("-o", "--output", type=output, action="append", default=[], metavar="FILE", help=what)
    group.add_argument("--unit", type=rate, metavar="S", help="seconds per column of the text; default: a forward pass")
    group.add_argument("--window", type=window, metavar="A:B", help="draw only these seconds")
    group.add_argument("--width", type=pixels, metavar="PIXELS", help="of the time axis in SVG and PNG")


def run(arguments: argparse.Namespace) -> Answer:
    for path in arguments.output:
        if Path(path).suffix not in _SUFFIXES:
            raise Refusal("--output", path, f"a name that ends in {', '.join(_SUFFIXES)}", "rename it").error()
    suffixes = {Path(path).suffix for path in arguments.output} or {".json" if arguments.json else ".txt"}
    pictures = {".svg", ".png"}
    for name, takes in (("unit", {".txt"}), ("width", pictures), ("window", {".txt", *pictures})):
        value = getattr(arguments, name)
        if value is not None and not takes & suffixes:
            allowed = f"the option with a picture in {', '.join(sorted(takes))}"
            raise Refusal(f"--{name}", value, allowed, "leave it out, or write one").error()
    timeline, *others = timelines_from(arguments)
    if others:
        remedy = "name one; report draws several"
        raise Refusal("input", arguments.paths, "one timeline, recording or DeepSpeed JSON", remedy).error()
    if arguments.window is not None and arguments.window[0] >= timeline.duration:
        allowed = f"a window that begins before {timeline.duration:.6g}, where the timeline ends"
        raise Refusal("--window", arguments.window, allowed, "give an earlier one").error()
    for path in arguments.output:
        if path.endswith(".txt"):
            Path(path).write_text(text_grid(timeline, arguments.unit, arguments.window) + "\n", encoding="utf-8")
        elif path.endswith(".json"):
            timeline.save(path)
        else:
            save_figure(timeline, path, arguments.width, arguments.window)

    def text() -> str:
        if arguments.output:
            return "\n".join(arguments.output)
        line_width = shutil.get_terminal_size().columns if sys.stdout and sys.stdout.isatty() else None
        return f"{timeline.title}\n{text_grid(timeline, arguments.unit, arguments.window, line_width)}"

    return Answer(timeline.to_json, text)
