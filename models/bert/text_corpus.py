"""The tokenised corpus of a training script that streams text: built once per machine, kept in the cache."""

from pathlib import Path

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.cache import cached
from ds_vpipe.models.bert.corpus import Document, default_documents, default_key, file_documents, files_key
from ds_vpipe.models.bert.raw_text import content_digest
from ds_vpipe.models.bert.vocabulary import read_vocabulary, write_vocabulary
from ds_vpipe.models.bert.wordpiece import MAX_VOCABULARY, MIN_VOCABULARY, tokenise, train_wordpiece

VOCABULARY_FILE = "vocab.txt"


def text_corpus(files: list[Path] | None, vocabulary: Path | None, vocab_size: int, builder: bool) -> Path:
    """The folder of a `wordpiece.TokenCorpus`, with its vocabulary in ``vocab.txt``.

    Args:
        files: prose in UTF-8; None for the docstrings of installed packages.
        vocabulary: a ``vocab.txt``; None to make one from the text.
        vocab_size: the most tokens that the vocabulary may have.
        builder: whether this process fills the cache; see `models.bert.cache`.

    Raises:
        VPipeConfigError: a file cannot be read, or the vocabulary does not fit.
    """
    if not MIN_VOCABULARY <= vocab_size <= MAX_VOCABULARY:
        raise VPipeConfigError(
            f"vocabulary size {vocab_size} is outside {MIN_VOCABULARY} .. {MAX_VOCABULARY}; see --vocab_size"
        )
    key = files_key(files) if files else default_key()
    given = None if vocabulary is None else read_vocabulary(vocabulary, vocab_size)
    words = str(vocab_size) if vocabulary is None else content_digest(vocabulary)[:16]

    def build_documents(path: Path) -> None:
        documents = file_documents(files) if files else default_documents()
        path.write_text("\n\n".join("\n".join(document) for document in documents), encoding="utf-8")

    def build_tokens(folder: Path) -> None:
        documents = _read_documents(cached(f"text-{key}.txt", build_documents, builder=True))
        tokenizer = train_wordpiece(documents, vocab_size) if given is None else given
        tokenise(documents, tokenizer).save(folder)
        write_vocabulary(tokenizer, folder / VOCABULARY_FILE)

    return cached(f"corpus-{key}-{words}", build_tokens, builder)


def _read_documents(path: Path) -> list[Document]:
    return [document.split("\n") for document in path.read_text(encoding="utf-8").split("\n\n")]
