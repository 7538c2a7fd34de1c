"""The end of a looping script, without any explicit call: what was handed in is trained, and nobody hangs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from worlds import free_port

pytestmark = pytest.mark.mp

TESTS = Path(__file__).resolve().parents[2]

SCRIPT = """
import atexit, json, os, sys
from pathlib import Path

import cases, loops, toy

end = sys.argv[1]
rank = int(os.environ["RANK"])
import deepspeed
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # nothing is built for this
deepspeed.init_distributed(dist_backend="gloo")


def report(name, **values):
    Path(f"{name}{rank}.json").write_text(json.dumps(values))


def train():
    config = cases.config(2, {"type": "SGD", "params": {"lr": 0.1}}, {"peer_timeout_s": 60})
    engine = loops.engine(config, 2)
    versions = engine.stashing_optimizer
    atexit.register(lambda: report("end", updates=versions.latest_version))  # runs after what the engine registers
    for number in range(6):
        loss = engine(*toy.micro_batch(number))
        engine.backward(loss)
        if number == 3 and end == "raise" and rank == 1:
            raise ValueError("boom")
        engine.step()
    report("loop", updates=versions.latest_version, steps=engine.global_steps)
    if end == "destroyed":
        import torch
        torch.distributed.destroy_process_group()


train()
"""


def run(folder: Path, end: str) -> list[subprocess.CompletedProcess[str]]:
    script, port = folder / "train.py", free_port()
    script.write_text(SCRIPT)
    processes = []
    for rank in range(2):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(TESTS / "support"), str(TESTS.parent)]),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "ds_vpipe.run", str(script), end],
                cwd=folder,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    done = []
    try:
        for process in processes:
            output, _ = process.communicate(timeout=400)
            done.append(subprocess.CompletedProcess(process.args, process.returncode, output))
    finally:
        for process in processes:
            process.kill()
    return done


def updates(folder: Path, name: str) -> list[int]:
    return [json.loads((folder / f"{name}{rank}.json").read_text())["updates"] for rank in range(2)]


def test_everything_handed_in_is_trained(tmp_path: Path) -> None:
    """The last stage has ended its third batch in the last round, the first stage would in the next one."""
    for done in run(tmp_path, "return"):
        assert done.returncode == 0, done.stdout
    assert updates(tmp_path, "loop") == [2, 3]
    assert updates(tmp_path, "end") == [3, 3]


def test_process_group_that_is_destroyed_before(tmp_path: Path) -> None:
    for done in run(tmp_path, "destroyed"):
        assert done.returncode == 0, done.stdout
        assert "destroyed with micro-batches in flight" in done.stdout
        assert "call engine.destroy() before" in done.stdout


def test_script_that_raises_on_one_rank(tmp_path: Path) -> None:
    """Between its calls, where no stage can know. The other rank says what has happened, and nobody waits."""
    first, second = run(tmp_path, "raise")
    assert second.returncode == 1
    assert "ValueError: boom" in second.stdout
    assert first.returncode == 1
    assert "stage 1 (rank 1) failed in the script: ValueError: boom" in first.stdout
