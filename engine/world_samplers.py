"""Samplers that deal a data set out to all ranks, where only the ranks of the first stage read it.

Scripts without pipelines give every rank a share of the data: ``DistributedSampler`` takes the number of ranks unless
told otherwise. In a pipeline all stages of a replica train one share, that of the first stage. The others' shares
would be read and dropped, and an epoch would be shorter than the script believes.

Nothing is patched to find out. At the first call of the engine the variables of the calling script are looked at: of
each function on the way to the call and of their modules, and one level deeper, the attributes of objects there. A
sampler that is only to be found elsewhere, such as in a container or a closure, is not detected.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from types import FrameType, FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

_MOST_OBJECTS = 20_000
_LIBRARIES = ("torch.", "deepspeed.", "ds_vpipe.", "transformers.", "runpy")


def world_sampler(frame: FrameType | None, replicas: int) -> DistributedSampler[Any] | None:
    """A sampler for more than ``replicas`` ranks that the script of ``frame`` uses, or None if none is found."""
    seen: set[int] = set()
    for candidate in itertools.islice(_candidates(frame), _MOST_OBJECTS):
        if id(candidate) in seen:
            continue
        seen.add(id(candidate))
        sampler = _sampler(candidate)
        if sampler is not None and sampler.num_replicas > replicas:
            return sampler
    return None


def remedy(sampler: DistributedSampler[Any], replicas: int, stages: int) -> str:
    """One line about ``sampler``."""
    return (
        f"DistributedSampler(num_replicas={sampler.num_replicas}): the data are dealt out to {sampler.num_replicas} "
        f"ranks, but the {stages} stages of a pipeline train those of the first one together, so an epoch is "
        f"{replicas}/{sampler.num_replicas} of the data; pass num_replicas=engine.dp_world_size (here {replicas}) and "
        f"rank=torch.distributed.get_rank() % engine.dp_world_size, or training_data to initialize()"
    )


def _candidates(frame: FrameType | None) -> Iterator[Any]:
    while frame is not None:
        names = frame.f_globals
        if not str(names.get("__name__", "")).startswith(_LIBRARIES):
            for variables in (frame.f_locals, names) if frame.f_locals is not names else (names,):
                for value in list(variables.values()):
                    yield value
                    yield from list(_attributes(value))
        frame = frame.f_back


def _attributes(value: Any) -> Iterator[Any]:
    if isinstance(value, (type, ModuleType, FunctionType, nn.Module)) or type(value).__module__.startswith(_LIBRARIES):
        return
    attributes: list[Any] = []
    with suppress(Exception):  # objects that answer for others may raise anything
        attributes += vars(value).values()
    yield from attributes


def _sampler(value: Any) -> DistributedSampler[Any] | None:
    if isinstance(value, DistributedSampler):
        return value
    if not isinstance(value, DataLoader):
        return None
    for holder in (value, value.batch_sampler):
        sampler = getattr(holder, "sampler", None)
        if isinstance(sampler, DistributedSampler):
            return sampler
    return None
