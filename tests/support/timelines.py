"""Small timelines that several tests draw."""

from __future__ import annotations

from dataclasses import replace

from ds_vpipe.schedules.actions import Action
from ds_vpipe.timelines.timeline import MemorySample, Span, Timeline


def span(rank: int, action: str, start: float, end: float, version: int | None = None) -> Span:
    return Span(rank, Action.parse(action), start, end, version)


TWO_STAGES = Timeline(
    title="two <stages> & all",
    source="recording",
    num_ranks=2,
    micro_batches=1,
    spans=(
        span(0, "F0", 0.0, 1.0, 0),
        span(0, "SEND_ACT0", 1.0, 1.5),
        span(0, "RECV_GRAD0", 1.0, 5.0),
        span(0, "B0", 5.0, 8.0, 0),
        span(0, "STEP0", 8.0, 8.5),
        span(1, "RECV_ACT0", 0.0, 1.5),
        span(1, "F0", 1.5, 2.5, 0),
        span(1, "B0", 2.5, 4.5, 0),
        span(1, "SEND_GRAD0", 4.5, 5.0),
        span(1, "STEP0", 4.5, 5.0),
    ),
    memory=(MemorySample(0, 0.0, 100), MemorySample(0, 1.0, 300), MemorySample(0, 8.0, 100), MemorySample(1, 0.0, 50)),
    losses=((0, 6.5), (1, 6.25)),
    staleness=((1.0, 1), (0.0, 0)),
    meta={"host": "a"},
)
"""One micro-batch through two stages with everything that a timeline can hold."""

TWO_PARTS = Timeline(
    title="two parts per rank",
    source="plan",
    num_ranks=2,
    micro_batches=1,
    spans=(
        span(0, "0F0", 0, 1),
        span(1, "1F0", 1, 2),
        span(0, "2F0", 2, 3),
        span(1, "3F0", 3, 4),
        span(1, "3B0", 4, 6),
    ),
    meta={"time_unit": "forward passes"},
)


def shifted(timeline: Timeline, rank: int, seconds: float) -> Timeline:
    """``timeline`` with the times of one rank moved."""
    spans = (s._replace(start=s.start + seconds, end=s.end + seconds) if s.rank == rank else s for s in timeline.spans)
    memory = (m._replace(time=m.time + seconds) if m.rank == rank else m for m in timeline.memory)
    return replace(timeline, spans=tuple(spans), memory=tuple(memory))
