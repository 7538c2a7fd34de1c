"""Supervisors of ``ds_vpipe.run --restarts N``: ranks here are scripts without torch; chaos has real ones.

tests/chaos restarts training runs that are killed and stopped at any moment, and compares what they train.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from worlds import free_port

from ds_vpipe import restarts
from ds_vpipe.kept_memory import connection
from ds_vpipe.restarts import Attempts
from ds_vpipe.run import main

ROOT = Path(__file__).resolve().parent.parent
RANKS = 3
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from ds_vpipe import restarts
restarts.GRACE_S, restarts.MEETING_S = 2.0, 6.0
def prepare(): Path(f"spare.{os.environ['RANK']}.{os.getpid()}").touch()
if (status := restarts.supervise(int(sys.argv[1]), prepare)) is not None:
    sys.exit(status)
rank, attempt = int(os.environ["RANK"]), int(os.environ["DS_VPIPE_RESTART"])
Path(f"{attempt}.{rank}").write_text(f"{os.getpid()} {os.environ['MASTER_PORT']}")
def others_come():
    deadline = time.monotonic() + 60
    while len([*Path().glob(f"{attempt}.*")]) < int(os.environ["WORLD_SIZE"]):
        assert time.monotonic() < deadline
        time.sleep(0.01)
others_come()
assert os.readlink("/proc/self/fd/0") == os.devnull  # no terminal, which would stop a process in the background
others = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if int(path.name) > 2 and path.is_symlink()]
assert sum(name.startswith("socket:") for name in others) == 1, others  # to its supervisor, and none of that one's
given = os.environ["DS_VPIPE_KEPT"].split(";")[2:]
assert sum(name.startswith("/memfd:") for name in others) == len(given), others  # others' memory would never be free
"""
KEEPS = """
from ds_vpipe.kept_memory import KeptFiles
kept = KeptFiles.of(os.environ)
found = {name: kept.open(name).read() for name in kept.found}
kept.keep(f"state {attempt}", lambda file: file.write(b"of " + str(attempt).encode()))
def spares():
    deadline = time.monotonic() + 60
    while len([*Path().glob(f"spare.{rank}.*")]) == attempt:
        assert time.monotonic() < deadline
        time.sleep(0.01)
if attempt < 2: spares()
"""
HANGS = "sys.excepthook = lambda *_: None\ntime.sleep(300)"
KILLED_AT_FIRST = """
if attempt == 0 and rank == {}: os.kill(os.getpid(), signal.SIGKILL)
time.sleep(attempt == 0)  # others notice later
sys.exit(attempt == 0)
"""


