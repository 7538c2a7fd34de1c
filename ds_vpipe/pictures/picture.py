"""A picture as a list of simple shapes, so that SVG and PNG are drawn from one layout.

Coordinates are pixels from the upper left corner, y downwards. Shapes are drawn in order, later ones on top.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias

from ds_vpipe.pictures.palette import INK

Anchor: TypeAlias = Literal["start", "middle", "end"]

BAR_FONT: Final = 11.0
EDGE_WIDTH: Final = 0.7
_EM = 0.6  # width of a digit or letter in a sans-serif font, as a share of its size: a little more than usual
_HEIGHT = 1.15  # height of a line of text, likewise


def text_width(text: str, size: float) -> float:
    """Upper estimate of the width of ``text`` in pixels."""
    return len(text) * size * _EM


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle. Its label, if any, is drawn in the middle if it fits; the tooltip shows where there is one.

    ``role`` becomes the class of the SVG element, for the script of the HTML report; ``edge`` is the colour of a thin
    outline, or nothing.
    """

    x: float
    y: float
    width: float
    height: float
    fill: str
    label: str = ""
    label_colour: str = INK
    tooltip: str = ""
    role: str = ""
    edge: str = ""

    @property
    def shows_label(self) -> bool:
        """True if the label fits inside."""
        fits = text_width(self.label, BAR_FONT) + 1 <= self.width and self.height >= BAR_FONT * _HEIGHT
        return bool(self.label) and fits


@dataclass(frozen=True, slots=True)
class Label:
    """A line of text; ``y`` is its middle."""

    x: float
    y: float
    text: str
    size: float = 12.0
    anchor: Anchor = "start"
    colour: str = INK
    bold: bool = False
    role: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """A straight line."""

    x1: float
    y1: float
    x2: float
    y2: float
    colour: str
    width: float = 1.0
    role: str = ""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line through points, or the area that they enclose if ``filled``."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.5
    filled: bool = False
    tooltip: str = ""
    role: str = ""


Shape: TypeAlias = Box | Label | Rule | Curve


@dataclass(frozen=True)
class Picture:
    """A whole picture.

    Attributes:
        width: Pixels.
        height: Pixels.
        shapes: In drawing order.
        title: What it shows, for screen readers.
        data: Numbers that the HTML report's script needs; ``data-`` attributes in SVG.
    """

    width: float
    height: float
    shapes: tuple[Shape, ...]
    title: str
    data: Mapping[str, str] = field(default_factory=dict)
