"""The measured peak of a stage beside the planned one, once training is over.

On an accelerator the peak is its allocator's, since the engine was built. The CPU has no such count; what is measured
there is the process's resident memory: its peak from then on, less what was resident when the engine had been built,
plus the weights, which were. That includes what libraries take and what the C allocator keeps of freed memory, so it is
more than the tensors need; ``scripts/bench/memory.py`` counts those exactly.
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
    """The most bytes so far: allocated on the device, or resident on the CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _resident_peak()


def _resident_peak() -> int:
    with suppress(OSError):  # no Linux
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # On Linux this would be at least what the process had before it became this program, a launcher's say.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _forget_resident_peak() -> None:
    with suppress(OSError):  # no Linux, or not allowed
        _FORGET.write_text("5")


class PeakMemory:
    """Peak bytes from now on.

    Args:
        device: where the stage computes.
        weights: tensors that are there already and count; of each storage once.
    """

    def __init__(self, device: torch.device, weights: Iterable[torch.Tensor]) -> None:
        self._device, self._before = device, 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        else:
            storages = {weight.untyped_storage().data_ptr(): weight.untyped_storage().nbytes() for weight in weights}
            _forget_resident_peak()
            self._before = int(psutil.Process().memory_info().rss) - sum(storages.values())
        self._least = peak_memory(device)

    def bytes(self) -> int | None:
        """The peak; None if memory had a higher one before, so that this one is not known."""
        peak = peak_memory(self._device)
        if self._device.type != "cuda" and peak == self._least:
            return None
        return peak - self._before

    @property
    def name(self) -> str:
        """What is measured."""
        return "measured peak" if self._device.type == "cuda" else "peak of resident memory above the start"


def memory_line(plan: Plan, stage: int, peak: PeakMemory) -> str:
    """One line for the log: what was planned for a stage, and what was measured."""
    planned, measured = plan.rank_memory()[stage].total, peak.bytes()
    found = "not known, there was a higher one before"
    if measured is not None:
        found = f"{show_bytes(measured)} ({100 * (measured / planned - 1):+.1f} %)"
    return f"ds_vpipe: stage {stage}: planned {show_bytes(planned)}, {peak.name} {found}"
