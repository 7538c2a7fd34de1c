"""Process groups of an engine over gloo, built from the store.

``torch.distributed.new_group`` is for none of them. Where the default group is bound to a device, it has every rank
that is no member of the new group split the default group's communicator. That is a collective, which the members of
a gloo group never enter: a dead-lock of three ranks or more. Here a group is known to its members alone.

What remains of ``new_group`` are groups over the device's backend that all ranks make in the same order: those of
DeepSpeed's process grid, and those of tied weights, with which DeepSpeed makes them equal at the start and reduces
their gradients in a synchronous pipeline (``PipelineModule._index_tied_modules``).
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch._C._distributed_c10d import AllreduceOptions, BroadcastOptions, PrefixStore, ProcessGroupGloo

from ds_vpipe.engine.links.device import Accelerator
from ds_vpipe.engine.links.failure_watch import FailureWatch, break_off, own_connection
from ds_vpipe.engine.links.pickled import as_bytes, from_bytes
from ds_vpipe.errors import PipelinePeerError, VPipeConfigError, VPipeError, one_line, show

_END_S = 10.0
_POLL_S = 0.02
_GLOO: Any = ProcessGroupGloo  # torch's stubs name its options otherwise


@dataclass(frozen=True, slots=True)
class Peer:
    """A stage and the rank that runs it."""

    stage: int
    rank: int

    def __str__(self) -> str:
        return f"stage {self.stage} (rank {self.rank})"


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that exchange messages.

    Every wait ends with a :class:`PipelinePeerError` after the time limit, or if a rank has failed or is lost.
    """

    name: str  # of this group alone, the same on its ranks
    backend: Any  # None for one rank alone
    ranks: tuple[int, ...]  # global numbers, in order
    me: Peer
    timeout_s: float  # limit of every wait
    failures: FailureWatch  # of other ranks

    def send(self, data: torch.Tensor, rank: int, tag: int) -> dist.Work:
        """A started send of ``data`` to global ``rank``."""
        return cast(dist.Work, self.backend.send([data], self.ranks.index(rank), tag))

    def recv(self, data: torch.Tensor, rank: int, tag: int) -> dist.Work:
        """A started receive of ``data`` from global ``rank``."""
        return cast(dist.Work, self.backend.recv([data], self.ranks.index(rank), tag))

    def wait(self, work: dist.Work | RuntimeError, what: str, timeout_s: float | None = None, peer: str = "it") -> None:
        """Wait for ``work`` of ``peer``, or raise the error in its place."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        try:
            if isinstance(work, RuntimeError):
                raise work
            work.wait(timedelta(seconds=limit))
        except RuntimeError as error:
            break_off(self.backend)  # a collective would go on without the limit of this wait
            raisable = limit if timeout_s is None else None
            raise failed_wait(self.me, self.failures, what, error, raisable, peer) from error

    def minimum(self, value: int, what: str) -> int:
        """The smallest ``value`` of all members."""
        if len(self.ranks) == 1:
            return value
        result, options = torch.tensor([value], device="cpu"), AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        self._run(lambda: self.backend.allreduce([result], options), what)
        return int(result.item())

    def broadcast(self, data: torch.Tensor, rank: int, what: str) -> None:
        """Copy ``data`` of global ``rank`` to all members."""
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = self.ranks.index(rank), 0
        self._run(lambda: self.backend.broadcast([data], options), what)

    def gather(self, value: Any, what: str, timeout_s: float | None = None) -> list[Any]:
        """The ``value`` of every member, in order; any that can be pickled. Tensors come in host memory."""
        if len(self.ranks) == 1:
            return [value]
        mine = as_bytes(value)
        sizes = self._gather(torch.tensor([len(mine)], device="cpu"), what, timeout_s)
        padded = torch.nn.functional.pad(mine, (0, max(int(size) for size in sizes) - len(mine)))
        parts = self._gather(padded, what, timeout_s)
        return [from_bytes(part[: int(size)]) for part, size in zip(parts, sizes, strict=True)]

    def _gather(self, mine: torch.Tensor, what: str, timeout_s: float | None) -> list[torch.Tensor]:
        parts = [torch.empty_like(mine) for _ in self.ranks]
        self._run(lambda: self.backend.allgather([parts], [mine]), what, timeout_s)
        return parts

    def _run(self, start: Callable[[], Any], what: str, timeout_s: float | None = None) -> None:
        try:
            work = start()
        except RuntimeError as error:
            work = error
        peer = "it" if len(self.ranks) == 2 else f"one of ranks {', '.join(map(str, self.ranks))}"
        self.wait(work, what, timeout_s, peer)


class Groups:
    """Groups of one engine with this rank; all ranks make one for every engine.

    Attributes:
        failures: the failures of other ranks, in the same store.
        name: of the engine, the same on all ranks and in every attempt of a run.
    """

    def __init__(self, me: Peer, timeout_s: float) -> None:
        store = dist.distributed_c10d._get_default_store()
        try:
            self.name = f"engine {store.add(f'ds_vpipe/engines of rank {me.rank}', 1)}"
            self._store = PrefixStore(f"ds_vpipe/{self.name}", store)
            self.failures = FailureWatch(self._store, dist.get_world_size(), timeout_s)
        except RuntimeError as error:
            what, peer = "the store of the default process group", "the rank that has it"
            raise failed_wait(me, None, what, error, None, peer) from error
        self.me, self.timeout_s = me, timeout_s
        self._devices = _devices()
        self._beside: Any = None  # connection of other threads than the stage's own
        self._gone = False

    def put(self, key: str, value: str) -> None:
        """Set a key of the engine's store; from the stage's own thread."""
        self._store.set(key, value)

    def put_from_any_thread(self, key: str, value: str) -> None:
        """:meth:`put` over a connection of its own, while the stage's thread may wait on the first."""
        with self._store_beside() as store:
            store.set(key, value)

    def wait_for(self, key: str, peer: Peer) -> str:
        """Value of a key that ``peer`` sets.

        Raises:
            PipelinePeerError: it did not come in time.
        """
        self._wait_for_keys([key], f"{peer} to connect ({key})")
        return str(self._store.get(key).decode())

    def refuse_unlike(self, what: str, mine: Mapping[str, Any], remedy: str, limit_s: float = 0.0) -> None:
        """Refuse values by name that are not rank 0's on every rank; all ranks call this.

        Through the store, of which every rank asks little: there need be no group yet. ``limit_s`` is a limit of the
        wait beyond the engine's, in seconds.
        """
        store, ranks, wait = self._store, dist.get_world_size(), f"all ranks to compare {what}"
        of_first, same, other, read = (f"{key} {what}" for key in ("rank 0's", "same", "other", "read"))
        limit_s = max(limit_s, self.timeout_s)
        mine = {name: json.dumps(value, default=lambda one: type(one).__name__) for name, value in mine.items()}
        if self.me.rank == 0:
            self.put(of_first, json.dumps(mine))
        self._wait_until(lambda: store.check([of_first]), wait, limit_s)
        first = json.loads(store.get(of_first))
        unlike = next((name for name in {**first, **mine} if first.get(name) != mine.get(name)), None)
        if unlike is None:
            store.add(same, 1)
        else:
            given, there = (show(json.loads(of[unlike])) if unlike in of else "nothing" for of in (mine, first))
            got = f"got {given} on rank {self.me.rank} and {there} on rank 0"
            self.put(other, f"{unlike}: {got}; allowed: the same on every rank; {remedy}")
        self._wait_until(lambda: store.add(same, 0) == ranks or store.check([other]), wait, limit_s)
        if store.check([other]):
            line = store.get(other).decode()
            with suppress(RuntimeError):  # the store is gone, with its rank, which stays until all have read this
                store.add(read, 1)
                self._wait_until(lambda: store.add(read, 0) == ranks, wait, self.timeout_s)
            raise VPipeConfigError(line)

    @contextmanager
    def _store_beside(self) -> Iterator[Any]:
        if self._gone:
            raise RuntimeError("the store of the default process group is gone")
        try:
            self._beside = self._beside or own_connection(self._store, self.timeout_s)
            yield self._beside
        except dist.DistNetworkError:
            self._gone = True  # torch does not connect anew, and prints a stack each time
            raise

    def _wait_for_keys(self, keys: list[str], what: str) -> None:
        """Wait until all keys are set."""
        self._wait_until(lambda: self._store.check(keys), what, self.timeout_s)

    def _wait_until(self, condition: Callable[[], bool], what: str, limit_s: float) -> None:
        """Wait for what the store says; unlike a wait of the store's own it ends when a rank fails."""
        deadline = time.monotonic() + limit_s
        try:
            while not condition():
                if self.failures.failing or time.monotonic() > deadline:
                    raise TimeoutError("Timed out")
                time.sleep(_POLL_S)
        except (RuntimeError, TimeoutError) as error:
            raise failed_wait(self.me, self.failures, what, error, limit_s) from error

    def leave(self, why: str) -> None:
        """Let other ranks, which may come to make an engine, know that this one makes none."""
        self.failures.publish(why)
        self.failures.reason()  # which waits until it is in the store
        self.failures.stop()

    @contextmanager
    def building(self, what: str) -> Iterator[None]:
        """Block that makes ``what``, whose failure ends it on all ranks; a refusal comes on each by itself.

        Raises:
            PipelinePeerError: a collective has failed, since another rank has.
        """
        try:
            yield
        except VPipeConfigError:
            raise
        except Exception as error:
            broken = isinstance(error, dist.DistError) or is_closed(error) or is_of_lost_rank(error)
            if broken and not isinstance(error, VPipeError) and (reason := self.failures.reason()) is not None:
                raise PipelinePeerError(f"{self.me} stopped while it made {what}: {reason}", reason) from error
            self.failures.publish(f"{self.me} failed while it made {what}: {one_line(error)}")
            self.failures.wait_until_seen()
            raise

    def get_from_any_thread(self, key: str) -> str | None:
        """Value of a key, or None if it is not set yet; does not wait.

        Raises:
            RuntimeError: the store is gone.
        """
        with self._store_beside() as store:
            return str(store.get(key).decode()) if store.check([key]) else None

    def delete(self, key: str) -> None:
        """Remove a key that this rank has set, once no rank needs it any more."""
        self._store.delete_key(key)

    def failed(self, what: str, error: Exception) -> PipelinePeerError:
        """The error of a wait for ``what`` that has ended with ``error``."""
        return failed_wait(self.me, self.failures, what, error, self.timeout_s)

    def of(self, name: str, ranks: Iterable[int], longest_s: float = 0.0) -> Group:
        """Group of ``ranks``, this one among them. Members of several groups make them in the same order.

        Args:
            name: what the group is for; another one for every group of the same ranks.
            ranks: global numbers, the same on all of them.
            longest_s: limit that a single wait may have beyond the engine's, in seconds.

        Raises:
            PipelinePeerError: the other ranks did not make it in time.
        """
        members, backend = list(ranks), None
        if len(members) > 1:
            options = _GLOO._Options()
            options._devices, options._threads = self._devices, len(self._devices)
            options._timeout = timedelta(seconds=max(self.timeout_s, longest_s))
            store, what = PrefixStore(f"{name} of {members}", self._store), f"ranks {members} to connect ({name})"
            self.put(f"{what}: {self.me.rank}", "")
            self._wait_for_keys([f"{what}: {rank}" for rank in members], what)  # gloo hears of no failure
            try:
                backend = ProcessGroupGloo(store, members.index(self.me.rank), len(members), options)
            except RuntimeError as error:
                raise self.failed(what, error) from error
            self.failures.breaks(backend)
        return self._group(name, members, backend)

    def between_devices(self, control: Group, name: str, accelerator: Accelerator, sends: bool) -> Group:
        """Group of the two ranks of ``control`` that sends from one accelerator's memory to the other's.

        One rank ``sends``, the other one receives. The name is as in :meth:`of`.

        Raises:
            PipelinePeerError: the other rank did not make it in time, or they cannot connect.
        """
        what = f"ranks {list(control.ranks)} to connect their devices ({name})"
        control.minimum(0, what)  # with its limit: NCCL has none
        name = f"{name}, device to device"
        store, rank = PrefixStore(f"{name} of {control.ranks}", self._store), control.ranks.index(self.me.rank)
        made: list[Any] = []
        errors: list[RuntimeError] = []

        def connect() -> None:
            try:
                accelerator.use()
                made.append(accelerator.communicator(store, rank))
                transfer = made[0].send if sends else made[0].recv
                made.append(transfer([accelerator.memory(1)], 1 - rank, 0))
            except RuntimeError as error:
                errors.append(error)

        within(self.timeout_s, connect)
        if len(made) < 2:
            end_communicator(made[0] if made else None)
            raise self.failed(what, errors[0] if errors else TimeoutError("Timed out"))
        return self._group(name, list(control.ranks), made[0])

    def _group(self, name: str, members: list[int], backend: Any) -> Group:
        ranks = tuple(members)
        return Group(f"{self.name}/{name} of {members}", backend, ranks, self.me, self.timeout_s, self.failures)


