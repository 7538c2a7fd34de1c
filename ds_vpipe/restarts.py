"""Restarts of all ranks once one has failed: ``ds_vpipe.run --restarts N``.

Each process that a launcher starts becomes a supervisor. It runs its rank in a child and lasts as long as the run,
since launchers end all processes once one of theirs has ended with an error. The supervisor of rank 0 listens on
``MASTER_PORT``, which the launcher has found to be free; the others tell it how their children end. Once all of them
have ended all are started again, or none is. The ranks themselves meet at another port of that host, which is kept from
other use and told to all at each start. What a rank hands over for the next attempt (:mod:`ds_vpipe.kept_memory`) its
supervisor keeps. Once a rank has done so there is a spare beside it: a child that has imported what ranks import, which
takes longer than all else before the next batch, and goes on as the rank of the next attempt. Here is neither torch nor
a thread: a child is a fork.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import Any

from ds_vpipe.errors import Refusal, say
from ds_vpipe.kept_memory import KeptMemory, await_start, connection

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GRACE_S = 30.0  # in which a rank ends by itself, after another has failed or a signal has come
MEETING_S = 300.0  # in which the supervisors of all ranks come
_LOOK_S = 0.1
_LONGEST_LINE = 100
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_FORWARDED = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP)
_PDEATHSIG = 1


def refusal(restarts: str, environment: Mapping[str, str]) -> Refusal | None:
    """The reason why ``--restarts`` does not work here, if there is one."""
    if not restarts.isascii() or not restarts.isdigit():
        return Refusal("--restarts", restarts, "a whole number, 0 or more", "write a number such as 3")
    if "TORCHELASTIC_RUN_ID" in environment:
        remedy = f"write torchrun --max-restarts {restarts} instead"
        return Refusal("--restarts", restarts, "launchers that do not restart ranks themselves", remedy)
    missing = [name for name in NEEDED if not environment.get(name)]
    if missing:
        allowed = f"only where {', '.join(NEEDED)} are set, as by deepspeed and scripts/slurm_rank.sh"
        return Refusal("--restarts", restarts, allowed, f"set {', '.join(missing)}, or leave --restarts out")
    return None


def supervise(restarts: int, prepare: Callable[[], object]) -> int | None:
    """Run this rank in children, until the run ends.

    Args:
        restarts: after the first start, at most.
        prepare: imports what ranks import, in a spare.

    Returns:
        The exit status of this process; None in a child, which has to go on as the rank.
    """
    rank, ranks, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    attempts = Attempts(ranks, restarts) if rank == 0 else None
    try:
        peers = Peers(rank, ranks, os.environ["MASTER_ADDR"], port)
    except OSError as error:
        say(f"--restarts cannot listen on MASTER_PORT {port} of this host: {error.strerror}; choose another port")
        return 1
    return _Supervisor(restarts, prepare, attempts, peers).run()


class _Supervisor:
    """Process that runs one rank in children, until the run ends.

    Methods that may fork say whether this is still the supervisor; else it is a child, which goes on as the rank.
    """

    def __init__(self, restarts: int, prepare: Callable[[], object], attempts: Attempts | None, peers: Peers) -> None:
        self._restarts, self._prepare, self._attempts, self._peers = restarts, prepare, attempts, peers
        self._child: _Child | None = None
        self._spare: _Child | None = None
        self._spares = 0  # that may be needed
        self._status, self._leaving = 1, False
        self._deadline = time.monotonic() + MEETING_S + GRACE_S  # rank 0 says more
        self._reports = [] if attempts is None else ["here"]  # the others' greeting says it
        self._kept = KeptMemory()
        self._signals: list[int] = []
        handlers = {int(number): signal.getsignal(number) for number in _FORWARDED}
        # Some may be ignored, as by nohup.
        self._handlers = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
        for number in self._handlers:
            signal.signal(number, lambda number, _: self._signals.append(number))

    def run(self) -> int | None:
        """The exit status; None in a child."""
        while self._child or self._reports or not self._leaving:
            for order in self._exchange():
                if not self._obey(order):
                    return None
            if not self._provide_spare():
                return None
            self._forward_signals()
            self._keep_deadline()
            self._look_at_child()
        if self._spare:
            os.kill(self._spare.process, signal.SIGKILL)
            os.waitpid(self._spare.process, 0)
        self._peers.close()
        return self._status if self._status >= 0 else 128 - self._status

    def _exchange(self) -> list[str]:
        """Wait a moment for others, tell them what has happened here, and return what is to be done."""
        child, attempts, peers = self._child, self._attempts, self._peers
        received = peers.receive([child.connection] if child and child.connection.fileno() >= 0 else [])
        if child:
            child.receive(self._kept)
        reports, self._reports = self._reports, []
        if attempts is None:
            peers.send(reports)
            return [order for _, order in received]
        received += [(0, report) for report in reports]
        orders = [order for rank, report in received for order in attempts.hear(rank, report)]
        orders += attempts.late(time.monotonic())
        orders = [f"{order} {peers.ranks_port()}" if order.startswith("start") else order for order in orders]
        peers.send(orders)
        return orders

    def _obey(self, order: str) -> bool:
        kind, _, values = order.partition(" ")
        if kind == "start" and not self._leaving:
            return self._start(values)
        if kind == "gone" and not self._leaving:
            say(f"the supervisor of rank 0 is gone, from MASTER_ADDR {os.environ['MASTER_ADDR']}; no restart")
        if kind in ("limit", "gone"):
            self._due_in(GRACE_S if self._child else 3 * GRACE_S)
        self._leaving |= kind in ("exit", "gone")
        return True

    def _start(self, values: str) -> bool:
        if self._spare and _ended(self._spare.process) is not None:  # for lack of memory, say
            self._spare = None
        try:
            self._child, self._spare = self._spare or _fork(self._handlers, [self._peers, self._kept]), None
        except OSError as error:
            say(f"this rank cannot be started: {error.strerror}")
            self._status, self._deadline = 1, time.monotonic() + 3 * GRACE_S
            self._reports.append("ended 1")
            return True
        if self._child is None:
            return False
        self._deadline = float("inf")
        self._child.start(self._kept, values)
        self._spares = self._restarts - int(values.split()[0])
        return True

    def _provide_spare(self) -> bool:
        """Fork a spare, if the rank has handed something over, and one may be needed."""
        child = self._child
        if not (child and child.keeps and self._spares) or self._spare or self._leaving:
            return True
        try:
            self._spare = _fork(self._handlers, [self._peers, self._kept, child.connection], self._prepare)
        except OSError:  # there is no room for one, and training goes on
            self._spares = 0
            return True
        return self._spare is not None

    def _forward_signals(self) -> None:
        while self._signals:
            number = self._signals.pop(0)
            if number == signal.SIGTSTP:
                _stop_with(self._child)
            elif self._child:
                os.kill(self._child.process, number)
            if number in _ENDING:
                self._leaving = True
                self._due_in(GRACE_S)
                self._reports.append(f"signal {number}")

    def _due_in(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)

    def _keep_deadline(self) -> None:
        """Kill a child that has not ended in time, or give up waiting for rank 0's supervisor."""
        if time.monotonic() <= self._deadline:
            return
        if self._child:
            say(f"this rank had not ended {GRACE_S:g} s after a failure or a signal, and is killed")
            os.kill(self._child.process, signal.SIGKILL)
        elif not self._leaving:
            say(f"the supervisor of rank 0 has not answered from MASTER_ADDR {os.environ['MASTER_ADDR']}")
            self._leaving = True
        self._deadline = float("inf")

    def _look_at_child(self) -> None:
        """Take note of the end of the child."""
        child = self._child
        if child is None or (ended := _ended(child.process)) is None:
            return
        child.receive(self._kept)
        child.connection.close()
        self._child, self._status = None, ended
        self._reports.append(f"ended {ended}")
        if ended or self._deadline < float("inf"):  # now rank 0's supervisor has to answer, which waits for all ranks
            self._deadline = time.monotonic() + 3 * GRACE_S


