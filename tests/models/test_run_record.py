"""The record of a run says how to do it again."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import torch

from ds_vpipe.models.start import write_run_record


def test_a_record_and_a_resumed_run(tmp_path: Path) -> None:
    config = {"train_batch_size": 8, "vpipe": {"partition": [1, 2]}}
    command = ["train.py", "--text", "a file.txt"]
    write_run_record(tmp_path / "run1", config, command, ["b", "b", "a", "a"])
    write_run_record(tmp_path / "run1", config, [*command, "--resume"], ["b", "b", "a", "a"])
    folder = tmp_path / "run1" / "run"
    assert json.loads((folder / "ds_config.json").read_text()) == config
    assert (folder / "hostfile").read_text() == "b slots=2\na slots=2\n"
    first, second = (line.split(" ", 1)[1] for line in (folder / "commands.log").read_text().splitlines())
    assert (shlex.split(first), shlex.split(second)) == (command, [*command, "--resume"])
    versions = json.loads((folder / "versions.json").read_text())
    assert torch.__version__.startswith(versions["torch"])  # which may have a build behind it
    assert versions["python"].startswith("3.")
