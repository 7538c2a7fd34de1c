"""Micro-batches that every rank computes for itself.

A run takes sample after sample: all of epoch 0 in its order, all of epoch 1 in another, and so on without a gap, for
an asynchronous pipeline does not drain between them. Data-parallel replica r of R takes every R-th group of B samples,
so replicas are disjoint, and micro-batch j of a replica is the same whichever rank asks for it and whenever. Neither B
nor R changes the order of the samples: a run goes on at its sample with others.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ds_vpipe.models.bert.sample import Order, Sample, Samples

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
Labels = tuple[Tensor, Tensor]
MicroBatch = tuple[Inputs, Labels]


class MicroBatches:
    """Numbered micro-batches of one data-parallel replica.

    Attributes:
        epoch_samples: samples of an epoch.

    Args:
        samples: where the samples come from.
        micro_batch_size: B.
        replica: number of this data-parallel replica, 0 .. replicas - 1.
        replicas: R, number of data-parallel replicas.
        seed: of the order of the samples.
        shuffle: whether each epoch has an order of its own and new masks; validation wants neither.

    Raises:
        ValueError: there are not enough samples for one micro-batch per replica.
    """

    def __init__(
        self, samples: Samples, micro_batch_size: int, replica: int, replicas: int, seed: int, shuffle: bool = True
    ) -> None:
        self._samples = samples
        self._size = micro_batch_size
        self._replica = replica
        self._replicas = replicas
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, Order] = (-1, np.empty(0, dtype=np.int64))
        self._round = micro_batch_size * replicas
        self.epoch_samples = len(samples)
        if self.epoch_samples < self._round:
            raise ValueError(
                f"{len(samples)} samples are too few for {replicas} replicas of micro-batch size {micro_batch_size}"
            )

    def __getitem__(self, number: int) -> MicroBatch:
        """Micro-batch `number` >= 0, shapes as in `models.bert.layers` and `models.bert.loss`."""
        return self._beginning_at(number * self._round)

    def range(self, start: int, stop: int) -> Iterator[MicroBatch]:
        """Micro-batches start .. stop - 1, in order."""
        return (self[number] for number in range(start, stop))

    def after(self, samples: int, count: int) -> Iterator[MicroBatch]:
        """The `count` micro-batches that follow `samples` samples, those of all replicas counted."""
        return (self._beginning_at(samples + number * self._round) for number in range(count))

    def _beginning_at(self, position: int) -> MicroBatch:
        """This replica's part of the B x R samples of the run from `position` on."""
        drawn: list[Sample] = []
        place = position + self._replica * self._size
        while len(drawn) < self._size:
            epoch, begin = divmod(place + len(drawn), self.epoch_samples)
            epoch = epoch if self._shuffle else 0
            indices = self._order_of(epoch)[begin : min(begin + self._size - len(drawn), self.epoch_samples)]
            drawn += [self._samples.sample(int(index), epoch) for index in indices]
        inputs = (
            _stack([sample.input_ids for sample in drawn]),
            _stack([sample.token_type_ids for sample in drawn]),
            _stack([sample.padding_mask for sample in drawn]),
            _stack([sample.masked_positions for sample in drawn]),
        )
        labels = (
            _stack([sample.masked_lm_labels for sample in drawn]),
            torch.tensor([sample.next_sentence_label for sample in drawn]),
        )
        return inputs, labels

    def _order_of(self, epoch: int) -> Order:
        if self._order[0] != epoch:
            order = self._samples.order(self._seed, epoch) if self._shuffle else np.arange(len(self._samples))
            self._order = (epoch, order)
        return self._order[1]


def _stack(
    rows: list[np.ndarray[tuple[int, ...], np.dtype[np.int64]]] | list[np.ndarray[tuple[int, ...], np.dtype[np.bool_]]],
) -> Tensor:
    return torch.from_numpy(np.stack(rows))