@dataclass
class _Child:
    """A process that is the rank, or a spare."""

    process: int
    connection: socket.socket
    keeps: bool = False  # it has handed over a file

    def start(self, kept: KeptMemory, values: str) -> None:
        try:
            kept.start(self.connection, values)
        except OSError:  # so it has failed
            with suppress(OSError):
                os.kill(self.process, signal.SIGKILL)

    def receive(self, kept: KeptMemory) -> None:
        if self.connection.fileno() >= 0:
            done = kept.receive(self.connection)
            self.keeps |= "keep" in done
            if "" in done:
                self.connection.close()


def _fork(
    handlers: Mapping[int, Any], inherited: Sequence[Any], prepare: Callable[[], object] | None = None
) -> _Child | None:
    """Fork a child that waits for its start, and ends with this process.

    It is in a process group of its own, which a terminal sends no signals.

    Returns:
        The child; None in the child, once it has to go on as the rank.
    """
    mine, its = connection()
    signal.pthread_sigmask(signal.SIG_BLOCK, handlers)  # none is lost before the child has its own handlers
    parent, child = os.getpid(), -1
    try:
        child = os.fork()
    finally:
        if child < 0:
            mine.close()
            its.close()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
    if child == 0:
        os.setpgid(0, 0)
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # a terminal stops groups in the background that read
        for number, handler in handlers.items():
            signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
    if child:
        its.close()
        return _Child(child, mine)
    for one in (mine, *inherited):
        one.close()
    try:
        if prepare is not None:
            prepare()
    except BaseException:  # a spare that is of no use, in a process that is no supervisor
        traceback.print_exc()
        os._exit(1)
    if not (values := await_start(its, os.environ)):
        os._exit(0)
    os.environ.update(DS_VPIPE_RESTART=values[0], MASTER_PORT=values[1])
    return None


