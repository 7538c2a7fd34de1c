"""Command lines: a parser whose errors are one line, and answers for every output."""

import argparse
import os
import sys
from typing import Any, NoReturn


def print_answer(text: str) -> None:
    """Print what a command answers; names of files may have characters that the output does not take."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # there is no output if it is closed
    try:
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:  # whoever read it, such as head, has enough; what is left would fail at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Once(argparse.Action):
    """Value of an option, which may be given once: argparse would take the last."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        if option is not None and getattr(namespace, self.dest) is not self.default:
            given = f"{getattr(namespace, self.dest)} and {values}"
            parser.error(f"{option}: got {given}, allowed is one; leave the others out")
        setattr(namespace, self.dest, values)


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line. The long usage is for ``--help``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register("action", None, _Once)

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; --help explains", file=sys.stderr)
        raise SystemExit(2)
