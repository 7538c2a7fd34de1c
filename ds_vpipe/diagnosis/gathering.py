"""Observes the facts: this machine, and over ssh every host of a hostfile. No step can take longer than its limit."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ds_vpipe.diagnosis import probe
from ds_vpipe.diagnosis.facts import Facts, NodeFacts, RemoteFacts
from ds_vpipe.diagnosis.host_checks import parse_hostfile
from ds_vpipe.diagnosis.limited import exchange, run
from ds_vpipe.diagnosis.versions import PACKAGES
from ds_vpipe.errors import Refusal

DEFAULT_PORT = 29500  # of DeepSpeed's launcher
_PORTS_AT_ONCE = 32
_EXCHANGES = 5
_AT_ONCE = 16
_PING = "while read -r _; do date +%s.%N; done"
_TORCH = (
    "import json, torch; d = torch.distributed; print(json.dumps({'cuda': torch.cuda.device_count(), 'backends': "
    "{'gloo': d.is_available() and d.is_gloo_available(), 'nccl': d.is_available() and d.is_nccl_available()}}))"
)


def gather(hostfile: Path | None, limit_s: float, port: int | None = None, ssh_port: int | None = None) -> Facts:
    """Look at this machine and at the hosts of ``hostfile``.

    Args:
        hostfile: DeepSpeed's; None for this machine alone.
        limit_s: seconds for each command, and for each connection.
        port: where ranks will meet; default: ``MASTER_PORT`` or the launcher's own.
        ssh_port: of the hosts, None for ssh's own.

    Raises:
        VPipeConfigError: the hostfile cannot be read.
    """
    text = None if hostfile is None else (str(hostfile), _hostfile_text(hostfile))
    node = node_facts(probe.observe(list(PACKAGES)))
    torch = _torch(limit_s)
    return Facts(
        node=node,
        backends=torch.get("backends", {}),
        cuda_devices=torch.get("cuda", 0),
        ports=_ports(port if port is not None else _master_port()),
        topology=_topology(limit_s) if node.gpus else (),
        hostfile=text,
        deepspeed_env=_deepspeed_env(),
        commands={name: shutil.which(name) for name in ("ssh", "pdsh")},
        remote={} if text is None else _remote(list(parse_hostfile(*text)[0]), limit_s, ssh_port),
    )


def node_facts(found: Mapping[str, Any]) -> NodeFacts:
    """Facts of a machine from the JSON of its probe."""
    gpus = found["gpus"]
    lists = {
        "build_locks": tuple((path, idle, state) for path, idle, state in found["build_locks"]),
        "interfaces": tuple(found["interfaces"]),
        "gpus": None if gpus is None else tuple(gpus),
    }
    return NodeFacts(**{**found, **lists})


def remote_facts(host: str, limit_s: float, ssh_port: int | None = None) -> RemoteFacts:
    """What can be learned of ``host`` within a few times ``limit_s``: clock first, then the probe."""
    ssh = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={max(1, int(limit_s))}"]
    ssh += [] if ssh_port is None else ["-p", str(ssh_port)]
    ssh += ["-o", "ControlPath=none"]  # a connection of its own, which ends with the command
    error, answers = exchange([*ssh, host, _PING], limit_s, _EXCHANGES)
    if error:
        return RemoteFacts(error=error)
    before, after, line = min(answers, key=lambda answer: answer[1] - answer[0])
    skew: float | None
    try:
        skew = float(line) - (before + after) / 2
    except ValueError:
        skew = None
    source = Path(probe.__file__).read_text(encoding="utf-8")
    command = shlex.join([sys.executable, "-", *PACKAGES])
    done, text = run([*ssh, host, command], 2 * limit_s, source)
    node, why = None, text
    if done:
        try:
            node = node_facts(json.loads(text.splitlines()[-1]))
        except (ValueError, IndexError, KeyError, TypeError):
            why = f"{sys.executable} printed {text[-200:]!r}"
    return RemoteFacts("", node, why if node is None else "", skew, after - before)


def _remote(hosts: Sequence[str], limit_s: float, ssh_port: int | None) -> dict[str, RemoteFacts]:
    if shutil.which("ssh") is None:
        return {}
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return dict(zip(hosts, pool.map(lambda host: remote_facts(host, limit_s, ssh_port), hosts), strict=True))


def _torch(limit_s: float) -> dict[str, Any]:
    """In a process of its own: a driver that hangs must not hang us, and importing torch takes seconds."""
    done, text = run([sys.executable, "-c", _TORCH], max(60.0, limit_s))
    return dict(json.loads(text.splitlines()[-1])) if done else {}


def _topology(limit_s: float) -> tuple[str, ...]:
    done, text = run(["nvidia-smi", "topo", "-m"], limit_s)
    plain = [line.replace("\x1b[4m", "").replace("\x1b[0m", "").strip() for line in text.splitlines()] if done else []
    rows = [line.split() for line in plain if line.startswith("GPU") and not line.startswith("GPU0\tGPU1")]
    return tuple(" ".join([row[0], *row[1 : len(rows) + 1]]) for row in rows if len(rows) > 1 and len(row) > len(rows))


def _ports(first: int) -> dict[int, bool]:
    found = {first: False}
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(("", first))
            server.listen()
            found[first] = True
        except (OSError, OverflowError):
            pass
    held = []
    try:
        for _ in range(_PORTS_AT_ONCE):
            held.append(socket.create_server(("", 0)))
            found[held[-1].getsockname()[1]] = True
    except OSError:
        found[0] = False
    finally:
        for server in held:
            server.close()
    return found


def _master_port() -> int:
    value = os.environ.get("MASTER_PORT", "")
    return int(value) if value.isdecimal() else DEFAULT_PORT


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
