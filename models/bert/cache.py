"""Files and folders that one process builds and the others wait for.

An entry is named by everything its content depends on, and it appears under its name complete or not at all (built
beside it, then renamed), so whoever sees it may use it, and two jobs that build it at once do no harm.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ds_vpipe.errors import VPipeConfigError

CACHE_VARIABLE = "DS_VPIPE_CACHE"
WAIT_SECONDS = 900.0
_POLL_SECONDS = 0.2


def cache_directory() -> Path:
    """``$DS_VPIPE_CACHE``, or ``~/.cache/ds_vpipe``."""
    given = os.environ.get(CACHE_VARIABLE)
    return Path(given).expanduser() if given else Path.home() / ".cache" / "ds_vpipe"


def cached(name: str, build: Callable[[Path], None], builder: bool, wait_s: float = WAIT_SECONDS) -> Path:
    """The path of a cache entry, built if it is not there yet.

    Args:
        name: file or folder name of the entry.
        build: writes the entry, a file or a folder, at the path it is given.
        builder: whether this process builds; one process per machine should. The others wait for the entry.
        wait_s: how long the others wait, in seconds.

    Raises:
        VPipeConfigError: the cache folder is not writable, or the entry did not appear in time.
    """
    directory = cache_directory()
    entry = directory / name
    if entry.exists():
        return entry
    if not builder:
        _wait_for(entry, wait_s)
        return entry
    try:
        directory.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=directory))
    except OSError as error:
        raise VPipeConfigError(
            f"cache folder {directory} is not writable ({error}): set {CACHE_VARIABLE} to one that is"
        ) from error
    try:
        build(scratch / name)
        try:
            os.replace(scratch / name, entry)
        except OSError:
            # A folder cannot replace a folder: another job has built the same entry meanwhile.
            if not entry.exists():
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return entry


def _wait_for(entry: Path, wait_s: float) -> None:
    deadline = time.monotonic() + wait_s
    while not entry.exists():
        if time.monotonic() > deadline:
            raise VPipeConfigError(
                f"waited {wait_s:.0f} s for {entry}, which local rank 0 of this machine should have built: see its"
                f" output, and check that all ranks of a machine see the same {CACHE_VARIABLE}"
            )
        time.sleep(_POLL_SECONDS)
