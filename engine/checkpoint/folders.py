"""Folders of checkpoints: complete or not there, whenever a run is killed.

A checkpoint is written into a folder of another name and renamed when it is complete. One that it replaces
is set aside for the moment in between.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path


def _previous(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def put_in_place(unfinished: Path, folder: Path, latest: Path | None) -> None:
    """Rename a complete checkpoint and let ``latest`` name it; one of the same name stays until then."""
    previous = _previous(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        os.replace(folder, previous)
    os.replace(unfinished, folder)
    if latest is not None:
        new = latest.with_name(f".{latest.name}.unfinished")
        new.write_text(str(folder.relative_to(latest.parent)))
        os.replace(new, latest)


def put_own_in_place(unfinished: Path, folder: Path, latest: Path | None, rank: int) -> None:
    """:func:`put_in_place` on a machine whose file system the first rank does not share; where it does, nothing.

    Whether ``unfinished`` is still there is not asked, since a network file system may answer from memory: a
    renaming is done or refused where the folder is.
    """
    mine = unfinished.with_name(f".{folder.name}.rank{rank}.unfinished")
    try:
        os.replace(unfinished, mine)
    except FileNotFoundError:
        return
    put_in_place(mine, folder, latest)


def clean(folder: Path) -> None:
    """Remove what ``folder`` has replaced, and folders of saves that were interrupted before."""
    shutil.rmtree(_previous(folder), ignore_errors=True)
    for left in folder.parent.glob(".*.unfinished"):
        shutil.rmtree(left, ignore_errors=True)


def recover(folder: Path) -> None:
    """Undo a renaming that was interrupted half-way; several ranks may call it at the same time."""
    if not folder.exists():
        with suppress(FileNotFoundError):
            os.replace(_previous(folder), folder)
