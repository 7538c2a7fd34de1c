"""What DeepSpeed tells of a run, on stages that run asynchronously: monitors, timers, logs and profile."""

from __future__ import annotations

import contextlib
import csv
import io
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import pytest
import torch
import toy
from worlds import Worlds

pytestmark = pytest.mark.mp

ADAMW = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}}
BATCHES = 6


@contextlib.contextmanager
def stub_packages(written: list[tuple[str, float, int]]) -> Iterator[None]:
    """Stand-ins for W&B and TensorBoard, which note the scalars that they are given."""
    wandb = types.ModuleType("wandb")
    wandb.init = lambda **kwargs: written.append((f"init {kwargs['project']}", 0.0, 0))  # type: ignore[attr-defined]
    wandb.log = lambda data, step, commit: written.extend((name, value, step) for name, value in data.items())  # type: ignore[attr-defined]
    board = types.ModuleType("torch.utils.tensorboard")
    board.SummaryWriter = (
        lambda log_dir: types.SimpleNamespace(  # type: ignore[attr-defined]
            add_scalar=lambda *event: written.append((f"board {event[0]}", *event[1:])), flush=lambda: None
        )
    )
    stubs = {"wandb": wandb, "torch.utils.tensorboard": board, "tensorboard": types.ModuleType("tensorboard")}
    before = {name: sys.modules.get(name) for name in stubs}
    sys.modules.update(stubs)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def observe(ds_config: dict[str, Any], stages: int, **model: Any) -> dict[str, Any]:
    """Train until the data end and report what is printed, what monitors get, what the communication log holds."""
    from deepspeed.comm import comm as ds_comm

    torch.manual_seed(1234)
    output, written = io.StringIO(), list[tuple[str, float, int]]()
    with stub_packages(written), contextlib.redirect_stdout(output):
        trained = cases.engine(ds_config, stages, **(model or {"dropout": 0.2}))
        iterator = toy.data(2 * BATCHES + 1)
        losses = [float(trained.train_batch(iterator)) for _ in range(BATCHES)]
        with pytest.raises(StopIteration):  # instructions are given up on the way
            trained.train_batch(iterator)
        timed = trained.timers("train_batch").elapsed(reset=False) > 0
        communication = ds_comm.log_summary(return_dict=True) if ds_comm.comms_logger.enabled else None
    report = {
        "output": output.getvalue(),
        "written": written,
        "losses": losses,
        "communication": communication,
        "timed": timed,
        "parameters": cases.parameters(trained),
    }
    ds_comm.comms_logger.enabled = False
    ds_comm.comms_logger.reset_data()
    cases.end(trained)
    return report


def observe_each(ds_configs: list[dict[str, Any]], stages: int) -> list[dict[str, Any]]:
    return [observe(ds_config, stages) for ds_config in ds_configs]


def profile_of(folder: Path) -> dict[str, Any]:
    return {
        "wall_clock_breakdown": True,
        "steps_per_print": 2,
        "flops_profiler": {"enabled": True, "profile_step": 2, "output_file": str(folder / "flops.txt")},
        "comms_logger": {"enabled": True, "prof_all": True},
        "csv_monitor": {"enabled": True, "output_path": str(folder), "job_name": "csv"},
        "tensorboard": {"enabled": True, "output_path": str(folder), "job_name": "board"},
        "wandb": {"enabled": True, "project": "pipelines"},
        "dump_state": True,
    }


