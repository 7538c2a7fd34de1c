"""Which values of tensors the host reads in a batch: on an accelerator it would wait for each.

Torch's counts of updates are on the host whatever a stage computes on. What remains is the norm of delayed clipping,
once per update, and a comparison of recomputed outputs now and then.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import cases
import pytest
import torch
import toy
from torch.utils._python_dispatch import TorchDispatchMode
from worlds import Worlds

pytestmark = pytest.mark.mp

SGD = {"type": "SGD", "params": {"lr": 0.01}}
TOLIST = torch.Tensor.tolist
READS = ("_local_scalar_dense", "equal.default", "nonzero", "item", "unique")


class Reads(TorchDispatchMode):
    """Counts operations that need a value, by the innermost line of this package or of DeepSpeed."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in READS):
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        frame = sys._getframe(1)
        while frame is not None and not {"ds_vpipe", "deepspeed"} & set(Path(frame.f_code.co_filename).parts):
            frame = frame.f_back  # type: ignore[assignment]
        self.found["?" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"] += 1

    def tolist(self, tensor: torch.Tensor) -> Any:
        """``Tensor.tolist``, which is no operation."""
        self.note()
        return TOLIST(tensor)


def reads(ds_config: dict[str, Any], stages: int, folder: str) -> list[str]:
    """Lines that read values in steady batches."""
    ds_config["vpipe"] |= {"timeline": {"enabled": True, "path": folder}}
    trained = cases.engine(ds_config, stages)
    iterator = toy.data()
    for _ in range(stages + 2):
        trained.train_batch(iterator)
    with Reads() as seen, mock.patch.object(torch.Tensor, "tolist", lambda tensor: seen.tolist(tensor)):
        for _ in range(3):
            trained.train_batch(iterator)
        torch.ones(()).item()  # which has to be seen
    trained.destroy()
    return sorted(seen.found)


@pytest.mark.parametrize(
    ("block", "extra", "allowed"),
    [
        ({}, {"gradient_clipping": 1.0}, set()),
        (
            {"gradient_clipping_scope": "delayed_global", "recompute_ratio": 0.5},
            {"gradient_clipping": 1.0},
            # Recomputations are compared in micro-batches 1, 2, 4, 8 and so on, ever less often.
            {"updates/clipping.py", "updates/peer_updates.py", "modules/run_again.py"},
        ),
        ({"sync_mode": "bsp"}, {"gradient_clipping": 1.0}, set()),
        (
            {"staleness": {"nadam": True}},
            {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
            {"staleness/nadam.py"},
        ),
    ],
    ids=["asp", "delayed clipping", "bsp", "bf16, ZeRO-1"],
)
def test_values_that_are_read(
    worlds: Worlds, tmp_path: Path, block: dict[str, Any], extra: dict[str, Any], allowed: set[str]
) -> None:
    optimizer = SGD if "staleness" not in block else {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    ds_config = cases.config(2, optimizer, {"partition": "uniform", **block}, **extra)
    for lines in worlds.run(3, reads, ds_config, 3, str(tmp_path)):
        files = {"/".join(line.split(":")[0].split("/")[-2:]) for line in lines if "/deepspeed/" not in line}
        mine = {"?", "execution/test_host_reads.py"}  # the latter in a folder of the package's name
        assert files & mine, "the watch sees nothing"
        assert files - mine <= allowed
