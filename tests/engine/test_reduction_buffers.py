"""No run leaves the shared memory of DeepSpeed's all-reduce behind, however it ends, and none loses what it uses."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked import Forked
from worlds import free_port

from ds_vpipe.doctor.probe import Claim
from ds_vpipe.engine import reduction_buffers
from ds_vpipe.engine.reduction_buffers import unlink_unused, unnamed_buffers
from ds_vpipe.errors import VPipeError

SCRIPT = """
import os, signal, sys
import deepspeed, torch

rank, name = int(os.environ["RANK"]), f"_{os.environ['MASTER_ADDR']}_{os.environ['MASTER_PORT']}_"

def left():
    return sorted(found for found in os.listdir("/dev/shm") if name in found)

def train():
    model = deepspeed.pipe.PipelineModule([torch.nn.Linear(4, 4)], 1, loss_fn=torch.nn.functional.mse_loss)
    optimizer = {"type": "SGD", "params": {"lr": 0.1}}
    config = {"train_batch_size": 2, "train_micro_batch_size_per_gpu": 1, "optimizer": optimizer, **block}
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=model.parameters())
    engine.train_batch(iter([(torch.ones(1, 4), torch.ones(1, 4))]))
    return type(engine).__name__

block = {}
deepspeed.init_distributed(dist_backend="gloo")
torch.distributed.barrier()
assert left() == [], left()
assert len([line for line in open("/proc/self/maps") if name in line]) == 2, "there are such buffers, and they stay"
assert train() == "PipelineEngine"
block = {"vpipe": {}}
assert train() == "VPipeEngine"
torch.distributed.destroy_process_group()
deepspeed.comm.comm.cdb = None
os.environ["MASTER_PORT"] = sys.argv[1]
deepspeed.init_distributed(dist_backend="gloo")
assert train() == "VPipeEngine"
values = torch.full((8,), rank + 1.0)
deepspeed.comm.inference_all_reduce(values)
assert values.tolist() == [3.0] * 8, values
print("killed", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.mp
def test_a_killed_run_with_replicas(forked: Forked, tmp_path: Path) -> None:
    """Stock engine, ours, and another world in the same processes; the reduction itself works without names."""
    script, port = tmp_path / "train.py", free_port()
    script.write_text(SCRIPT)
    unused = Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_2")
    unused.touch()  # of a run of before
    world = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    line = ["-m", "ds_vpipe.run", str(script), str(free_port())]
    ranks = [(line, {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(2)]
    try:
        for done in forked.run(tmp_path, ranks):
            assert (done.returncode, done.stdout.splitlines()[-1]) == (-signal.SIGKILL, "killed"), done.stdout
    finally:
        found = list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))
        for path in found:
            path.unlink()
    assert not found


@pytest.fixture
def buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files with the names of buffers, in a folder of their own."""
    monkeypatch.setattr(reduction_buffers, "FILES", f"{tmp_path}/deepspeed_allreduce_buffer_")
    paths = [tmp_path / f"deepspeed_allreduce_buffer_0_127.0.0.1_29500_{rank}" for rank in range(2)]
    for path in paths:
        path.write_bytes(bytes(mmap.PAGESIZE))
    return paths


def test_what_is_mapped_stays(buffers: list[Path]) -> None:
    with buffers[0].open("r+b") as file:
        mapped = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    unlink_unused()
    assert [path.exists() for path in buffers] == [True, False]
    mapped.close()
    unlink_unused()
    assert not buffers[0].exists()


def test_what_somebody_is_about_to_open_stays(buffers: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import os, sys; sys.stdin.readline(); file = open(sys.argv[1]); print(os.fstat(file.fileno()).st_nlink)"
    command = [sys.executable, "-c", script, str(buffers[0])]
    opens = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert opens.stdin is not None
    rename = Path.rename

    def wait_for_it(path: Path, target: str) -> Path:
        if path == buffers[0] and opens.poll() is None:
            print(file=opens.stdin, flush=True)
            while "break_lease" not in Path(f"/proc/{opens.pid}/wchan").read_text():
                assert opens.poll() is None
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", wait_for_it)
    unlink_unused()
    assert opens.communicate(timeout=60)[0] == "1\n"
    assert [path.exists() for path in buffers] == [True, False]
    assert len(list(buffers[0].parent.iterdir())) == 1


def test_files_of_other_hosts_stay(buffers: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ds_vpipe.doctor.probe._file_system", lambda path: "nfs4")
    with Claim(buffers[0]) as claim:
        assert "nfs4" in claim.state
    unlink_unused()
    assert all(path.exists() for path in buffers)


@pytest.mark.parametrize(
    ("total_mib", "free_mib", "written_mib", "hosts", "wanted"),
    [
        (200, 200, 0, 1, "operator"),
        (200, 100, 60, 1, "operator"),  # another rank has begun to write its own
        (64, 64, 0, 1, None),  # a container's default, for which DeepSpeed's code ends by a segmentation fault
        (64, 64, 0, 2, "operator"),  # which makes no buffers
        (200, 100, 0, 1, "got 100 MiB that are free, needed are 66 MiB for each of 2 ranks"),
    ],
)
def test_buffers_that_do_not_fit(
    buffers: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    total_mib: int,
    free_mib: int,
    written_mib: int,
    hosts: int,
    wanted: str | None,
) -> None:
    os.truncate(buffers[0], written_mib * 2**20)
    for name, value in {"RANK": 0, "LOCAL_SIZE": 2, "WORLD_SIZE": 2 * hosts, "MASTER_PORT": 29500}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setattr(reduction_buffers, "FILES", str(buffers[0]).replace("0_127.0.0.1_29500_0", ""))
    for path in buffers:
        path.rename(path.with_name(path.name.replace("buffer_0", f"buffer_{os.getuid()}")))
    monkeypatch.setattr(reduction_buffers, "unlink_unused", lambda: None)
    room = SimpleNamespace(f_frsize=4096, f_blocks=total_mib * 256, f_bavail=free_mib * 256)
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    monkeypatch.setattr(reduction_buffers.backends, "build_shm_op", lambda: "operator")
    with unnamed_buffers():
        try:
            found = reduction_buffers.backends.build_shm_op()
        except VPipeError as error:
            found = str(error)
    assert found == wanted or (wanted is not None and wanted in found)
    assert reduction_buffers.backends.build_shm_op() == "operator"
