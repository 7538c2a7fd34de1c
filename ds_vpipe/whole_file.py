"""Files that appear complete or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Context of a path to write to; ``path`` is replaced by it once the block has ended without an error."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")  # beside it, since only there a renaming is one step
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)  # what filled the disk should not stay there
