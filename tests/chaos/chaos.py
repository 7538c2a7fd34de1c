"""Runs that are killed and stopped at any moment, and what becomes of them.

Usage: scripts/chaos.sh [--minutes N] [--events N] [--seed S] [--restarted SHARE] [--kinds KIND ...]
    [--shapes SHAPE ...] [--folder FOLDER] [--few | --record LINE]

Every event befalls a training run of a few processes (training.py). Checked after it: every rank has ended, or goes
on; survivors say in one line which stage waited for what, and why; no process and no shared memory is left; and the
run, started once more, goes on from its last checkpoint and ends with the losses and weights of an undisturbed run, bit
for bit.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import random
import re
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from events import FEW, KINDS, OF_FILES, OF_SAVES, PEER_TIMEOUT_S, PHASES, Counts, Event, drawn, few, recorded
from worlds import free_port

HERE = Path(__file__).resolve().parent
GRACE_S = PEER_TIMEOUT_S + 10  # for the others, after a rank has ended by an event
LIMIT_S = 180.0  # of a run, and of each restart
_WORKERS_S = 8.0  # in which the workers of a data loader notice that their rank has ended
_SUBREAPER, _PDEATHSIG = 36, 1


class RankBegins(BaseException):
    """Leaves the driver's frames in a process that has been forked from it, so that it ends as any other process."""

    def __init__(self, arguments: list[str]) -> None:
        self.arguments = arguments


@dataclass
class Attempt:
    """One start of a run: how its ranks ended, and what they said."""

    statuses: dict[int, int] = field(default_factory=dict)  # by rank; negative for a signal
    logs: dict[int, str] = field(default_factory=dict)
    results: dict[int, dict[str, Any]] = field(default_factory=dict)
    place: str = ""  # where the event came
    left: list[str] = field(default_factory=list)  # processes and memory
    ended_by_launcher: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not any(self.statuses.values()) and not self.left

    @property
    def outcome(self) -> dict[int, Any]:
        return {rank: (result["losses"], result["weights"]) for rank, result in self.results.items()}


def attempt(
    shape: str, ranks: int, folder: Path, event: Event | None, counts: bool = False, recovers: bool = False
) -> Attempt:
    """Start a run and wait for its end, as a launcher does, with an event, or with counts of calls."""
    found, port, begin = Attempt(), free_port(), time.monotonic()
    for path in (*folder.glob("result.*"), *folder.glob("place"), *folder.glob("process"), *folder.glob("begun.*")):
        path.unlink()
    restarts = ["--restarts", "1"] if recovers or (event is not None and event.restarted) else []
    arguments = [*restarts, str(HERE / "training.py"), shape, str(folder)]
    if event is not None or counts:
        arguments.append(json.dumps(None if event is None else asdict(event)))
    alive: dict[int, int] = {}
    logs: dict[int, tuple[int, bytearray]] = {}
    for rank in range(ranks):
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_SIZE": ranks, "MASTER_PORT": port}
        pid, output = fork(next(iter(alive), 0), environment, arguments)
        alive[pid], logs[rank] = rank, (output, bytearray())
    group = next(iter(alive))
    lasts = event.seconds if event is not None and event.kind in ("stop", "hang") and not event.restarted else 0.0
    stopped, goes_on_at = 0, math.inf
    deadline = begin + LIMIT_S * (1 + len(restarts) // 2)
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        now = time.monotonic()
        if pid in alive:
            rank = alive.pop(pid)
            found.statuses[rank] = os.waitstatus_to_exitcode(status)
            if found.statuses[rank]:
                deadline = min(deadline, now + GRACE_S + (event.seconds if event is not None else 0))
        if lasts and not stopped and (process := folder / "process").exists() and (told := process.read_text()):
            stopped, goes_on_at = int(told), now + lasts  # a child of the supervisor's, where there is one
        if now > goes_on_at:
            goes_on_at = math.inf
            with suppress(ProcessLookupError):
                os.kill(stopped, signal.SIGCONT)
        if alive and now > deadline:
            found.ended_by_launcher = sorted(alive.values())
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)
            deadline = now + LIMIT_S
        read(logs.values())
        if pid == 0:
            time.sleep(0.01)
    found.seconds = time.monotonic() - begin
    found.left = left_behind()
    read(logs.values())
    found.logs = {rank: text.decode(errors="replace") for rank, (_, text) in logs.items()}
    for output, _ in logs.values():
        os.close(output)
    for rank in range(ranks):
        with suppress(FileNotFoundError):
            found.results[rank] = json.loads((folder / f"result.{rank}.json").read_text())
    if event is not None and (told := folder / "place").exists():
        found.place = told.read_text()
    words = [f"_{word}_" for path in folder.glob("begun.*") for word in path.name.split(".")[1:]]  # processes and ports
    found.left += [name for name in os.listdir("/dev/shm") if any(word in f"{name}_" for word in words)]
    return found


