"""Documents out of raw text files, piece by piece, so that processes can share large files.

Documents are separated by blank lines. Inside a document every line is a sentence (``lines``), or the text is prose
whose sentences have to be found (``prose``).
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.corpus import Document
from ds_vpipe.models.bert.prose import sentences

FORMS = ("lines", "prose")
PIECE_BYTES = 1 << 24
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Piece:
    """Bytes start .. stop - 1 of a file; documents lie in one piece whole."""

    path: Path
    start: int
    stop: int


def pieces_of(path: Path, size: int = PIECE_BYTES) -> list[Piece]:
    """A file cut into pieces of about `size` bytes, between documents.

    Raises:
        VPipeConfigError: the file does not exist or cannot be read.
    """
    starts = [0]
    try:
        with path.open("rb") as file:
            end = path.stat().st_size
            while starts[-1] + size < end:
                file.seek(starts[-1] + size)
                file.readline()  # the rest of a line
                for line in iter(file.readline, b""):
                    if not line.strip():
                        break
                if file.tell() >= end:
                    break
                starts.append(file.tell())
    except OSError as error:
        raise VPipeConfigError(f"--train_file {path}: not readable: {error}") from error
    return [Piece(path, start, stop) for start, stop in zip(starts, [*starts[1:], end], strict=True) if start < stop]


def documents_of(piece: Piece, form: str) -> Iterator[Document]:
    """The documents of a piece that have a sentence.

    Raises:
        VPipeConfigError: the file cannot be read, or is no UTF-8.
    """
    try:
        with piece.path.open("rb") as file:
            file.seek(piece.start)
            text = file.read(piece.stop - piece.start).decode("utf-8-sig" if piece.start == 0 else "utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise VPipeConfigError(f"--train_file {piece.path}: not readable as UTF-8 text: {error}") from error
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        if line.strip():
            lines.append(line.strip())
        elif lines:
            document = lines if form == "lines" else sentences("\n".join(lines))
            if document:
                yield document
            lines = []


def content_digest(path: Path) -> str:
    """SHA-256 of a file's bytes.

    Raises:
        VPipeConfigError: the file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            for chunk in iter(lambda: file.read(_READ_BYTES), b""):
                digest.update(chunk)
    except OSError as error:
        raise VPipeConfigError(f"{path}: not readable: {error}") from error
    return digest.hexdigest()
