"""The command line: ``python -m ds_vpipe COMMAND``.

Exit status: 0 if all is well, 1 if what was asked about is wrong (a schedule with a fault, a split that does not
fit), 2 if the command line, the configuration or a file is wrong. Errors are one line on standard error.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, cast

from ds_vpipe.command_line import Parser, print_answer
from ds_vpipe.errors import VPipeConfigError, VPipeError

if TYPE_CHECKING:
    from ds_vpipe.commands.arguments import Answer

COMMANDS = {
    "show": "draw a schedule, a timeline or a recording",
    "config": 'explain the keys of the "vpipe" block',
    "check": "check a configuration and its schedule without processes",
    "profile": "measure or compute what every layer of a model costs",
    "plan": "find the fastest split and recomputation that fit a memory budget",
    "simulate": "time a pipeline on paper: throughput, bubble, staleness, memory",
    "forecast": "train in one process as a pipeline would: loss and time beside synchronous training",
    "trace": "turn recordings and timelines into a Chrome or Perfetto trace",
    "report": "one HTML page: timelines, use of time, memory, staleness, loss",
    "replay": "do a past update of a recorded run again, bit for bit, and find where its numbers went wrong",
    "convert": "turn a vPipe or PipeDream run into a DeepSpeed JSON, a hostfile and a command",
    "doctor": "look for what keeps training from starting, here and on every host",
}
_MODULES = {  # which have command lines of their own
    "export": "python -m ds_vpipe.export CHECKPOINT_DIR OUTPUT",
    "run": "deepspeed --module ds_vpipe.run train.py ...",
}
_DESCRIPTION = "Look at, check, time and plan pipelines before they run, and look at what they did afterwards."
_EPILOG = """\
Show, check, profile, plan, simulate and forecast look ahead, trace, report and replay back; convert is for those who
come from vPipe or PipeDream, and doctor for wherever training does not start. A module of its own makes one state dict
of a checkpoint: python -m ds_vpipe.export --help.

Every command reads the DeepSpeed JSON that training reads; a JSON without a "vpipe" block is DeepSpeed's own 1F1B.
Every command explains itself: python -m ds_vpipe COMMAND --help. Exit status: 0 well, 1 found wrong, 2 misused.
"""


def build_parser(chosen: str | None) -> argparse.ArgumentParser:
    """The parser. Only the command ``chosen`` is imported; its help is its docstring."""
    form = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="python -m ds_vpipe", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=form)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, summary in COMMANDS.items():
        child = commands.add_parser(name, help=summary, formatter_class=form)
        if name == chosen:
            command = import_module(f"ds_vpipe.commands.{name}")
            child.description, examples, rest = str(command.__doc__).partition("examples:\n")
            child.epilog = examples + rest
            command.add_arguments(child)
            child.add_argument("--json", action="store_true", help="print the result as JSON, for scripts")
            child.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in _MODULES:
        print(f"python -m ds_vpipe: {argv[0]} is not one of the commands: use {_MODULES[argv[0]]}", file=sys.stderr)
        return 2
    try:
        arguments = build_parser(argv[0] if argv else None).parse_args(argv)
    except SystemExit as stop:
        return cast(int, stop.code)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed's log goes to where it finds the output
            answer: Answer = arguments.run(arguments)
        if arguments.json:  # which has no NaN, such as that of a training that diverged: it becomes null
            data = json.loads(json.dumps(answer.data()), parse_constant=lambda _: None)
        print_answer(json.dumps(data) if arguments.json else answer.text())
        return answer.status
    except VPipeError as error:
        print(f"ds_vpipe: {error}", file=sys.stderr)
        return 2 if isinstance(error, VPipeConfigError) else 1
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(f"ds_vpipe: {where}{error.strerror or error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
