"""Statistics of each stage and batch: seconds, bytes, staleness, versions, memory.

A stage's record covers the time from its last backward pass of the batch before to its last backward
pass of this one. It is closed there because the batch's last gradient leaves then and takes the record
with it, so that the first stage has every stage's record of a batch without a message or a wait of its
own. The update in a record is therefore the one before the batch's own.

Seconds are the host's, from ``time.perf_counter()``. Nothing waits for a device on their account: on
an accelerator a pass counts until its kernels are queued, and the time until they are done shows where
the host waits for messages, which leave once they are done.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter, sub
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch

from ds_vpipe.engine.links.link import Receiver, Sender
from ds_vpipe.engine.stage import Stage
from ds_vpipe.planning.plan import Plan
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.schedules.pipeline import Pipeline
from ds_vpipe.tables import show_bytes

Rows = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """Record of one stage and batch, or the mean over several batches; times are in seconds."""

    stage: int
    batch: int  # from 0; of several the last
    load_s: float  # reading data, and agreeing with replicas that all have some
    forward_s: float  # forward passes, those ahead of the batch included
    backward_s: float
    reduce_s: float  # averaging gradients over replicas
    update_s: float  # of the batch before
    send_s: float  # passing messages to the links
    wait_activations_s: float  # for the previous stage
    wait_gradients_s: float  # for the next stage
    wait_tied_s: float  # for owners or copies of tied weights
    wait_copies_s: float  # until what was sent has been copied, before a pass or an update
    bytes_sent: int  # passed to the links; they may still be on their way
    bytes_received: int
    bytes_swapped: int  # activations copied to the host
    staleness: int  # updates between a micro-batch's forward pass and that with its gradient, the most in the batch
    versions: int  # weight versions alive at most
    peak_memory_bytes: int  # since the start; allocated on the device, or resident on the CPU

    @property
    def wait_s(self) -> float:
        """Seconds of waiting for other stages and for copies of what was sent."""
        return self.wait_activations_s + self.wait_gradients_s + self.wait_tied_s + self.wait_copies_s

    @property
    def busy(self) -> float:
        """Share of the measured time, in [0, 1], that was not waiting."""
        work = self.load_s + self.forward_s + self.backward_s + self.reduce_s + self.update_s + self.send_s
        return work / (work + self.wait_s) if work else 0.0

    @classmethod
    def from_row(cls, row: Iterable[float]) -> StageStatistics:
        """From ``COLUMNS`` numbers, in the order of the fields."""
        numbers: list[Any] = [int(x) if field.type == "int" else x for field, x in zip(_FIELDS, row, strict=True)]
        return cls(*numbers)


def pass_seconds(row: Sequence[float]) -> float:
    """Seconds of passes in a record's row."""
    return row[_FORWARD_S] + row[_BACKWARD_S]


_FIELDS = dataclasses.fields(StageStatistics)
_FORWARD_S, _BACKWARD_S = map([field.name for field in _FIELDS].index, ("forward_s", "backward_s"))
_ADDED = np.array([field.name.endswith("_s") or field.name.startswith("bytes_") for field in _FIELDS])
_TIMED = (Kind.LOAD, Kind.FORWARD, Kind.BACKWARD, Kind.REDUCE, Kind.STEP)  # in the order of a record
_SENDS = [kind for kind in Kind if kind.value.startswith("SEND")]
_WAITED, _SENT, _RECEIVED = map(attrgetter, ("waited_s", "bytes_sent", "bytes_received"))
_PEAK_INTERVAL_S = 1.0
_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
COLUMNS = len(_FIELDS)
"""Numbers in a record."""


class StageMeter:
    """Watcher of one stage that makes a record of each batch.

    Its ``links`` count bytes and waiting time. Function ``closed`` gets every record as a row, when the stage has
    completed a batch and before its last gradient leaves.
    """

    def __init__(
        self, stage: Stage, links: Mapping[Kind, Sequence[Sender | Receiver]], closed: Callable[[list[float]], None]
    ) -> None:
        self._stage, self._closed = stage, closed
        tied = [*links[Kind.RECV_TIED], *links[Kind.RECV_TIED_GRAD]]
        self._waiting = links[Kind.RECV_ACT], links[Kind.RECV_GRAD], tied
        every = {id(link): link for found in links.values() for link in found}.values()
        self._senders = [link for link in every if isinstance(link, Sender)]
        self._receivers = [link for link in every if isinstance(link, Receiver)]
        self._seconds = dict.fromkeys(Kind, 0.0)
        self._staleness = self._versions = 0
        self._counted = self._counters()
        self._begin = 0.0
        self._peak = (float("-inf"), 0)

    def before(self, action: Action) -> None:
        """Note the time, and before a backward pass versions and staleness."""
        if action.kind is Kind.BACKWARD:
            weights = self._stage.weights
            stale = weights.latest_version - weights.version_of(self._stage.key(action))
            self._staleness = max(self._staleness, stale)
            self._versions = max(self._versions, weights.num_versions)
        self._begin = time.perf_counter()

    def after(self, action: Action) -> None:
        """Add the seconds of an action to those of its kind, and close the record of a batch."""
        self._seconds[action.kind] += time.perf_counter() - self._begin
        if action.kind is Kind.BACKWARD and (batch := self._stage.batch_ended_by(action)) is not None:
            self._closed(self._close(batch))

    def _close(self, batch: int) -> list[float]:
        """Record of the actions since the last one, as a row: the fields of :class:`StageStatistics` in order."""
        before, seconds = self._counted, self._seconds
        self._counted, self._seconds = self._counters(), dict.fromkeys(seconds, 0.0)
        passes, sends = map(seconds.__getitem__, _TIMED), sum(map(seconds.__getitem__, _SENDS))
        most = self._staleness, self._versions, self._peak_memory()
        self._staleness = self._versions = 0
        return [self._stage.number, batch, *passes, sends, *map(sub, self._counted, before), *most]

    def _peak_memory(self) -> int:
        """The peak, which never falls, looked up once a second at most: that is a file on the CPU."""
        now = time.monotonic()
        if now - self._peak[0] >= _PEAK_INTERVAL_S:
            self._peak = (now, peak_memory(self._stage.device))
        return self._peak[1]

    def _counters(self) -> tuple[float, ...]:
        """Counters since the start: seconds of waits for others and for copies, bytes sent, received, and swapped."""
        return (
            *(sum(map(_WAITED, links)) for links in self._waiting),
            sum(map(_WAITED, self._senders)),
            sum(map(_SENT, self._senders)),
            sum(map(_RECEIVED, self._receivers)),
            0 if self._stage.swap is None else self._stage.swap.bytes_moved,
        )


