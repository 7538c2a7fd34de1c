"""The Slurm scripts, with stand-ins for Slurm's own commands that start everything here."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 240
# Two nodes: srun starts a task on each of them, or as many as SLURM_NTASKS says, and waits for all.
SRUN = """#!/usr/bin/env bash
while [[ $1 == --* ]]; do shift; done
tasks=()
for ((task = 0; task < SLURM_NTASKS; task++)); do
    per_node=$((SLURM_NTASKS / SLURM_NNODES))
    SLURM_PROCID=$task SLURM_LOCALID=$((task % per_node)) SLURM_NODEID=$((task / per_node)) "$@" &
    tasks+=($!)
done
status=0
for task in "${tasks[@]}"; do wait "$task" || status=$?; done
exit "$status"
"""
SCONTROL = '#!/bin/sh\n[ "$*" = "show hostnames node[0-1]" ] && printf "127.0.0.1\\n127.0.0.2\\n"\n'


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """What Slurm tells a job of two nodes with a rank each."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text, encoding="utf-8")
        (commands / name).chmod(0o755)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    config = json.loads((ROOT / "ds_configs" / "bert_tiny_cpu.json").read_text(encoding="utf-8"))
    config["vpipe"] |= {"partition": "uniform", "recompute_ratio": 0}  # for any number of ranks
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": str(ROOT),
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "SLURM_SUBMIT_DIR": str(tmp_path / "repository"),
        "SLURM_JOB_ID": str(port - 20000),
        "SLURM_JOB_NODELIST": "node[0-1]",
        "SLURM_NNODES": "2",
        "SLURM_NTASKS": "2",
        "SLOTS": "1",
        "CONFIG": str(tmp_path / "config.json"),
    }


@pytest.mark.mp
def test_a_job_with_a_launcher_on_every_node(tmp_path: Path, environment: dict[str, str]) -> None:
    repository = tmp_path / "repository"  # a job's outputs go below the folder that it was submitted from
    repository.mkdir()
    (repository / "models").symlink_to(ROOT / "models")
    command = ["bash", str(ROOT / "scripts" / "bert.sbatch"), "--synthetic", "--max_steps", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    folder = repository / "runs" / f"slurm-{environment['SLURM_JOB_ID']}"
    logs = sorted((folder / "logs").glob("*_rank*.log")) if folder.exists() else []
    text = "\n".join(log.read_text(encoding="utf-8") for log in logs)
    assert done.returncode == 0, done.stdout + done.stderr + text
    assert (folder / "hostfile").read_text(encoding="utf-8") == "127.0.0.1 slots=1\n127.0.0.2 slots=1\n"
    assert len(logs) == 2
    assert "Finished 2 updates" in text
    assert (folder / "metrics.jsonl").is_file()


def test_arguments_with_blanks_stay_whole(tmp_path: Path, environment: dict[str, str]) -> None:
    """From sbatch to the launcher on each node; a stand-in prints what it gets."""
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "models").symlink_to(ROOT / "models")
    (tmp_path / "bin" / "deepspeed").write_text('#!/bin/sh\nprintf "<%s>" "$@" >"$SLURM_NODEID.got"\n')
    (tmp_path / "bin" / "deepspeed").chmod(0o755)
    command = ["bash", str(ROOT / "scripts" / "bert.sbatch"), "--data_dir", "two words", "$(id) *"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for node in range(2):
        got = (tmp_path / "repository" / f"{node}.got").read_text()
        assert f"<--node_rank><{node}>" in got
        assert got.endswith("<--data_dir><two words><$(id) *>")


@pytest.mark.mp
def test_a_step_without_a_launcher(tmp_path: Path, environment: dict[str, str]) -> None:
    step = ["srun", "--ntasks-per-node=1", str(ROOT / "scripts" / "slurm_rank.sh"), str(ROOT / "models/bert/train.py")]
    arguments = [
        "--deepspeed_config",
        environment["CONFIG"],
        "--synthetic",
        "--max_steps",
        "2",
        "--output_dir",
        str(tmp_path),
    ]
    environment = {**environment, "SLURM_NTASKS_PER_NODE": "1"}
    done = subprocess.run([*step, *arguments], env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Finished 2 updates" in done.stdout


@pytest.mark.parametrize(
    ("visible", "number"), [(None, "3"), ("0,1,2,3", "3"), ("0", "0"), ("MIG-8a1b", "0"), ("-1", "3")]
)
def test_a_task_that_sees_one_gpu(environment: dict[str, str], visible: str | None, number: str) -> None:
    """As number 0, whatever its number on the host."""
    task = {**environment, "SLURM_PROCID": "7", "SLURM_LOCALID": "3", "SLURM_NTASKS": "8", "MASTER_ADDR": "127.0.0.1"}
    task.pop("CUDA_VISIBLE_DEVICES", None)
    task |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    code = "import os; print(os.environ['RANK'], os.environ['LOCAL_RANK'])"
    command = ["bash", str(ROOT / "scripts" / "slurm_rank.sh"), "-c", code]
    done = subprocess.run(command, env=task, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.split() == ["7", number], done.stderr


def test_the_interpreter_may_be_a_name(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "bin" / "python3.job").write_text('#!/bin/sh\necho "python3.job $*"\n')
    (tmp_path / "bin" / "python3.job").chmod(0o755)
    task = {**environment, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "PYTHON": "python3.job"}
    command = ["bash", str(ROOT / "scripts" / "slurm_rank.sh"), "train.py"]
    done = subprocess.run(command, env=task, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == "python3.job -u train.py\n", done.stderr


def test_what_is_missing_is_said(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "repository").mkdir()
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "bert.sbatch")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr == f"bert.sbatch: {tmp_path / 'repository'} is not the root of the repository\n"
    without = {name: value for name, value in environment.items() if not name.startswith("SLURM")}
    for script, line in (("bert.sbatch", "start this with sbatch"), ("slurm_rank.sh", "start this with srun")):
        done = subprocess.run(["bash", str(ROOT / "scripts" / script)], env=without, capture_output=True, text=True)
        assert done.returncode != 0
        assert line in done.stderr
