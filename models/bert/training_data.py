"""Training and held-out samples, as the command line asks for them."""

import hashlib
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import BertConfig

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.preparation import read_manifest
from ds_vpipe.models.bert.sample import Samples
from ds_vpipe.models.bert.sample_shape import check_shape
from ds_vpipe.models.bert.samples import HELD_OUT_EVERY, PairSamples, RandomSamples, spans_of, split_documents
from ds_vpipe.models.bert.shard_samples import ShardSamples, digest_of, open_shards
from ds_vpipe.models.bert.shards import find_shards
from ds_vpipe.models.bert.text_corpus import text_corpus
from ds_vpipe.models.bert.vocabulary import SPECIAL_TOKENS
from ds_vpipe.models.bert.wordpiece import TokenCorpus

SYNTHETIC_SAMPLES = 16384


@dataclass(frozen=True)
class TrainingData:
    """What to train and validate on.

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


def prepare(arguments: Namespace, config: BertConfig, builder: bool) -> TrainingData:
    """Find the shards; or collect and tokenise the text if it is not in the cache, and cut it into samples.

    Args:
        arguments: of the training script.
        config: of the model; its vocabulary size is the most that the vocabulary may have.
        builder: whether this process fills the cache; see `models.bert.cache`.

    Raises:
        VPipeConfigError: an argument does not fit, there is too little text, or a shard is broken.
    """
    if arguments.data_dir is not None:
        return _from_shards(arguments, config)
    length, predictions, seed = arguments.max_seq_length, arguments.max_predictions_per_seq, arguments.seed
    _check_length(length, arguments, config)
    vocab_size = config.vocab_size
    if arguments.synthetic:
        return TrainingData(
            RandomSamples(SYNTHETIC_SAMPLES, vocab_size, length, predictions, seed),
            RandomSamples(SYNTHETIC_SAMPLES // HELD_OUT_EVERY, vocab_size, length, predictions, seed + 1),
            float(np.log(vocab_size - len(SPECIAL_TOKENS))),
            f"random tokens, vocabulary {vocab_size}",
            f"synthetic-{vocab_size}",
        )
    corpus = TokenCorpus.load(text_corpus(arguments.train_file, arguments.tokenizer_name, vocab_size, builder))
    return _from_corpus(corpus, length, predictions, seed)


def _check_length(length: int, arguments: Namespace, config: BertConfig) -> None:
    if length > config.max_position_embeddings:
        raise VPipeConfigError(
            f"--max_seq_length {length}: {arguments.config_name} has {config.max_position_embeddings} position"
            " embeddings, use at most so many tokens"
        )


def _from_corpus(corpus: TokenCorpus, length: int, predictions: int, seed: int) -> TrainingData:
    try:
        training, validation = (
            PairSamples(corpus, spans_of(corpus, documents, length), length, predictions, seed)
            for documents in split_documents(corpus)
        )
    except ValueError as error:
        raise VPipeConfigError(
            f"the text is too short ({corpus.num_documents} documents, {len(corpus.tokens)} tokens):"
            f" {error}; give more --train_file"
        ) from error
    digest = hashlib.sha256(corpus.tokens.tobytes()).hexdigest()[:16]
    description = (
        f"{corpus.num_documents} documents, {len(corpus.tokens)} tokens, vocabulary {corpus.vocab_size},"
        f" {len(training)} training and {len(validation)} held-out samples"
    )
    return TrainingData(training, validation, corpus.unigram_entropy, description, digest)


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
    manifest = read_manifest(folder)
    result = manifest["result"] if manifest is not None else None
    return TrainingData(
        training,
        validation,
        None if result is None else float(result["unigram_entropy"]),
        f"{len(shards)} shards, {len(training)} training and {len(validation or ())} validation samples of {length}"
        f" tokens with up to {slots} predictions",
        digest_of(folder, [*shards, *held_out]),
    )
