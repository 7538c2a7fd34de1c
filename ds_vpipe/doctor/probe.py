"""Probe of one machine: the fields of ``NodeFacts`` as a JSON object.

It is also sent to other hosts, where ds_vpipe need not be installed: it imports nothing but the standard library and
takes the names of the packages to look for as arguments.
"""

from __future__ import annotations

import fcntl
import glob
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "DS_ACCELERATOR",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
)
LIMIT_S = 10
BUILD_LIMIT_S = 900.0  # for how long a build may write nothing: the slowest file of DeepSpeed's takes some minutes

# What can be said of a file, beside reasons why nothing can be.
UNUSED = "which no process has open"
HELD = "which a process of this host has open"
LOCKED = "which a process has locked"

# A file on any other may be open on another machine, whose processes this one's kernel does not count.
LOCAL_FILE_SYSTEMS = ("bcachefs", "btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "ramfs", "tmpfs", "xfs", "zfs")


def observe(packages):  # type: ignore[no-untyped-def] # runs on other hosts, under whatever Python they have
    """The facts, as JSON types."""
    shm = _attempt(lambda: os.statvfs("/dev/shm"))
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "packages": {name: _attempt(lambda n=name: importlib.metadata.version(n)) for name in packages},
        "apex": _apex(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "cpus": _attempt(lambda: len(os.sched_getaffinity(0)), os.cpu_count() or 1),
        "shm_bytes": shm and shm.f_frsize * shm.f_blocks,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "compiler": shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++"),
        "ninja": shutil.which("ninja", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])),
        "address": _attempt(lambda: socket.gethostbyname(socket.gethostname())),
        "build_locks": _build_locks(),
        "interfaces": [name for _, name in socket.if_nameindex()],
        **_gpus(),
    }


def _attempt(look, otherwise=None):  # type: ignore[no-untyped-def]
    """What a look at something finds, or ``otherwise`` where there is no such thing."""
    try:
        return look()
    except (AttributeError, ImportError, OSError, ValueError):
        return otherwise


class Claim:
    """Exclusive claim on a file that no process has open or mapped. Until its end none can open it.

    The kernel grants a write lease only on a file that no other process has open, in any container or process
    namespace, and a process that opens it meanwhile waits until the lease is given back.
    """

    def __init__(self, path):  # type: ignore[no-untyped-def]
        self._file = None
        file_system = _file_system(path)
        if file_system not in LOCAL_FILE_SYSTEMS:
            self.state = f"of which this host cannot know who has it open (a file system of type {file_system})"
            return
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
            fcntl.fcntl(self._file, fcntl.F_SETSIG, signal.SIGURG)  # if somebody opens it; the default would end us
            fcntl.fcntl(self._file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
            self.state = UNUSED if os.path.samestat(os.fstat(self._file), os.stat(path)) else HELD
        except BlockingIOError:
            self.state = HELD
        except OSError as error:
            self.state = f"of which this process cannot know who has it open ({error.strerror})"

    def nobody_waits(self):  # type: ignore[no-untyped-def]
        """Whether no process waits to open an unused file."""
        return self._file is not None and fcntl.fcntl(self._file, fcntl.F_GETLEASE) == fcntl.F_WRLCK

    def __enter__(self):  # type: ignore[no-untyped-def]
        return self

    def __exit__(self, *_):  # type: ignore[no-untyped-def]
        if self._file is not None:
            os.close(self._file)


def _file_system(path):  # type: ignore[no-untyped-def]
    """The type of the one that a file is on: that of the longest mount point above it, the last one of equal ones."""
    path, longest, found = os.path.realpath(path), "", "unknown"
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                before, _, after = line.partition(" - ")
                point = re.sub(r"\\(\d{3})", lambda code: chr(int(code.group(1), 8)), before.split()[4])
                if len(point) >= len(longest) and os.path.commonpath([point, path]) == point:
                    longest, found = point, after.split()[0]
    except OSError:
        pass
    return found


def idle_s(lock):  # type: ignore[no-untyped-def]
    """Seconds since anything beside a lock has changed. None if the build has ended.

    A build that goes on writes a file now and then, however long it takes.
    """
    try:
        with os.scandir(os.path.dirname(lock)) as beside:
            return time.time() - max(entry.stat().st_mtime for entry in beside)
    except (OSError, ValueError):
        return None


def _build_locks():  # type: ignore[no-untyped-def]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")
    version = _attempt(lambda: importlib.metadata.version("torch"), "0.0")
    by_kernel = [int(part) for part in re.findall(r"\d+", version)[:2]] >= [2, 14]  # it leaves the file of every build
    locks = []
    for path in glob.glob(os.path.join(folder, "*", "lock")) + glob.glob(os.path.join(folder, "*", "*", "lock")):
        idle = idle_s(path)
        if by_kernel:
            state = LOCKED if locked(path) else None
        else:
            with Claim(path) as claim:
                state = claim.state
        if idle is not None and state is not None:
            locks.append([path, idle, state])
    return locks


def locked(path):  # type: ignore[no-untyped-def]
    """Whether the kernel holds a lock of this file for a process."""
    try:
        with open(path) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # there is none
        return False
    return False


def _apex():  # type: ignore[no-untyped-def]
    spec = _attempt(lambda: importlib.util.find_spec("apex"))
    if spec is None:
        return "none"
    folders = list(spec.submodule_search_locations or [])
    return "nvidia" if any(os.path.isdir(os.path.join(folder, "optimizers")) for folder in folders) else "other"


def _gpus():  # type: ignore[no-untyped-def]
    done, text = run(["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"], LIMIT_S)
    if done:
        return {"gpus": [line.strip() for line in text.splitlines() if line.strip()]}
    return {"gpus": None, "gpu_error": f"nvidia-smi: {text}" if shutil.which("nvidia-smi") else ""}


def run(argv, limit_s, given=""):  # type: ignore[no-untyped-def]
    """Run a command with a time limit. Returns success, and its output or the reason of a failure.

    Its output goes to files and not through pipes: a process that it leaves behind, such as the master of shared ssh
    connections, would keep a pipe open and its reader waiting. What cannot be killed, because a driver hangs, is not
    waited for.
    """
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin.write(given.encode())
        stdin.seek(0)
        try:
            process = subprocess.Popen(argv, stdin=stdin, stdout=out, stderr=err, start_new_session=True)
            status = process.wait(limit_s)
        except OSError as error:
            return False, error.strerror or str(error)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return False, f"no answer within {limit_s:g} s"
        out.seek(0)
        err.seek(0)
        text = out.read().decode(errors="replace")
        if not status:
            return True, text
        reason = " ".join((err.read().decode(errors="replace") or text).split())
        return False, reason[-200:] or f"it ended with status {status}"


if __name__ == "__main__":
    print(json.dumps(observe(sys.argv[1:])))
