"""Recorder of the actions of a stage over time: ``"timeline": {"enabled": true}`` in the JSON.

A ring buffer keeps the latest spans; putting one in costs two readings of the clock and an append. Times are the
host's: on CUDA a pass ends when its kernels are queued. The buffer is written when the engine is destroyed, the script
ends or a stage fails, one file per rank in the folder ``timeline.path``; ``python -m ds_vpipe report FOLDER`` draws it.
"""

from __future__ import annotations

import re
import socket
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from ds_vpipe.engine.weights.stashing import WeightStashingOptimizer
from ds_vpipe.schedules.actions import Action, Kind
from ds_vpipe.timelines.timeline import MemorySample, Recording, Span

SPANS_KEPT = 1 << 17  # about 33 MB; some thousand batches of four micro-batches
_NANO = 1e-9
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # host names may be the same in two containers


class Recorder:
    """Observes the actions of one stage.

    Args:
        stage: number of the stage.
        num_stages: K.
        replica: number of the pipeline's replica.
        optimizer: gives the stashing optimizer, which loading a checkpoint replaces.
        key_of: key of a pass's micro-batch among those in flight.
        device: device of the stage. On CUDA the allocated bytes are sampled after every pass.
    """

    def __init__(
        self,
        stage: int,
        num_stages: int,
        replica: int,
        optimizer: Callable[[], WeightStashingOptimizer],
        key_of: Callable[[Action], int],
        device: torch.device,
    ) -> None:
        self._stage, self._num_stages, self._replica = stage, num_stages, replica
        self._optimizer, self._key_of, self._device = optimizer, key_of, device
        self._origin = time.monotonic_ns()
        self._spans: deque[tuple[Action, int, int, int | None]] = deque(maxlen=SPANS_KEPT)
        self._memory: deque[tuple[int, int]] = deque(maxlen=SPANS_KEPT)
        self._losses: deque[tuple[int, float]] = deque(maxlen=SPANS_KEPT)
        self._staleness = (0, 0, 0)  # sum, count, most
        self._recorded = 0
        self._begin = 0
        self._version: int | None = None

    def before(self, action: Action) -> None:
        """Note the start of an action and the version of a backward pass."""
        self._version = None
        if action.kind is Kind.BACKWARD:
            optimizer = self._optimizer()
            self._version = optimizer.version_of(self._key_of(action))
            stale = optimizer.latest_version - self._version
            total, count, most = self._staleness
            self._staleness = (total + stale, count + 1, max(most, stale))
        self._begin = time.monotonic_ns()

    def after(self, action: Action) -> None:
        """Keep the span of an action that has ended, or was given up at the end of the data."""
        end = time.monotonic_ns()
        if action.kind is Kind.FORWARD:
            with suppress(KeyError):  # the pass has failed
                self._version = self._optimizer().version_of(self._key_of(action))
        self._spans.append((action, self._begin, end, self._version))
        self._recorded += 1
        if self._device.type == "cuda" and action.kind in (Kind.FORWARD, Kind.BACKWARD, Kind.STEP):
            self._memory.append((end, torch.cuda.memory_allocated(self._device)))

    def loss(self, batch: int, value: float) -> None:
        """Keep the mean loss of ``batch``."""
        self._losses.append((batch, value))

    def recording(self, micro_batches: int, meta: dict[str, Any]) -> Recording:
        """The recording so far."""
        total, count, most = self._staleness

        def seconds(instant: int) -> float:
            return round((instant - self._origin) * _NANO, 9)

        return Recording(
            title=f"{self._num_stages} stages",
            source="recording",
            num_ranks=self._num_stages,
            micro_batches=micro_batches,
            spans=[Span(self._stage, action, seconds(begin), seconds(end), v) for action, begin, end, v in self._spans],
            memory=[MemorySample(self._stage, seconds(at), size) for at, size in self._memory],
            losses=tuple(self._losses),
            staleness=((total / count, most),) if count else (),
            meta=meta,
            rank=self._stage,
            clock=_clock(),
            origin_ns=self._origin,
            replica=self._replica,
            dropped=self._recorded - len(self._spans),
        )

    def forget_earlier(self, folder: Path) -> None:
        """Remove this rank's recording of an earlier run, and on stage 0 those of stages that do not exist any more.

        All files in the folder are then of one run, also if a rank is killed before it can write its own.
        """
        with suppress(OSError):  # there is no folder, or it cannot be written to: saving will say so
            for path in list(folder.iterdir()):
                name = re.fullmatch(rf"{self._prefix}(\d{{3,}})\.json", path.name)
                gone = name is not None and self._stage == 0 and int(name[1]) >= self._num_stages
                if gone or (name is not None and int(name[1]) == self._stage):
                    path.unlink(missing_ok=True)

    def save(self, folder: Path, micro_batches: int, meta: dict[str, Any]) -> Path:
        """Write the recording to ``folder``, which is made if need be, and return the file's path.

        Raises:
            OSError: the file cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self._prefix}{self._stage:03d}.json"
        unfinished = path.with_suffix(".part")  # a launcher may kill this rank while it writes
        self.recording(micro_batches, meta).save(unfinished)
        return unfinished.replace(path)

    @property
    def _prefix(self) -> str:
        return f"replica{self._replica:02d}-rank"


def _clock() -> str:
    """Name of the clock: the same on all ranks between two starts of one machine's kernel."""
    with suppress(OSError):
        return _BOOT_ID.read_text(encoding="ascii").strip()
    return socket.gethostname()
