"""What each stage did for a batch: seconds, bytes, staleness, versions, memory.

A stage's record covers the time from its last backward pass of the batch before to its last backward
pass of this one. It is closed there because the batch's last gradient leaves then and takes the record
with it, so that the first stage has every stage's record of a batch without a message or a wait of its
own. The update in a record is therefore the one before the batch's own.

Seconds are the host's, from ``time.perf_counter()``. Nothing waits for a device on their account: on
CUDA a pass counts until its kernels are queued, and the time until they are done shows where the host
waits for them, which is in ``wait_copies_s``.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds_vpipe.engine.links.receiver import Receiver
from ds_vpipe.engine.links.sender import Sender
from ds_vpipe.engine.observe.memory import peak_memory
from ds_vpipe.engine.stage import Stage
from ds_vpipe.schedules.actions import Action, Kind

Rows = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class StageStatistics:
    """One stage's record of one batch, or the mean over several batches.

    Attributes:
        stage: number of the stage.
        batch: number of the batch, from 0; of several the last.
        load_s: seconds of reading data, and of agreeing with replicas that all have some.
        forward_s: seconds of forward passes, those ahead of the batch included.
        backward_s: seconds of backward passes.
        reduce_s: seconds of averaging gradients over replicas.
        update_s: seconds of the update before the batch's own.
        send_s: seconds of handing messages to the links.
        wait_activations_s: seconds of waiting for the previous stage.
        wait_gradients_s: seconds of waiting for the next stage.
        wait_tied_s: seconds of waiting for owners or copies of tied weights.
        wait_copies_s: seconds of waiting until what was sent has been copied, before a pass or an update.
        bytes_sent: bytes handed to the links; they may still be under way.
        bytes_received: bytes received.
        staleness: updates applied here between a micro-batch's forward pass and the update with its
            gradient, the most of the batch's micro-batches.
        versions: weight versions alive at most.
        peak_memory_bytes: the most memory since the start; allocated on the device, or resident on the CPU.
    """

    stage: int
    batch: int
    load_s: float
    forward_s: float
    backward_s: float
    reduce_s: float
    update_s: float
    send_s: float
    wait_activations_s: float
    wait_gradients_s: float
    wait_tied_s: float
    wait_copies_s: float
    bytes_sent: int
    bytes_received: int
    staleness: int
    versions: int
    peak_memory_bytes: int

    @property
    def wait_s(self) -> float:
        """Seconds of waiting for other stages and for copies of what was sent."""
        return self.wait_activations_s + self.wait_gradients_s + self.wait_tied_s + self.wait_copies_s

    @property
    def busy(self) -> float:
        """Share of the measured time, in [0, 1], that was not waiting."""
        work = self.load_s + self.forward_s + self.backward_s + self.reduce_s + self.update_s + self.send_s
        return work / (work + self.wait_s) if work else 0.0

    def row(self) -> list[float]:
        """As ``COLUMNS`` numbers."""
        return [getattr(self, name) for name in _NAMES]

    @classmethod
    def from_row(cls, row: Iterable[float]) -> StageStatistics:
        """The inverse of :meth:`row`."""
        values: dict[str, Any] = {
            field.name: int(value) if field.type == "int" else value for field, value in zip(_FIELDS, row, strict=True)
        }
        return cls(**values)


_FIELDS = dataclasses.fields(StageStatistics)
_NAMES = [field.name for field in _FIELDS]
_ADDED = np.array([name.endswith("_s") or name in ("bytes_sent", "bytes_received") for name in _NAMES])

_PEAK_INTERVAL_S = 0.1
_BATCHES_AT_A_TIME = 64
COLUMNS = len(_FIELDS)
"""Numbers in a record."""


class StageMeter:
    """Watcher of one stage that makes a record of each batch.

    Args:
        stage: the stage.
        links: the links that actions of each kind use; they count bytes and waiting time.
    """

    def __init__(self, stage: Stage, links: Mapping[Kind, Sequence[Sender | Receiver]]) -> None:
        self._stage = stage
        waits = ((Kind.RECV_ACT,), (Kind.RECV_GRAD,), (Kind.RECV_TIED, Kind.RECV_TIED_GRAD))
        self._waits = [
            [link for kind in kinds for link in links[kind] if isinstance(link, Receiver)] for kinds in waits
        ]
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
        """Add its seconds to those of its kind."""
        self._seconds[action.kind] += time.perf_counter() - self._begin

    def close(self, batch: int) -> StageStatistics:
        """The record of what has been observed since the last call."""
        counters, seconds = self._counters(), self._seconds
        waited_activations, waited_gradients, waited_tied, waited_copies, sent, received = (
            now - before for now, before in zip(counters, self._counted, strict=True)
        )
        record = StageStatistics(
            stage=self._stage.number,
            batch=batch,
            load_s=seconds[Kind.LOAD],
            forward_s=seconds[Kind.FORWARD],
            backward_s=seconds[Kind.BACKWARD],
            reduce_s=seconds[Kind.REDUCE],
            update_s=seconds[Kind.STEP],
            send_s=sum(value for kind, value in seconds.items() if kind.value.startswith("SEND")),
            wait_activations_s=waited_activations,
            wait_gradients_s=waited_gradients,
            wait_tied_s=waited_tied,
            wait_copies_s=waited_copies,
            bytes_sent=int(sent),
            bytes_received=int(received),
            staleness=self._staleness,
            versions=self._versions,
            peak_memory_bytes=self._peak_memory(),
        )
        self._counted = counters
        self._seconds = dict.fromkeys(Kind, 0.0)
        self._staleness = self._versions = 0
        return record

    def _peak_memory(self) -> int:
        """The peak, which never falls, looked up ten times a second at most: that is a file on the CPU."""
        now = time.monotonic()
        if now - self._peak[0] >= _PEAK_INTERVAL_S:
            self._peak = (now, peak_memory(self._stage.device))
        return self._peak[1]

    def _counters(self) -> tuple[float, ...]:
        """Seconds waited for both neighbours, ties and copies, bytes sent and received, since the start."""
        return (
            *(sum(link.waited_s for link in found) for found in self._waits),
            sum(link.waited_s for link in self._senders),
            sum(link.bytes_sent for link in self._senders),
            sum(link.bytes_received for link in self._receivers),
        )


class StatisticsMean:
    """Records of all stages, averaged over batches: seconds and bytes as the mean, everything else as the most."""

    def __init__(self) -> None:
        self._added: list[Rows] = []
        self._count = 0

    def add(self, rows: Rows) -> None:
        """One batch's records, ``[K, COLUMNS]``; they are summed up a number of batches at a time."""
        self._added.append(rows)
        self._count += 1
        if len(self._added) >= _BATCHES_AT_A_TIME:
            self._added = [self._together()]

    def _together(self) -> Rows:
        rows = np.stack(self._added)
        return np.where(_ADDED, rows.sum(axis=0), rows.max(axis=0))

    def take(self) -> list[StageStatistics]:
        """The mean of what was added since the last call, by stage; empty if nothing was."""
        if self._count == 0:
            return []
        rows = self._together()
        means = np.where(_ADDED, rows / self._count, rows).tolist()
        self._added, self._count = [], 0
        return [StageStatistics.from_row(row) for row in means]


def line(records: Sequence[StageStatistics]) -> str:
    """The records of all stages in one line, a column for each stage."""

    def columns(values: Iterable[float], digits: int = 0) -> str:
        return " ".join(f"{value:>6.{digits}f}" for value in values)

    parts = {
        "busy %": columns(100 * r.busy for r in records),
        "forward ms": columns((1e3 * r.forward_s for r in records), 1),
        "backward ms": columns((1e3 * r.backward_s for r in records), 1),
        "update ms": columns((1e3 * r.update_s for r in records), 1),
        "wait ms": columns((1e3 * r.wait_s for r in records), 1),
        "sent MB": columns((r.bytes_sent / 1e6 for r in records), 3),
        "received MB": columns((r.bytes_received / 1e6 for r in records), 3),
        "staleness": columns(r.staleness for r in records),
        "versions": columns(r.versions for r in records),
        "peak MB": columns(r.peak_memory_bytes / 1e6 for r in records),
    }
    return " | ".join(f"{name} {text}" for name, text in parts.items())
