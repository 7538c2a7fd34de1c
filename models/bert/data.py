"""Training data: micro-batches that every rank computes for itself, out of text, shards or random tokens.

A source of samples is a pure function of (seed, epoch, index). The first pipeline stage needs inputs and the last one
labels: both compute whole samples, nothing but activations crosses the network, and a run goes on at any sample.

A run takes all of epoch 0 in its order, all of epoch 1 in another, and so on without a gap, for an asynchronous
pipeline does not drain between them. Data-parallel replica r of R takes every R-th group of B samples, so replicas are
disjoint. Neither B nor R changes the order of the samples: a run can go on with others.
"""

import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, distributed
from transformers import BertConfig

from ds_vpipe.errors import VPipeConfigError, VPipeError
from ds_vpipe.models.bert.masking import (
    SPECIAL_TOKENS,
    Ints,
    Masking,
    RandomSamples,
    Sample,
    Vocabulary,
    check_shape,
)
from ds_vpipe.models.bert.shards import ShardSamples, digest_of, find_shards, open_shards, read_manifest

SYNTHETIC_SAMPLES = 16384
WAIT_SECONDS = 900.0  # for a rank that tokenises a text

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
Labels = tuple[Tensor, Tensor]
MicroBatch = tuple[Inputs, Labels]


class Order(Protocol):
    """Indices of all samples in the order of an epoch."""

    def __getitem__(self, positions: slice) -> Ints: ...


class Samples(Protocol):
    """Finite set of samples that differ from epoch to epoch."""

    def __len__(self) -> int: ...

    def sample(self, index: int, epoch: int) -> Sample:
        """Sample `index` as seen in `epoch`."""
        ...

    def order(self, seed: int, epoch: int) -> Order:
        """Order of an epoch: every index once."""
        ...


class CountedSamples:
    """Number of samples, for a rank that reads none.

    Args:
        count: number of samples.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int, epoch: int) -> Sample:
        """Raise LookupError."""
        raise LookupError(f"sample {index} of epoch {epoch}: this rank reads no data")

    def order(self, seed: int, epoch: int) -> Order:
        """Raise LookupError."""
        raise LookupError(f"order of epoch {epoch} with seed {seed}: this rank reads no data")


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
        return self._at(number * self._round)

    def range(self, start: int, stop: int) -> Iterator[MicroBatch]:
        """Micro-batches start .. stop - 1, in order."""
        return (self[number] for number in range(start, stop))

    def after(self, samples: int, count: int) -> Iterator[MicroBatch]:
        """The `count` micro-batches that follow `samples` samples, those of all replicas counted."""
        return (self._at(samples + number * self._round) for number in range(count))

    def _at(self, position: int) -> MicroBatch:
        """This replica's part of the B x R samples of the run from `position` on."""
        drawn: list[Sample] = []
        place = position + self._replica * self._size
        while len(drawn) < self._size:
            epoch, begin = divmod(place + len(drawn), self.epoch_samples)
            epoch = epoch if self._shuffle else 0
            indices = self._order_of(epoch)[begin : min(begin + self._size - len(drawn), self.epoch_samples)]
            drawn += [self._samples.sample(int(index), epoch) for index in indices]

        def stacked(name: str) -> Tensor:
            return torch.from_numpy(np.stack([getattr(sample, name) for sample in drawn]))

        inputs = (
            stacked("input_ids"),
            stacked("token_type_ids"),
            stacked("padding_mask"),
            stacked("masked_positions"),
        )
        return inputs, (stacked("masked_lm_labels"), stacked("next_sentence_label"))

    def _order_of(self, epoch: int) -> Order:
        if self._order[0] != epoch:
            order = self._samples.order(self._seed, epoch) if self._shuffle else np.arange(len(self._samples))
            self._order = (epoch, order)
        return self._order[1]


@dataclass(frozen=True)
class TrainingData:
    """Samples of a run.

    Attributes:
        training: the samples to train on.
        held_out: samples that are not trained on; None if there are none.
        unigram_entropy: of the corpus, in nats per token; None if it is not known.
        description: one line for the log.
        digest: equal on two ranks if and only if both have the same data.
    """

    training: Samples
    held_out: Samples | None
    unigram_entropy: float | None
    description: str
    digest: str

    def counted(self) -> "TrainingData":
        """Numbers of the data alone, as other ranks need them."""
        held_out = None if self.held_out is None else CountedSamples(len(self.held_out))
        return replace(self, training=CountedSamples(len(self.training)), held_out=held_out)


