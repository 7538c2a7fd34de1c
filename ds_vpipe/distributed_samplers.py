"""Distributed samplers of an unedited script, with a share per pipeline and not per rank.

torch's ``DistributedSampler`` gives every rank a share of the data by default. In a pipeline all stages of a replica
train the share of the first stage; the others' would be read and dropped, and an epoch would be 1/K of the data. The
number of replicas is known in ``initialize()``, before or after which a script makes its samplers.
"""

import functools
import weakref
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from deepspeed.utils import logger
from torch.utils.data.distributed import DistributedSampler

_SHARE = {"num_replicas", "rank", "num_samples", "total_size"}


class DistributedSamplers:
    """Samplers that are made while it is watching, with their arguments.

    Only those for all ranks change, and only by :meth:`deal`; the script wants those with another number of replicas.
    """

    def __init__(self) -> None:
        self._made: weakref.WeakKeyDictionary[DistributedSampler[Any], tuple[Any, ...]] = weakref.WeakKeyDictionary()
        self._place: tuple[int, int] | None = None

    def watching(self) -> AbstractContextManager[object]:
        """Context in which samplers that are made are seen."""
        original = DistributedSampler.__init__

        @functools.wraps(original)
        def make(sampler: Any, dataset: Any, num_replicas: Any = None, rank: Any = None, *args: Any, **kw: Any) -> None:
            rank = 0 if num_replicas == 1 else rank  # an Accelerator's processes are one, and its ranks the stages
            original(sampler, dataset, num_replicas, rank, *args, **kw)
            self._made[sampler] = (original, dataset, args, kw, _length(sampler))
            self._deal(sampler)

        return patch.object(DistributedSampler, "__init__", make)

    def deal(self, replicas: int, replica: int) -> None:
        """Share the data of samplers for all ranks, also of later ones, among ``replicas``; ``replica`` is this one."""
        self._place = replicas, replica
        for sampler in list(self._made):
            self._deal(sampler, "; what the script has computed of its length, as a schedule's, is too short")

    def _deal(self, sampler: DistributedSampler[Any], remark: str = "") -> None:
        place, world = self._place, dist.get_world_size() if dist.is_initialized() else 1
        if place is None or place[0] == world or (sampler.num_replicas, sampler.rank) != (world, dist.get_rank()):
            return
        make, dataset, args, kwargs, length = self._made[sampler]
        if _length(sampler) != length:
            if dist.get_rank() == 0:
                logger.warning(
                    f"ds_vpipe: {type(sampler).__name__}(num_replicas={world}): got {sampler.num_samples} samples an "
                    f"epoch, which the script has set itself, so that it keeps them and reads 1/{world} of the data; "
                    f"make it after initialize(), or with num_replicas={place[0]} and its rank among these"
                )
            return
        samples, kept = sampler.num_samples, {key: vars(sampler)[key] for key in vars(sampler).keys() - _SHARE}
        make(sampler, dataset, *place, *args, **kwargs)
        vars(sampler).update(kept)
        if dist.get_rank() == 0:
            logger.warning(
                f"ds_vpipe: DistributedSampler(num_replicas={world}): {world} ranks are {place[0]} pipelines, and all "
                f"ranks of one read the same data; num_replicas={place[0]} is used, with {sampler.num_samples} samples "
                f"an epoch where they were {samples}{remark}"
            )


def _length(sampler: DistributedSampler[Any]) -> tuple[int, int]:
    return sampler.num_samples, sampler.total_size
