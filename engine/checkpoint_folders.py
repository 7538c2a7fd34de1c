"""Folders of checkpoints: complete or not there, whenever a run is killed.

A checkpoint is written into a folder of another name and renamed when it is complete. One that it replaces
is set aside for the moment in between.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path


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


def recover(folder: Path) -> None:
    """Undo a renaming that was interrupted half-way."""
    if not folder.exists() and _previous(folder).exists():
        os.replace(_previous(folder), folder)