def heed_interrupts() -> None:
    """Processes of a shell's background ignore SIGINT, those of nohup SIGHUP, and so would those that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


class Run:
    """Supervisors of a few ranks, in a folder in which each start of a rank leaves its process and its port."""

    def __init__(self, folder: Path, what_ranks_do: str, allowed: int = 2, ranks: int = RANKS) -> None:
        self.folder, self.port, self.ranks = folder, free_port(), ranks
        (folder / "train.py").write_text(SCRIPT + what_ranks_do)
        self.allowed, self.processes = allowed, dict[int, subprocess.Popen[str]]()

    def start(self, *ranks: int) -> Run:
        for rank in ranks or range(self.ranks):
            command = [sys.executable, "train.py", str(self.allowed)]
            names = {"RANK": rank, "WORLD_SIZE": self.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": self.port}
            environment = {**os.environ, "PYTHONPATH": str(ROOT), **{name: str(value) for name, value in names.items()}}
            self.processes[rank] = subprocess.Popen(
                command,
                cwd=self.folder,
                env=environment,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                preexec_fn=heed_interrupts,
            )
        return self

    def end(self) -> tuple[list[int], str]:
        """Exit statuses by rank, and what rank 0 has printed."""
        said = [process.communicate(timeout=90)[1] for _, process in sorted(self.processes.items())]
        assert not any("Traceback" in text or "has not answered" in text for text in said), said
        return [process.returncode for _, process in sorted(self.processes.items())], said[0]

    def started(self, attempt: int) -> dict[int, tuple[int, int]]:
        """Process and port of each rank in a start, once all are there."""
        deadline = time.monotonic() + 60
        while True:
            texts = {rank: self.folder / f"{attempt}.{rank}" for rank in range(self.ranks)}
            found = {rank: path.read_text().split() for rank, path in texts.items() if path.exists()}
            if len(found) == self.ranks and all(len(words) == 2 for words in found.values()):
                return {rank: (int(words[0]), int(words[1])) for rank, words in found.items()}
            assert time.monotonic() < deadline, f"only {found} of attempt {attempt}"
            time.sleep(0.02)

    def spares(self, rank: int) -> list[int]:
        """Processes that have prepared themselves to go on as a rank, the oldest first."""
        paths = sorted(self.folder.glob(f"spare.{rank}.*"), key=lambda path: path.stat().st_mtime_ns)
        return [int(path.suffix[1:]) for path in paths]

    def alive(self) -> list[int]:
        """Processes of ranks that have not ended, a moment after they should have."""
        deadline = time.monotonic() + 5
        while True:
            pids = [int(path.read_text().split()[0]) for path in self.folder.glob("[0-9].[0-9]")]
            pids += [pid for rank in range(self.ranks) for pid in self.spares(rank)]
            found = [pid for pid in pids if Path(f"/proc/{pid}").exists()]
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.02)


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[list[Run]]:
    """Whatever a test starts, ended with it; no rank outlives its run."""
    begun: list[Run] = []
    yield begun
    for run in begun:
        for process in run.processes.values():
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()
        assert run.alive() == []


@pytest.mark.mp
@pytest.mark.parametrize("killed", range(RANKS))
def test_all_ranks_start_again_at_another_port(killed: int, tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, KILLED_AT_FIRST.format(killed))
    runs.append(run.start())
    statuses, said = run.end()
    assert (statuses, said) == ([0, 0, 0], f"[rank 0] ds_vpipe: rank {killed} ended by SIGKILL; restart 1 of 2\n")
    first, second = run.started(0), run.started(1)
    assert not {pid for pid, _ in first.values()} & {pid for pid, _ in second.values()}
    assert len({port for _, port in first.values()}) == len({port for _, port in second.values()}) == 1
    assert run.port not in (first[0][1], second[0][1])
    assert not (tmp_path / "2.0").exists()
    assert not [*tmp_path.glob("spare.*")], "ranks have left nothing to go on with"


@pytest.mark.mp
def test_a_spare_goes_on_with_what_ranks_have_left(tmp_path: Path, runs: list[Run]) -> None:
    """A spare is there once its rank has left something, and none is made that no restart could use."""
    fails = (
        "assert found == {f'state {n}': f'of {n}'.encode() for n in range(attempt)}, found\n"
        "Path(f'{attempt}.{rank}.good').touch()\n"
        "if attempt == 0 and rank == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(attempt == 0)\n"
        "others_come() or time.sleep(0.5)\n"
        "sys.exit(attempt < 2)"
    )
    run = Run(tmp_path, KEEPS + fails)
    runs.append(run.start())
    statuses, said = run.end()
    assert statuses == [0, 0, 0], said
    assert "restart 2 of 2" in said
    assert len([*tmp_path.glob("[0-9].[0-9].good")]) == 3 * RANKS
    for rank in range(RANKS):
        assert run.spares(rank) == [run.started(attempt)[rank][0] for attempt in (1, 2)]


@pytest.mark.mp
def test_a_spare_that_is_lost(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, KEEPS + "time.sleep(0 if attempt else 300)", ranks=1)
    script = tmp_path / "train.py"
    script.write_text(script.read_text().replace("if attempt < 2", "if attempt < 1"))
    runs.append(run.start())
    rank, _ = run.started(0)[0]
    while not run.spares(0):
        time.sleep(0.02)
    os.kill(*run.spares(0), signal.SIGKILL)
    os.kill(rank, signal.SIGKILL)
    assert run.end() == ([0], "[rank 0] ds_vpipe: rank 0 ended by SIGKILL; restart 1 of 2\n")
    assert run.started(1)[0][0] not in run.spares(0)


@pytest.mark.mp
def test_no_spare_where_there_is_no_room_for_one(tmp_path: Path, runs: list[Run]) -> None:
    """And a run that goes on; a spare that fails to prepare itself is none either."""
    run = Run(tmp_path, KEEPS.replace("spares()\n", "time.sleep(1)\n") + "sys.exit(attempt <= 1)", ranks=1)
    script = tmp_path / "train.py"
    fails = (
        "fork, forks = os.fork, []\n"
        "def fork_once():\n"
        "    forks.append(1)\n"
        "    if len(forks) == 2: raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "    return fork()\n"
        "os.fork = fork_once\n"
        "def prepare(): Path(f'failed.{os.getpid()}').touch(); raise OSError('a library')\n"
    )
    script.write_text(script.read_text().replace("if (status :=", fails + "if (status :=").replace("attempt < 2", "1"))
    runs.append(run.start())
    run.processes[0].wait(90)
    said = run.processes[0].communicate()[1]
    assert (run.processes[0].returncode, said.count("restart 1 of 2")) == (0, 1), said
    assert said.count("OSError: a library") == 1, "of the second attempt"
    assert not (tmp_path / f"failed.{run.started(2)[0][0]}").exists()


@pytest.mark.mp
def test_a_rank_that_hangs_and_one_that_has_ended_well_start_again(tmp_path: Path, runs: list[Run]) -> None:
    """What a failed one has started, such as workers of a data loader, ends with it."""
    worker = "if rank and not os.fork():\n    Path(f'9.{rank}').write_text(str(os.getpid())); time.sleep(300)"
    there = "while rank and not Path(f'9.{rank}').exists(): time.sleep(0.01)"
    hangs = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(300)"
    begin = f"if attempt == 0:\n  {worker}\n  {there}\n"
    run = Run(tmp_path, f"{begin}  if rank == 1: {hangs}\n  sys.exit(5 if rank else 0)")
    runs.append(run.start())
    assert run.end() == ([0, 0, 0], "[rank 0] ds_vpipe: rank 2 ended with status 5; restart 1 of 2\n")


@pytest.mark.mp
def test_the_last_restart(tmp_path: Path, runs: list[Run]) -> None:
    gone = "not Path('/proc', *Path(f'{attempt}.1').read_text().split()[:1]).exists()"
    there = f"while not (Path(f'{{attempt}}.1').exists() and {gone}): time.sleep(0.05)"
    aborts = "if rank == 2: os.kill(os.getpid(), signal.SIGABRT)"
    run = Run(tmp_path, f"if rank == 1: sys.exit(7)\n{there}\ntime.sleep(0.5)\n{aborts}")
    runs.append(run.start())
    lines = [
        f"rank 1 ended with status 7; restart {text}"
        for text in ("1 of 2", "2 of 2", "2 of 2 was the last; no restart")
    ]
    assert run.end() == ([0, 7, 134], "".join(f"[rank 0] ds_vpipe: {line}\n" for line in lines))
    assert run.started(2)


@pytest.mark.mp
def test_a_wrong_configuration_is_not_tried_again(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, "sys.exit(1 if rank == 0 else 2)")
    runs.append(run.start())
    statuses, said = run.end()
    assert statuses == [1, 2, 2]
    assert "ended with status 2: configuration or command line are wrong; no restart\n" in said
    assert not (tmp_path / "1.0").exists()


@pytest.mark.mp
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("where", ["all", "one"])
def test_a_signal_ends_everything(number: signal.Signals, where: str, tmp_path: Path, runs: list[Run]) -> None:
    """Of a launcher or a terminal to all of them, or to one: then the others' peers would fail, and here they hang."""
    run = Run(tmp_path, HANGS)
    runs.append(run.start())
    run.started(0)
    for rank in range(RANKS) if where == "all" else [1]:
        run.processes[rank].send_signal(number)
    statuses, said = run.end()
    ended, killed = 128 + number, 128 + signal.SIGKILL
    assert statuses == ([ended] * RANKS if where == "all" else [killed, ended, killed])
    assert f" got {number.name}; no restart\n" in said
    assert "restart 1" not in said
    assert not (tmp_path / "1.0").exists()