def _stop_with(child: _Child | None) -> None:
    """Stop this process, as Ctrl-Z does, and the rank with what it has started; they go on together."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        if child:
            with suppress(OSError):  # it has ended, or is not in its group yet
                os.killpg(child.process, number)
        if number == signal.SIGSTOP:
            os.kill(os.getpid(), number)


def _ended(child: int) -> int | None:
    """The exit status of a child that has ended.

    What a failed one leaves of its process group is ended too.
    """
    found = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    if found.si_code != os.CLD_EXITED or found.si_status:
        with suppress(OSError):
            os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@dataclass
class Attempts:
    """Starts of all ranks, with what supervisors do next.

    Orders are ``start ATTEMPT``; ``limit``, to end a child that does not end by itself; ``exit``, once it has ended.
    """

    ranks: int
    restarts: int
    attempt: int = 0
    present: set[int] = field(default_factory=set)
    statuses: dict[int, int] = field(default_factory=dict)
    failed: str = ""  # the first of them
    over: bool = False
    deadline: float = field(default_factory=lambda: time.monotonic() + MEETING_S)

    def hear(self, rank: int, report: str) -> Iterator[str]:
        """Orders that follow from a report: ``here``, ``ended STATUS``, ``signal NUMBER`` or ``gone``."""
        kind, _, number = report.partition(" ")
        if self.over:
            return
        if kind == "here":
            self.present.add(rank)
            if len(self.present) == self.ranks:
                self.deadline = float("inf")
                yield "start 0"
        elif kind == "ended":
            self.statuses[rank] = status = int(number)
            if status and not self.failed:
                how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
                self.failed, self.deadline = f"rank {rank} ended {how}", time.monotonic() + 2 * GRACE_S
                yield "limit"
            if len(self.statuses) == self.ranks:
                yield from self._all_have_ended()
        else:
            what = f"got {signal.Signals(int(number)).name}" if kind == "signal" else "has lost its supervisor"
            yield from self._end(f"rank {rank} {what}")

    def late(self, now: float) -> Iterator[str]:
        """Orders that follow from the time."""
        if not self.over and now > self.deadline:
            silent = sorted({*range(self.ranks)} - (self.statuses.keys() if self.failed else self.present))
            why = f"{self.failed}, and not a word" if self.failed else f"nothing has come in {MEETING_S:g} s"
            yield from self._end(f"{why} from the supervisors of ranks {silent}, which need the same --restarts")

    def _all_have_ended(self) -> Iterator[str]:
        wrong = next((rank for rank, status in self.statuses.items() if status == 2), None)
        if not self.failed:
            yield from self._end("")
        elif wrong is not None:
            yield from self._end(f"rank {wrong} ended with status 2: configuration or command line are wrong")
        elif self.attempt == self.restarts:
            yield from self._end(f"{self.failed}; restart {self.attempt} of {self.restarts} was the last")
        else:
            self.attempt += 1
            say(f"{self.failed}; restart {self.attempt} of {self.restarts}")
            self.statuses, self.failed, self.deadline = {}, "", float("inf")
            yield f"start {self.attempt}"

    def _end(self, why: str) -> Iterator[str]:
        self.over = True
        if why:
            say(f"{why}; no restart")
            yield "limit"
        yield "exit"


class _Link:
    """Lines to and from another supervisor.

    They are far shorter than what a connection takes at once.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # finds a host that is gone
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._connection, self._unread = connection, b""
        self.fileno, self.close = connection.fileno, connection.close

    def send(self, lines: Sequence[str]) -> None:
        with suppress(OSError):  # found by receive()
            self._connection.send("".join(f"{line}\n" for line in lines).encode())

    def receive(self) -> list[str]:
        """Lines that have come; the last is ``gone`` if no more will."""
        try:
            some = self._connection.recv(4096)
        except BlockingIOError:
            return []
        except OSError:
            some = b""
        *lines, self._unread = (self._unread + some).split(b"\n")
        gone = not some or len(self._unread) > _LONGEST_LINE
        return [*(line.decode(errors="replace") for line in lines), *(["gone"] if gone else [])]


