"""What the thread that looks for failures of other ranks asks the store."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from ds_vpipe.engine.links.failure_watch import FailureWatch


class Gone:
    """A store whose process has ended."""

    def __init__(self) -> None:
        self.asked = 0

    def check(self, _: Sequence[str]) -> bool:
        self.asked += 1
        raise dist.DistNetworkError("Failed to recv, got 0 bytes")


def test_store_that_is_gone_is_asked_once() -> None:
    """torch prints a stack of its own for every question, and rank 0 may end a while before others."""
    store = Gone()
    watch = FailureWatch(store, 2, limit_s=100)
    assert watch.reason() is None  # has looked twice
    watch.stop()
    assert store.asked == 1


def test_store_that_has_been_gone_for_long_is_a_failure() -> None:
    watch = FailureWatch(Gone(), 2, limit_s=0)
    reason = watch.reason()
    watch.stop()
    assert reason is not None
    assert "store of the default process group is gone" in reason
