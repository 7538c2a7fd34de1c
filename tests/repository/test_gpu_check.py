"""The check for GPUs does the same on the CPU, says where there is no GPU, and one failing step stops no other."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def gpu_check(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command, given = [str(ROOT / "scripts" / "gpu_check.sh"), *words], {"PYTHON": sys.executable, **environment}
    return subprocess.run(command, env={**os.environ, **given}, capture_output=True, text=True, timeout=900)


@pytest.mark.mp
def test_a_rehearsal() -> None:
    done = gpu_check("--cpu", "tests", "bert-2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"### tests\n\n.*1 passed", done.stdout, re.DOTALL)
    rows = dict(re.findall(r"^\| (\w[\w, ]+) \| [\d.]+ \|.*\| ([\d.]+) \|$", done.stdout, re.MULTILINE))
    assert rows.keys() == {"stock", "bsp", "asp", "asp, recomputing", "asp, swapping"}
    assert rows["bsp"] == rows["stock"], "losses after the same batches"
    assert rows["asp"] == rows["asp, recomputing"] == rows["asp, swapping"] != rows["bsp"]
    assert "all steps are well: tests bert-2" in done.stdout


@pytest.mark.mp
def test_a_step_that_fails_stops_no_other() -> None:
    done = gpu_check("--cpu", "bert-2", "gpt2-2", LIMIT_S="0.01")
    assert done.returncode == 1
    assert "### gpt2-2" in done.stdout
    assert "failed: bert-2 gpt2-2" in done.stdout


def test_a_step_that_is_none() -> None:
    done = gpu_check("--cpu", "bert")
    assert done.returncode == 1
    assert (
        done.stderr
        == "gpu_check: got the step bert; allowed are tests, exactness, bert-K, gpt2-K and mps-K, such as bert-2\n"
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    done = gpu_check()
    assert done.returncode == 2
    assert done.stdout == "gpu_check: no GPU was at hand, nothing was run\n"
