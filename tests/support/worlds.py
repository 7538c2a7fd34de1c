"""Worlds of gloo ranks for tests: processes that have imported torch and DeepSpeed and run many cases."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing as mp
import os
import pickle
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest import mock

CASE_TIMEOUT_S = 400.0
MOST_NEW_THREADS = 25  # that cases may leave in a worker


def free_port() -> int:
    """A TCP port that nobody listens on, and that the system gives to nobody who asks for any.

    One that it does give may be taken again before the ranks listen on it: gloo asks for many.
    """
    first, last = 32768, 60999
    with contextlib.suppress(OSError):
        first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    others = [*range(10_000, first), *range(last + 1, 65_536)]
    for port in [*random.SystemRandom().sample(others, min(50, len(others))), 0]:
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return int(server.getsockname()[1])
    raise OSError("no TCP port is free")


def _sent(*values: Any) -> bytes:
    """Values, with tensors as bytes: to share their memory would take a thread and a socket in every process."""
    return pickle.dumps(values)


def _threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 0


def _all_gpus() -> int:
    if os.environ.get("DS_VPIPE_TEST_DEVICE") != "cuda":
        return 0
    import torch

    found = torch.cuda.device_count()
    if not found:
        raise RuntimeError("DS_VPIPE_TEST_DEVICE=cuda, and there is no GPU")
    return found


# For NCCL between ranks that share a GPU, which it refuses on one host: each also says that its host is another one.
SHARED_GPU = {"NCCL_NET": "Socket", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}


def _serve(connection: Connection, rank: int, gpus: int, backend: str, environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(
        environment,
        MASTER_ADDR="127.0.0.1",
        RANK=str(rank),
        LOCAL_RANK=str(rank % gpus if gpus else rank),  # ranks may share a GPU
    )
    if gpus:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if gpus == 1:
        os.environ.update(SHARED_GPU)
    if gpus:
        os.environ["NCCL_HOSTID"] = f"host {rank // gpus}"
    import deepspeed
    import deepspeed.comm.comm as ds_comm
    import numpy as np
    import preloaded  # noqa: F401 - first, and by the process that this one is forked from, if there is one
    import torch
    from deepspeed.utils import groups, logger

    mp.set_start_method("fork", force=True)  # as in every process that a launcher starts: data loaders have workers
    np.random.seed()  # forked workers are not alike in this; they are in how they hash strings
    # DeepSpeed's shared-memory all-reduce can be set up only once in the life of a process.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    torch.set_num_threads(1)
    deepspeed.get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    logger.setLevel("ERROR")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - DeepSpeed prints its topology for every case
    threads_before = _threads()
    while True:
        request = connection.recv_bytes()
        if not request:
            return
        world_size, port, function, args, kwargs = pickle.loads(request)
        os.environ.update(WORLD_SIZE=str(world_size), LOCAL_SIZE=str(world_size), MASTER_PORT=str(port))
        faulthandler.dump_traceback_later(CASE_TIMEOUT_S - 10, file=sys.__stderr__)  # so that a hang says where
        try:
            if gpus and backend == "gloo":
                # DeepSpeed would bind the group to the GPU, and torch then split it for every group of some ranks only,
                # which gloo cannot.
                torch.distributed.init_process_group("gloo")
            deepspeed.init_distributed(dist_backend=backend)
            torch.manual_seed(1234)
            answer = (True, function(*args, **kwargs))
        except BaseException as error:
            answer = (False, (f"{type(error).__name__}: {error}", traceback.format_exc()))
        try:
            if torch.distributed.is_initialized():
                torch.distributed.destroy_process_group()
            ds_comm.cdb = None
            groups.mpu = None
            _let_go()
            gc.collect()  # the threads of a group end with the last engine that knows it, and engines are cyclic
            faulthandler.cancel_dump_traceback_later()
        finally:
            connection.send_bytes(_sent(*answer, _threads() - threads_before))


def _let_go() -> None:
    """Drop the graphs of engines that a case has left in the midst of training, and end workers of data loaders.

    Graphs refer to their engine in cycles that Python cannot see, and with it live the threads of all its groups, each
    of which wakes a hundred times a second. Of a loader in a cycle Python closes the queues first, and torch then waits
    5 s for each worker, which no message reaches any more.
    """
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    from ds_vpipe.engine.engine import VPipeEngine
    from ds_vpipe.engine.loop.engine import VPipeLoopEngine

    for found in gc.get_objects():
        if type(found) is _MultiProcessingDataLoaderIter:
            found._shutdown_workers()
        elif issubclass(type(found), VPipeEngine) and "stage" in vars(found):
            found.stage.in_flight.clear()
            if isinstance(found, VPipeLoopEngine) and "script_end" in vars(found):  # it has been built to the end
                found.rounds._gates.clear()
                found.rounds._newest = None
                found.script_end.forget()


@dataclass(frozen=True)
class Outcome:
    """What became of a rank: its result, or the last line and the traceback of what it raised."""

    good: bool
    value: Any
    text: str
    details: str
    seconds: float


class CaseFailed(AssertionError):  # noqa: N818 - a verdict of a test
    """A rank raised; ``errors`` maps ranks to the last line of what they raised."""

    def __init__(self, errors: dict[int, str], details: str) -> None:
        super().__init__(details)
        self.errors = errors


class Worlds:
    """Runs functions on the ranks of a fresh process group in waiting worker processes.

    Args:
        gpus: how many GPUs the ranks share; without any they compute on the CPU. Default: all if tests are to run on
            GPUs, else none.
        backend: of the group of all ranks. Default: NCCL if GPUs are taken because tests are to run there, else gloo.
    """

    def __init__(self, gpus: int | None = None, backend: str | None = None) -> None:
        found = _all_gpus() if gpus is None else 0
        self._gpus = found if gpus is None else gpus
        self._backend = backend or ("nccl" if found else "gloo")
        # Fresh workers come often, and to import takes each some seconds: they are forked from a process that has
        # imported, with the environment of the first of them.
        self._context = mp.get_context("spawn" if self._gpus else "forkserver")
        if not self._gpus:
            self._context.set_forkserver_preload(["preloaded"])
        self._workers: list[tuple[Any, Connection]] = []

    def run(self, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """``function(*args, **kwargs)`` on every rank; results in order of rank.

        Raises:
            CaseFailed: a rank raised or did not answer in time.
        """
        outcomes = self.outcomes(world_size, function, *args, **kwargs)
        errors = {rank: outcome.text for rank, outcome in enumerate(outcomes) if not outcome.good}
        if errors:
            raise CaseFailed(errors, "\n".join(f"--- rank {rank}\n{o.details}" for rank, o in enumerate(outcomes)))
        return [outcome.value for outcome in outcomes]

    def outcomes(self, world_size: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Outcome]:
        """Like :meth:`run`, but says what became of each rank instead of raising."""
        while len(self._workers) < world_size:
            self._add(len(self._workers))
        port, start = free_port(), time.monotonic()
        workers = self._workers[:world_size]
        for _, connection in workers:
            connection.send_bytes(_sent(world_size, port, function, args, kwargs))
        outcomes: dict[int, Outcome] = {}
        most_threads = 0
        while len(outcomes) < world_size:
            waiting = {workers[rank][1]: rank for rank in range(world_size) if rank not in outcomes}
            ready = wait(list(waiting), timeout=max(0.0, start + CASE_TIMEOUT_S - time.monotonic()))
            for connection in ready:
                seconds = time.monotonic() - start
                try:
                    good, value, threads = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    good, value, threads = False, ("died", "died"), 0
                most_threads = max(most_threads, threads)
                text, details = ("", "") if good else value
                outcomes[waiting[connection]] = Outcome(good, value if good else None, text, details, seconds)  # type: ignore[index]
            if not ready:
                for rank in waiting.values():
                    outcomes[rank] = Outcome(False, None, "timeout", "timeout", CASE_TIMEOUT_S)
        result = [outcomes[rank] for rank in range(world_size)]
        # An engine that a case has left keeps its groups' threads, each of which wakes a hundred times a second.
        if most_threads > MOST_NEW_THREADS or any(outcome.text in ("died", "timeout") for outcome in result):
            self.close()
        return result

    def _add(self, rank: int) -> None:
        mine, theirs = self._context.Pipe()
        seen = {"DS_ACCELERATOR": "cuda"} if self._gpus else {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
        with mock.patch.dict(os.environ, OMP_NUM_THREADS="1", **seen):  # what is imported reads them
            if not self._gpus:
                with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
                    forkserver.ensure_running()
            arguments = (theirs, rank, self._gpus, self._backend, dict(os.environ))
            process = self._context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
        self._workers.append((process, mine))

    def close(self) -> None:
        """End all worker processes."""
        for _, connection in self._workers:
            with contextlib.suppress(OSError):
                connection.send_bytes(b"")
        for process, _ in self._workers:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join(2)
        self._workers = []
