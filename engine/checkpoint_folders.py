"""Folders of checkpoints: complete or not there, whenever a run is killed.

A checkpoint is written into a folder of another name and renamed when it is complete. One that it replaces
is set aside for the moment in between.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def tag_of(folder: str, tag: str | None) -> str:
    """``tag``, or the one that ``latest`` names."""
    return Path(folder, "latest").read_text().strip() if tag is None else str(tag)


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def put_in_place(unfinished: Path, folder: Path) -> None:
    """Rename a complete checkpoint; one of the same name stays until then."""
    previous = _previous(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.replace(folder, previous)
    os.replace(unfinished, folder)
    shutil.rmtree(previous, ignore_errors=True)


def recover(folder: str, tag: str | None) -> None:
    """Undo a renaming that was interrupted half-way."""
    if tag is None and not Path(folder, "latest").is_file():
        return
    wanted = Path(folder, tag_of(folder, tag))
    if not wanted.exists() and _previous(wanted).exists():
        os.replace(_previous(wanted), wanted)
