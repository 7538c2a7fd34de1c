"""A WordPiece vocabulary trained from the corpus, and the corpus as token numbers."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.trainers import WordPieceTrainer

from ds_vpipe.models.bert.vocabulary import OWN_SPECIAL_TOKENS, SPECIAL_TOKENS, SpecialTokens, special_tokens

MIN_VOCABULARY = 256  # the special tokens and the alphabet must fit
MAX_VOCABULARY = 65536  # token numbers are stored in 16 bits

_CHUNK = 8192  # sentences encoded at once, to bound memory


@dataclass(frozen=True)
class TokenCorpus:
    """A corpus as one array of token numbers, with the places where sentences and documents begin.

    Attributes:
        tokens: uint16 [N], the tokens of all sentences one after the other, without special tokens.
        sentence_starts: int64 [sentences + 1], offsets into `tokens`; the last is N.
        document_starts: int64 [documents + 1], offsets into the sentences; the last is the number of sentences.
        vocab_size: number of token numbers, special tokens included.
        special: the numbers of the special tokens.
    """

    tokens: NDArray[np.uint16]
    sentence_starts: NDArray[np.int64]
    document_starts: NDArray[np.int64]
    vocab_size: int
    special: SpecialTokens = OWN_SPECIAL_TOKENS

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return len(self.document_starts) - 1

    @cached_property
    def unigram_entropy(self) -> float:
        """Entropy of the token distribution in nats: the loss of a model that knows word frequencies and no context."""
        counts = np.bincount(self.tokens)
        shares = counts[counts > 0] / counts.sum()
        return float(-(shares * np.log(shares)).sum())

    def save(self, folder: Path) -> None:
        """Write the corpus as one NumPy file per array, so that many processes can share them memory-mapped."""
        folder.mkdir(parents=True, exist_ok=True)
        np.save(folder / "tokens.npy", self.tokens)
        np.save(folder / "sentence_starts.npy", self.sentence_starts)
        np.save(folder / "document_starts.npy", self.document_starts)
        meta = {"vocab_size": self.vocab_size, "special": asdict(self.special)}
        (folder / "meta.json").write_text(json.dumps(meta), encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "TokenCorpus":
        """Read what `save` wrote, the arrays memory-mapped."""
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        tokens, sentences, documents = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("tokens", "sentence_starts", "document_starts")
        )
        return cls(tokens, sentences, documents, int(meta["vocab_size"]), SpecialTokens(**meta["special"]))


def train_wordpiece(documents: Iterable[list[str]], vocab_size: int) -> Tokenizer:
    """A lower-casing WordPiece tokenizer with at most `vocab_size` tokens, the special ones numbered 0 to 4.

    The trainer breaks ties between pieces by chance: another run may give other tokens at the end of the vocabulary.

    Raises:
        ValueError: `vocab_size` is outside `MIN_VOCABULARY` .. `MAX_VOCABULARY`.
    """
    if not MIN_VOCABULARY <= vocab_size <= MAX_VOCABULARY:
        raise ValueError(f"vocabulary size {vocab_size} is outside {MIN_VOCABULARY} .. {MAX_VOCABULARY}")
    tokenizer = Tokenizer(WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    trainer = WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        limit_alphabet=MIN_VOCABULARY // 2,
        show_progress=False,
    )
    tokenizer.train_from_iterator((sentence for document in documents for sentence in document), trainer)
    return tokenizer


def tokenise(documents: list[list[str]], tokenizer: Tokenizer) -> TokenCorpus:
    """The documents as token numbers; sentences without any token keep their place with length 0."""
    flat = [sentence for document in documents for sentence in document]
    pieces: list[NDArray[np.uint16]] = []
    for start in range(0, len(flat), _CHUNK):
        encodings = tokenizer.encode_batch_fast(flat[start : start + _CHUNK], add_special_tokens=False)
        pieces.extend(np.asarray(encoding.ids, dtype=np.uint16) for encoding in encodings)
    return TokenCorpus(
        tokens=np.concatenate(pieces) if pieces else np.empty(0, dtype=np.uint16),
        sentence_starts=_starts([len(piece) for piece in pieces]),
        document_starts=_starts([len(document) for document in documents]),
        vocab_size=tokenizer.get_vocab_size(),
        special=special_tokens(tokenizer),
    )


def _starts(lengths: list[int]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
