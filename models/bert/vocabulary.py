"""A WordPiece vocabulary file and the special tokens in it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from ds_vpipe.errors import VPipeConfigError

SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class SpecialTokens:
    """The numbers of the special tokens; the defaults are those of vocabularies that are made here."""

    pad: int = 0
    unknown: int = 1
    cls: int = 2
    sep: int = 3
    mask: int = 4

    def ordinary(self, vocab_size: int) -> NDArray[np.int64]:
        """The numbers of all other tokens of a vocabulary, ascending."""
        special = [self.pad, self.unknown, self.cls, self.sep, self.mask]
        return np.setdiff1d(np.arange(vocab_size), special).astype(np.int64)


OWN_SPECIAL_TOKENS = SpecialTokens()


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Where a tokenizer has the special tokens, all of which it must have."""
    vocabulary = tokenizer.get_vocab()
    return SpecialTokens(*(vocabulary[token] for token in SPECIAL_TOKENS))


def read_vocabulary(path: Path, most: int) -> Tokenizer:
    """The tokenizer of a ``vocab.txt``: one token a line, its number the line's, word pieces marked with ``##``.

    Text is lower-cased and accents are removed unless the vocabulary has upper-case letters.

    Args:
        path: the file, UTF-8.
        most: as many tokens as are allowed.

    Raises:
        VPipeConfigError: the file cannot be read, a special token is missing, or there are too many tokens.
    """
    try:
        tokens = [line.rstrip("\r") for line in path.read_text(encoding="utf-8").rstrip("\n").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        raise VPipeConfigError(f"--tokenizer_name {path}: not readable as UTF-8 text: {error}") from error
    missing = [token for token in SPECIAL_TOKENS if token not in tokens]
    if missing:
        raise VPipeConfigError(
            f"--tokenizer_name {path}: {missing[0]} is missing; give a WordPiece vocabulary of BERT's"
        )
    if len(set(tokens)) < len(tokens):
        twice = next(token for token in tokens if tokens.count(token) > 1)
        raise VPipeConfigError(f"--tokenizer_name {path}: {twice!r} is there twice; every line must hold another token")
    if len(tokens) > most:
        raise VPipeConfigError(
            f"--tokenizer_name {path}: {len(tokens)} tokens, at most {most} are allowed; see --vocab_size"
        )
    lower = not any(token != token.lower() for token in tokens if not token.startswith("["))
    numbers = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(WordPiece(numbers, unk_token="[UNK]", max_input_chars_per_word=100))
    tokenizer.normalizer = BertNormalizer(lowercase=lower)
    tokenizer.pre_tokenizer = BertPreTokenizer()
    return tokenizer


def write_vocabulary(tokenizer: Tokenizer, path: Path) -> None:
    """Write the ``vocab.txt`` of a tokenizer."""
    vocabulary = tokenizer.get_vocab()
    path.write_text("".join(f"{token}\n" for token in sorted(vocabulary, key=vocabulary.__getitem__)), encoding="utf-8")