def within(limit_s: float, task: Callable[[], object]) -> None:
    """Run a task that may never return, and wait for it no longer than the limit."""
    thread = threading.Thread(target=task, name="ds_vpipe-limited", daemon=True)
    thread.start()
    thread.join(limit_s)


def end_communicator(backend: Any) -> None:
    """End a communicator, whatever is under way."""
    within(_END_S, lambda: break_off(backend))


def failed_wait(
    me: Peer, failures: FailureWatch | None, what: str, error: Exception, limit_s: float | None, peer: str = "it"
) -> PipelinePeerError:
    """The error that ends a wait for ``what``; ``limit_s`` is the limit that the user may raise, if any."""
    reason = None if failures is None else failures.reason()
    if reason is not None:
        return PipelinePeerError(f"{me} stopped waiting for {what}: {reason}", reason)
    cause = " ".join(str(error).split())
    if _is_timeout(error) and limit_s is None:
        cause = "nothing came in time; see the other ranks' logs"
    elif _is_timeout(error):
        remedy = "see that rank's log, or raise vpipe.peer_timeout_s if a step may take that long"
        cause = f"nothing came within {limit_s:g} s; {remedy}"
    elif is_closed(error):
        cause = f"{peer} is gone (connection closed); see that rank's log for the cause"
    return PipelinePeerError(f"{me} waited for {what}: {cause}")


