"""Commands of the ``deepspeed`` launcher, without the launcher."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import os
import runpy
import sys
from pathlib import Path

from deepspeed.launcher.runner import parse_args
from worlds import Worlds


def launched(folder: Path, words: list[str], **environment: str) -> str:
    """What the ranks of a command print, in processes that have imported everything, which is most of what it takes.

    Args:
        folder: where the command is given.
        words: those after ``deepspeed``.
        environment: what the ranks find in their environment besides.
    """
    asked = parse_args(words)
    line = [asked.user_script, *asked.user_args]
    with contextlib.closing(Worlds()) as worlds:
        return "".join(worlds.run(asked.num_gpus, run_on_rank, folder, line, asked.module, environment))


def run_on_rank(folder: Path, line: list[str], as_module: bool, environment: dict[str, str]) -> str:
    """The script, or ``ds_vpipe.run`` with it, on a rank of a fresh world, which has its process group already."""
    import ds_vpipe.run

    os.chdir(folder)
    os.environ.update(environment)
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # data loaders have workers
    name, *arguments = line
    arguments.insert(0, f"--local_rank={os.environ['LOCAL_RANK']}")
    status: object = 0
    with contextlib.redirect_stdout(io.StringIO()) as output:
        try:
            if as_module:
                assert name == "ds_vpipe.run"
                status = ds_vpipe.run.main(arguments)
            else:
                sys.argv, sys.path[0] = [name, *arguments], str(Path(name).resolve().parent)
                runpy.run_path(name, run_name="__main__")
        except SystemExit as end:
            status = end.code
    assert not status, f"exit status {status}: {output.getvalue()[-4000:]}"
    return output.getvalue()
