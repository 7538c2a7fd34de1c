"""Distributed samplers that are dealt out to pipelines: which ones, and what stays as the script has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from ds_vpipe import distributed_samplers
from ds_vpipe.distributed_samplers import DistributedSamplers

DATA = TensorDataset(torch.arange(24))
WORLD, RANK, REPLICAS, REPLICA = 4, 3, 2, 1


class Named(DistributedSampler[Any]):
    """A script's own, with a signature of its own."""

    def __init__(self, name: str, data: Any) -> None:
        super().__init__(data, shuffle=False)
        self.name, self.share = name, self.num_samples


class Skipping(DistributedSampler[Any]):
    """As scripts have them that go on in the middle of an epoch."""

    def __init__(self, data: Any, skipped: int) -> None:
        super().__init__(data, shuffle=False)
        self.skipped = skipped
        self.num_samples -= skipped


@pytest.fixture
def samplers() -> Iterator[DistributedSamplers]:
    made = DistributedSamplers()
    with (
        mock.patch("torch.distributed.is_available", return_value=True),
        mock.patch("torch.distributed.is_initialized", return_value=True),
        mock.patch("torch.distributed.get_world_size", return_value=WORLD),
        mock.patch("torch.distributed.get_rank", return_value=RANK),
        made.watching(),
    ):
        yield made


def test_samplers_for_all_ranks_are_dealt_anew(samplers: DistributedSamplers) -> None:
    before: list[DistributedSampler[Any]] = [
        DistributedSampler(DATA, seed=5), DistributedSampler(DATA, WORLD, RANK, seed=5),
        DistributedSampler(DATA, num_replicas=WORLD, rank=RANK, seed=5),
    ]  # fmt: skip
    loader = DataLoader(DATA, batch_size=3, sampler=before[0])
    before[0].set_epoch(7)
    assert len(loader) == 2
    samplers.deal(REPLICAS, REPLICA)
    assert len(loader) == 4
    wanted = DistributedSampler(DATA, REPLICAS, REPLICA, seed=5)
    for sampler in [*before[1:], DistributedSampler(DATA, seed=5)]:
        assert list(sampler) == list(wanted)
    wanted.set_epoch(7)
    assert list(before[0]) == list(wanted)
    named = Named("mine", DATA)
    assert (named.name, named.share, list(named)) == ("mine", 12, list(range(1, 24, 2)))


def test_others_stay(samplers: DistributedSamplers) -> None:
    given = [DistributedSampler(DATA, *place) for place in ((REPLICAS, 0), (WORLD, 0), (8, RANK), (1, 0))]
    orders = [list(sampler) for sampler in given]
    samplers.deal(REPLICAS, REPLICA)
    assert [list(sampler) for sampler in given] == orders


def test_the_only_share_is_everyones(samplers: DistributedSamplers) -> None:
    """Of an Accelerator, whose ``num_processes`` is 1 in a pipeline, and whose ``process_index`` is the rank."""
    assert list(DistributedSampler(DATA, 1, RANK)) == list(DistributedSampler(DATA, num_replicas=1, rank=0))


def test_without_a_pipeline_nothing_changes(samplers: DistributedSamplers) -> None:
    sampler: DistributedSampler[Any] = DistributedSampler(DATA)
    with mock.patch.object(distributed_samplers.logger, "warning") as warning:
        samplers.deal(WORLD, RANK)
    assert (sampler.num_replicas, sampler.rank) == (WORLD, RANK)
    assert not warning.called


def test_torchs_own_is_back_afterwards() -> None:
    original = DistributedSampler.__init__
    with DistributedSamplers().watching():
        assert DistributedSampler.__init__ is not original
    assert DistributedSampler.__init__ is original


def test_schedules_made_of_an_earlier_length_are_named(samplers: DistributedSamplers) -> None:
    """They were computed where the sampler was shorter, and would end training early without a word."""
    remark = "what the script has computed of its length, as a schedule's, is too short"
    with (
        mock.patch("torch.distributed.get_rank", return_value=0),
        mock.patch.object(distributed_samplers.logger, "warning") as warning,
    ):
        earlier = DistributedSampler(DATA)
        samplers.deal(REPLICAS, 0)
        assert remark in warning.call_args.args[0]
        assert len(earlier) == len(DistributedSampler(DATA)) == 12
        assert remark not in warning.call_args.args[0]


def test_what_a_script_has_set_itself_is_kept(samplers: DistributedSamplers) -> None:
    """A length of its own cannot be carried over; such a sampler stays as it is, and a line says what to do."""
    plain, named, skipping = DistributedSampler(DATA), Named("mine", DATA), Skipping(DATA, 2)
    plain.shuffle, plain.seed, named.extra = False, 7, 5
    with (
        mock.patch("torch.distributed.get_rank", return_value=0),
        mock.patch.object(distributed_samplers.logger, "warning") as warning,
    ):
        for sampler in (plain, named, skipping):
            sampler.rank = 0
        samplers.deal(REPLICAS, 0)
        lines = [call.args[0] for call in warning.call_args_list]
    assert (plain.shuffle, plain.seed, list(plain)) == (False, 7, list(range(0, 24, 2)))
    assert (named.extra, named.name, len(named)) == (5, "mine", 12)
    assert (skipping.num_replicas, len(skipping)) == (WORLD, 4)
    assert [("Skipping(num_replicas=4): got 4 samples" in line, "after initialize()" in line) for line in lines].count(
        (True, True)
    ) == 1
    assert len(Skipping(DATA, 2)) == 10