class Peers:
    """Connections of a supervisor: rank 0's with all others'."""

    def __init__(self, rank: int, ranks: int, address: str, port: int) -> None:
        self._rank, self._ranks, self._at = rank, ranks, (address, port)
        self._links: dict[int, _Link] = {}  # by rank; negative for those that have not said it
        self._family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._listeners: list[socket.socket] = []
        self._kept: socket.socket | None = None
        if rank == 0:
            both = self._family == socket.AF_INET6
            self._listeners.append(
                socket.create_server(("", port), family=self._family, backlog=ranks, dualstack_ipv6=both)
            )

    def receive(self, beside: Sequence[socket.socket]) -> list[tuple[int, str]]:
        """Lines of other supervisors, with their ranks; waits a moment for some, or until ``beside`` has something."""
        if self._rank and not self._links:
            try:
                self._links[0] = _Link(socket.create_connection(self._at, timeout=5))
                self._links[0].send([f"rank {self._rank}"])
            except OSError:
                time.sleep(_LOOK_S)
        waited: list[Any] = [*self._links.values(), *self._listeners, *beside]
        ready: list[Any] = wait(waited, _LOOK_S)
        received = []
        for rank, link in [(rank, link) for rank, link in self._links.items() if link in ready]:
            lines = link.receive()
            if rank < 0 and lines:
                rank, lines = self._greeted(rank, lines)
            received += [(rank, line) for line in lines]
            if lines[-1:] == ["gone"]:
                self._links.pop(rank).close()
        for listener in [listener for listener in self._listeners if listener in ready]:
            with suppress(OSError):
                self._links[min([0, *self._links]) - 1] = _Link(listener.accept()[0])
        return received

    def _greeted(self, unknown: int, lines: list[str]) -> tuple[int, list[str]]:
        """Rank of a supervisor that has come, and its lines; a stranger's connection is closed."""
        link, (name, _, number) = self._links.pop(unknown), lines[0].partition(" ")
        rank = int(number) if name == "rank" and number.isascii() and number.isdigit() else 0
        if rank in self._links or not 0 < rank < self._ranks:
            link.close()
            return 0, []
        self._links[rank] = link
        return rank, ["here", *lines[1:]]

    def send(self, lines: Sequence[str]) -> None:
        for rank, link in self._links.items() if lines else ():
            if rank >= 0:
                link.send(lines)

    def ranks_port(self) -> int:
        """A port for the ranks: bound, so that nobody else is given it, and listened on by rank 0 alone."""
        if self._kept is not None:
            self._kept.close()
        self._kept = socket.socket(self._family)
        self._kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._kept.bind(("", 0))
        return int(self._kept.getsockname()[1])

    def close(self) -> None:
        for one in (*self._links.values(), *self._listeners, self._kept):
            if one is not None:
                one.close()
