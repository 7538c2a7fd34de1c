"""What the command lines of all models have in common."""

import argparse
import sys
from typing import Any, NoReturn

from ds_vpipe.errors import VPipeConfigError


class Parser(argparse.ArgumentParser):
    """Reports mistakes as exceptions, so that each rank prints one line and not the whole usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse with the words of names joined by dashes or underscores, whichever they were registered with."""
        known = {name.replace("-", "_"): name for action in self._actions for name in action.option_strings}

        def as_registered(word: str) -> str:
            name, equals, value = word.partition("=")
            return known.get(name.replace("-", "_"), name) + equals + value if word.startswith("--") else word

        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([as_registered(word) for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line."""
        raise VPipeConfigError(f"{message}; see --help")


def positive(text: str) -> int:
    """An int of at least 1, as the type of an argument."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value