def fork(group: int, environment: dict[str, int], arguments: list[str]) -> tuple[int, int]:
    """A process of a process group, or the first of one, that goes on in :func:`main` with ``ds_vpipe.run``.

    Returns:
        The process and what it prints: a pipe, since the limit that stands for a full disk is one of files.
    """
    sys.stdout.flush()
    mine, its = os.pipe()
    pid = os.fork()
    with suppress(OSError):  # whoever comes first
        os.setpgid(pid, group)
    if pid:
        os.close(its)
        os.set_blocking(mine, False)
        return pid, mine
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets background processes ignore it
    for number in (1, 2):
        os.dup2(its, number)
    os.closerange(3, 64)  # pipes of the driver's, and its log
    os.environ.update({name: str(value) for name, value in environment.items()}, MASTER_ADDR="127.0.0.1")
    raise RankBegins(arguments)


def read(logs: Iterable[tuple[int, bytearray]]) -> None:
    """Take what ranks have printed."""
    for output, text in logs:
        with suppress(BlockingIOError):
            while some := os.read(output, 1 << 16):
                text += some


def left_behind() -> list[str]:
    """Processes of a run that outlive its ranks, whose parent this process then is; they are ended."""
    deadline, children = time.monotonic() + _WORKERS_S, Path(f"/proc/self/task/{os.getpid()}/children")
    while time.monotonic() < deadline:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return []
        time.sleep(0.05)
    found = [f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_text()}" for pid in children.read_text().split()]
    for pid in children.read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    return found


# A stage, what it waited for or did, and why that ended; or what is wrong with a file.
_WAITED = r"(.*stage \d+ \(rank \d+\) .*(wait|stopped).*|load_checkpoint\(.*\): stage \d+ \(rank \d+\) failed): .+"
LINE = re.compile(r"^\[rank \d+\] ds_vpipe: " + _WAITED, re.MULTILINE)
RECOVERED = re.compile(r"ds_vpipe: recover\(\): on from update (\d+)")
RESTART = re.compile(r"^\[rank 0\] ds_vpipe: (.*); restart 1 of 1$", re.MULTILINE)
OF_FILE = re.compile(r"^\[rank \d+\] ds_vpipe: .*checkpoint.*: got \S+, which .*; allowed .*; .+", re.MULTILINE)


def complaints(event: Event, found: Attempt) -> Iterator[str]:
    """What is wrong with an attempt that an event befell."""
    for what in found.left:
        if not found.place or event.phase != "start":  # a killed run's memory loses its names when the next one starts
            yield f"left behind: {what}"
    goes_on = event.kind in ("stop", "delay", "clock", *OF_SAVES) or event.restarted or not found.place
    if event.restarted and found.place and not any(found.statuses.values()):
        said = [line for log in found.logs.values() for line in RESTART.findall(log)]
        if len(said) != 1 or (event.kind == "kill" and said != [f"rank {event.rank} ended by SIGKILL"]):
            yield f"rank 0 says {said} of restarts: {found.logs[0][-1500:]}"
    for rank, status in found.statuses.items():
        if status and goes_on:
            yield f"rank {rank} ended with {status} where training goes on: {found.logs[rank][-1500:]}"
        elif rank in found.ended_by_launcher and event.phase != "start":
            yield f"rank {rank} had not ended {GRACE_S:g} s after the first"
        elif status == 0 and rank not in found.results:
            yield f"rank {rank} ended as if nothing had come"
        elif status < 0 and rank not in (event.rank, *found.ended_by_launcher):
            yield f"rank {rank} ended by signal {-status}"
        elif status > 0 and event.phase != "start" and (rank != event.rank or event.kind not in ("raise", "interrupt")):
            lines = (OF_FILE if event.kind in OF_FILES else LINE).findall(found.logs[rank])
            if len(lines) != 1 or "Traceback" in found.logs[rank]:
                yield f"rank {rank} says {len(lines)} lines that name stage, wait and cause: {found.logs[rank][-1500:]}"


