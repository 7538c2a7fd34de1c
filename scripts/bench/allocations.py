"""Allocations and releases of torch's CPU allocator.

Every one is a record of torch's profiler, so that nothing depends on which tensors Python can see; what an operation
allocates and frees within itself counts too. Memory that libraries take for themselves, such as gloo's, is not counted.
A release by a thread that the profiler does not follow is missed. Neither training on the CPU nor gloo's sends and
receives have such; gloo's all-reduce has, unless its caller holds the tensor for a moment longer. The profiler keeps
all records until the end: meant for some batches, not for a training run.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

_RECORD, _WATCHED = "[memory]", "ds_vpipe: peak of interest"


@dataclass(frozen=True)
class Allocations:
    """Bytes, relative to what there was before: most at once inside :func:`watched`, and those at the end."""

    peak: int
    kept: int


def watched() -> torch.profiler.record_function:
    """A context: the part of what is counted whose peak is wanted."""
    return torch.profiler.record_function(_WATCHED)


def count_allocations(work: Callable[[], Any]) -> Allocations:
    """Call ``work`` and count.

    What was allocated before is not known and its release does not count. ``work`` has to end what it begins: a
    process group's work that is alive when it returns and ends in a later count writes into records that are gone.

    Raises:
        ValueError: nothing in ``work`` was :func:`watched`.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    spans = [(event.start_ns(), event.end_ns()) for event in events if event.name() == _WATCHED]
    if not spans:
        raise ValueError("count_allocations(): got work without a part inside watched(); allowed: at least one")
    records = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == _RECORD)
    times = [time for time, _ in records]
    live = [0, *accumulate(size for _, size in records)]
    peak = max(max(live[bisect_left(times, start) : bisect_right(times, end) + 1]) for start, end in spans)
    return Allocations(peak, live[-1])
