"""Sentence pairs out of text, tokenised once by Hugging Face's ``datasets`` and kept in its cache.

Documents are separated by blank lines. Each is cut into runs of sentences that just fill a sequence; a run is a row of
the dataset and one sample. Rows are memory-mapped, and named by everything that they depend on: a second start, and
the other ranks of a machine, find them. Nothing is downloaded.
"""

import hashlib
import os
import re
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock
from tokenizers import Tokenizer
from transformers import AutoTokenizer, BertTokenizer

from ds_vpipe.errors import VPipeConfigError, VPipeError
from ds_vpipe.models.bert.corpus import docstring_key, write_docstrings
from ds_vpipe.models.bert.samples import (
    SPECIAL_IN_PAIR,
    SPECIAL_TOKENS,
    Ints,
    Masking,
    Sample,
    Samples,
    Vocabulary,
    check_shape,
    digest_of,
)
from ds_vpipe.whole_file import whole_file

os.environ.setdefault("HF_DATASETS_OFFLINE", "1")  # read when `datasets` is imported
from datasets import Dataset, Features, List, Value, disable_progress_bars

CACHE_VARIABLE = "DS_VPIPE_CACHE"
HELD_OUT_EVERY = 20  # every 20th document, 5 % of the corpus, is for validation
MIN_VOCABULARY = 256  # the special tokens and the alphabet must fit
MAX_VOCABULARY = 65536  # token numbers are stored in 16 bits

_RULES = 2  # raise it when rows change that are made of the same text
_READ_CHARACTERS = 1 << 20
_SENTENCE_END = re.compile(  # by full stops and the like, of scripts with spaces between words, and without
    r"([.!?\u2026\u0589\u061f\u06d4\u0964\u0965\u104b\u1362\u17d4][^\w\s]{0,3}\s"
    r"|[\u3002\uff01\uff1f\uff61][\u201d\u300d\u300f\uff09]*\s?)(?=\W{0,3}(\w))"
)
_TEXT = Features({"text": Value("string")})
_ROWS = Features({"tokens": List(Value("uint16")), "ends": List(Value("int32")), "document": Value("int64")})


