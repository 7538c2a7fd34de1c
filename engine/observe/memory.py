"""Measured peak memory of a stage beside the planned one, once training is over.

On an accelerator the peak is its allocator's, since the engine was built. On the CPU it is that of the process's
resident memory since then, less what was resident before, plus the weights. That includes what libraries take and what
the C allocator keeps of freed memory; ``scripts/bench/memory.py`` counts tensors exactly.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from ds_vpipe.tables import show_bytes

if TYPE_CHECKING:
    from ds_vpipe.planning.plan import Plan

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


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
    """Peak bytes from now on. ``weights``, which are there already, count too, each storage once."""

    def __init__(self, device: torch.device, weights: Iterable[torch.Tensor]) -> None:
        self._device, self._before, self.name = device, 0, "measured peak"
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            self.name = "peak of resident memory above the start"
            storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
            with suppress(OSError):  # no Linux, or not allowed
                _FORGET.write_text("5")
            self._before = int(psutil.Process().memory_info().rss) - sum(storages.values())
        self._least = peak_memory(device)

    def bytes(self) -> int | None:
        """The peak; None if a higher one before hides it."""
        peak = peak_memory(self._device)
        if self._device.type != "cuda" and peak == self._least:
            return None
        return peak - self._before


def memory_line(plan: Plan, stage: int, peak: PeakMemory) -> str:
    """Log line with the planned and the measured peak of a stage."""
    planned, measured = plan.rank_memory()[stage].total, peak.bytes()
    found = "not known, there was a higher one before"
    if measured is not None:
        found = f"{show_bytes(measured)} ({100 * (measured / planned - 1):+.1f} %)"
    return f"ds_vpipe: stage {stage}: planned {show_bytes(planned)}, {peak.name} {found}"
