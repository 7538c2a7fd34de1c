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
    assert rows.keys() == {"stock", "bsp", "asp", "asp, recomputing", "asp, swapping", "asp, gloo"}
    assert rows["bsp"] == rows["stock"], "losses after the same batches"
    assert len({loss for arm, loss in rows.items() if arm.startswith("asp")}) == 1
    assert rows["asp"] != rows["bsp"]
    assert "| asp, swapping | 0.00 0.00 | 0% 0% | 0.00 0.00 | 0% 0% | 0.00 0.00 |" in done.stdout  # traced
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
        done.stderr == "gpu_check: got the step bert; allowed are tests, exactness, bert-K and gpt2-K, such as bert-2\n"
    )


def test_a_step_that_needs_a_gpu() -> None:
    done = gpu_check("--cpu", "exactness")
    assert done.returncode == 1
    assert done.stderr.endswith("allowed are the others; it needs a GPU\n")


@pytest.mark.parametrize(("stages", "share", "connections"), [(2, 50, 32), (4, 25, 16)])
@pytest.mark.parametrize("status", [0, 3])
def test_ranks_that_share_a_gpu(tmp_path: Path, stages: int, share: int, connections: int, status: int) -> None:
    """With stand-ins for an interpreter that knows one GPU, and for the service."""
    python, service = tmp_path / "python", tmp_path / "nvidia-cuda-mps-control"
    python.write_text(
        f"""#!/bin/sh
        case "$*" in
            *print*) echo 1 ;;
            *device.py*)
                env | grep -E "^CUDA_(MPS|DEV)" | sort
                for word in "$@"; do echo "<$word>"; done
                exit {status} ;;
        esac
        """
    )
    service.write_text(
        f"""#!/bin/sh
        if [ "$1" = -d ]; then echo begun; else cat; fi >> {tmp_path}/service
        """
    )
    for file in (python, service):
        file.chmod(0o755)
    path, step = f"{tmp_path}:{os.environ['PATH']}", f"bert-{stages}"
    done = gpu_check(step, PYTHON=str(python), PATH=path, TMPDIR=str(tmp_path), CUDA_MPS_LOG_DIRECTORY="theirs")
    assert done.returncode == bool(status), done.stdout + done.stderr
    assert f"CUDA_DEVICE_MAX_CONNECTIONS={connections}\nCUDA_MPS_ACTIVE_THREAD_PERCENTAGE={share}\n" in done.stdout
    assert ("<asp, swapping>" in done.stdout) == (stages > 2)  # else all arms, those over NCCL too
    assert (tmp_path / "service").read_text() == "begun\nquit\n"
    assert {file.name for file in tmp_path.iterdir()} == {"python", "nvidia-cuda-mps-control", "service"}


def test_reading_of_a_trace() -> None:
    from device import in_both, reading, union

    assert union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    assert in_both([(0, 4), (5, 7)], [(1, 2), (3, 6), (6.5, 9)]) == 1 + 1 + 1 + 0.5
    assert in_both([(0, 1)], []) == 0

    def event(name: str, begin: int, lasts: int, category: str = "kernel", thread: int = 1) -> dict[str, object]:
        return {"name": name, "cat": category, "ts": begin, "dur": lasts, "tid": thread}

    events = [
        event("gemm", 500, 500),
        event("gemm", 1500, 500),
        event("ncclDevKernel_SendRecv", 0, 9000),
        event("Memcpy DtoH (Device -> Pinned)", 500, 1000, "gpu_memcpy"),
        event("Memcpy HtoD (Pinned -> Device)", 2000, 1000, "gpu_memcpy"),
        event("Memcpy DtoD (Device -> Device)", 0, 9000, "gpu_memcpy"),
        event("cudaLaunchKernelExC", 0, 1, "cuda_runtime"),
        event("cudaStreamSynchronize", 0, 1, "cuda_runtime"),
        event("cudaEventSynchronize", 0, 1, "cuda_runtime", thread=2),  # which launches nothing: it sends
        {"name": "process_name", "ph": "M"},
    ]
    assert reading(events, 2) == (0.5, pytest.approx(2 / 3), 1.0, 0.25, 0.5)
    assert reading([], 2) == (0, 0, 0, 0, 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    done = gpu_check()
    assert done.returncode == 2
    assert done.stdout == "gpu_check: no GPU was at hand, nothing was run\n"