def damage(event: Event, checkpoints: Path) -> str:
    """Cut off a file of the latest checkpoint, or change a bit in it; returns what has been done."""
    files = sorted(path for path in (checkpoints / (checkpoints / "latest").read_text()).rglob("*") if path.is_file())
    draw = random.Random(event.draw)
    path = draw.choice(files)
    content, at = bytearray(path.read_bytes()), draw.randrange(path.stat().st_size)
    if event.kind == "cut":
        del content[at:]
    else:
        content[at] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
    return f"{path.name} at {at}"


@dataclass
class Table:
    """Events by kind and phase, and the complaints."""

    events: Counter[tuple[str, str]] = field(default_factory=Counter)
    restarted: int = 0
    recovered: list[int] = field(default_factory=list)  # updates from whose states in memory runs have gone on
    pauses: list[float] = field(default_factory=list)  # seconds by which that took longer than an undisturbed run
    without_effect: int = 0  # the rank had passed the call by another way
    wrong: list[str] = field(default_factory=list)

    def lines(self) -> Iterator[str]:
        kinds = sorted({kind for kind, _ in self.events})
        yield f"{'':12}" + "".join(f"{kind:>10}" for kind in kinds)
        for phase in PHASES:
            yield f"{phase:12}" + "".join(f"{self.events[kind, phase]:10}" for kind in kinds)
        yield f"{'all':12}" + "".join(
            f"{sum(n for (k, _), n in self.events.items() if k == kind):10}" for kind in kinds
        )
        yield (
            f"{sum(self.events.values())} events, {self.restarted} of them with --restarts, {self.without_effect} that "
            f"did not come, {len(self.wrong)} wrong"
        )
        if self.recovered:
            pause = statistics.median(self.pauses)
            yield f"{len(self.recovered)} went on from states in memory; median pause {pause:.1f} s"


class Chaos:
    """Runs, undisturbed and disturbed, in a folder of their own."""

    def __init__(self, root: Path, log: Any) -> None:
        import training

        self._root, self._log = root, log
        self.table, self._shapes, self.undisturbed = Table(), training.SHAPES, {}
        self.counts: dict[str, Counts] = {}
        self._seconds: dict[str, float] = {}  # of undisturbed runs

    def measure(self, shapes: Iterable[str]) -> None:
        """Train undisturbed, for the weights and for the number of calls in every phase, also of a resumed run."""
        for shape in shapes:
            folder = self._folder(shape)
            ranks, recovers = self._shapes[shape].ranks, self._shapes[shape].recovers
            found = attempt(shape, ranks, folder, None, counts=True, recovers=recovers)
            if not found.good:
                raise RuntimeError(f"{shape}: an undisturbed run fails: {found}")
            self.undisturbed[shape], self._seconds[shape] = found.outcome, found.seconds
            calls = {str(rank): dict(result["calls"]) for rank, result in found.results.items()}
            again = attempt(shape, ranks, folder, None, counts=True, recovers=recovers)
            for rank, result in again.results.items():
                calls[str(rank)]["load"] = result["calls"]["load"]
            if self._differences(shape, again):
                raise RuntimeError(f"{shape}: a resumed run is another one: {self._differences(shape, again)}")
            self.counts[shape] = calls
            self._write({"shape": shape, "seconds": [found.seconds, again.seconds], "calls": calls})

    def befall(self, shape: str, event: Event) -> list[str]:
        """Let an event come, start the run once more, and return what is wrong."""
        folder, ranks, recovers = self._folder(shape), self._shapes[shape].ranks, self._shapes[shape].recovers
        checkpoints, damaged = folder / "checkpoints", ""
        if event.phase == "load":
            shutil.copytree(self._root / shape / "checkpoints", checkpoints)
        if event.kind in OF_FILES:
            damaged = damage(event, checkpoints)
        found = attempt(shape, ranks, folder, event, recovers=recovers)
        found.place = "every transfer" if event.kind == "delay" else damaged or found.place
        wrong = [*complaints(event, found), *self._unlike(shape, found)]
        again = found
        if any(found.statuses.values()):
            if damaged:
                tags = sorted(path.name for path in checkpoints.glob("global_step*"))
                (checkpoints / "latest").write_text(tags[-2])
            again = attempt(shape, ranks, folder, None, recovers=recovers)
            wrong += [f"the run that follows: {what}" for what in self._differences(shape, again)]
        wrong += [f"left in checkpoints: {path.name}" for path in checkpoints.glob(".*")]
        recovered = [int(update) for log in found.logs.values() for update in RECOVERED.findall(log)]
        self.table.recovered += recovered
        self.table.pauses += [found.seconds - self._seconds[shape] for _ in recovered]
        if found.place:
            self.table.events[event.kind, event.phase] += 1
            self.table.restarted += event.restarted
        else:
            self.table.without_effect += 1
        self.table.wrong += [f"{shape}, {event}: {what}" for what in wrong]
        self._write(
            {
                "shape": shape, **asdict(event), "place": found.place, "statuses": found.statuses, "wrong": wrong,
                "launcher": found.ended_by_launcher, "recovered": recovered,
                "said": [line for log in found.logs.values() for line in log.splitlines() if line.startswith("[rank ")],
                "took_s": [round(found.seconds, 2), round(again.seconds, 2)],
            }
        )  # fmt: skip
        if not wrong:
            shutil.rmtree(folder)
        return wrong

    def _differences(self, shape: str, found: Attempt) -> list[str]:
        if not found.good:
            return [f"statuses {found.statuses}, left {found.left}: {[log[-1500:] for log in found.logs.values()]}"]
        return self._unlike(shape, found)

    def _unlike(self, shape: str, found: Attempt) -> list[str]:
        wrong = []
        for rank, (losses, weights) in found.outcome.items():
            right_losses, right_weights = self.undisturbed[shape][rank]
            wrong += [f"rank {rank}: loss {at}" for at, loss in losses.items() if right_losses[at] != loss]
            wrong += [f"rank {rank}: {name}" for name in right_weights if weights.get(name) != right_weights[name]]
        return wrong

    def _folder(self, shape: str) -> Path:
        path = self._root / shape
        if path.exists():
            path = Path(tempfile.mkdtemp(prefix=f"{shape}-", dir=self._root))
        path.mkdir(exist_ok=True)
        return path

    def _write(self, record: dict[str, Any]) -> None:
        print(json.dumps(record), file=self._log, flush=True)


