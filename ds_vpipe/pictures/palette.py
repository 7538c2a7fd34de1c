"""Colours of the pictures. They are told apart by people who are colour-blind, and in print.

Source of the hues: Okabe and Ito, "Color Universal Design" (2008), whose eight colours are chosen for that.
"""

from __future__ import annotations

from typing import Final

from ds_vpipe.timelines.span_category import Category

COLOURS: Final = {
    Category.FORWARD: "#0072b2",
    Category.BACKWARD: "#e69f00",
    Category.RECOMPUTE: "#cc79a7",
    Category.UPDATE: "#009e73",
    Category.LOAD: "#f0e442",
    Category.OTHER: "#8c6d46",
    Category.TRANSFER: "#56b4e9",
    Category.WAIT: "#d4d4d4",
}
IDLE: Final = "#f4f4f4"
INK: Final = "#222222"
FAINT_INK: Final = "#666666"
LINES: Final = "#dddddd"
PAPER: Final = "#ffffff"


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def paler(colour: str, steps: int) -> str:
    """Return ``colour`` mixed with white, more of it the more ``steps``; 0 leaves it as it is."""
    keep = 0.62**steps
    red, green, blue = (round(255 - (255 - channel) * keep) for channel in _channels(colour))
    return f"#{red:02x}{green:02x}{blue:02x}"


def ink_on(colour: str) -> str:
    """Return the colour of text that is legible on ``colour``: white or dark, whichever contrasts more.

    Source: relative luminance and contrast ratio of the Web Content Accessibility Guidelines 2.1.
    """

    def luminance(of: str) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (x / 255 for x in _channels(of))]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    here = luminance(colour)
    with_white = 1.05 / (here + 0.05)
    with_ink = (here + 0.05) / (luminance(INK) + 0.05)
    return PAPER if with_white >= with_ink else INK
