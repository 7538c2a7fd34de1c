"""Training data: micro-batches that every rank computes for itself, out of text, shards or random tokens.

The first pipeline stage needs inputs and the last one labels: both compute whole samples, nothing but activations
crosses the network, and a run goes on at any sample.

A run takes all of epoch 0 in its order, all of epoch 1 in another, and so on without a gap, for an asynchronous
pipeline does not drain between them. Data-parallel replica r of R takes every R-th group of B samples, so replicas are
disjoint. Neither B nor R changes the order of the samples: a run can go on with others.
"""

import os
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed
from transformers import BertConfig

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.samples import (
    SPECIAL_TOKENS,
    Masking,
    RandomSamples,
    Samples,
    Vocabulary,
    check_shape,
    digest_of,
)
from ds_vpipe.models.bert.shards import ShardSamples, find_shards, open_shards, read_manifest
from ds_vpipe.models.start import on_all_ranks

IGNORED_LABEL = -100
SYNTHETIC_SAMPLES = 16384

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]
Labels = tuple[Tensor, Tensor]
MicroBatch = tuple[Inputs, Labels]


def micro_batches(
    samples: Samples, size: int, seed: int | None, begin: int = 0, replica: int = 0, replicas: int = 1
) -> Iterator[MicroBatch]:
    """Endless micro-batches of one data-parallel replica; shapes as in :mod:`ds_vpipe.models.bert.layers`.

    Args:
        samples: where they come from.
        size: B, samples of a micro-batch.
        seed: of the order of the samples, None for validation; see `Samples.between`.
        begin: samples that the run has had, those of all replicas counted.
        replica: number of this replica, 0 .. replicas - 1.
        replicas: R, number of replicas.
    """
    begin += replica * size
    while True:
        drawn = list(samples.between(begin, begin + size, seed))
        row = {key: torch.from_numpy(np.stack([sample[key] for sample in drawn])) for key in drawn[0]}
        positions = row["masked_lm_positions"]
        labels = row["masked_lm_ids"].masked_fill(positions == 0, IGNORED_LABEL)
        inputs = row["input_ids"], row["segment_ids"], row["input_mask"].bool(), positions
        yield inputs, (labels, row["next_sentence_labels"])
        begin += size * replicas


def micro_batches_of(
    engine: Any, samples: Samples, seed: int | None, number: int, begin: int = 0
) -> Iterator[MicroBatch] | None:
    """``number`` micro-batches for this rank of an engine, ours or DeepSpeed's. None where it reads no data."""
    if not (engine.is_first_stage() or engine.is_last_stage()):
        return None
    replica, replicas = engine.grid.get_data_parallel_rank(), engine.grid.get_data_parallel_world_size()
    endless = micro_batches(samples, engine.train_micro_batch_size_per_gpu(), seed, begin, replica, replicas)
    return islice(endless, number)


@dataclass(frozen=True)
class TrainingData:
    """Samples of a run."""

    training: Samples  # the samples to train on
    held_out: Samples | None  # samples that are not trained on; None if there are none
    unigram_entropy: float | None  # of the corpus, in nats per token; None if it is not known
    description: str  # one line for the log
    digest: str  # equal where text and tokenizer are, or names, sizes and shapes of the shards

    def counted(self) -> "TrainingData":
        """Numbers of the data alone, as other ranks need them."""
        held_out = None if self.held_out is None else Samples(len(self.held_out))
        return replace(self, training=Samples(len(self.training)), held_out=held_out)


def prepare(arguments: Namespace, config: BertConfig) -> TrainingData:
    """Samples of shards, of a text, or of random tokens, as the arguments ask.

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
    """Prepare the data on the ranks that need files, elsewhere their numbers alone. All ranks call this.

    Text is tokenised by the first rank of each machine while the others wait. A rank that cannot prepare its data ends
    all ranks with its message, and so do ranks that would read different data. Ranks are numbered stage by stage, as
    DeepSpeed numbers them.

    Raises:
        VPipeConfigError: on every rank: an argument does not fit, the data are broken, or they differ.
    """
    stage = distributed.get_rank() // (distributed.get_world_size() // stages)
    builder = int(os.environ.get("LOCAL_RANK", "0")) == 0
    needed = stage in (0, stages - 1) or (builder and arguments.data_dir is None)
    mine: list[TrainingData] = []

    def prepare_now() -> TrainingData | None:
        if needed and not mine:
            mine.append(prepare(arguments, config))
        return mine[0].counted() if mine else None

    # Builders first, so that nobody waits for what a builder has failed to build.
    on_all_ranks("prepare their data", lambda: prepare_now() if builder else None)
    found = on_all_ranks("prepare their data", prepare_now)
    known = {rank: data for rank, data in enumerate(found) if data is not None}
    if len({data.digest for data in known.values()}) > 1:
        digests = ", ".join(f"rank {number}: {data.digest}" for number, data in known.items())
        raise VPipeConfigError(
            f"ranks have different data ({digests}): stages would read different samples; give all machines the same"
            " --data_dir or --train_file, and the same --tokenizer_name"
        )
    return mine[0] if mine else known[0]


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
    validation = ShardSamples(held_out, slots, config.vocab_size) if held_out else None
    result = (read_manifest(folder) or {}).get("result")
    return TrainingData(
        training,
        validation,
        None if result is None else float(result["unigram_entropy"]),
        f"{len(shards)} shards, {len(training)} training and {len(validation or ())} validation samples"
        f" of {length} tokens with up to {slots} predictions",
        digest_of(
            f"{shard.path.relative_to(folder)} {shard.path.stat().st_size} {shard.rows} {shard.sequence_length}"
            for shard in (*shards, *held_out)
        ),
    )