def drive(options: argparse.Namespace) -> int:
    ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    root = Path(options.folder or tempfile.mkdtemp(prefix="chaos-"))
    root.mkdir(parents=True, exist_ok=True)
    chaos = Chaos(root, (root / "events.jsonl").open("a"))
    print(f"seed {options.seed}, events in {root / 'events.jsonl'}", flush=True)
    import training

    record = json.loads(options.record) if options.record else None
    chosen = options.shapes or list(training.SHAPES)
    if not set(chosen) <= set(training.SHAPES):
        sys.exit(f"--shapes: got {chosen}; allowed: {', '.join(training.SHAPES)}")
    chaos.measure([record["shape"]] if record else {row[0] for row in FEW} if options.few else chosen)
    end = time.monotonic() + 60 * options.minutes
    recovering = {name for name, shape in training.SHAPES.items() if shape.recovers}
    events = drawn(options.seed, chaos.counts, recovering, options.restarted, options.kinds)
    if record or options.few:
        events = iter([(record["shape"], recorded(record))]) if record else few(chaos.counts)
    for number, (shape, event) in enumerate(events):
        if number == options.events or time.monotonic() > end:
            break
        for what in chaos.befall(shape, event):
            print(f"{shape}, {event}: {what}", flush=True)
    print("\n".join(chaos.table.lines()))
    return bool(chaos.table.wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="how long events go on")
    parser.add_argument("--events", type=int, default=-1, help="how many there are at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--restarted", type=float, default=0.3, help="share of failures after which --restarts restarts"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of events; default: all")
    parser.add_argument("--shapes", nargs="+", help="of runs, as training.py has them; default: all")
    parser.add_argument("--few", action="store_true", help="the events that are part of the tests")
    parser.add_argument("--record", help="a line of a log of events: that event alone comes again")
    parser.add_argument("--folder", help="of the runs and of the log of all events; default: a new one")
    options = parser.parse_args()
    import preloaded  # noqa: F401 - once, for all ranks
    import torch

    torch.set_num_threads(1)
    try:
        return drive(options)
    except RankBegins as begins:
        arguments = begins.arguments
    import ds_vpipe.run

    return ds_vpipe.run.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
