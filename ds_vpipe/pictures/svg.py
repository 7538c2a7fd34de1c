"""A picture as SVG text, written by hand: no dependency, and small enough to read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from xml.sax.saxutils import escape, quoteattr

from ds_vpipe.pictures.palette import PAPER
from ds_vpipe.pictures.picture import BAR_FONT, EDGE_WIDTH, Box, Curve, Label, Picture, Rule, Shape

_FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"


def svg(picture: Picture, standalone: bool = True) -> str:
    """Return ``picture`` as an SVG document, or as an element for an HTML page if not ``standalone``."""
    width, height = _number(picture.width), _number(picture.height)
    data = "".join(f" data-{key}={quoteattr(value)}" for key, value in picture.data.items())
    space = ' xmlns="http://www.w3.org/2000/svg"' if standalone else ""
    lines = [
        f'<svg{space} width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img"'
        f' aria-label={quoteattr(picture.title)} font-family="{_FONT}"{data}>',
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>',
    ]
    for shape in picture.shapes:
        lines += _elements(shape)
    return "\n".join([*lines, "</svg>"])


def save_svg(picture: Picture, path: str | os.PathLike[str]) -> None:
    """Write ``picture`` to the file ``path``."""
    Path(path).write_text(svg(picture) + "\n", encoding="utf-8")


def _number(value: float) -> str:
    text = f"{value:.2f}"
    return text.rstrip("0").rstrip(".")


def _attributes(**values: str | float) -> str:
    pairs = ((key, value if isinstance(value, str) else _number(value)) for key, value in values.items())
    return "".join(f" {key.replace('_', '-')}={quoteattr(text)}" for key, text in pairs if text)


def _elements(shape: Shape) -> Iterator[str]:
    role = f" class={quoteattr(shape.role)}" if shape.role else ""
    if isinstance(shape, Box):
        place = _attributes(x=shape.x, y=shape.y, width=shape.width, height=shape.height, fill=shape.fill)
        place += _attributes(stroke=shape.edge, stroke_width=EDGE_WIDTH if shape.edge else "")
        label = f" data-label={quoteattr(shape.label)}" if shape.label else ""
        title = f"<title>{escape(shape.tooltip)}</title>" if shape.tooltip else ""
        yield f"<rect{role}{place}{label}>{title}</rect>" if title else f"<rect{role}{place}{label}/>"
        if shape.shows_label:
            x, y = shape.x + shape.width / 2, shape.y + shape.height / 2
            place = _attributes(x=x, y=y, fill=shape.label_colour, font_size=BAR_FONT)
            within = ' class="label" text-anchor="middle" dominant-baseline="central" pointer-events="none"'
            yield f"<text{within}{place}>{escape(shape.label)}</text>"
    elif isinstance(shape, Label):
        place = _attributes(x=shape.x, y=shape.y, fill=shape.colour, font_size=shape.size)
        anchor = "" if shape.anchor == "start" else f' text-anchor="{shape.anchor}"'
        weight = ' font-weight="bold"' if shape.bold else ""
        yield f'<text{role}{place}{anchor}{weight} dominant-baseline="central">{escape(shape.text)}</text>'
    elif isinstance(shape, Rule):
        place = _attributes(x1=shape.x1, y1=shape.y1, x2=shape.x2, y2=shape.y2)
        yield f"<line{role}{place}{_attributes(stroke=shape.colour, stroke_width=shape.width)}/>"
    elif isinstance(shape, Curve):
        yield from _curve(shape, role)


def _curve(curve: Curve, role: str) -> Iterator[str]:
    points = " ".join(f"{_number(x)},{_number(y)}" for x, y in curve.points)
    title = f"<title>{escape(curve.tooltip)}</title>" if curve.tooltip else ""
    if curve.filled:
        yield f'<polygon{role} points="{points}" fill="{curve.colour}">{title}</polygon>'
    else:
        paint = _attributes(stroke=curve.colour, stroke_width=curve.width)
        yield f'<polyline{role} points="{points}" fill="none"{paint}>{title}</polyline>'
