"""Parser of command lines whose errors are one line."""

import argparse
import sys
from typing import Any, NoReturn


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
