"""Shared memory of DeepSpeed's all-reduce between CPU processes of one host: 69 MB per rank under ``/dev/shm``.

DeepSpeed makes the files with the world, opens each by its name once, on every rank, and removes none, however a run
ends. Mapped memory needs no name, so that the names can go as soon as all ranks have mapped all files. Nor does it look
whether there is room for them: where a container has 64 MB under ``/dev/shm``, ranks end by a segmentation fault.
"""

import functools
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from deepspeed.utils import logger
from torch import distributed
from torch.distributed.distributed_c10d import _get_default_store

from ds_vpipe.after_init import after_init
from ds_vpipe.doctor.probe import UNUSED, Claim
from ds_vpipe.errors import VPipeError

FILES = "/dev/shm/deepspeed_allreduce_buffer_"  # then user, address, port and rank
backends: Any = importlib.import_module("deepspeed.comm.torch")  # an attribute of that name is torch itself
BYTES = 66 * 2**20 + 4096  # of each


@contextmanager
def unnamed_buffers() -> Iterator[None]:
    """Buffers lose their names: at once those of a world that is made inside, at the start those of one made before."""
    build = backends.build_shm_op

    @functools.wraps(build)
    def build_if_they_fit() -> Any:
        operator = build()
        return operator if operator is None or have_room() else None

    unlink_mapped()
    unlink_unused()
    made = after_init(backends.TorchBackend, lambda backend: unlink_mapped())
    with made, patch.object(backends, "build_shm_op", build_if_they_fit):
        yield


def have_room() -> bool:
    """Whether this world's buffers fit under ``/dev/shm``; without them DeepSpeed reduces by the backend.

    All ranks have to agree, and see the same size, but not the same free room: others take theirs meanwhile.

    Raises:
        VPipeError: they would, but something else is there.
    """
    ranks = int(os.environ.get("LOCAL_SIZE") or 0)
    if str(ranks) != os.environ.get("WORLD_SIZE"):
        return True  # several hosts have no buffers
    folder = Path(FILES).parent
    room = os.statvfs(folder)
    if room.f_frsize * room.f_blocks < ranks * BYTES:
        if os.environ.get("RANK") == "0":
            logger.warning(
                f"ds_vpipe: {folder} has {room.f_frsize * room.f_blocks >> 20} MiB; DeepSpeed's all-reduce between CPU "
                f"processes, which takes {BYTES >> 20} MiB for each of {ranks} ranks, is left to gloo"
            )
        return False
    name = f"{FILES}{os.getuid()}_{os.environ.get('MASTER_ADDR', '')}_{os.environ.get('MASTER_PORT', '')}_"
    written = 0
    for rank in range(ranks):
        with suppress(FileNotFoundError):
            written += Path(f"{name}{rank}").stat().st_size
    free = room.f_frsize * room.f_bavail
    if free < ranks * BYTES - written:
        raise VPipeError(
            f"{folder}: got {free >> 20} MiB that are free, needed are {BYTES >> 20} MiB for each of {ranks} ranks, "
            f"for DeepSpeed's all-reduce between CPU processes; remove what is left there, or give the container more "
            f"(docker run --shm-size)"
        )
    return True


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
