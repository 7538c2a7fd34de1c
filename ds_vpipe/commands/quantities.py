"""Numbers on a command line: types for ``argparse`` that say in one line what they take."""

from __future__ import annotations

import math
import re
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"([0-9.]+)\s*(|[kmgt]i?)b?")
_PIXELS = (100, 20_000)  # narrower has no room for an axis, and a wider PNG none in memory


def count(text: str) -> int:
    """A whole number >= 1."""
    value = _read(int, text, "a whole number >= 1")
    return _checked(value, value >= 1, text, "a whole number >= 1")


def seconds(text: str) -> float:
    """A finite number >= 0."""
    value = _read(float, text, "a finite number >= 0")
    return _checked(value, 0 <= value < math.inf, text, "a finite number >= 0")


def rate(text: str) -> float:
    """A finite number > 0."""
    value = _read(float, text, "a finite number > 0")
    return _checked(value, 0 < value < math.inf, text, "a finite number > 0")


def pixels(text: str) -> float:
    """The width of a picture."""
    least, most = _PIXELS
    allowed = f"pixels, {least} to {most}"
    value = _read(float, text, allowed)
    return _checked(value, least <= value <= most, text, allowed)


def size(text: str) -> int:
    """Bytes, more than none: ``16GB``, ``80GiB``, ``1.5e9`` or ``123456``."""
    allowed = "bytes > 0 such as 16GB, 80GiB or 123456"
    match = _SIZE.fullmatch(text.strip().lower())
    value = _read(float, text if match is None else match[1], allowed) * (1 if match is None else _SIZES[match[2]])
    return int(_checked(value, 1 <= value < math.inf, text, allowed))


def sizes(text: str) -> int | tuple[int, ...]:
    """A size, or several with commas between them."""
    values = tuple(size(item) for item in text.split(","))
    return values if len(values) > 1 else values[0]


def numbers(of: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """A type for ``argparse``: numbers with commas between them."""

    def parse(text: str) -> tuple[Any, ...]:
        return tuple(of(item) for item in text.split(","))

    parse.__name__ = "numbers with commas"
    return parse


def window(text: str) -> tuple[float, float]:
    """``A:B``, two instants in seconds."""
    allowed = "two instants in seconds, A:B with 0 <= A < B"
    begin, _, end = text.partition(":")
    start, stop = _read(float, begin, allowed), _read(float, end, allowed)
    _checked(start, 0 <= start < stop < math.inf, text, allowed)
    return start, stop


def _read(of: Callable[[str], Any], text: str, allowed: str) -> Any:
    try:
        return of(text)
    except ValueError:
        raise ArgumentTypeError(f'got "{text}"; allowed: {allowed}') from None


def _checked(value: Any, holds: bool, text: str, allowed: str) -> Any:
    if not holds:
        raise ArgumentTypeError(f'got "{text}"; allowed: {allowed}')
    return value
