"""Training and held-out samples, as the command line asks for them."""

import hashlib
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from transformers import BertConfig

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.cache import cached
from ds_vpipe.models.bert.corpus import Document, default_documents, default_key, file_documents, files_key
from ds_vpipe.models.bert.samples import PairSamples, RandomSamples, Samples, split_documents
from ds_vpipe.models.bert.wordpiece import (
    MAX_VOCABULARY,
    MIN_VOCABULARY,
    SPECIAL_TOKENS,
    TokenCorpus,
    tokenise,
    train_wordpiece,
)

HELD_OUT_EVERY = 20  # every 20th document, 5 % of the corpus, is for validation
SYNTHETIC_SAMPLES = 16384


@dataclass(frozen=True)
class TrainingData:
    """What to train and validate on.

    Attributes:
        training: the samples to train on.
        held_out: samples from documents that are not trained on.
        unigram_entropy: of the corpus, in nats per token.
        description: one line for the log.
        digest: equal on two ranks if and only if both have the same data.
    """

    training: Samples
    held_out: Samples
    unigram_entropy: float
    description: str
    digest: str


def prepare(arguments: Namespace, config: BertConfig, builder: bool) -> TrainingData:
    """Collect and tokenise the text if it is not in the cache, and cut it into samples.

    Args:
        arguments: of the training script.
        config: of the model; its vocabulary size is the most that the vocabulary may have.
        builder: whether this process fills the cache; see `models.bert.cache`.

    Raises:
        VPipeConfigError: an argument does not fit, or there is too little text.
    """
    length, predictions, seed = arguments.seq_length, arguments.max_predictions, arguments.seed
    vocab_size = config.vocab_size
    if length > config.max_position_embeddings:
        raise VPipeConfigError(
            f"--seq-length {length}: {arguments.bert_config} has {config.max_position_embeddings} position embeddings,"
            " use at most so many tokens"
        )
    if arguments.synthetic:
        return TrainingData(
            RandomSamples(SYNTHETIC_SAMPLES, vocab_size, length, predictions, seed),
            RandomSamples(SYNTHETIC_SAMPLES // HELD_OUT_EVERY, vocab_size, length, predictions, seed + 1),
            float(np.log(vocab_size - len(SPECIAL_TOKENS))),
            f"random tokens, vocabulary {vocab_size}",
            f"synthetic-{vocab_size}",
        )
    if not MIN_VOCABULARY <= vocab_size <= MAX_VOCABULARY:
        raise VPipeConfigError(
            f"vocabulary size {vocab_size} is outside {MIN_VOCABULARY} .. {MAX_VOCABULARY}; see --vocab-size"
        )
    corpus = _corpus(arguments.text, vocab_size, builder)
    return _from_corpus(corpus, length, predictions, seed)


def _from_corpus(corpus: TokenCorpus, length: int, predictions: int, seed: int) -> TrainingData:
    numbers, held_out = split_documents(corpus, HELD_OUT_EVERY)
    try:
        training = PairSamples(corpus, numbers, length, predictions, seed)
        validation = PairSamples(corpus, held_out, length, predictions, seed)
    except ValueError as error:
        raise VPipeConfigError(
            f"the text is too short ({corpus.num_documents} documents, {len(corpus.tokens)} tokens):"
            f" {error}; give more --text"
        ) from error
    digest = hashlib.sha256(corpus.tokens.tobytes()).hexdigest()[:16]
    description = (
        f"{corpus.num_documents} documents, {len(corpus.tokens)} tokens, vocabulary {corpus.vocab_size},"
        f" {len(training)} training and {len(validation)} held-out samples"
    )
    return TrainingData(training, validation, corpus.unigram_entropy, description, digest)


def _corpus(files: list[Path] | None, vocab_size: int, builder: bool) -> TokenCorpus:
    key = files_key(files) if files else default_key()

    def build_documents(path: Path) -> None:
        documents = file_documents(files) if files else default_documents()
        path.write_text("\n\n".join("\n".join(document) for document in documents), encoding="utf-8")

    def build_tokens(folder: Path) -> None:
        documents = _read_documents(cached(f"text-{key}.txt", build_documents, builder=True))
        tokenise(documents, train_wordpiece(documents, vocab_size)).save(folder)

    return TokenCorpus.load(cached(f"tokens-{key}-{vocab_size}", build_tokens, builder))


def _read_documents(path: Path) -> list[Document]:
    return [document.split("\n") for document in path.read_text(encoding="utf-8").split("\n\n")]
