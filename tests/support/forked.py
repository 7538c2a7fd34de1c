"""Programs in processes that have imported everything when they begin, and that end as Python ends.

Workers of :mod:`worlds` end without what a script has registered for its end; to start Python for each rank of a test
is most of what the test would cost.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_PDEATHSIG = 1


class Forked:
    """A process that waits with everything imported, and forks one for each program."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "DS_ACCELERATOR": "cpu"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(
        self, folder: Path, programs: Sequence[tuple[list[str], dict[str, str]]], timeout_s: float = 400
    ) -> list[subprocess.CompletedProcess[str]]:
        """Run programs side by side in a folder; what each has printed is its ``stdout``.

        Args:
            folder: where they begin.
            programs: for each the words after ``python``, a script or ``-m`` and a module, and its own variables.
            timeout_s: after which this process ends them all.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.TemporaryDirectory() as outputs:
            logs = [str(Path(outputs, str(number))) for number in range(len(programs))]
            names = ("words", "environment", "log", "folder")
            tasks = [
                dict(zip(names, (words, {**os.environ, **own}, log, str(folder)), strict=True))
                for (words, own), log in zip(programs, logs, strict=True)
            ]
            self._process.stdin.write(json.dumps(tasks).encode() + b"\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                self._process.kill()  # and with it what it has forked
            answer = self._process.stdout.readline()
            texts = [Path(log).read_text(errors="replace") if Path(log).exists() else "" for log in logs]
            assert answer, texts
        return [
            subprocess.CompletedProcess(words, status, text)
            for (words, _), status, text in zip(programs, json.loads(answer), texts, strict=True)
        ]

    def close(self) -> None:
        """End the process that waits."""
        self._process.communicate()


def _next_program() -> list[str]:
    """The words of a program, in a process of its own; an empty list in the one that waits, at its end."""
    while line := sys.stdin.readline():
        children = []
        for task in json.loads(line):
            sys.stdout.flush()
            if not (child := os.fork()):
                return _begin(task)
            children.append(child)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(statuses), flush=True)
    return []


def _begin(task: dict[str, Any]) -> list[str]:
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(task["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, number)
    os.closerange(3, 64)
    os.environ.clear()
    os.environ.update(task["environment"])
    os.chdir(task["folder"])
    return list(task["words"])


if __name__ == "__main__":
    import preloaded  # noqa: F401
    import torch

    torch.set_num_threads(1)
    words = _next_program()
    if words:
        warnings.filterwarnings("ignore", ".* found in sys.modules", RuntimeWarning)
        if words[0] == "-m":
            sys.argv, sys.path[0] = words[1:], os.getcwd()
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = words, str(Path(words[0]).resolve().parent)
            runpy.run_path(words[0], run_name="__main__")
