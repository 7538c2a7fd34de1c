"""Data that are dealt out to all ranks are noticed in the calling script, and the remedy is said in one line."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from ds_vpipe.engine.world_samplers import remedy, world_sampler

DATA = TensorDataset(torch.arange(12))


def sampler(replicas: int) -> DistributedSampler[Any]:
    return DistributedSampler(DATA, num_replicas=replicas, rank=0)


def called() -> DistributedSampler[Any] | None:
    """As the engine is called by a script: from a function of its own."""
    return world_sampler(sys._getframe(1), replicas=2)


def found_in(value: Any) -> DistributedSampler[Any] | None:
    return called()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda s: s,
        lambda s: DataLoader(DATA, sampler=s),
        lambda s: DataLoader(DATA, batch_sampler=BatchSampler(s, 2, drop_last=True)),
        lambda s: SimpleNamespace(loader=DataLoader(DATA, sampler=s)),
    ],
    ids=["sampler", "loader", "batches", "provider"],
)
def test_found_where_scripts_have_it(wrap: Any) -> None:
    for_all_ranks, for_pipelines = sampler(4), sampler(2)
    assert found_in(wrap(for_all_ranks)) is for_all_ranks
    del for_all_ranks
    assert found_in(wrap(for_pipelines)) is None


def test_nothing_to_find() -> None:
    loader = DataLoader(DATA, batch_size=2)
    assert found_in(loader) is None


def test_remedy() -> None:
    line = remedy(sampler(4), replicas=2, stages=2)
    assert line.startswith("DistributedSampler(num_replicas=4): ")
    assert "an epoch is 2/4 of the data" in line
    assert "num_replicas=engine.dp_world_size (here 2)" in line
    assert "\n" not in line
