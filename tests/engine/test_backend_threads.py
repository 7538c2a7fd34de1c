"""Threads that need Python's lock once more get it before the interpreter goes down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import ctypes, hashlib, importlib.util, os, sys, threading
spec = importlib.util.spec_from_file_location("backend_threads", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
if sys.argv[2] == "with":
    module.outlive_backend_threads()
    module.outlive_backend_threads()
started = threading.Event()

def late():
    started.set()
    # Outside of Python, as a thread of the backend is.
    if sys.argv[3] == "busy":
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)
    else:
        ctypes.CDLL(None).usleep(20_000)
    os.write(1, b"had the lock")

threading.Thread(target=late, daemon=True).start()
started.wait()
"""


def end(*kind: str) -> str:
    command = [sys.executable, "-c", SCRIPT, str(ROOT / "engine" / "backend_threads.py"), *kind]
    return subprocess.run(command, env=dict(os.environ), capture_output=True, text=True, timeout=300, check=True).stdout


@pytest.mark.parametrize("what", ["idle", "busy"])
def test_they_come_to_their_end(what: str) -> None:
    assert end("with", what) == "had the lock"


def test_without_it_they_would_not() -> None:
    assert end("without", "idle") == ""