class StatisticsMean:
    """Records of all stages, averaged over batches: seconds and bytes as the mean, everything else as the most."""

    def __init__(self) -> None:
        self._sum: Rows = np.zeros(())
        self._most: Rows = np.zeros(())
        self._count = 0

    def add(self, rows: Rows) -> None:
        """Add one batch's records, ``[K, COLUMNS]``."""
        self._sum, self._most = self._sum + rows, np.maximum(self._most, rows)
        self._count += 1

    def take(self) -> list[StageStatistics]:
        """Mean of the records added since the last call, by stage; empty if there are none."""
        if self._count == 0:
            return []
        means = np.where(_ADDED, self._sum / self._count, self._most).tolist()
        self._sum = self._most = np.zeros(())
        self._count = 0
        return [StageStatistics.from_row(row) for row in means]


def line(records: Sequence[StageStatistics]) -> str:
    """The records of all stages in one line, a column for each stage."""
    rows: dict[str, tuple[int, Callable[[StageStatistics], float]]] = {
        "busy %": (0, lambda r: 100 * r.busy),
        "forward ms": (1, lambda r: 1e3 * r.forward_s),
        "backward ms": (1, lambda r: 1e3 * r.backward_s),
        "update ms": (1, lambda r: 1e3 * r.update_s),
        "wait ms": (1, lambda r: 1e3 * r.wait_s),
        "sent MB": (3, lambda r: r.bytes_sent / 1e6),
        "received MB": (3, lambda r: r.bytes_received / 1e6),
        "swapped MB": (3, lambda r: r.bytes_swapped / 1e6),
        "staleness": (0, lambda r: r.staleness),
        "versions": (0, lambda r: r.versions),
        "peak MB": (0, lambda r: r.peak_memory_bytes / 1e6),
    }
    texts = {name: " ".join(f"{value(r):>6.{digits}f}" for r in records) for name, (digits, value) in rows.items()}
    return " | ".join(f"{name} {text}" for name, text in texts.items())


def peak_memory(device: torch.device) -> int:
    """Most bytes so far: allocated on the device, or resident on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):  # no Linux
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # On Linux this is at least the peak of the program that started this one, such as a launcher.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


class PeakMemory:
    """Peak bytes of a stage from now on, for comparison with the planned ones.

    On an accelerator the peak is its allocator's. On the CPU it is that of the process's resident memory, less what was
    resident before, plus the ``weights``, which are there already, each storage once. That includes what libraries take
    and what the C allocator keeps of freed memory; ``scripts/bench/memory.py`` counts tensors exactly.
    """

    def __init__(self, device: torch.device, weights: Iterable[torch.Tensor]) -> None:
        self._device, self._resident_before, self.name = device, 0, "measured peak"
        self.counts_more = device.type != "cuda"  # than what is planned
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self.name = "peak of resident memory above the start"
            storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
            with suppress(OSError):  # no Linux, or not allowed
                _FORGET.write_text("5")
            self._resident_before = int(psutil.Process().memory_info().rss) - sum(storages.values())
        self._peak_before = peak_memory(device)

    def bytes(self) -> int | None:
        """Peak bytes since the start. None if the process had a higher peak before, which hides it."""
        peak = peak_memory(self._device)
        if self._device.type != "cuda" and peak == self._peak_before:
            return None
        return peak - self._resident_before


def memory_line(plan: Plan, pipeline: Pipeline, stage: int, peak: PeakMemory) -> str:
    """Log line with the planned and the measured peak of a stage, at the end with ``pipeline``."""
    planned, measured = plan.rank_memory()[stage].total, peak.bytes()
    found = "not known, there was a higher one before"
    if measured is not None:
        difference = f"{100 * (measured / planned - 1):+.1f} %"
        if peak.counts_more:  # by megabytes, of which the share of a small model's plan says nothing
            more = "more" if measured >= planned else "less"
            difference = f"{show_bytes(abs(measured - planned))} {more}; libraries and the C allocator count too"
        found = f"{show_bytes(measured)} ({difference})"
    then = "" if pipeline == plan.pipeline else " for an earlier split, depths or batch size"
    return f"ds_vpipe: stage {stage}: planned {show_bytes(planned)}{then}, {peak.name} {found}"
