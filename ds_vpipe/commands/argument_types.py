"""Types for ``argparse``: each says in one line what it takes."""

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"([0-9.]+)\s*(|[kmgt]i?)b?")
_MOST_SECONDS = 1e9


def checked(read: Callable[[str], Any], holds: Callable[[Any], bool], allowed: str) -> Callable[[str], Any]:
    """A type for ``argparse`` that says in one line what it takes."""

    def parse(text: str) -> Any:
        try:
            value = read(text)
        except (ValueError, OverflowError):
            value = None
        if value is None or not holds(value):
            raise ArgumentTypeError(f'got "{text}"; allowed: {allowed}')
        return value

    return parse


def formed(read: Callable[[str], Any], form: str) -> Callable[[str], Any]:
    """A type for ``argparse`` that takes all that it can read."""
    return checked(read, lambda value: True, form)


def numbers(of: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """A type for ``argparse``: numbers with commas between them."""

    def parse(text: str) -> tuple[Any, ...]:
        return tuple(of(item) for item in text.split(","))

    parse.__name__ = "numbers with commas"
    return parse


def _bytes(text: str) -> int:
    match = _SIZE.fullmatch(text.strip().lower())
    return int(float(text) if match is None else float(match[1]) * _SIZES[match[2]])


def fields(make: Callable[..., Any], *types: Callable[[str], Any]) -> Callable[[str], Any]:
    """What ``make`` makes of values with colons between them, ``A:B``, each of its type."""
    return lambda text: make(*(of(part) for of, part in zip(types, text.split(":"), strict=True)))


factor = checked(float, lambda value: 1e-3 <= value <= 1e3, "a number from 0.001 to 1000")
port = checked(int, lambda value: 1 <= value <= 65535, "a whole number from 1 to 65535")
count = checked(int, lambda value: value >= 1, "a whole number >= 1")
whole = checked(int, lambda value: value >= 0, "a whole number >= 0")
seconds = checked(float, lambda value: 0 <= value <= _MOST_SECONDS, "a number from 0 to 1e9")
rate = checked(float, lambda value: 0 < value <= 1e18, "a number > 0, at most 1e18")
# Narrower has no room for an axis, and a wider PNG none in memory.
pixels = checked(float, lambda value: 100 <= value <= 20_000, "pixels, 100 to 20000")
window = checked(
    fields(lambda *ends: ends, float, float),
    lambda ends: 0 <= ends[0] < ends[1] < math.inf,
    "two instants in seconds, A:B with 0 <= A < B",
)
size = checked(_bytes, lambda value: 1 <= value <= 2**60, "bytes > 0 such as 16GB, 80GiB or 123456")
output = checked(str, lambda path: Path(path).parent.is_dir(), "a file in a folder that is there")
depth = formed(int, "whole numbers with commas between them, such as 3,2,1,0")


def sizes(text: str) -> int | tuple[int, ...]:
    """A size, or several with commas between them."""
    values = numbers(size)(text)
    return values if len(values) > 1 else int(values[0])