@dataclass(frozen=True)
class Corpus:
    """Tokenised text: rows of sentences that fill a sequence."""

    rows: Any  # a `datasets.Dataset` of tokens, the ends of their sentences, and the number of their document
    tokenizer: Any  # of Hugging Face
    digest: str  # equal for equal text, tokenizer and sequence length
    documents: int  # number of documents

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """Token numbers of the tokenizer."""
        known = self.tokenizer.get_vocab()
        continues = np.zeros(len(self.tokenizer), dtype=bool)
        continues[[number for token, number in known.items() if token.startswith("##")]] = True
        return Vocabulary([known[token] for token in SPECIAL_TOKENS], continues)

    @cached_property
    def document_of_row(self) -> Ints:
        """Number of every row's document, ascending."""
        return np.asarray(self.rows.data.column("document").to_numpy())

    @cached_property
    def token_counts(self) -> Ints:
        """Number of occurrences of every token."""
        chunks = (chunk.flatten().to_numpy() for chunk in self.rows.data.column("tokens").chunks)
        none = np.zeros(self.vocabulary.size, dtype=np.int64)
        return sum((np.bincount(chunk, minlength=len(none)) for chunk in chunks), start=none)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all rows."""
        return int(self.token_counts.sum())

    @property
    def unigram_entropy(self) -> float:
        """Entropy of the token distribution in nats: the loss of a model that knows word frequencies alone."""
        shares = self.token_counts[self.token_counts > 0] / self.token_counts.sum()
        return float(-(shares * np.log(shares)).sum())

    def split(self, every: int = HELD_OUT_EVERY) -> tuple[Ints, Ints]:
        """Rows of the training documents, and of every `every`-th document, which is held out."""
        held_out = self.document_of_row % every == every - 1
        return np.flatnonzero(~held_out), np.flatnonzero(held_out)


class PairSamples(Samples):
    """Sentence pairs out of some rows of a corpus.

    A row is split at a random sentence boundary (one of a single sentence: in its middle), and in half of the cases
    its second part is replaced by a part of another document's row that begins with a random sentence.

    Args:
        corpus: the tokenised text, also an attribute.
        rows: numbers of rows to use, ascending.
        masking: of the samples.
        seed: of everything random.

    Raises:
        ValueError: the rows are of fewer than two documents.
    """

    def __init__(self, corpus: Corpus, rows: Ints, masking: Masking, seed: int) -> None:
        super().__init__(len(rows))
        self.corpus = corpus
        self._rows = rows
        self._documents = corpus.document_of_row[rows]
        self._masking = masking
        self._seed = seed
        if len(rows) == 0 or self._documents[0] == self._documents[-1]:
            raise ValueError("at least two documents with text are needed: half of the pairs join two documents")

    def sample(self, index: int, epoch: int) -> Sample:
        random = np.random.default_rng((self._seed, epoch, index))
        tokens, ends = self._row(index)
        cut = int(ends[random.integers(len(ends) - 1)]) if len(ends) > 1 else len(tokens) // 2
        first, second = tokens[:cut], tokens[cut:]
        label = int(random.random() < 0.5)
        if label:
            second = self._elsewhere(index, len(second), random)
        kept, kept_after = _fit(len(first), len(second), self._masking.length - SPECIAL_IN_PAIR)
        # The first segment loses its beginning and the second its end: those that meet at the boundary stay.
        return self._masking.sample(first[len(first) - kept :], second[:kept_after], label, random)

    def _elsewhere(self, index: int, length: int, random: np.random.Generator) -> Ints:
        """Up to `length` tokens of another document."""
        other = index
        while self._documents[other] == self._documents[index]:
            other = int(random.integers(len(self)))
        tokens, ends = self._row(other)
        # Not so near to the end of the row that its length would give the pair away.
        starts = [0, *(end for end in ends[:-1] if end + length <= len(tokens))]
        start = starts[random.integers(len(starts))]
        return tokens[start : start + length]

    def _row(self, index: int) -> tuple[Ints, list[int]]:
        row = self.corpus.rows[int(self._rows[index])]
        return np.array(row["tokens"]), row["ends"]


def text_samples(
    arguments: Namespace, vocab_size: int, tokenizer: Path | None = None, workers: int = 1
) -> tuple[PairSamples, PairSamples | None]:
    """Training and held-out samples of a text, as a command line asks.

    Every 20th document is held out if there is no ``--validation_file``; None if those are too few for pairs.

    Raises:
        VPipeConfigError: there is too little text, as for `check_shape`, or as for `read_corpus`.
    """
    length = arguments.max_seq_length
    slots = check_shape(length, arguments.max_predictions_per_seq, arguments.mlm_probability)
    given = None if tokenizer is None else read_tokenizer(tokenizer, vocab_size)
    options = {"cache": arguments.cache_dir, "line_by_line": arguments.line_by_line, "workers": workers}
    corpus = read_corpus(arguments.train_file, length, vocab_size, tokenizer=given, **options)
    training, held_out = corpus.split()
    other = corpus
    if arguments.validation_file:
        other = read_corpus(arguments.validation_file, length, vocab_size, tokenizer=corpus.tokenizer, **options)
        training, held_out = np.arange(len(corpus.rows)), np.arange(len(other.rows))
    share, whole_words = arguments.mlm_probability, arguments.whole_word_masking
    if whole_words and not corpus.vocabulary.continues.any():
        raise VPipeConfigError("--whole_word_masking: the vocabulary has no pieces of words (##); leave it out")
    masking = Masking(corpus.vocabulary, length, slots, share, whole_words)
    try:
        samples = PairSamples(corpus, training, masking, arguments.seed)
    except ValueError as error:
        raise VPipeConfigError(
            f"the text is too short ({corpus.documents} documents, {corpus.num_tokens} tokens): {error}, with blank"
            " lines between them; give more --train_file"
        ) from error
    try:
        return samples, PairSamples(other, held_out, masking, arguments.seed)
    except ValueError:
        return samples, None


def read_corpus(
    files: Sequence[Path] | None,
    length: int,
    vocab_size: int,
    cache: Path | None = None,
    tokenizer: Any = None,
    line_by_line: bool = False,
    workers: int = 1,
) -> Corpus:
    """Tokenise text, or find the result in the cache.

    Args:
        files: UTF-8 with blank lines between documents; None for the prose in docstrings of installed packages.
        length: S, tokens per sequence.
        vocab_size: the most tokens that the vocabulary may have.
        cache: folder of the results; default: ``$DS_VPIPE_CACHE``, ``~/.cache/ds_vpipe``.
        tokenizer: see `read_tokenizer`; default: made from the text.
        line_by_line: whether every line is a sentence; default: sentences are found, and all are kept.
        workers: processes.

    Raises:
        VPipeConfigError: a file cannot be read, the cache cannot be written, or the vocabulary has a wrong size.
        VPipeError: a process was killed.
    """
    if not MIN_VOCABULARY <= vocab_size <= MAX_VOCABULARY:
        raise VPipeConfigError(f"--vocab_size {vocab_size}: must be {MIN_VOCABULARY} .. {MAX_VOCABULARY}")
    cache = cache or Path(os.environ.get(CACHE_VARIABLE) or "~/.cache/ds_vpipe").expanduser()
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise VPipeConfigError(
            f"cache folder {cache} is not writable ({error}): choose one with --cache_dir"
        ) from error
    if not sys.stderr.isatty():  # bars are noise in a log file
        disable_progress_bars()
    rules = _RULES
    if files is None:
        files = [kept(cache / f"docstrings-{docstring_key()}.txt", write_docstrings)]
        line_by_line, rules = True, 1  # their rows are what they were, and recorded runs name the digest
    key = digest_of([*map(content_digest, files), line_by_line, rules])
    if next(_documents(files), None) is None:
        raise VPipeConfigError(f"--train_file {files[0]}: the files are empty; give text")
    options = {"features": _TEXT, "cache_dir": str(cache), "fingerprint": key}
    documents: Any = Dataset.from_generator(_documents, gen_kwargs={"files": [*files]}, **options)
    if tokenizer is None:

        def train(folder: Path) -> None:
            texts = (text for batch in documents.iter(1000) for text in batch["text"])
            lines = (line for text in texts for line in _sentences(text, line_by_line))
            made = BertTokenizer().train_new_from_iterator(
                lines, vocab_size, limit_alphabet=MIN_VOCABULARY // 2, show_progress=False
            )
            made.save_pretrained(folder)

        # The trainer breaks ties by chance: the file that all ranks and later runs read decides.
        tokenizer = read_tokenizer(kept(cache / f"tokenizer-{key}-{vocab_size}", train), vocab_size)
    digest = digest_of([key, tokenizer.backend_tokenizer.to_str(), length])
    try:
        rows = documents.map(
            _rows,
            with_indices=True,
            batched=True,
            remove_columns=["text"],
            features=_ROWS,
            fn_kwargs={"tokenizer": tokenizer.backend_tokenizer, "line_by_line": line_by_line, "length": length},
            num_proc=workers if workers > 1 else None,
            cache_file_name=str(cache / f"rows-{digest}.arrow"),
            new_fingerprint=digest,
            desc="tokenising",
        )
    except RuntimeError as error:
        raise VPipeError(
            f"tokenising failed ({error}): start again with fewer --preprocessing_num_workers; finished parts are kept"
        ) from error
    return Corpus(rows, tokenizer, digest, len(documents))


def read_tokenizer(path: Path, most: int) -> Any:
    """WordPiece tokenizer of a ``vocab.txt``, or of a folder of ``save_pretrained``.

    The text of a ``vocab.txt`` is lower-cased and loses its accents unless the vocabulary has upper-case letters.

    Raises:
        VPipeConfigError: it cannot be read, a special token is missing, or there are more tokens than ``most``.
    """
    if path.is_dir() and not (path / "tokenizer.json").is_file() and (path / "vocab.txt").is_file():
        path = path / "vocab.txt"
    where = f"--tokenizer_name {path}"
    try:
        if path.is_dir():
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True)
            tokens = list(tokenizer.get_vocab())
        else:
            tokens = [line.rstrip("\r") for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n")]
            lower = not any(token != token.lower() for token in tokens if not token.startswith("["))
            numbers = {token: number for number, token in enumerate(tokens)}
            tokenizer = BertTokenizer(numbers, do_lower_case=lower)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise VPipeConfigError(f"{where}: neither a UTF-8 vocab.txt nor a folder with a tokenizer: {reason}") from error
    missing = [token for token in SPECIAL_TOKENS if token not in tokens]
    if missing:
        raise VPipeConfigError(f"{where}: {missing[0]} is missing; give a WordPiece vocabulary of BERT's")
    twice = next((token for token, number in Counter(tokens).items() if number > 1), None)
    if twice is not None:
        raise VPipeConfigError(f"{where}: {twice!r} is there twice; every line must hold another token")
    if len(tokenizer) > most:
        raise VPipeConfigError(f"{where}: {len(tokenizer)} tokens, at most {most} are allowed; see --vocab_size")
    return tokenizer


def content_digest(path: Path) -> str:
    """SHA-256 of a text file, which is read to its end for it.

    Raises:
        VPipeConfigError: the file cannot be read, or is no UTF-8.
    """
    digest = hashlib.sha256()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for text in iter(lambda: file.read(_READ_CHARACTERS), ""):
                digest.update(text.encode())
    except (OSError, UnicodeDecodeError) as error:
        raise VPipeConfigError(f"{path}: not readable as UTF-8 text: {error}") from error
    return digest.hexdigest()


def _documents(files: Sequence[Path]) -> Iterator[dict[str, str]]:
    """Texts between blank lines."""
    for path in files:
        with path.open(encoding="utf-8-sig") as file:
            for blank, lines in groupby(file, str.isspace):
                if not blank:
                    yield {"text": "".join(lines)}


def _rows(
    batch: dict[str, list[str]], numbers: list[int], tokenizer: Tokenizer, line_by_line: bool, length: int
) -> dict[str, list[Any]]:
    """Rows of some documents: the shortest runs of sentences, or of parts of longer ones, that fill a sequence."""
    documents = [_sentences(text, line_by_line) for text in batch["text"]]
    flat = [sentence for document in documents for sentence in document]
    encoded = iter(tokenizer.encode_batch_fast(flat, add_special_tokens=False))
    rows: dict[str, list[Any]] = {"tokens": [], "ends": [], "document": []}
    for number, document in zip(numbers, documents, strict=True):
        tokens: list[int] = []
        ends: list[int] = []
        for place in range(len(document)):
            ids, most = next(encoded).ids, max(1, length - SPECIAL_IN_PAIR)  # lengths are checked with their samples
            whole = line_by_line or len(ids) <= most
            parts = [ids] if whole else [part.tolist() for part in np.array_split(ids, -(-len(ids) // most))]
            for part in parts:
                tokens += part
                if part:
                    ends.append(len(tokens))
                last = place == len(document) - 1 and part is parts[-1]
                if (len(tokens) >= most or last) and len(tokens) > 1:  # a token for each segment
                    rows["tokens"].append(np.array(tokens, dtype=np.uint16))
                    rows["ends"].append(np.array(ends, dtype=np.int32))
                    rows["document"].append(number)
                    tokens, ends = [], []
    return rows


def _sentences(text: str, line_by_line: bool) -> list[str]:
    if line_by_line:
        return [line for line in text.splitlines() if line.strip()]
    # Behind a full stop a small letter goes on with the sentence, in text that has capitals.
    text, begin, found = " ".join(text.split()), 0, list[str]()
    cased = text != text.lower()
    for end in [*(m.end() for m in _SENTENCE_END.finditer(text) if not (cased and m[2] != m[2].title())), len(text)]:
        found.append(text[begin:end].strip())
        begin = end
    return [sentence for sentence in found if sentence]


def _fit(first: int, second: int, budget: int) -> tuple[int, int]:
    """Lengths cut to `budget` in total, the longer segment first."""
    kept = min(second, max(budget // 2, budget - first))
    return min(first, budget - kept), kept


def kept(path: Path, write: Callable[[Path], None]) -> Path:
    """Entry of the cache: complete or absent, even with two writers."""
    with FileLock(f"{path}.lock"):
        if not path.exists():
            with whole_file(path) as part:
                write(part)
    return path
