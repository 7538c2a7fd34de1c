"""The command line: ``python -m ds_vpipe COMMAND``.

Exit status: 0 if all is well, 1 if what was asked about is wrong (a schedule with a fault, a split that does not
fit), 2 if the command line, the configuration or a file is wrong. Errors are one line on standard error.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import NoReturn, cast

from ds_vpipe.errors import VPipeConfigError, VPipeError

COMMANDS = {
    "show": "draw a schedule, a timeline or a recording",
    "config": 'explain the keys of the "vpipe" block',
    "check": "check a configuration and its schedule without processes",
    "simulate": "time a pipeline on paper: throughput, bubble, staleness, memory",
    "profile": "measure or compute what every layer of a model costs",
    "plan": "find the fastest split and recomputation that fit a memory budget",
    "trace": "turn recordings and timelines into a Chrome or Perfetto trace",
    "report": "one HTML page: timelines, use of time, memory, staleness, loss",
    "convert": "turn a vPipe or PipeDream run into a DeepSpeed JSON, a hostfile and a command",
    "doctor": "look for what keeps training from starting, here and on every host",
}
_DESCRIPTION = "Look at, check, time and plan pipelines before they run, and look at what they did afterwards."
_EXAMPLES = """\
A pipeline from the first look to the last:

  python -m ds_vpipe show ds_config.json --stages 4         what will every rank do?
  python -m ds_vpipe config recompute_ratio                 what does a key of the "vpipe" block mean?
  python -m ds_vpipe check ds_config.json --stages 4        can it dead-lock, does every version match?
  python -m ds_vpipe profile --help                         what does every layer cost?
  python -m ds_vpipe plan ds_config.json --help             which split and recomputation fit and are fastest?
  python -m ds_vpipe simulate ds_config.json --help         how fast will it be?
  python -m ds_vpipe trace runs/timeline -o trace.json      what did it do? (for https://ui.perfetto.dev)
  python -m ds_vpipe report plan.json runs/timeline -o report.html

Before it, for those who come from vPipe or PipeDream, and wherever training does not start:

  python -m ds_vpipe convert configs/bert_4vpipe.yml -o converted
  python -m ds_vpipe doctor --hostfile hostfile

Every command reads the DeepSpeed JSON that training reads; a JSON without a "vpipe" block is DeepSpeed's own 1F1B.
Every command explains itself: python -m ds_vpipe COMMAND --help. Exit status: 0 well, 1 found wrong, 2 misused.
"""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the long usage is for ``--help``."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; --help explains", file=sys.stderr)
        raise SystemExit(2)


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser; only the command ``chosen`` knows its arguments, so that the others need not be imported."""
    form = argparse.RawDescriptionHelpFormatter
    parser = _Parser(prog="python -m ds_vpipe", description=_DESCRIPTION, epilog=_EXAMPLES, formatter_class=form)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        child = commands.add_parser(name, help=summary, formatter_class=form)
        if name == chosen:
            command = import_module(f"ds_vpipe.commands.{name}")
            child.description, child.epilog = command.DESCRIPTION, command.EXAMPLES
            command.add_arguments(child)
            child.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        arguments = build_parser(argv[0] if argv else None).parse_args(argv)
    except SystemExit as stop:
        return cast(int, stop.code)
    try:
        return cast(int, arguments.run(arguments))
    except VPipeError as error:
        print(f"ds_vpipe: {error}", file=sys.stderr)
        return 2 if isinstance(error, VPipeConfigError) else 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"ds_vpipe: {where}{error.strerror or error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
