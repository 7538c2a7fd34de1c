"""The charts of a report: shares of time, memory, staleness, losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeAlias

from ds_vpipe.pictures.palette import COLOURS, FAINT_INK, IDLE, INK, LINES, PAPER, ink_on
from ds_vpipe.pictures.picture import Box, Curve, Label, Picture, Rule, Shape, text_width
from ds_vpipe.pictures.time_axis import TimeAxis, round_step, write_number, write_to
from ds_vpipe.pictures.timeline_layout import left_margin
from ds_vpipe.planning.plan import show_bytes
from ds_vpipe.timelines.span_category import Category
from ds_vpipe.timelines.timeline import MemorySample, Timeline
from ds_vpipe.timelines.timeline_summary import TimelineSummary

Points: TypeAlias = tuple[tuple[float, float], ...]

_ROW = 22.0
_SERIES = tuple(
    COLOURS[category] for category in (Category.FORWARD, Category.BACKWARD, Category.UPDATE, Category.RECOMPUTE)
)


def share_chart(timeline: Timeline, summary: TimelineSummary, width: float = 420.0) -> Picture:
    """A bar per rank, cut into what the rank does with its time."""
    left = left_margin(timeline)
    length = max(summary.end - summary.start, 1e-12)
    shapes: list[Shape] = []
    for rank in summary.ranks:
        y = rank.rank * _ROW + 4
        shapes.append(Label(left - 8, y + 8, f"{timeline.rank_word} {rank.rank}", 12, "end"))
        shapes.append(Box(left, y, width, 16, IDLE))
        x = left
        for category, seconds in rank.seconds.items():
            piece = seconds / length * width
            fill = COLOURS[category]
            label = f"{seconds / length:.0%}"
            tooltip = f"{timeline.rank_word} {rank.rank}: {category.value} {seconds / length:.1%} of the time"
            shapes.append(Box(x, y, piece, 16, fill, label, ink_on(fill), tooltip))
            x += piece
        shapes.append(Label(left + width + 8, y + 8, f"{rank.busy:.0%} busy", 12, colour=FAINT_INK))
    height = len(summary.ranks) * _ROW + 6
    return Picture(left + width + 80, height, tuple(shapes), f"{timeline.title}: shares of time")


def memory_chart(
    timeline: Timeline,
    width: float,
    unit: tuple[float, str] | None = None,
    window: tuple[float, float] | None = None,
) -> Picture:
    """A row per rank with its allocated bytes over time, all to one scale.

    With the width, unit and window of the timeline's picture it can stand below that.
    """
    left, row = left_margin(timeline), 34.0
    axis = TimeAxis.of(timeline, window or (0.0, timeline.duration), left, width, unit)
    most = max((sample.bytes for sample in timeline.memory), default=0) or 1
    bottom = row * timeline.num_ranks
    shapes: list[Shape] = [*axis.draw(0, bottom)]
    labels: list[Shape] = [Box(0, 0, left - 2, bottom, PAPER, role="side")]
    for rank in range(timeline.num_ranks):
        samples = sorted((s for s in timeline.memory if s.rank == rank), key=lambda sample: sample.time)
        base = (rank + 1) * row - 4
        shapes.append(Box(left, base - row + 6, width, row - 6, IDLE, role="row"))
        if samples:
            peak = max(sample.bytes for sample in samples)
            points = _steps(_within(samples, axis), axis, base, (row - 6) / most)
            tooltip = f"{timeline.rank_word} {rank}: at most {show_bytes(peak)}"
            shapes.append(Curve(points, COLOURS[Category.TRANSFER], filled=True, tooltip=tooltip, role="area"))
            labels.append(Label(left - 8, base - 7, show_bytes(peak), 10, "end", FAINT_INK, role="side"))
        labels.append(Label(left - 8, base - 20, f"{timeline.rank_word} {rank}", 12, "end", role="side"))
    shapes += labels
    return Picture(left + width + 16, bottom + 36, tuple(shapes), f"{timeline.title}: memory", axis.data())


def _within(samples: Sequence[MemorySample], axis: TimeAxis) -> list[MemorySample]:
    """What is held on the axis: the last sample before it holds from its start."""
    before = [sample for sample in samples if sample.time <= axis.start][-1:]
    held = [replace(sample, time=axis.start) for sample in before]
    return held + [sample for sample in samples if axis.start < sample.time <= axis.end]


def _steps(
    samples: Sequence[MemorySample], axis: TimeAxis, base: float, scale: float
) -> tuple[tuple[float, float], ...]:
    """Outline of the area below a step curve; of the samples within a pixel only the highest is drawn."""
    highest: dict[int, MemorySample] = {}
    for sample in samples:
        column = int(axis.x(sample.time))
        if column not in highest or sample.bytes > highest[column].bytes:
            highest[column] = sample
    kept = list(highest.values())
    if not kept:
        return ()
    points = [(axis.x(kept[0].time), base)]
    for sample, after in pairwise([*kept, MemorySample(0, axis.end, 0)]):
        y = base - sample.bytes * scale
        points += [(axis.x(sample.time), y), (axis.x(max(after.time, sample.time)), y)]
    return (*points, (points[-1][0], base))


def staleness_chart(timeline: Timeline, width: float = 240.0) -> Picture:
    """A bar per rank for the mean staleness in updates, and a mark for the largest."""
    left = left_margin(timeline)
    scale = width / max(1, *(most for _, most in timeline.staleness))
    shapes: list[Shape] = []
    for rank, (mean, most) in enumerate(timeline.staleness):
        y = rank * _ROW + 4
        shapes.append(Label(left - 8, y + 8, f"{timeline.rank_word} {rank}", 12, "end"))
        shapes.append(Box(left, y, width, 16, IDLE))
        shapes.append(Box(left, y, mean * scale, 16, COLOURS[Category.RECOMPUTE]))
        shapes.append(Rule(left + most * scale, y - 1, left + most * scale, y + 17, INK, 2))
        text = f"mean {write_number(round(mean, 2))}, at most {most}"
        shapes.append(Label(left + width + 8, y + 8, text, 12, colour=FAINT_INK))
    height = len(timeline.staleness) * _ROW + 6
    return Picture(left + width + 150, height, tuple(shapes), f"{timeline.title}: staleness")


def loss_chart(timelines: Sequence[Timeline], width: float = 640.0, height: float = 220.0) -> Picture:
    """The losses of all timelines that have any, over their batches."""
    shown = [timeline for timeline in timelines if timeline.losses]
    batches = [batch for timeline in shown for batch, _ in timeline.losses]
    losses = [loss for timeline in shown for _, loss in timeline.losses]
    step = round_step(max(max(losses) - min(losses), 1e-3 * abs(max(losses)), 1e-6) / 4)
    low, high = step * (min(losses) // step), step * (max(losses) // step + 1)
    first, last = min(batches), max(max(batches), min(batches) + 1)
    left, top = 56.0, 10.0

    def place(batch: float, loss: float) -> tuple[float, float]:
        return left + (batch - first) / (last - first) * width, top + (high - loss) / (high - low) * height

    shapes: list[Shape] = []
    for index in range(round((high - low) / step) + 1):
        _, y = place(first, low + index * step)
        shapes.append(Rule(left, y, left + width, y, LINES))
        shapes.append(Label(left - 6, y, write_to(low + index * step, step), 11, "end", FAINT_INK))
    across = max(1, round(round_step(max(1.0, (last - first) / 8))))
    for batch in range(-(-first // across) * across, last + 1, across):
        shapes.append(Label(place(batch, low)[0], top + height + 12, str(batch), 11, "middle", FAINT_INK))
    shapes.append(Label(left + width, top + height + 28, "batch", 11, "end", FAINT_INK))
    x = left
    for index, timeline in enumerate(shown):
        colour = _SERIES[index % len(_SERIES)]
        points = tuple(place(batch, loss) for batch, loss in sorted(timeline.losses))
        shapes.append(Curve(points, colour, tooltip=timeline.title))
        name = f"{timeline.source}: {timeline.title}"
        shapes.append(Rule(x, top + height + 48, x + 14, top + height + 48, colour, 3))
        shapes.append(Label(x + 20, top + height + 48, name, 12))
        x += 20 + text_width(name, 12) + 20
    return Picture(max(left + width + 16, x), top + height + 62, tuple(shapes), "loss")
