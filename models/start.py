"""How training scripts start: arguments, the DeepSpeed JSON, ranks, the record of the run, DeepSpeed kept silent.

The record lies beside what a run writes::

    OUTPUT/run/ds_config.json    the DeepSpeed JSON as it was read
    OUTPUT/run/commands.log      one line per start: when, and the command line; a resumed run adds one
    OUTPUT/run/hostfile          hosts and their ranks, as the launcher reads it
    OUTPUT/run/versions.json     Python and the packages that matter

Logs per rank are the launcher's: ``deepspeed --enable_each_rank_log OUTPUT/logs``.
"""

import contextlib
import io
import json
import logging
import os
import platform
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.utils import logger as deepspeed_logger
from torch import distributed

from ds_vpipe.engine.build import use_local_device
from ds_vpipe.engine.reduction_buffers import unnamed_buffers
from ds_vpipe.errors import VPipeConfigError, VPipeError
from ds_vpipe.extension_builds import extension_builds
from ds_vpipe.models.command_line import Parser

# Of ranks for each other until training starts: one may have to collect and tokenise its text.
START_LIMIT = timedelta(minutes=15)
_PACKAGES = ("ds_vpipe", "deepspeed", "torch", "transformers", "tokenizers", "numpy", "h5py", "safetensors")


def training_parser(description: str) -> Parser:
    """A parser of what every training script has: DeepSpeed's own arguments and what its launcher adds."""
    parser = Parser(description=description, allow_abbrev=False)
    deepspeed.add_config_arguments(parser)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the deepspeed launcher")
    return parser


def exit_code(run: Callable[[], None]) -> int:
    """Do a script's work; 2 after an error that its message explains, on any rank, else 0."""
    try:
        run()
    except VPipeError as error:
        print(f"[Rank {os.environ.get('RANK', '0')}] error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def read_ds_config(path: str) -> dict[str, Any]:
    """The DeepSpeed JSON at `path`.

    Raises:
        VPipeConfigError: there is no such file, or it is not a JSON object.
    """
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise VPipeConfigError(
            f"--deepspeed_config {path}: {error.strerror}; give an existing DeepSpeed JSON file"
        ) from error
    except ValueError as error:
        raise VPipeConfigError(f"--deepspeed_config {path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise VPipeConfigError(f"--deepspeed_config {path}: must hold a JSON object, not a {type(content).__name__}")
    return content


def start_process_group() -> tuple[int, int]:
    """Join the other ranks; returns this rank's number and how many there are.

    Raises:
        VPipeConfigError: nobody has said which rank this is.
    """
    if "RANK" not in os.environ:
        raise VPipeConfigError(
            "RANK is not set: start with a launcher, e.g. deepspeed --num_accelerators 4 train.py ..."
        )
    with silence(), extension_builds(), unnamed_buffers():
        deepspeed.init_distributed(timeout=START_LIMIT)
    use_local_device()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    print(
        f"Finished initializing process group; backend: {distributed.get_backend()}, rank: {rank}, world_size: {world}",
        flush=True,
    )
    return rank, world


def record_run(output: Path, ds_config: Mapping[str, Any]) -> None:
    """Let the first rank write what the run is, with the host of every rank; all ranks call this.

    Raises:
        VPipeConfigError: on every rank: the folder cannot be written to.
    """
    rank = distributed.get_rank()
    names = [""] * distributed.get_world_size()
    distributed.all_gather_object(names, socket.gethostname())
    failure: list[str | None] = [None]
    if rank == 0:
        try:
            write_run_record(output, ds_config, sys.argv, names)
        except OSError as error:
            failure[0] = (
                f"--output_dir {output}: {error.strerror} ({error.filename}); give a folder that can be written to"
            )
    distributed.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise VPipeConfigError(failure[0] if rank == 0 else f"rank 0: {failure[0]}")


def write_run_record(output: Path, ds_config: Mapping[str, Any], command: Sequence[str], hosts: Sequence[str]) -> None:
    """Write the record of a run; an earlier one of the same folder is replaced, but for its commands.

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


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep back what DeepSpeed prints and warns of while it starts: every layer, and a scheduler not yet stepped."""
    deepspeed_logger.setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        deepspeed_logger.setLevel(logging.WARNING)
