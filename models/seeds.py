"""Layers that are initialised from a seed of their own, so that initial weights do not depend on the split."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let torch draw from ``seed`` for a while."""
    # Layers are built on the CPU; devices=[] keeps fork_rng from touching every GPU of the machine.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield
