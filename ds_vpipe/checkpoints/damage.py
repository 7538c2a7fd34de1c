"""Checksums of a checkpoint's files, which torch writes and does not read.

A file that a disk or a copy has changed would load without a word, one weight with another value. torch writes zip
archives, each record of which has its CRC-32, and skips it when it reads. A file that was cut off it does refuse, in
words that name neither the file nor what to do.
"""

import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from ds_vpipe.errors import VPipeError

_ARCHIVE = b"PK\x03\x04"


def files_of(folder: Path) -> list[Path]:
    """All files of torch's in a checkpoint, in order."""
    return sorted(folder.rglob("*.pt"))


def share_of(me: int, seen: Sequence[object], files: Sequence[Path]) -> Sequence[Path]:
    """Share of the files that rank ``me`` reads; ranks that have ``seen`` the same files divide them."""
    alike = [rank for rank, other in enumerate(seen) if other == seen[me]]
    return files[alike.index(me) :: len(alike)]


def refuse_damage(folder: Path, files: Iterable[Path]) -> None:
    """Checksum test of files in a checkpoint's folder. The first that is cut off or was changed is refused.

    Raises:
        VPipeError: with the names of the other checkpoints.
    """
    for file in files:
        found = _damage(file)
        if found:
            others = sorted(path.parent.name for path in folder.parent.glob("[!.]*/mp_rank_00_model_states.pt"))
            raise VPipeError(
                f"checkpoint {str(folder)!r}: got {file.relative_to(folder)}, which {found}; allowed are files as they "
                f"were written; copy it anew, or load another tag: {[name for name in others if name != folder.name]}"
            )


def _damage(file: Path) -> str:
    """What is wrong with an archive; empty for other files, which torch checks when it reads them."""
    if file.stat().st_size == 0:
        return "is empty"
    with file.open("rb") as opened:
        begins = opened.read(len(_ARCHIVE)) == _ARCHIVE
    if not begins and not zipfile.is_zipfile(file):
        return ""
    try:
        with zipfile.ZipFile(file) as archive:
            # All are 0 if the script has turned them off (torch.serialization.set_crc32_options).
            record = archive.testzip() if any(one.CRC for one in archive.infolist()) else None
    except Exception as error:  # whatever the bytes lead the reader to, also to a place before the file
        return f"is cut off or damaged ({' '.join(str(error).split()) or type(error).__name__})"
    return "" if record is None else f"has been changed since it was written (checksum of {record!r})"
