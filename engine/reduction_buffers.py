"""Shared memory of DeepSpeed's all-reduce between CPU processes of one host: 69 MB per rank under ``/dev/shm``.

DeepSpeed makes the files with the world, opens each by its name once, on every rank, and removes none, however a run
ends. Mapped memory needs no name, so that the names can go as soon as all ranks have mapped all files.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from deepspeed.comm.torch import TorchBackend
from torch import distributed
from torch.distributed.distributed_c10d import _get_default_store

from ds_vpipe.doctor.probe import UNUSED, Claim

FILES = "/dev/shm/deepspeed_allreduce_buffer_"  # then user, address, port and rank


@contextmanager
def unnamed_buffers() -> Iterator[None]:
    """Buffers lose their names: at once those of a world that is made inside, at the start those of one made before."""
    original = TorchBackend.__init__

    @functools.wraps(original)
    def begin(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        unlink_mapped()

    unlink_mapped()
    unlink_unused()
    TorchBackend.__init__ = begin
    try:
        yield
    finally:
        TorchBackend.__init__ = original


def unlink_mapped() -> None:
    """Unlink the buffers of this world, on the last of its ranks that calls this, so that no rank waits for another."""
    mapped: dict[Path, int] = {}  # with their inodes
    with suppress(OSError):
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if FILES in line]
        mapped = {Path(line[5]): int(line[4]) for line in lines if line[-1] != "(deleted)"}
    if not mapped or not distributed.is_initialized():
        return
    store, ranks = _get_default_store(), range(distributed.get_world_size())
    with suppress(distributed.DistError):  # the rank that keeps the store has ended: the next run unlinks them
        store.set(f"ds_vpipe/mapped/{distributed.get_rank()}", "")
        if store.check([f"ds_vpipe/mapped/{rank}" for rank in ranks]):
            for path, inode in mapped.items():
                with suppress(FileNotFoundError):  # another rank was as late
                    if path.stat().st_ino == inode:
                        path.unlink()


def unlink_unused() -> None:
    """Unlink the buffers of runs that were killed before they had mapped them all.

    A run that begins now under the name of an old file may be about to open it: the file is renamed first, and gets
    its name back if a process has opened it meanwhile.
    """
    for path in Path(FILES).parent.glob(f"{Path(FILES).name}*"):
        with suppress(OSError), Claim(path) as claim:
            if claim.state == UNUSED:
                aside = path.rename(f"{path}.unused")
                if claim.nobody_waits():
                    aside.unlink()
                else:
                    aside.rename(path)
