"""Commands with a limit on time.

Their output goes to files and not through pipes: a process that the command leaves behind, such as the master of shared
ssh connections, would keep a pipe open and its reader waiting. What cannot be killed, because a driver hangs, is not
waited for.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import IO

_AFTER_KILL_S = 2.0
_LOOK_S = 0.5  # how often to see whether a process ended whose output another one holds open


def run(argv: Sequence[str], limit_s: float, text: str = "") -> tuple[bool, str]:
    """Whether a command ended well within its limit, and what it printed, or why not.

    Args:
        argv: the command.
        limit_s: after so many seconds it is killed, with all processes of its group.
        text: its standard input.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(text.encode())
        given.seek(0)
        try:
            process = subprocess.Popen(argv, stdin=given, stdout=out, stderr=err, start_new_session=True)
        except OSError as error:
            return False, error.strerror or str(error)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            return False, f"no answer within {limit_s:g} s"
        if status:
            return False, _said(err) or f"it ended with status {status}"
        out.seek(0)
        return True, out.read().decode(errors="replace")


def exchange(argv: Sequence[str], limit_s: float, count: int) -> tuple[str, list[tuple[float, float, str]]]:
    """Send a command ``count`` empty lines, one after the answer to the one before.

    Returns:
        Why there was no answer, and for each answer our clock before and after it, in seconds, and its text.
    """
    answers: list[tuple[float, float, str]] = []
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryFile() as err:
        pipe = subprocess.PIPE
        try:
            process = subprocess.Popen(argv, bufsize=0, stdin=pipe, stdout=pipe, stderr=err, start_new_session=True)
        except OSError as error:
            return error.strerror or str(error), []
        given, out = process.stdin, process.stdout
        assert given is not None
        assert out is not None
        with contextlib.suppress(OSError):  # it ended; why is said below
            for _ in range(count):
                before = time.time()
                given.write(b"\n")
                line = _line(out.fileno(), process, deadline)
                if not line:
                    break
                answers.append((before, time.time(), line.decode(errors="replace")))
        for stream in (given, out):
            with contextlib.suppress(OSError):
                stream.close()
        try:
            status = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            _kill(process)
            return "" if answers else f"no answer within {limit_s:g} s", answers
        return "" if answers else _said(err) or f"it ended with status {status}", answers


def _line(descriptor: int, process: subprocess.Popen[bytes], deadline: float) -> bytes:
    """The next line; without its end if the process or the time ends before."""
    line = b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        ready, _, _ = select.select([descriptor], [], [], max(0.0, min(left, _LOOK_S)))
        if ready:
            part = os.read(descriptor, 4096)
            if not part:
                break
            line += part
        elif left <= 0 or process.poll() is not None:
            break
    return line


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_AFTER_KILL_S)


def _said(file: IO[bytes]) -> str:
    file.seek(0)
    return " ".join(file.read().decode(errors="replace").split())[-200:]
