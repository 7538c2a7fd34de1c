"""A tokenised corpus out of raw text files, piece by piece in several processes, and put together on disk."""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ds_vpipe.models.bert.raw_text import Piece, documents_of
from ds_vpipe.models.bert.vocabulary import read_vocabulary
from ds_vpipe.models.bert.wordpiece import MAX_VOCABULARY, TokenCorpus, tokenise


@dataclass(frozen=True)
class PieceTokeniser:
    """Tokenises pieces of text, each into a folder of its own.

    Attributes:
        pieces: all pieces of the corpus.
        form: of the text; see `raw_text`.
        vocabulary: a ``vocab.txt``.
        folder: where the folders go.
    """

    pieces: tuple[Piece, ...]
    form: str
    vocabulary: Path
    folder: Path

    def folder_of(self, number: int) -> Path:
        """The folder of a piece's corpus."""
        return self.folder / f"piece_{number:06d}"

    def missing(self) -> list[int]:
        """Numbers of the pieces that are not tokenised yet."""
        return [number for number in range(len(self.pieces)) if not self.folder_of(number).exists()]

    def write(self, number: int) -> None:
        """Tokenise a piece; its folder appears complete or not at all.

        Raises:
            VPipeConfigError: the file cannot be read.
        """
        documents = list(documents_of(self.pieces[number], self.form))
        corpus = tokenise(documents, read_vocabulary(self.vocabulary, MAX_VOCABULARY))
        appear(self.folder_of(number), corpus.save)


def appear(folder: Path, write: Callable[[Path], None]) -> None:
    """Let ``write`` fill a folder, which gets its name when it is complete."""
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    write(unfinished)
    os.replace(unfinished, folder)


def join(parts: Sequence[Path], folder: Path) -> None:
    """Write one corpus of several with the same vocabulary, at least one, without holding them in memory."""
    corpora = [TokenCorpus.load(part) for part in parts]
    folder.mkdir(parents=True)
    shutil.copy(parts[0] / "meta.json", folder)
    _concatenate(folder / "tokens.npy", [corpus.tokens for corpus in corpora])
    for name in ("sentence_starts", "document_starts"):
        offset = 0
        pieces: list[np.ndarray[Any, Any]] = []
        for corpus in corpora:
            starts = getattr(corpus, name)
            pieces.append(starts[:-1] + offset)
            offset += int(starts[-1])
        _concatenate(folder / f"{name}.npy", [*pieces, np.array([offset], dtype=np.int64)])


def _concatenate(path: Path, pieces: Sequence[np.ndarray[Any, Any]]) -> None:
    shape = (sum(len(piece) for piece in pieces),)
    whole = np.lib.format.open_memmap(path, mode="w+", dtype=pieces[0].dtype, shape=shape)
    begin = 0
    for piece in pieces:
        whole[begin : begin + len(piece)] = piece
        begin += len(piece)
    whole.flush()