@pytest.fixture(scope="module", params=["asp", "bsp"])
def runs(request: pytest.FixtureRequest, worlds: Worlds, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Three stages, M = 2: without anything, and with everything that tells something; and where that went."""
    folder = tmp_path_factory.mktemp(request.param)
    block = {"sync_mode": request.param}
    ds_configs = [cases.config(2, ADAMW, block), cases.config(2, ADAMW, block, **profile_of(folder))]
    ranks = worlds.run(3, observe_each, ds_configs, 3)
    return [rank[0] for rank in ranks], [rank[1] for rank in ranks], folder


def test_telling_changes_nothing(runs: Any) -> None:
    silent, telling, _ = runs
    for quiet, loud in zip(silent, telling, strict=True):
        assert quiet["losses"] == loud["losses"]
        for name, value in quiet["parameters"].items():
            assert torch.equal(value, loud["parameters"][name]), name
        assert "busy %" not in quiet["output"]


def test_steps_are_printed_by_rank_0(runs: Any) -> None:
    _, telling, _ = runs
    shown = [re.findall(r"^steps: (\d+) loss: ([\d.]+) iter time", rank["output"], re.MULTILINE) for rank in telling]
    losses = telling[0]["losses"]
    assert shown == [[(str(step), f"{losses[step - 1]:.4f}") for step in (2, 4, 6)], [], []]
    assert all(rank["timed"] for rank in telling), "batches before the end of the data are in the next line"


def test_wall_clock_breakdown_has_every_stage(runs: Any) -> None:
    _, telling, _ = runs
    for stage, rank in enumerate(telling):
        lines = [text for text in rank["output"].splitlines() if text.startswith(f"[Rank {stage}] time (ms)")]
        times = [dict(re.findall(r"\| (\w+): ([\d.]+)", text)) for text in lines]
        assert len(times) == 3 * 3, "three log lines, every two steps"
        micro, whole, transfers = times[-3:]
        assert set(whole) == {"fwd", "bwd", "bwd_inner", "bwd_allreduce", "step"}
        assert all(float(whole[name]) > 0 for name in ("fwd", "bwd", "step"))
        assert ("batch_input" in micro) == (stage in (0, 2))
        expected = {"pipe_send_output": stage < 2, "pipe_recv_grad": stage < 2}
        expected |= {"pipe_send_grad": stage > 0, "pipe_recv_input": stage > 0}
        assert {name: name in transfers for name in expected} == expected


def test_flops_profile_is_of_the_first_stage(runs: Any) -> None:
    _, _, folder = runs
    text = (folder / "flops.txt").read_text()
    assert "Profile Summary at step 2:" in text
    latency, unit = re.search(r"fwd latency: +([\d.]+) (\w+)", text).groups()  # type: ignore[union-attr]
    assert {"us": 1e-6, "ms": 1e-3, "s": 1.0}[unit] * float(latency) < 10, "one forward pass, not time since 1970"
    matrix_product = toy.MICRO_BATCH * toy.SEQUENCE * toy.HIDDEN**2
    assert f"{matrix_product} MACs" in text, "of a Scale"
    assert "Embed(" in text
    assert "Pool(" not in text


def profile(folder: str) -> bool:
    """Whether a flops profile is written by a run that prints no steps, as DeepSpeed's default is."""
    profiler = {"enabled": True, "profile_step": 1, "output_file": f"{folder}/silent.txt"}
    trained = cases.engine(cases.config(2, ADAMW, {}, steps_per_print=None, flops_profiler=profiler), 2)
    iterator = toy.data()
    for _ in range(3):
        trained.train_batch(iterator)
    cases.end(trained)
    return trained.wall_clock_breakdown()


def test_flops_profile_of_a_run_that_prints_no_steps(worlds: Worlds, tmp_path: Path) -> None:
    assert worlds.run(2, profile, str(tmp_path)) == [False, False]
    assert "Profile Summary at step 1:" in (tmp_path / "silent.txt").read_text()


def test_communication_log_has_the_messages(runs: Any) -> None:
    _, telling, _ = runs
    for stage, rank in enumerate(telling):
        log = rank["communication"]["summary"]
        counts = {name: sum(size["count"] for size in log[name].values()) for name in ("isend", "recv")}
        least = 2 * BATCHES * (2 if stage == 1 else 1)
        assert all(least <= count <= least + 4 for count in counts.values()), "forward passes ahead may come on top"


def log_for_one_batch(stages: int) -> list[int]:
    """Messages in the log after a batch, after others with the log on, off again, and on for sends alone."""
    from deepspeed.comm import comm as ds_comm

    trained = cases.engine(cases.config(2, ADAMW, {"sync_mode": "bsp"}), stages)
    iterator, counts, log = toy.data(8), [], ds_comm.comms_logger
    for log.enabled, log.prof_all, log.prof_ops in (  # type: ignore[assignment]
        (False, True, []),
        (True, True, []),
        (False, True, []),
        (True, False, ["send"]),
    ):
        trained.train_batch(iterator)
        counts.append(sum(row[0] for name in ("isend", "recv") for row in log.comms_dict.get(name, {}).values()))
    log.enabled, log.prof_all, log.prof_ops = False, True, []
    log.reset_data()
    cases.end(trained)
    return counts


def test_communication_log_is_turned_on_and_off_between_batches(worlds: Worlds) -> None:
    """The first batch after that is in the log, or is not, as with DeepSpeed."""
    for counts in worlds.run(2, log_for_one_batch, 2):
        assert counts == [0, 4, 4, 6], "two activations and two gradients, sent or received"


def test_monitors_get_losses_rates_and_statistics(runs: Any) -> None:
    _, telling, folder = runs
    samples = 2 * toy.MICRO_BATCH
    losses = [(samples * (step + 1), loss) for step, loss in enumerate(telling[0]["losses"])]
    with (folder / "csv" / "Train_Samples_train_loss.csv").open() as file:
        rows = [(int(step), float(loss)) for step, loss in list(csv.reader(file))[1:]]
    assert rows == losses
    written = telling[0]["written"]
    assert ("init pipelines", 0.0, 0) in written
    for prefix in ("", "board "):
        assert [(step, value) for name, value, step in written if name == f"{prefix}Train/Samples/train_loss"] == losses
        rates = [(step, value) for name, value, step in written if name == f"{prefix}Train/Samples/lr"]
        assert rates == [(step, ADAMW["params"]["lr"]) for step, _ in losses]  # type: ignore[index]
        waits = [step for name, _, step in written if name == f"{prefix}Train/Pipeline/stage2/wait_s"]
        assert waits == [2 * samples, 4 * samples, 6 * samples]
    assert telling[1]["written"] == telling[2]["written"] == []
