"""Folders of checkpoints on the disk: one is there whole or not at all, whenever a run is killed.

A checkpoint is written into a folder of another name and renamed when it is complete, and ``latest`` is replaced when
all machines have it, so that a run that is killed at any moment leaves the one before. One that it replaces is set
aside for the moment in between. Files are on the disk before they are renamed, so that this holds for a machine that
loses its power.
"""

import os
import shutil
import time
from contextlib import nullcontext, suppress
from pathlib import Path

from ds_vpipe.checkpoints.pipeline_checkpoint import previous_folder

# Written by an engine; other entries of a checkpoint's folder are the script's.
_WRITTEN = ("layer_*.pt", "mp_rank_*.pt", "*zero_pp_rank_*.pt", "vpipe-stage_*.pt", "offloaded_tensors")


def put_in_place(unfinished: Path, folder: Path) -> None:
    """Rename a complete checkpoint. One of the same name stays until then."""
    previous = previous_folder(folder)
    if folder.exists():
        _remove(previous, folder)
        os.replace(folder, previous)
    os.replace(unfinished, folder)
    _sync(folder.parent)


def write_latest(latest: Path, folder: Path, mark: str) -> None:
    """Let ``latest`` name a checkpoint. ``mark`` tells this save from that of another job, at the same moment."""
    new = latest.with_name(f".{latest.name}.{mark}.unfinished")
    new.write_text(str(folder.relative_to(latest.parent)))
    _sync(new)
    os.replace(new, latest)
    _sync(latest.parent)


def to_disk(folder: Path) -> None:
    """Wait until all files of a folder are on the disk, this rank's among them; others add theirs meanwhile."""
    for path in (*folder.rglob("*"), folder):
        with suppress(FileNotFoundError):
            _sync(path)


def _sync(path: Path) -> None:
    """Wait until the disk has a file, or the names in a folder where a file system can say so."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError) if path.is_dir() else nullcontext():
            os.fsync(handle)
    finally:
        os.close(handle)


def put_own_in_place(unfinished: Path, folder: Path, rank: int) -> bool:
    """:func:`put_in_place` on a machine whose file system the first rank does not share. Where it does, False.

    Whether ``unfinished`` is still there is not asked, since a network file system may answer from memory: a
    renaming is done or refused where the folder is.
    """
    mine = unfinished.with_name(f".{folder.name}.rank{rank}.unfinished")
    try:
        os.replace(unfinished, mine)
    except FileNotFoundError:
        return False
    put_in_place(mine, folder)
    return True


def clean(folder: Path, began: float) -> None:
    """Remove checkpoints that were replaced, and what saves have left that were interrupted before this run ``began``.

    One that has been written to since is another job's, which saves into the same folder at this moment. Times of
    files are those of a clock that may be another machine's: the folder's own is that of the renaming just before.
    """
    began += folder.parent.stat().st_mtime - time.time()
    for left in folder.parent.glob(".*.previous"):
        replacing = left.with_name(left.name.removeprefix(".").removesuffix(".previous"))
        if replacing.is_dir():
            _remove(left, replacing)
    for left in folder.parent.glob(".*.unfinished"):
        with suppress(FileNotFoundError):  # it has been renamed, or another rank removes it
            if max(path.stat().st_mtime for path in (left, *left.rglob("*"))) < began:
                left.unlink() if left.is_file() else shutil.rmtree(left, ignore_errors=True)


def _remove(previous: Path, folder: Path) -> None:
    """Remove a checkpoint that ``folder`` has replaced, which keeps what scripts have put there.

    Several ranks may call it at the same time.
    """
    with suppress(FileNotFoundError):
        for path in previous.iterdir():
            if not any(map(path.match, _WRITTEN)) and not (folder / path.name).exists():
                with suppress(FileNotFoundError):
                    os.replace(path, folder / path.name)
    shutil.rmtree(previous, ignore_errors=True)


def recover(folder: Path) -> None:
    """Undo a renaming that was interrupted half-way. Several ranks may call it at the same time."""
    if not folder.exists():
        with suppress(FileNotFoundError):
            os.replace(previous_folder(folder), folder)
