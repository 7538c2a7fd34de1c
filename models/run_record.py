"""What a run was: configuration, command line, hosts and versions, kept beside what it wrote.

::

    OUTPUT/run/ds_config.json    the DeepSpeed JSON as it was read
    OUTPUT/run/commands.log      one line per start: when, and the command line; a resumed run adds one
    OUTPUT/run/hostfile          hosts and their ranks, as the launcher reads it
    OUTPUT/run/versions.json     Python and the packages that matter

Logs per rank are the launcher's: ``deepspeed --enable_each_rank_log OUTPUT/logs``.
"""

from __future__ import annotations

import json
import platform
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("ds_vpipe", "deepspeed", "torch", "transformers", "tokenizers", "numpy", "h5py", "safetensors")


def write_run_record(output: Path, ds_config: Mapping[str, Any], command: Sequence[str], hosts: Sequence[str]) -> None:
    """Write the record below ``output``; an earlier one of the same folder is replaced, but for its commands.

    Args:
        output: the folder of the run; made if missing.
        ds_config: what the JSON says.
        command: ``sys.argv``.
        hosts: name of the host of every rank, in order.
    """
    folder = output / "run"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "ds_config.json").write_text(json.dumps(ds_config, indent=2) + "\n", encoding="utf-8")
    slots = Counter(hosts)  # keeps the order in which hosts first come
    (folder / "hostfile").write_text("".join(f"{host} slots={n}\n" for host, n in slots.items()), encoding="utf-8")
    (folder / "versions.json").write_text(json.dumps(_versions(), indent=2) + "\n", encoding="utf-8")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with (folder / "commands.log").open("a", encoding="utf-8") as file:
        file.write(f"{now} {shlex.join(command)}\n")


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # a checkout that is not installed
            found[package] = None
    return found
