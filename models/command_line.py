"""What the command lines of all models have in common."""

import argparse
from typing import NoReturn

from ds_vpipe.errors import VPipeConfigError


class Parser(argparse.ArgumentParser):
    """Reports mistakes as exceptions, so that each rank prints one line and not the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line."""
        raise VPipeConfigError(f"{message}; see --help")


def positive(text: str) -> int:
    """An int of at least 1, as the type of an argument."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value
