"""The README's first command, for seconds and on random tokens."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.mp
def test_the_demo(tmp_path: Path) -> None:
    words = ["--seconds", "1", "--synthetic", "--output_dir", str(tmp_path / "run")]
    done = subprocess.run([str(ROOT / "scripts" / "demo.sh"), *words], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warn" not in (done.stdout + done.stderr).lower()
    assert re.search(r"^ *DeepSpeed +\d.*\n *ds_vpipe +\d", done.stdout, re.MULTILINE)
    assert re.search(r"^ds_vpipe trains \d\.\d\d times as many micro-batches per second", done.stdout, re.MULTILINE)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"loss.png", "report.html", "timelines"}
    report = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "recording: DeepSpeed's schedule" in report.replace("&#x27;", "'")
    assert "recording: ds_vpipe" in report
    assert re.search(r"<td>replan at update 2\d: \[[\d, ]+\] ", report)  # layers have moved, or it was not worth it


def stand_in(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_folders_are_relative_to_the_callers(tmp_path: Path) -> None:
    scripts = tmp_path / "repository" / "scripts"
    stand_in(scripts / "setup_env.sh", "exit 0")
    stand_in(scripts.parent / ".venv" / "bin" / "deepspeed", 'pwd; echo "$*"')
    demo = shutil.copy(ROOT / "scripts" / "demo.sh", scripts)
    done = subprocess.run([demo, "--output_dir", "out"], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    where, given = done.stdout.splitlines()[1:]
    assert where == str(tmp_path), done.stderr
    assert given.endswith(f"{scripts / 'demo.py'} --output_dir out")


def test_an_environment_without_pip_is_made_again(tmp_path: Path) -> None:
    """A setup that was ended in the middle leaves one."""
    (tmp_path / "scripts").mkdir()
    setup = shutil.copy(ROOT / "scripts" / "setup_env.sh", tmp_path / "scripts")
    for name in ("constraints.txt", "setup.py"):
        shutil.copy(ROOT / name, tmp_path)
    stand_in(tmp_path / ".venv" / "bin" / "python", "exit 1")
    python = stand_in(tmp_path / "python", 'echo "$*" >>made; [ "$2" != venv ] || exit 7')
    done = subprocess.run([setup], env={**os.environ, "PYTHON": str(python)}, capture_output=True, timeout=60)
    assert done.returncode == 7, done.stderr
    assert (tmp_path / "made").read_text().splitlines()[-1] == "-m venv .venv"


def test_when_a_loss_comes_down_to_a_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    demo = importlib.import_module("demo")
    run = demo.Run("", None, None, None, losses=[(0.0, 8.0), (3.0, 4.0), (5.0, 6.0), (7.0, 2.0)])
    assert [run.reaches(level) for level in (6.0, 4.0, 3.0, 1.0)] == [1.5, 3.0, 6.5, None]
