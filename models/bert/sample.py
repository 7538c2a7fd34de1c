"""What a pre-training sample is, and what a source of samples offers.

A source is a pure function of (seed, epoch, index), so that every rank computes what it needs for itself, replicas
and epochs do not overlap, and a run goes on at any sample.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

IGNORED_LABEL = -100

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Sample:
    """One sequence of length S with P prediction slots.

    Attributes:
        input_ids: int64 [S].
        token_type_ids: int64 [S], 0 for the first segment and 1 for the second.
        padding_mask: bool [S], true where there is a token.
        masked_positions: int64 [P], 0 in unused slots.
        masked_lm_labels: int64 [P], `IGNORED_LABEL` in unused slots; at least one slot is used.
        next_sentence_label: 0 if the second segment continues the first, 1 if it is random.
    """

    input_ids: Ints
    token_type_ids: Ints
    padding_mask: NDArray[np.bool_]
    masked_positions: Ints
    masked_lm_labels: Ints
    next_sentence_label: int


class Order(Protocol):
    """The indices of all samples in the order of an epoch."""

    def __getitem__(self, positions: slice) -> Ints: ...


class Samples(Protocol):
    """A finite set of samples that differ from epoch to epoch."""

    def __len__(self) -> int: ...

    def sample(self, index: int, epoch: int) -> Sample:
        """Sample number `index` as it looks in `epoch`."""
        ...

    def order(self, seed: int, epoch: int) -> Order:
        """The order in which an epoch takes the samples: each index once."""
        ...


def shuffled(count: int, seed: int, epoch: int) -> Ints:
    """The indices 0 .. count - 1 in an order drawn for the epoch: int64 [count]."""
    return np.random.default_rng((seed, epoch)).permutation(count)


class CountedSamples:
    """Stands for samples on a rank that does not read them, but has to know how many there are.

    Args:
        count: number of samples.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int, epoch: int) -> Sample:
        """Not to be had here.

        Raises:
            LookupError: always.
        """
        raise LookupError(f"sample {index} of epoch {epoch}: this rank reads no data")

    def order(self, seed: int, epoch: int) -> Order:
        """Not to be had here, like the samples.

        Raises:
            LookupError: always.
        """
        raise LookupError(f"order of epoch {epoch} with seed {seed}: this rank reads no data")
