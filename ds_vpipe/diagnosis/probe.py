"""Looks at the machine that it runs on and prints a JSON object, the fields of ``NodeFacts``.

It is also sent to other hosts, where ds_vpipe need not be installed: it imports nothing but the standard library and
takes the names of the packages to look for as arguments.
"""

import glob
import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time

VARIABLES = (
    "CUDA_VISIBLE_DEVICES",
    "CXX",
    "DS_ACCELERATOR",
    "GLOO_SOCKET_IFNAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NCCL_SOCKET_IFNAME",
    "OMP_NUM_THREADS",
)
LIMIT_S = 10


def observe(packages):  # type: ignore[no-untyped-def] # runs on other hosts, under whatever Python they have
    """The facts, as JSON types."""
    return {
        "host": socket.gethostname(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in packages},
        "apex": _apex(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "cpus": _cpus(),
        "shm_bytes": _shm_bytes(),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "compiler": shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++"),
        "ninja": shutil.which("ninja", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])),
        "address": _address(),
        "build_locks": _build_locks(),
        "interfaces": [name for _, name in socket.if_nameindex()],
        **_gpus(),
    }


def _address():  # type: ignore[no-untyped-def]
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _build_locks():  # type: ignore[no-untyped-def]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.environ.get("TORCH_EXTENSIONS_DIR") or os.path.join(cache, "torch_extensions")
    ages = []
    for path in glob.glob(os.path.join(folder, "*", "lock")) + glob.glob(os.path.join(folder, "*", "*", "lock")):
        try:
            beside = glob.glob(os.path.join(glob.escape(os.path.dirname(path)), "*"))
            ages.append([path, time.time() - max(os.stat(name).st_mtime for name in beside)])
        except (OSError, ValueError):  # the build has ended
            continue
    return ages


def _version(package):  # type: ignore[no-untyped-def]
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _apex():  # type: ignore[no-untyped-def]
    try:
        spec = importlib.util.find_spec("apex")
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return "none"
    folders = list(spec.submodule_search_locations or [])
    return "nvidia" if any(os.path.isdir(os.path.join(folder, "optimizers")) for folder in folders) else "other"


def _cpus():  # type: ignore[no-untyped-def]
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def _shm_bytes():  # type: ignore[no-untyped-def]
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_frsize * found.f_blocks


def _gpus():  # type: ignore[no-untyped-def]
    command = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        except OSError:
            return {"gpus": None}
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # and not waited for: where a driver hangs even that does not end it
            return {"gpus": None, "gpu_error": "nvidia-smi gives no answer"}
        output.seek(0)
        lines = [line.strip() for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    if status:
        return {"gpus": None, "gpu_error": "nvidia-smi: " + " ".join(lines)[-200:]}
    return {"gpus": lines}


if __name__ == "__main__":
    print(json.dumps(observe(sys.argv[1:])))
