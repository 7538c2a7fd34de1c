"""From seconds to pixels, with round numbers on the axis."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ds_vpipe.pictures.palette import FAINT_INK, LINES
from ds_vpipe.pictures.picture import Label, Rule, Shape
from ds_vpipe.timelines.timeline import Timeline

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_TICK_DISTANCE = 80.0  # pixels, about


def unit_for(timeline: Timeline, seconds: float) -> tuple[float, str]:
    """Return the unit in which to write times of about ``seconds``: its length in seconds and its name."""
    given = timeline.meta.get("time_unit")
    if isinstance(given, str):
        return 1.0, given
    return next(((length, name) for length, name in _UNITS if seconds >= 2 * length), _UNITS[-1])


def write_number(value: float) -> str:
    """Return ``value`` with about four digits, never as a power of ten where people have to read it."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def write_to(value: float, step: float) -> str:
    """Return ``value`` with the decimal places that tell it from values ``step`` away."""
    text = f"{value:.{max(0, -math.floor(math.log10(step) + 1e-9))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def round_step(least: float) -> float:
    """Return the smallest of 1, 2, 5, 10, 20, 50 ... times a power of ten that is at least ``least``."""
    power = 10.0 ** math.floor(math.log10(least))
    return next((factor * power for factor in (1, 2, 5) if factor * power >= least * (1 - 1e-9)), 10 * power)


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """Maps the seconds ``start`` to ``end`` to ``left`` to ``left + width`` pixels.

    Attributes:
        start: First second.
        end: Last second, after ``start``.
        left: Pixel of ``start``.
        width: Pixels between ``start`` and ``end``.
        unit_s: Length of the unit of the numbers, seconds.
        unit: Its name.
    """

    start: float
    end: float
    left: float
    width: float
    unit_s: float
    unit: str

    @classmethod
    def of(
        cls,
        timeline: Timeline,
        window: tuple[float, float],
        left: float,
        width: float,
        unit: tuple[float, str] | None = None,
    ) -> TimeAxis:
        """Axis for a window of ``timeline``, in the unit that suits it or in ``unit``.

        An empty window is made a second long, so that it can be drawn.
        """
        start, end = window
        end = end if end > start else start + 1.0
        return cls(start, end, left, width, *(unit or unit_for(timeline, end - start)))

    def x(self, seconds: float) -> float:
        """Pixel of an instant."""
        return self.left + (seconds - self.start) / (self.end - self.start) * self.width

    def write(self, seconds: float) -> str:
        """A length in the axis's unit, without its name."""
        return write_number(seconds / self.unit_s)

    def write_instant(self, seconds: float, length: float) -> str:
        """An instant in the axis's unit, as exactly as something that takes ``length`` seconds needs it."""
        step = (length or self.end - self.start) / self.unit_s / 100
        return write_to(seconds / self.unit_s, step)

    def ticks(self) -> Iterator[tuple[float, str]]:
        """Pixels and numbers of the round times."""
        scale = (self.end - self.start) / self.unit_s
        step = round_step(scale * min(1.0, _TICK_DISTANCE / self.width))
        first = math.ceil(self.start / self.unit_s / step - 1e-9)
        last = math.floor(self.end / self.unit_s / step + 1e-9)
        for index in range(first, last + 1):
            yield self.x(index * step * self.unit_s), write_to(index * step, step)

    def draw(self, top: float, bottom: float) -> Iterator[Shape]:
        """Grid lines from ``top`` to ``bottom``, numbers below them and the unit below the first number."""
        for x, text in self.ticks():
            yield Rule(x, top, x, bottom, LINES, role="tick")
            yield Label(x, bottom + 9, text, 11, "middle", FAINT_INK, role="tick")
        yield Label(self.left, bottom + 24, f"time in {self.unit}", 11, colour=FAINT_INK, role="side")

    def data(self) -> dict[str, str]:
        """What the report's script needs to zoom."""
        return {
            "left": f"{self.left:g}",
            "width": f"{self.width:g}",
            "start": repr(self.start / self.unit_s),
            "end": repr(self.end / self.unit_s),
        }
