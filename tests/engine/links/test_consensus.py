"""Agreements of ranks that need no other rank to be looked at."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ds_vpipe.engine.links.consensus import Consensus
from ds_vpipe.errors import VPipeError


class NoTextError(Exception):
    """An exception of a script's whose text fails."""

    def __str__(self) -> str:
        return self.args[1]  # type: ignore[no-any-return]


def test_a_failure_without_a_text_is_reported_to_all_ranks() -> None:
    told: list[Any] = []
    group = SimpleNamespace(ranks=[0], gather=lambda value, *_: told.append(value) or [value])
    me = SimpleNamespace(rank=0)
    topology = SimpleNamespace(get_axis_comm_lists=lambda _: [[0]])
    grid = SimpleNamespace(topology=lambda: topology, world_size=1, get_slice_parallel_world_size=lambda: 1)
    groups: Any = SimpleNamespace(me=me, timeout_s=1.0, of=lambda *_, **__: group)
    consensus = Consensus(grid, groups)
    with pytest.raises(VPipeError, match=r"failed: NoTextError: its text cannot be shown$"), consensus.all_or_none("x"):
        raise NoTextError("")
    with pytest.raises(VPipeError, match=r"^two lines\n"), consensus.all_or_none("x"):
        raise VPipeError("two lines\nof ours")
    assert [line.partition("failed: ")[2] for line in told] == [
        "NoTextError: its text cannot be shown",
        "two lines of ours",
    ]
