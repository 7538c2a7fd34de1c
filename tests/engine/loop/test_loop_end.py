"""The end of a looping script, without any explicit call: what was handed in is trained, and nobody hangs."""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import cases
import loops
import pytest
import toy
from forked import Forked
from worlds import Worlds, free_port

pytestmark = pytest.mark.mp

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
    if end == "fail" and rank == 0:

        def refuse(gradient):
            if Path("loop0.json").exists():
                raise ValueError("bad gradient")

        next(engine.module.parameters()).register_hook(refuse)
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


def run(forked: Forked, folder: Path, end: str) -> list[subprocess.CompletedProcess[str]]:
    (folder / "train.py").write_text(SCRIPT)
    world = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    line = ["-m", "ds_vpipe.run", "train.py", end]
    return forked.run(folder, [(line, {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)])


def updates(folder: Path, name: str) -> list[int]:
    return [json.loads((folder / f"{name}{rank}.json").read_text())["updates"] for rank in range(2)]


def trained_around_a_fork(loop: bool, forks: bool) -> list[float]:
    """Losses of a run, before and after a child that it has forked ends as ``sys.exit()`` does."""
    ds_config = cases.config(2, {"type": "SGD", "params": {"lr": 0.1}}, {"link": "host", "peer_timeout_s": 20})
    trained = (loops if loop else cases).engine(ds_config, 2)
    losses, iterator = [], toy.data()
    for number in range(8):
        if number == 5 and forks:
            child = os.fork()
            if not child:
                try:
                    atexit._run_exitfuncs()
                finally:
                    trained.__del__()
                    os._exit(0)
            deadline = time.monotonic() + 30
            while os.waitpid(child, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline:
                    os.kill(child, signal.SIGKILL)
                    deadline = float("inf")
                time.sleep(0.01)
            assert deadline < float("inf"), "the child hangs"
        if loop:
            loss = trained(*toy.micro_batch(number))
            trained.backward(loss)
            trained.step()
        else:
            loss = trained.train_batch(iterator)
        losses.append(float(loss))
    trained.destroy()
    return losses


@pytest.mark.parametrize("loop", [False, True])
def test_a_forked_child_that_ends_leaves_the_links_alone(worlds: Worlds, loop: bool) -> None:
    """It has no part in the pipeline: neither are its graphs trained, nor do others receive what it would say."""
    assert worlds.run(2, trained_around_a_fork, loop, True) == worlds.run(2, trained_around_a_fork, loop, False)


def test_everything_handed_in_is_trained(forked: Forked, tmp_path: Path) -> None:
    """The last stage has ended its third batch in the last round, the first stage would in the next one."""
    for done in run(forked, tmp_path, "return"):
        assert done.returncode == 0, done.stdout
    assert updates(tmp_path, "loop") == [2, 3]
    assert updates(tmp_path, "end") == [3, 3]


def test_process_group_that_is_destroyed_before(forked: Forked, tmp_path: Path) -> None:
    for done in run(forked, tmp_path, "destroyed"):
        assert done.returncode == 0, done.stdout
        assert "destroyed with micro-batches in flight" in done.stdout
        assert "call engine.destroy() before" in done.stdout


def test_last_micro_batches_that_fail(forked: Forked, tmp_path: Path) -> None:
    """Those that are trained after the script's last line; its exit status says so. The last stage has none left."""
    first, _ = run(forked, tmp_path, "fail")
    assert first.returncode == 1, first.stdout
    assert "ValueError: bad gradient" in first.stdout


def test_script_that_raises_on_one_rank(forked: Forked, tmp_path: Path) -> None:
    """Between its calls, where no stage can know. The other rank says what has happened, and nobody waits."""
    first, second = run(forked, tmp_path, "raise")
    assert second.returncode == 1
    assert "ValueError: boom" in second.stdout
    assert first.returncode == 1
    assert "stage 1 (rank 1) failed in the script: ValueError: boom" in first.stdout