def prepare(arguments: Namespace, config: BertConfig) -> TrainingData:
    """Find the shards; or tokenise the text, or find it in the cache, and cut it into samples.

    Args:
        arguments: of the training script.
        config: of the model; its vocabulary size is the most that the vocabulary may have.

    Raises:
        VPipeConfigError: an argument does not fit, there is too little text, or a shard is broken.
    """
    if arguments.data_dir is not None:
        return _from_shards(arguments, config)
    length, slots, seed = arguments.max_seq_length, arguments.max_predictions_per_seq, arguments.seed
    _check_length(length, arguments, config)
    if arguments.synthetic:
        vocab_size = config.vocab_size
        masking = Masking(Vocabulary.numbered(vocab_size), length, slots, arguments.mlm_probability)
        return TrainingData(
            RandomSamples(SYNTHETIC_SAMPLES, masking, seed),
            RandomSamples(SYNTHETIC_SAMPLES // 20, masking, seed + 1),
            float(np.log(vocab_size - len(SPECIAL_TOKENS))),
            f"random tokens, vocabulary {vocab_size}",
            f"synthetic-{vocab_size}",
        )
    from ds_vpipe.models.bert.text import text_samples  # takes seconds to import

    training, held_out = text_samples(arguments, config.vocab_size, arguments.tokenizer_name)
    corpus = training.corpus
    return TrainingData(
        training,
        held_out,
        corpus.unigram_entropy,
        f"{corpus.documents} documents, {corpus.num_tokens} tokens, vocabulary {corpus.vocabulary.size},"
        f" {len(training)} training and {len(held_out or ())} held-out samples",
        " ".join(dict.fromkeys(samples.corpus.digest for samples in (training, held_out) if samples)),
    )


def prepare_on_readers(arguments: Namespace, config: BertConfig, stages: int) -> TrainingData:
    """Prepare the data on the ranks that need files; all ranks call this.

    Text is tokenised by the first rank of each machine while the others wait. A rank that cannot prepare its data ends
    all ranks with its message, and so do ranks that would read different data.

    Args:
        arguments: of the training script.
        config: of the model.
        stages: pipeline stages; ranks are numbered stage by stage, as DeepSpeed numbers them.

    Returns:
        On ranks that read no samples, `CountedSamples` in their place.

    Raises:
        VPipeConfigError: on every rank: an argument does not fit, the data are broken, or they differ.
    """
    rank, world = distributed.get_rank(), distributed.get_world_size()
    stage = rank // (world // stages)
    builder = int(os.environ.get("LOCAL_RANK", "0")) == 0
    needed = stage in (0, stages - 1) or (builder and arguments.data_dir is None)
    # Over gloo, whatever training uses: this waits for a text to be tokenised, and for no device.
    group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=WAIT_SECONDS))
    mine: TrainingData | None = None
    known: dict[int, TrainingData] = {}
    for turn in (True, False):  # builders first, so that nobody waits for what a builder has failed to build
        error: str | None = None
        if needed and builder == turn:
            try:
                mine = prepare(arguments, config)
            except VPipeError as caught:
                error = str(caught)
        outcomes = _gathered((error, mine.counted() if mine else None), group)
        for number, (reason, _) in enumerate(outcomes):
            if reason is not None:
                raise VPipeConfigError(reason if number == rank else f"rank {number}: {reason}")
        known = {number: data for number, (_, data) in enumerate(outcomes) if data is not None}
    if len({data.digest for data in known.values()}) > 1:
        digests = ", ".join(f"rank {number}: {data.digest}" for number, data in known.items())
        raise VPipeConfigError(
            f"ranks have different data ({digests}): stages would read different samples; give all machines the same"
            " --data_dir or --train_file, and the same --tokenizer_name"
        )
    return mine or known[0]


def _gathered(mine: tuple[str | None, TrainingData | None], group: Any) -> list[Any]:
    """What every rank has of the data, or the reason why it has none."""
    outcomes: list[Any] = [None] * distributed.get_world_size()
    try:
        # The first rank learns who is missing; this does not take its limit from the group.
        distributed.monitored_barrier(group, timedelta(seconds=WAIT_SECONDS), wait_all_ranks=True)
        distributed.all_gather_object(outcomes, mine, group=group)
    except RuntimeError as error:
        reason = " ".join(str(error).split())
        raise VPipeConfigError(
            f"waited up to {WAIT_SECONDS:.0f} s for all ranks to prepare their data ({reason}): see the output of the"
            " missing ones; prepare large texts with python -m ds_vpipe.models.bert.prepare"
        ) from error
    return outcomes


def _check_length(length: int, arguments: Namespace, config: BertConfig) -> None:
    if length > config.max_position_embeddings:
        raise VPipeConfigError(
            f"--max_seq_length {length}: {arguments.config_name} has {config.max_position_embeddings} position"
            " embeddings, use at most so many tokens"
        )


def _from_shards(arguments: Namespace, config: BertConfig) -> TrainingData:
    folder: Path = arguments.data_dir
    if not folder.is_dir():
        raise VPipeConfigError(
            f"--data_dir {folder}: no such folder; make one with python -m ds_vpipe.models.bert.prepare"
        )
    training_files, held_out_files = find_shards(folder)
    shards, held_out = open_shards(training_files), open_shards(held_out_files)
    if not shards:
        raise VPipeConfigError(
            f"--data_dir {folder}: no .hdf5 or .h5 file with samples below it has 'training' in its name"
            f" ({len(held_out_files)} have 'validation' or 'test'); give the folder of the shards"
        )
    length = shards[0].sequence_length
    others = [(f"--max_seq_length {arguments.max_seq_length}", arguments.max_seq_length or length)]
    others += [(f"{shard.path} with {shard.sequence_length}", shard.sequence_length) for shard in held_out]
    for name, given in others:
        if given != length:
            raise VPipeConfigError(
                f"--data_dir {folder}: sequences have {length} tokens, which does not fit {name}; prepare shards of"
                " the wanted length"
            )
    _check_length(length, arguments, config)
    slots = check_shape(length, arguments.max_predictions_per_seq or max(shard.predictions for shard in shards))
    training = ShardSamples(shards, slots, config.vocab_size, arguments.keep_order)
    result = (read_manifest(folder) or {}).get("result")
    return TrainingData(
        training,
        ShardSamples(held_out, slots, config.vocab_size) if held_out else None,
        None if result is None else float(result["unigram_entropy"]),
        f"{len(shards)} shards, {len(training)} training and {sum(shard.rows for shard in held_out)} validation samples"
        f" of {length} tokens with up to {slots} predictions",
        digest_of(folder, [*shards, *held_out]),
    )