@pytest.mark.mp
def test_a_signal_while_others_are_awaited(tmp_path: Path, runs: list[Run]) -> None:
    """What listens here never answers, and the supervisor would wait for it longer than this test."""
    run = Run(tmp_path, HANGS)
    script = tmp_path / "train.py"
    script.write_text(script.read_text().replace("MEETING_S = 2.0, 6.0", "MEETING_S = 2.0, 300.0"))
    with socket.create_server(("", run.port)) as listener:
        runs.append(run.start(1))
        connection = listener.accept()[0]
        run.processes[1].send_signal(signal.SIGHUP)
        assert run.end() == ([1], "")
        connection.close()


@pytest.mark.mp
def test_other_signals_reach_the_rank(tmp_path: Path, runs: list[Run]) -> None:
    """A terminal that closes does not, where the command was started with nohup: then training goes on."""
    catches = (
        "signal.signal((signal.SIGUSR1, signal.SIGUSR2)[attempt], lambda *_: sys.exit(attempt == 0))\n"
        "Path(f'ready.{attempt}').touch()\ntime.sleep(300)"
    )
    run = Run(tmp_path, catches, ranks=1)
    script = tmp_path / "train.py"
    ignores = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\nif (status :="
    script.write_text(script.read_text().replace("if (status :=", ignores))
    runs.append(run.start())
    for attempt, number in enumerate((signal.SIGUSR1, signal.SIGUSR2)):
        while not (tmp_path / f"ready.{attempt}").exists():
            assert run.processes[0].poll() is None
            time.sleep(0.02)
        run.processes[0].send_signal(signal.SIGHUP)
        time.sleep(0.3)  # in which the supervisor would see it
        run.processes[0].send_signal(number)
    assert run.end() == ([0], "[rank 0] ds_vpipe: rank 0 ended with status 1; restart 1 of 2\n")


@pytest.mark.mp
def test_ctrl_z_stops_the_rank_and_what_it_has_started(tmp_path: Path, runs: list[Run]) -> None:
    """A rank is in a group of its own, which a terminal's signals do not reach."""
    waits = "while not Path('go').exists(): time.sleep(0.02)"
    starts = f"if not (child := os.fork()):\n  Path('child').write_text(str(os.getpid()))\n  {waits}\n  os._exit(0)"
    run = Run(tmp_path, f"{starts}\n{waits}\nos.waitpid(child, 0)", ranks=1)
    runs.append(run.start())
    while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
        time.sleep(0.02)
    supervisor, rank, child = run.processes[0].pid, run.started(0)[0][0], int((tmp_path / "child").read_text())
    for number, stopped in ((signal.SIGTSTP, True), (signal.SIGCONT, False), (signal.SIGTSTP, True)):
        run.processes[0].send_signal(number)
        deadline = time.monotonic() + 20
        for pid in (supervisor, rank, child):
            while (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T") != stopped:
                assert time.monotonic() < deadline, f"{number.name}, {pid} of {supervisor, rank, child}"
                time.sleep(0.02)
    (tmp_path / "go").touch()
    run.processes[0].send_signal(signal.SIGCONT)
    assert run.end() == ([0], "")


@pytest.mark.mp
def test_all_start_again_though_nobody_reads_what_is_said(tmp_path: Path, runs: list[Run]) -> None:
    """As behind a launcher that has ended."""
    run = Run(tmp_path, "while not Path('go').exists(): time.sleep(0.02)\n" + KILLED_AT_FIRST.format(1), ranks=2)
    runs.append(run.start())
    run.started(0)
    for process in run.processes.values():
        assert process.stderr is not None
        process.stderr.close()
    (tmp_path / "go").touch()
    assert [process.wait(90) for process in run.processes.values()] == [0, 0]
    assert run.started(1)


@pytest.mark.mp
def test_a_rank_that_cannot_be_started_has_failed(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, "", ranks=1)
    script = tmp_path / "train.py"
    fails = (
        "fork = os.fork\n"
        "def fork_later():\n"
        "    os.fork = fork_as_orphan\n"
        "    raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
        "def fork_as_orphan():\n"  # as if the supervisor had ended before the child asked to end with it
        "    os.fork = fork\n"
        "    if child := fork(): return child\n"
        "    os.getppid = lambda: 1\n"
        "    return 0\n"
        "os.fork = fork_later\n"
    )
    script.write_text(script.read_text().replace("if (status :=", fails + "if (status :="))
    runs.append(run.start())
    lines = [
        "this rank cannot be started: Resource temporarily unavailable",
        "rank 0 ended with status 1; restart 1 of 2",
        "rank 0 ended with status 1; restart 2 of 2",
    ]
    assert run.end() == ([0], "".join(f"[rank 0] ds_vpipe: {line}\n" for line in lines))


@pytest.mark.mp
@pytest.mark.parametrize("lost", [0, 1])
def test_no_rank_outlives_a_killed_supervisor(lost: int, tmp_path: Path, runs: list[Run]) -> None:
    """Nor does a spare."""
    run = Run(tmp_path, KEEPS + HANGS)
    runs.append(run.start())
    while not all(run.spares(rank) for rank in range(RANKS)):
        time.sleep(0.02)
    run.processes[lost].kill()
    statuses, said = run.end()
    assert statuses[lost] == -signal.SIGKILL
    assert all(status == 128 + signal.SIGKILL for rank, status in enumerate(statuses) if rank != lost)
    assert lost == 0 or "[rank 0] ds_vpipe: rank 1 has lost its supervisor; no restart\n" in said
    assert run.alive() == []
    assert not (tmp_path / "1.0").exists()


@pytest.mark.mp
def test_strangers_at_the_port_change_nothing(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, KILLED_AT_FIRST.format(2))
    runs.append(run.start(0))
    words_of = [b"GET / HTTP/1.1\n", b"\xff" * 999, b"rank 0\n", b"rank 9\n", b"rank one\n", b"rank 1"]
    silent, *others = [_connected(run.port) for _ in range(1 + len(words_of))]
    for stranger, words in zip(others, words_of, strict=True):
        stranger.sendall(words)
        stranger.close()
    run.start(1, 2)
    assert run.end() == ([0, 0, 0], "[rank 0] ds_vpipe: rank 2 ended by SIGKILL; restart 1 of 2\n")
    silent.close()


def _connected(port: int) -> socket.socket:
    deadline = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_connections_of_a_supervisor() -> None:
    """Of two strangers, one that resets its connection, one that never ends a line, and two that are one rank."""
    port = free_port()
    peers = restarts.Peers(0, 3, "127.0.0.1", port)

    def received(until: int) -> list[tuple[int, str]]:
        deadline, found = time.monotonic() + 20, []
        while len(peers._links) != until:
            assert time.monotonic() < deadline
            found += peers.receive([])
        return found

    reset, endless = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
    assert received(2) == []
    assert all(link._connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) for link in peers._links.values())
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    reset.close()
    endless.sendall(b"x" * 2 * restarts._LONGEST_LINE)
    received(0)
    one, other = (socket.create_connection(("127.0.0.1", port)) for _ in range(2))
    received(2)
    one.sendall(b"rank 1\n")
    deadline = time.monotonic() + 20
    while 1 not in peers._links:
        assert time.monotonic() < deadline
        peers.receive([])
    other.sendall(b"rank 1\n")
    assert received(1) == []
    peers.send(["limit"])
    assert one.recv(99) == b"limit\n"
    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    one.close()
    for _ in range(2):
        peers.send(["limit"])
    assert received(0) == [(1, "gone")]
    for connected in (endless, other):
        assert connected.recv(99) == b""
        connected.close()
    peers.close()


@pytest.mark.mp
def test_a_rank_without_supervisor(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, HANGS)
    runs.append(run.start(0, 1))
    statuses, said = run.end()
    assert statuses == [1, 1]
    silent = "nothing has come in 6 s from the supervisors of ranks [2], which need the same --restarts; no restart"
    assert said == f"[rank 0] ds_vpipe: {silent}\n"


@pytest.mark.mp
def test_a_port_in_use(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, HANGS, ranks=1)
    with socket.create_server(("", run.port)):
        runs.append(run.start())
        statuses, said = run.end()
    assert statuses == [1]
    assert said.startswith(f"[rank 0] ds_vpipe: --restarts cannot listen on MASTER_PORT {run.port} of this host: ")


def test_ranks_that_do_not_say_how_they_end(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    attempts = Attempts(3, 1)
    orders = [order for rank in (0, 2, 1) for order in attempts.hear(rank, "here")]
    assert orders == ["start 0"]
    assert [*attempts.late(attempts.deadline)] == []
    assert [*attempts.hear(1, "ended -9")] == ["limit"]
    assert [*attempts.hear(2, "ended 1")] == []
    assert [*attempts.late(attempts.deadline - 1)] == []
    assert [*attempts.late(attempts.deadline + 1)] == ["limit", "exit"]
    assert "rank 1 ended by SIGKILL, and not a word from the supervisors of ranks [0]" in capsys.readouterr().err
    assert [*attempts.hear(0, "ended 1")] == [*attempts.late(float("inf"))] == []


def test_attempts_one_after_the_other(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Training takes as long as it takes, and each restart begins with nothing known of how ranks end."""
    monkeypatch.setenv("RANK", "0")
    attempts = Attempts(2, 1)
    assert [order for rank in (0, 1) for order in attempts.hear(rank, "here")] == ["start 0"]
    assert attempts.deadline == float("inf")
    assert [order for rank in (0, 1) for order in attempts.hear(rank, f"ended {rank}")] == ["limit", "start 1"]
    assert attempts.deadline == float("inf")
    assert [*attempts.hear(1, "ended 1")] == ["limit"]
    assert [*attempts.hear(0, "ended 0")] == ["limit", "exit"]
    said = "rank 1 ended with status 1; restart 1 of 1"
    assert capsys.readouterr().err == "".join(
        f"[rank 0] ds_vpipe: {line}\n" for line in (said, f"{said} was the last; no restart")
    )


def test_no_rank_is_started_after_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order to start may be on its way when the signal comes; nobody would tell that rank of it."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    rank = SimpleNamespace(start=lambda *_: None, process=0, keeps=True, connection=None)
    monkeypatch.setattr(restarts, "_fork", lambda *_: rank)
    monkeypatch.setattr(os, "kill", lambda *_: None)
    supervisor = restarts._Supervisor(1, lambda: None, None, None)  # type: ignore[arg-type]
    assert supervisor._obey("start 0 29500")
    assert supervisor._deadline == float("inf"), "training takes as long as it takes"
    monkeypatch.setattr(restarts, "_fork", lambda *_: pytest.fail("it starts"))
    supervisor._signals.append(signal.SIGTERM)
    supervisor._forward_signals()
    assert supervisor._deadline <= time.monotonic() + restarts.GRACE_S, "even if rank 0's supervisor says nothing"
    supervisor._deadline = 0.0
    supervisor._due_in(restarts.GRACE_S)
    assert supervisor._deadline == 0.0, "another signal gives no more time"
    assert supervisor._provide_spare()
    assert supervisor._obey("start 1 29500")


def test_ranks_that_do_not_start_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be forked, and a spare that does not take its order: it would wait for another forever."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("RANK", "1")

    def fails(*_: Any) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(restarts, "_fork", fails)
    supervisor = restarts._Supervisor(1, lambda: None, None, None)  # type: ignore[arg-type]
    supervisor._deadline = float("inf")
    assert supervisor._obey("start 0 29500")
    assert supervisor._reports == ["ended 1"]
    assert supervisor._deadline <= time.monotonic() + 3 * restarts.GRACE_S, "rank 0's supervisor has to answer"
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "kill", lambda *given: killed.append(given))
    mine, its = connection()
    its.close()
    supervisor._spare = restarts._Child(77, mine)
    monkeypatch.setattr(restarts, "_ended", lambda _: None)
    assert supervisor._obey("start 1 29500")
    assert killed == [(77, signal.SIGKILL)]
    mine.close()


def test_a_rank_that_has_ended_cannot_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []
    monkeypatch.setattr(os, "kill", lambda *given: killed.append(given))
    monkeypatch.setattr(os, "killpg", mock.Mock(side_effect=ProcessLookupError))
    restarts._stop_with(restarts._Child(77, connection()[0]))
    assert killed == [(os.getpid(), signal.SIGSTOP)]


def test_a_supervisor_of_rank_0_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setenv("MASTER_ADDR", "some-host")
    monkeypatch.setenv("RANK", "1")
    nothing: Iterator[list[Any]] = iter([[]])
    waits = SimpleNamespace(receive=lambda _: next(nothing), send=lambda _: None, close=lambda: None)
    supervisor = restarts._Supervisor(1, lambda: None, None, waits)  # type: ignore[arg-type]
    assert supervisor._deadline > time.monotonic() + restarts.MEETING_S, "rank 0 says more"
    supervisor._deadline = 0.0
    assert supervisor.run() == 1
    line = "[rank 1] ds_vpipe: the supervisor of rank 0 has not answered from MASTER_ADDR some-host\n"
    assert capsys.readouterr().err == line


def test_what_a_rank_has_handed_over_last_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may end right after that. Rank 0 then has to answer, unless this one has ended well and all others train."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    file = (tmp_path / "state").open("wb")
    for ended, before, limited in ((1, float("inf"), True), (0, 0.0, True), (0, float("inf"), False)):
        supervisor = restarts._Supervisor(1, lambda: None, None, None)  # type: ignore[arg-type]
        mine, its = connection()
        socket.send_fds(its, [b"keep state"], [file.fileno()])
        supervisor._child, supervisor._deadline = restarts._Child(0, mine), before
        monkeypatch.setattr(restarts, "_ended", lambda _, ended=ended: ended)
        supervisor._look_at_child()
        assert supervisor._kept._files.keys() == {"state"}
        assert supervisor._reports == [f"ended {ended}"]
        if limited:
            assert supervisor._deadline == pytest.approx(time.monotonic() + 3 * restarts.GRACE_S, abs=20)
        else:
            assert supervisor._deadline == float("inf")
        supervisor._kept.close()
        its.close()
    file.close()


@pytest.mark.mp
def test_through_the_launcher(tmp_path: Path) -> None:
    """``deepspeed`` sees no rank end while one is killed and all start again; Ctrl-C then ends everything."""
    script = tmp_path / "train.py"
    script.write_text(
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        "attempt, rank = os.environ['DS_VPIPE_RESTART'], os.environ['RANK']\n"
        "Path(f'{attempt}.{rank}').write_text(f'{os.getpid()} {sys.argv[1:]}')\n"
        "while not all(Path(f'0.{one}').exists() for one in range(2)): time.sleep(0.01)\n"
        "if attempt == '0' and rank == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(300 if attempt == '1' else 5)\nsys.exit(3)\n"
    )
    launcher = Path(sys.executable).with_name("deepspeed")
    command = [str(launcher), "--num_accelerators", "2", "--master_port", str(free_port()), "--module", "ds_vpipe.run"]
    path = os.pathsep.join([str(launcher.parent), os.environ["PATH"]])
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    log = tmp_path / "log"
    with log.open("w") as output:
        launched = subprocess.Popen(
            [*command, "--restarts", "3", str(script), "--lr", "1"], cwd=tmp_path, env=environment,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    deadline = time.monotonic() + 300
    try:
        written = [tmp_path / f"1.{rank}" for rank in range(2)]
        while not all(path.exists() and path.stat().st_size for path in written):
            assert launched.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        os.killpg(launched.pid, signal.SIGINT)  # as a terminal does
        assert launched.wait(timeout=120) != 0
    finally:
        with suppress(ProcessLookupError):
            os.killpg(launched.pid, signal.SIGKILL)
    assert "[rank 0] ds_vpipe: rank 1 ended by SIGKILL; restart 1 of 3\n" in log.read_text()
    assert "restart 2" not in log.read_text()
    words = [path.read_text().split(maxsplit=1) for path in sorted(tmp_path.glob("[01].[01]"))]
    assert [arguments for _, arguments in words] == 2 * [
        "['--local_rank=0', '--lr', '1']",
        "['--local_rank=1', '--lr', '1']",
    ]
    assert not [pid for pid, _ in words if Path(f"/proc/{pid}").exists()]


KILLED_ONCE = """
import os, signal, sys, time
from pathlib import Path
attempt = os.environ.get("DS_VPIPE_RESTART") or os.environ["TORCHELASTIC_RESTART_COUNT"]
Path(f"{attempt}.{os.environ['RANK']}").write_text(" ".join(sys.argv[1:]))
while not all(Path(f"0.{rank}").exists() for rank in range(2)): time.sleep(0.01)
if attempt == "0" and os.environ["RANK"] == "1": os.kill(os.getpid(), signal.SIGKILL)
time.sleep(5 * (attempt == "0"))
sys.exit(attempt == "0")
"""


@pytest.mark.mp
@pytest.mark.parametrize("launcher", ["Slurm", "torchrun"])
def test_other_launchers(launcher: str, tmp_path: Path) -> None:
    """Ranks that Slurm has started; torchrun restarts them itself."""
    (tmp_path / "train.py").write_text(KILLED_ONCE)
    folder, port = Path(sys.executable).parent, str(free_port())
    job = {
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": "1",
        "SLURM_JOB_ID": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    seen = {
        **os.environ,
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "PYTHON": sys.executable,
    }
    words = ["-m", "ds_vpipe.run", "train.py", "--lr", "1"]
    if launcher == "Slurm":
        words[2:2] = ["--restarts", "1"]
        tasks = [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
        commands = [[str(ROOT / "scripts" / "slurm_rank.sh"), *words] for _ in tasks]
    else:
        tasks = [{}]
        commands = [[str(folder / "torchrun"), "--standalone", "--nproc-per-node", "2", "--max-restarts", "1", *words]]
    started = [
        subprocess.Popen(command, cwd=tmp_path, env={**seen, **task}, stderr=subprocess.PIPE, text=True)
        for command, task in zip(commands, tasks, strict=True)
    ]
    said = [process.communicate(timeout=300)[1] for process in started]
    assert [process.returncode for process in started] == [0] * len(tasks), said
    assert {path.name: path.read_text() for path in tmp_path.glob("[0-9].[0-9]")} == {
        f"{attempt}.{rank}": "--lr 1" for attempt in range(2) for rank in range(2)
    }


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("given", "environment", "line"),
    [
        (["--restarts="], LAUNCHED, '--restarts: got ""; allowed: a whole number'),
        (["--restarts=²"], LAUNCHED, '--restarts: got "²"; allowed: a whole number'),
        (["--restarts=-1"], LAUNCHED, '--restarts: got "-1"; allowed: a whole number'),
        (["--local_rank=0", "--restarts", "3"], {"RANK": "0"}, "set WORLD_SIZE, MASTER_ADDR, MASTER_PORT"),
        (["--restarts=3"], {**LAUNCHED, "TORCHELASTIC_RUN_ID": "x"}, "write torchrun --max-restarts 3 instead"),
    ],
)
def test_refused(
    given: list[str], environment: dict[str, str], line: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in (*LAUNCHED, "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(restarts, "supervise", lambda *_: pytest.fail("it starts"))
    assert main([*given, "train.py"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("ds_vpipe.run: --restarts: got ")
    assert line in said


def test_the_script_of_a_child_gets_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And without restarts there is no supervisor."""
    script, asked = tmp_path / "train.py", []
    script.write_text(
        "import sys\nfrom pathlib import Path\nPath(__file__).with_suffix('.txt').write_text(' '.join(sys.argv[1:]))"
    )
    monkeypatch.setattr("ds_vpipe.run.supervise", lambda number, _: asked.append(number))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name, value in LAUNCHED.items():
        monkeypatch.setenv(name, value)
    for given in (
        ["--restarts", "3", "--local_rank=0"],
        ["--local_rank=0", "--restarts=3"],
        ["--restarts", "0", "--local_rank=0"],
    ):
        assert main([*given, str(script), "--lr", "1", "--restarts", "9"]) == 0
        assert script.with_suffix(".txt").read_text() == "--local_rank=0 --lr 1 --restarts 9"
    assert asked == [3, 3]
