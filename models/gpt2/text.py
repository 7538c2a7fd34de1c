"""A byte-level tokenizer, and text as one array of tokens.

The default text is that of :mod:`ds_vpipe.models.bert.corpus`: the prose in the docstrings of installed packages.
"""

import hashlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from ds_vpipe.errors import Refusal
from ds_vpipe.models.bert.corpus import docstring_documents, docstring_key
from ds_vpipe.models.bert.text import cache_folder, content_digest, digest_of, kept

END_OF_TEXT = "<|endoftext|>"
SMALLEST_VOCABULARY = 257  # bytes and the end of a text
_CHUNK = 1024  # documents encoded at once, to bound memory

Tokens = NDArray[np.int32]


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-pair encoding of at most ``vocab_size`` tokens, the first of which ends a text.

    Raises:
        VPipeConfigError: the vocabulary is too small for the bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise Refusal("vocab_size", vocab_size, f"at least {SMALLEST_VOCABULARY}", "take a larger one").error()
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    alphabet = sorted(ByteLevel.alphabet())
    trainer = BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def read_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that lies beside a model's weights.

    Raises:
        VPipeConfigError: there is none, or it does not know the end of a text.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        remedy = "save the model's tokenizer there: its numbers are what the weights know"
        raise Refusal("--model_name_or_path", str(folder), "a folder with tokenizer.json", remedy).error()
    tokenizer = Tokenizer.from_file(str(path))
    if tokenizer.token_to_id(END_OF_TEXT) is None:
        raise Refusal(str(path), None, f"a tokenizer with {END_OF_TEXT}", "give that of a GPT-2").error()
    return tokenizer


def encode(texts: list[str], tokenizer: Tokenizer) -> Tokens:
    """All texts one after the other, int32 [N], each ended by `END_OF_TEXT`."""
    end = np.array([tokenizer.token_to_id(END_OF_TEXT)], dtype=np.int32)
    pieces: list[Tokens] = []
    for start in range(0, len(texts), _CHUNK):
        for encoding in tokenizer.encode_batch_fast(texts[start : start + _CHUNK], add_special_tokens=False):
            pieces += [np.asarray(encoding.ids, dtype=np.int32), end]
    return np.concatenate(pieces)


def corpus_tokens(files: list[Path] | None, folder: Path | None, vocab_size: int) -> Tokens:
    """The tokens of ``files``, or of the default text; kept in the cache.

    Args:
        files: of the user, UTF-8.
        folder: whose tokenizer to use; default: one trained on the text.
        vocab_size: the most that the vocabulary may have.

    Raises:
        VPipeConfigError: a file or the tokenizer cannot be read.
    """
    given = None if folder is None else read_tokenizer(folder)
    if given is not None and given.get_vocab_size() > vocab_size:
        allowed = f"at most the {vocab_size} tokens of config.json"
        raise Refusal(f"{folder}/tokenizer.json", given.get_vocab_size(), allowed, "give the model's own").error()
    kind = str(vocab_size) if given is None else hashlib.sha256(given.to_str().encode()).hexdigest()[:16]

    def build(path: Path) -> None:
        texts = [" ".join(document) for document in docstring_documents()] if not files else []
        for text in files or ():
            texts += text.read_text(encoding="utf-8").split("\n\n")
        tokens = encode(texts, given or train_tokenizer(texts, vocab_size))
        with path.open("wb") as file:
            np.save(file, tokens)

    source = digest_of(map(content_digest, files)) if files else docstring_key()
    cache_folder().mkdir(parents=True, exist_ok=True)
    tokens: Tokens = np.load(kept(cache_folder() / f"gpt2-{source}-{kind}.npy", build), mmap_mode="r")
    return tokens
