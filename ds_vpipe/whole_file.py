"""Files and folders that appear complete or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path, *, several: bool = False) -> Iterator[Path]:
    """Path to write to, which replaces ``path`` at the end.

    A process that is killed leaves what it has written, until the next one writes the file.

    Args:
        path: of the file, or of a folder that is new or empty; it stays as it was if the block ends with an error.
        several: processes may write the file at once, so that each leaves its own.
    """
    mark = f".{os.getpid()}" if several else ""
    part = path.with_name(f".{path.name}{mark}.part")  # beside it, since only there a renaming is one step
    _remove(part)
    try:
        yield part
        os.replace(part, path)
    finally:
        _remove(part)  # what filled the disk should not stay there


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
