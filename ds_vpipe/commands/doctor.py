"""Findings about this machine, and with --hostfile over ssh about every host.

Looked at are versions of Python and packages, communication backends, GPUs and what is between them, the wrong apex,
OMP_NUM_THREADS, /dev/shm, limits, compiler, the port, network interfaces, .deepspeed_env, ssh, pdsh, clocks. Every
finding is one line, ok, warning or error, with its remedy.

examples:
  python -m ds_vpipe doctor
  python -m ds_vpipe doctor --hostfile hostfile
  python -m ds_vpipe doctor --hostfile hostfile --limit 3 --json

exit status: 0 no error, 1 at least one error, 2 the hostfile cannot be read
"""

import argparse
from dataclasses import asdict
from pathlib import Path

from ds_vpipe.commands.argument_types import checked, port
from ds_vpipe.commands.arguments import Answer
from ds_vpipe.doctor.checks import diagnose
from ds_vpipe.doctor.gather import gather

_limit = checked(float, lambda value: 0 < value <= 600, "seconds, up to 600")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hostfile", type=Path, metavar="FILE", help="DeepSpeed's hostfile")
    parser.add_argument("--port", type=port, metavar="N", help="where ranks will meet; default MASTER_PORT or 29500")
    parser.add_argument("--ssh-port", type=port, metavar="N", help="of the hosts, as the launcher's --ssh_port")
    parser.add_argument("--limit", type=_limit, default=10.0, metavar="S", help="seconds per command; default 10")
    parser.add_argument("--problems", action="store_true", help="leave out what is ok")


def run(arguments: argparse.Namespace) -> Answer:
    findings = diagnose(gather(arguments.hostfile, arguments.limit, arguments.port, arguments.ssh_port))
    counts = {level: sum(found.level == level for found in findings) for level in ("ok", "warning", "error")}
    shown = [found for found in findings if not arguments.problems or found.level != "ok"]
    total = f"{counts['ok']} ok, {counts['warning']} warning(s), {counts['error']} error(s)"
    return Answer(
        data=lambda: {**counts, "findings": [asdict(found) for found in shown]},
        text=lambda: "\n".join([*map(str, shown), total]),
        status=1 if counts["error"] else 0,
    )
