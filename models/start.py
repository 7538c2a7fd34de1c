"""Start of a training script: command line, DeepSpeed JSON, ranks, the record of the run.

The record lies beside what a run writes::

    OUTPUT/run/ds_config.json    the DeepSpeed JSON as it was read
    OUTPUT/run/commands.log      one line per start: when, and the command line; a resumed run adds one
    OUTPUT/run/hostfile          hosts and their ranks, as the launcher reads it
    OUTPUT/run/versions.json     Python and the packages that matter

Logs per rank are the launcher's: ``deepspeed --enable_each_rank_log OUTPUT/logs``.
"""

import argparse
import contextlib
import io
import json
import logging
import os
import platform
import shlex
import socket
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, NoReturn, TextIO, TypeVar

import deepspeed
from deepspeed.utils import logger as deepspeed_logger
from torch import distributed

from ds_vpipe.engine.links.groups import check_local_device, use_local_device
from ds_vpipe.engine.reduction_buffers import unnamed_buffers
from ds_vpipe.errors import VPipeConfigError, VPipeError, one_line
from ds_vpipe.extension_builds import extension_builds
from ds_vpipe.run_record import PACKAGES, package_version

START_LIMIT_S = 900.0  # of ranks for each other: one may have to collect and tokenise its text

_OWN = "ds_vpipe: "  # begins what this package prints and warns of

Result = TypeVar("Result")


class Parser(argparse.ArgumentParser):
    """Parser that raises mistakes: each rank prints one line, not the usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse with dashes and underscores in names alike."""
        known = {name.replace("-", "_"): name for action in self._actions for name in action.option_strings}

        def as_registered(word: str) -> str:
            name, equals, value = word.partition("=")
            return known.get(name.replace("-", "_"), name) + equals + value if word.startswith("--") else word

        words = sys.argv[1:] if args is None else args
        return super().parse_known_args([as_registered(word) for word in words], namespace)

    def error(self, message: str) -> NoReturn:
        """Raise what is wrong with the command line."""
        raise VPipeConfigError(f"{message}; see --help")


def exit_code(run: Callable[[], None], who: str = "") -> int:
    """Do the work of ``who``. Returns 2 after a wrong configuration or command line, 1 after another error, else 0."""
    try:
        run()
    except VPipeError as error:
        print(f"{who}error: {error}", file=sys.stderr, flush=True)
        return 2 if isinstance(error, VPipeConfigError) else 1
    return 0


def start_process_group() -> tuple[int, int]:
    """Join the other ranks. Returns this rank's number and how many there are.

    Raises:
        VPipeConfigError: nobody has said which rank this is.
    """
    if "RANK" not in os.environ:
        raise VPipeConfigError(
            "RANK is not set: start with a launcher, e.g. deepspeed --num_accelerators 4 train.py ..."
        )
    check_local_device()
    with silence(), extension_builds(), unnamed_buffers():
        deepspeed.init_distributed(timeout=timedelta(seconds=START_LIMIT_S))
    use_local_device()
    rank, world = distributed.get_rank(), distributed.get_world_size()
    backend = distributed.get_backend()
    print(f"Finished initializing process group; backend: {backend}, rank: {rank}, world_size: {world}", flush=True)
    return rank, world


def on_all_ranks(what: str, work: Callable[[], Result]) -> list[Result]:
    """Results of `work` on every rank. All ranks call this, and an error of one ends all with its message.

    Raises:
        VPipeConfigError: the work failed on a rank, or a rank did not finish it in time.
    """
    rank, limit = distributed.get_rank(), timedelta(seconds=START_LIMIT_S)
    outcomes: list[Any] = [None] * distributed.get_world_size()
    # Over gloo, whatever training uses: this waits for files, and for no device.
    group = distributed.new_group(backend="gloo", timeout=limit)
    result, error = None, None
    try:
        result = work()
    except Exception as caught:  # the others would wait for this rank
        error = str(caught) if isinstance(caught, VPipeError) else f"failed to {what}: {one_line(caught)}"
        if not isinstance(caught, VPipeError | OSError):  # a defect
            traceback.print_exc()
    try:
        # The first rank learns who is missing; this does not take its limit from the group.
        distributed.monitored_barrier(group, limit, wait_all_ranks=True)
        distributed.all_gather_object(outcomes, (error, result), group=group)
    except RuntimeError as failure:
        reason = " ".join(str(failure).split())
        raise VPipeConfigError(
            f"waited up to {START_LIMIT_S:.0f} s for all ranks to {what} ({reason}): see the output of the missing"
            " ones; prepare large texts with python -m ds_vpipe.models.bert.prepare"
        ) from failure
    distributed.destroy_process_group(group)
    for number, (reason, _) in enumerate(outcomes):
        if reason is not None:
            raise VPipeConfigError(reason if number == rank else f"rank {number}: {reason}")
    return [result for _, result in outcomes]


def record_run(output: Path, ds_config: Mapping[str, Any]) -> None:
    """Let the first rank write what the run is, with the host of every rank. All ranks call this.

    Raises:
        VPipeConfigError: on every rank: the folder cannot be written to.
    """
    hosts = on_all_ranks("name their hosts", socket.gethostname)

    def write() -> None:
        try:
            if distributed.get_rank() == 0:
                write_run_record(output, ds_config, sys.argv, hosts)
        except OSError as error:
            raise VPipeConfigError(
                f"--output_dir {output}: {error.strerror} ({error.filename}); give a folder that can be written to"
            ) from error

    on_all_ranks("record the run", write)


def write_run_record(output: Path, ds_config: Mapping[str, Any], command: Sequence[str], hosts: Sequence[str]) -> None:
    """Write the record of a run on ``hosts``, one per rank. An earlier one is replaced, but for its commands."""
    folder = output / "run"
    folder.mkdir(parents=True, exist_ok=True)
    versions = {"python": platform.python_version(), "platform": platform.platform()}
    versions |= {package: package_version(package) for package in PACKAGES}
    for name, content in (("ds_config.json", ds_config), ("versions.json", versions)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    slots = Counter(hosts)  # keeps the order in which hosts first come
    (folder / "hostfile").write_text("".join(f"{host} slots={n}\n" for host, n in slots.items()), encoding="utf-8")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    with (folder / "commands.log").open("a", encoding="utf-8") as file:
        file.write(f"{now} {shlex.join(command)}\n")


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Keep back what DeepSpeed prints and warns of while it starts: every layer, and a scheduler not yet stepped."""
    deepspeed_logger.setLevel(logging.WARNING)
    deepspeed_logger.addFilter(_is_shown)
    try:
        with contextlib.redirect_stdout(_OwnLines(sys.stdout)):
            yield
    finally:
        deepspeed_logger.removeFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR or record.getMessage().startswith(_OWN)


class _OwnLines(io.StringIO):
    """Stream that keeps back all but what ds_vpipe prints, a call of ``print()`` at a time."""

    def __init__(self, shown: TextIO) -> None:
        super().__init__()
        self._shown = shown

    def write(self, text: str) -> int:
        if text.startswith(_OWN):
            print(text, file=self._shown, flush=True)
        return len(text)