def check_local_device() -> None:
    """Refuse a LOCAL_RANK without an accelerator.

    Best before ranks connect, since the others would wait.
    """
    accelerator, number = get_accelerator(), int(os.environ.get("LOCAL_RANK", "0"))
    if accelerator.device_name() == "cpu" or number < accelerator.device_count():
        return
    raise VPipeConfigError(
        f"LOCAL_RANK: got {number} in a process that sees {accelerator.device_count()} devices, allowed are numbers of "
        f"those; let every process see all devices of its host, or set LOCAL_RANK=0 where each sees its own alone"
    )


def use_local_device() -> None:
    """Take this rank's accelerator, before any collective: DeepSpeed takes it only while it builds an engine."""
    check_local_device()
    get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))


def collective_groups(grid: Any, module: Any) -> list[Any]:
    """Groups in which a stage may wait for DeepSpeed's collectives."""
    groups = [group for group in vars(grid).values() if isinstance(group, dist.ProcessGroup)]
    groups += [tied["group"] for tied in module.tied_comms.values()]
    return [group for group in dict.fromkeys(groups) if group is not dist.group.WORLD]


def _devices() -> list[Any]:
    """The network devices that torch would take: the interfaces in ``GLOO_SOCKET_IFNAME``, or the host name's."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    if not names:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in names]


def is_closed(error: BaseException | None) -> bool:
    """Whether an error says that a peer has closed its connections, as it does when it ends in any way."""
    return any(word in str(error) for word in ("closed", "reset", "Broken pipe"))


def is_of_collective(error: BaseException) -> bool:
    """Whether an error is of a backend's collective, not a layer."""
    words = ("gloo", "pair closure", "NCCL", "Operation timed out")
    if not isinstance(error, RuntimeError) or isinstance(error, VPipeError):
        return False
    return any(word in one_line(error) for word in words)


def is_of_lost_rank(error: BaseException) -> bool:
    """Whether an error of a backend's collective says that a rank is gone, or did not come in time."""
    return is_of_collective(error) and (is_closed(error) or _is_timeout(error))


def _is_timeout(error: BaseException) -> bool:
    return any(word in str(error).lower() for word in ("timed out", "timeout"))
