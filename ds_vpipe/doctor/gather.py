"""Facts about this machine, and over ssh about every host of a hostfile. No step can take longer than its limit.

torch is looked at in a process of its own, and DeepSpeed not imported at all: where one of them is missing, broken or
hangs, that is a finding.
"""

import json
import os
import shlex
import shutil
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ds_vpipe.doctor import probe
from ds_vpipe.doctor.checks import Facts, NodeFacts, RemoteFacts, parse_hostfile
from ds_vpipe.errors import Refusal
from ds_vpipe.requirements import PACKAGES

DEFAULT_PORT = 29500  # of DeepSpeed's launcher
_AT_ONCE = 16
_TORCH = (
    "import json, torch; d = torch.distributed; print(json.dumps({'cuda_devices': torch.cuda.device_count(), 'backends'"
    ": {'gloo': d.is_available() and d.is_gloo_available(), 'nccl': d.is_available() and d.is_nccl_available()}}))"
)


def gather(hostfile: Path | None, limit_s: float, port: int | None = None, ssh_port: int | None = None) -> Facts:
    """Facts about this machine and its hosts. Each command and connection has a limit.

    ``port`` is where ranks will meet, by default ``MASTER_PORT`` or the launcher's own, ``ssh_port`` that of the hosts.

    Raises:
        VPipeConfigError: the hostfile cannot be read.
    """
    text = None if hostfile is None else (str(hostfile), _hostfile_text(hostfile))
    node = NodeFacts(**probe.observe(list(PACKAGES)))
    if port is None:
        value = os.environ.get("MASTER_PORT", "")
        port = int(value) if value.isdecimal() else DEFAULT_PORT
    commands = {name: shutil.which(name) for name in ("ssh", "pdsh")}
    remote = {}
    if text is not None and commands["ssh"] is not None:
        hosts = list(parse_hostfile(*text)[0])
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            found = pool.map(lambda host: remote_facts(host, limit_s, ssh_port), hosts)
            remote = dict(zip(hosts, found, strict=True))
    return Facts(
        node=node,
        **_torch(limit_s),
        port=port,
        port_is_free=_is_free(port),
        topology=_topology(limit_s) if node.gpus else (),
        hostfile=text,
        deepspeed_env=_deepspeed_env(),
        commands=commands,
        remote=remote,
    )


def remote_facts(host: str, limit_s: float, ssh_port: int | None = None) -> RemoteFacts:
    """Facts about ``host``, its clock first, within a few times ``limit_s``."""
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(limit_s))}"]
    ssh += [] if ssh_port is None else ["-p", str(ssh_port)]
    ssh += ["-o", "ControlPath=none", host]  # a connection of its own, which ends with the command
    begin = time.time()
    done, text = probe.run([*ssh, "date +%s.%N"], limit_s)
    end = time.time()
    if not done:
        return RemoteFacts(error=text)
    skew: float | None
    try:
        skew = float(text) - (begin + end) / 2
    except ValueError:
        skew = None
    command = shlex.join([sys.executable, "-", *PACKAGES])
    done, text = probe.run([*ssh, command], 2 * limit_s, Path(probe.__file__).read_text(encoding="utf-8"))
    node, why = None, text
    if done:
        try:
            node, why = NodeFacts(**json.loads(text.splitlines()[-1])), ""
        except (ValueError, IndexError, TypeError):
            why = f"{sys.executable} printed {text[-200:]!r}"
    return RemoteFacts("", node, why, skew, end - begin)


def _torch(limit_s: float) -> dict[str, Any]:
    done, text = probe.run([sys.executable, "-c", _TORCH], max(60.0, limit_s))
    return dict(json.loads(text.splitlines()[-1])) if done else {"torch_error": text}


def _topology(limit_s: float) -> tuple[str, ...]:
    """Rows of ``nvidia-smi topo -m``, GPU columns only."""
    done, text = probe.run(["nvidia-smi", "topo", "-m"], limit_s)
    plain = (line.replace("\x1b[4m", "").replace("\x1b[0m", "") for line in text.splitlines() if done)
    rows = [line.split() for line in plain if line.startswith("GPU")]  # the header begins with a tab
    return tuple(" ".join([row[0], *row[1 : len(rows) + 1]]) for row in rows if len(rows) > 1 and len(row) > len(rows))


def _is_free(port: int) -> bool:
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", port))
            server.listen()
        except (OSError, OverflowError):
            return False
    return True


def _deepspeed_env() -> dict[str, str]:
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    paths = dict.fromkeys(os.path.join(folder, name) for folder in (os.path.expanduser("~"), "."))
    return {path: Path(path).read_text(encoding="utf-8", errors="replace") for path in paths if os.path.isfile(path)}


def _hostfile_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        allowed = "a file with a line HOST slots=N per host"
        raise Refusal("--hostfile", str(path), allowed, "correct the path", reason).error() from None
