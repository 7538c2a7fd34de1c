"""Recorder of the actions of a stage over time: ``"timeline": {"enabled": true}`` in the JSON.

A ring buffer keeps the latest spans, at two readings of the clock and an append each. Times are the host's: on CUDA a
pass ends when its kernels are queued. The buffer is written when the engine is destroyed, the script ends or a stage
fails, one file per rank in the folder ``timeline.path``; ``python -m ds_vpipe report FOLDER`` draws it.
"""

import re
import socket
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

import torch

from ds_vpipe.engine.stage import Stage
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.timelines.timeline import MemorySample, Recording, Span
from ds_vpipe.whole_file import whole_file

SPANS_KEPT = 1 << 17  # about 33 MB; some thousand batches of four micro-batches
_READ_AT_ONCE = 256  # losses
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # host names may be the same in two containers


class TimelineRecorder:
    """Watcher of a stage that keeps the span of every action. On CUDA it samples the allocated bytes after a pass."""

    def __init__(self, stage: Stage, replica: int) -> None:
        self._stage, self._replica = stage, replica
        self._origin = time.monotonic_ns()
        self._spans: deque[tuple[Action, int, int, int | None]] = deque(maxlen=SPANS_KEPT)
        self._memory: deque[tuple[int, int]] = deque(maxlen=SPANS_KEPT)
        self._losses: deque[tuple[int, float]] = deque(maxlen=SPANS_KEPT)
        self._unread: list[tuple[int, torch.Tensor]] = []
        self._events: deque[tuple[int, str]] = deque(maxlen=SPANS_KEPT)
        self._staleness = (0, 0, 0)  # sum, count, most
        self._recorded = 0
        self._begin = 0
        self._version: int | None = None

    def before(self, action: Action) -> None:
        """Note the start of an action and the version of a backward pass."""
        self._version = None
        if action.kind is Kind.BACKWARD:
            weights = self._stage.weights
            used = weights.version_of(self._stage.key(action))
            stale = weights.latest_version - used
            self._version = weights.latest_version if self._stage.pipeline.weight_sync == "none" else used
            total, count, most = self._staleness
            self._staleness = (total + stale, count + 1, max(most, stale))
        self._begin = time.monotonic_ns()

    def after(self, action: Action) -> None:
        """Keep the span of an action, also of one that the end of the data broke off."""
        end = time.monotonic_ns()
        if action.kind is Kind.FORWARD:
            with suppress(KeyError):  # the pass has failed
                self._version = self._stage.weights.version_of(self._stage.key(action))
        self._spans.append((action, self._begin, end, self._version))
        self._recorded += 1
        device = self._stage.device
        if device.type == "cuda" and action.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.STEP):
            self._memory.append((end, torch.cuda.memory_allocated(device)))

    def loss(self, batch: int, value: torch.Tensor) -> None:
        """Keep the mean loss of ``batch``. The host waits for an accelerator to read one, and reads many at once."""
        self._unread.append((batch, value))
        if len(self._unread) == _READ_AT_ONCE:
            self._read_losses()

    def _read_losses(self) -> None:
        with suppress(RuntimeError):  # of a device that has failed: the spans are the host's
            self._losses.extend((batch, value.item()) for batch, value in self._unread)
        self._unread.clear()

    def note(self, event: str) -> None:
        """Keep an event between two actions."""
        self._events.append((time.monotonic_ns(), event))

    def recording(self) -> Recording:
        """The recording so far."""
        pipeline, number = self._stage.pipeline, self._stage.number
        total, count, most = self._staleness
        self._read_losses()

        def seconds(instant: int) -> float:
            return round((instant - self._origin) * 1e-9, 9)

        return Recording(
            title=f"{pipeline.num_stages} stages",
            source="recording",
            num_ranks=pipeline.num_stages,
            micro_batches=pipeline.micro_batches,
            spans=[Span(number, action, seconds(begin), seconds(end), v) for action, begin, end, v in self._spans],
            memory=[MemorySample(number, seconds(at), size) for at, size in self._memory],
            losses=tuple(self._losses),
            staleness=((total / count, most),) if count else (),
            meta={
                "schedule": pipeline.schedule,
                "depths": list(pipeline.depths),
                "device": str(self._stage.device),
                **({"events": [[seconds(at), event] for at, event in self._events]} if self._events else {}),
            },
            rank=number,
            clock=_clock(),
            origin_ns=self._origin,
            replica=self._replica,
            dropped=self._recorded - len(self._spans),
        )

    def forget_earlier(self, folder: Path, replicas: int) -> None:
        """Remove this rank's recording of an earlier run, and on stage 0 those of stages and replicas that are gone.

        All files in the folder are then of one run, also if a rank is killed before it can write its own.
        """
        with suppress(OSError):  # there is no folder, or it cannot be written to: saving will say so
            for path in list(folder.iterdir()):
                name = re.fullmatch(r"replica(\d{2,})-rank(\d{3,})\.json", path.name)
                replica, stage = map(int, name.groups()) if name else (-1, -1)
                gone = self._replica == 0 and replica >= replicas
                if replica == self._replica:
                    gone = stage >= self._stage.pipeline.num_stages
                if (gone and self._stage.is_first) or (replica, stage) == (self._replica, self._stage.number):
                    path.unlink(missing_ok=True)

    def save(self, folder: Path) -> Path:
        """Write the recording to ``folder``, made if need be; returns the file's path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"replica{self._replica:02d}-rank{self._stage.number:03d}.json"
        with whole_file(path) as part:  # a launcher may kill this rank while it writes
            self.recording().save(part)
        return path


def _clock() -> str:
    """Name of the clock: the same on all ranks between two starts of one machine's kernel."""
    with suppress(OSError):
        return _BOOT_ID.read_text(encoding="ascii").strip()
    return socket.gethostname()
