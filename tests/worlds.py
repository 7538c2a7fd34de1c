"""Worlds of gloo ranks for tests: processes that import torch and DeepSpeed once and then run many cases."""

from __future__ import annotations

import multiprocessing as mp
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

CASE_TIMEOUT_S = 120.0


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _serve(connection: Connection, rank: int) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", RANK=str(rank), LOCAL_RANK=str(rank), OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu"
    )
    import deepspeed
    import deepspeed.comm.comm as ds_comm
    import torch
    from deepspeed.utils import groups, logger

    # DeepSpeed's shared-memory all-reduce can be set up only once in the life of a process.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    logger.setLevel("ERROR")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - DeepSpeed prints its topology for every case
    while True:
        request = connection.recv()
        if request is None:
            return
        world_size, port, function, args, kwargs = request
        os.environ.update(WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size), MASTER_PORT=str(port))
        try:
            deepspeed.init_distributed(dist_backend="gloo")
            torch.manual_seed(1234)
            answer = (True, function(*args, **kwargs))
        except BaseException as error:
            answer = (False, (f"{type(error).__name__}: {error}", traceback.format_exc()))
        try:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            ds_comm.cdb = None
            groups.mpu = None
        finally:
            connection.send(answer)


class CaseFailed(AssertionError):
    """A rank raised; ``errors`` maps ranks to the last line of what they raised."""

    def __init__(self, errors: dict[int, str], details: str) -> None:
        super().__init__(details)
        self.errors = errors


class Worlds:
    """Runs functions on the ranks of a fresh process group in waiting worker processes."""

    def __init__(self) -> None:
        self._context = mp.get_context("spawn")
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """``function(*args, **kwargs)`` on every rank; results in order of rank.

        Raises:
            CaseFailed: a rank raised or did not answer in time.
        """
        while len(self._workers) < world_size:
            self._add(len(self._workers))
        port = free_port()
        workers = self._workers[:world_size]
        for _, connection in workers:
            connection.send((world_size, port, function, args, kwargs))
        results, errors, details = [], {}, []
        for rank, (_process, connection) in enumerate(workers):
            if not connection.poll(CASE_TIMEOUT_S):
                self.close()
                raise CaseFailed({rank: "timeout"}, f"rank {rank} did not answer within {CASE_TIMEOUT_S} s")
            try:
                good, value = connection.recv()
            except EOFError:
                self.close()
                raise CaseFailed({rank: "died"}, f"rank {rank} died") from None
            if good:
                results.append(value)
            else:
                errors[rank] = value[0]
                details.append(f"--- rank {rank}\n{value[1]}")
        if errors:
            raise CaseFailed(errors, "\n".join(details))
        return results

    def _add(self, rank: int) -> None:
        mine, theirs = self._context.Pipe()
        process = self._context.Process(target=_serve, args=(theirs, rank), daemon=True)
        process.start()
        self._workers.append((process, mine))

    def close(self) -> None:
        """End all worker processes."""
        for process, connection in self._workers:
            try:
                connection.send(None)
            except OSError:
                pass
            process.join(2)
            if process.is_alive():
                process.kill()
        self._workers = []
