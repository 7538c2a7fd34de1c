"""The training script's parts that talk to a process group, on one and two ranks, and its command line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import Worlds, free_port

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.arguments import parse_arguments
from ds_vpipe.models.bert.deadline import Deadline
from ds_vpipe.models.bert.pretraining import main, read_ds_config
from ds_vpipe.models.bert.report import Report

ROOT = Path(__file__).parents[1]
CONFIG = ["--deepspeed_config", "config.json"]


def stopped_after(limits: list[float | None], interval: int) -> int:
    rank = torch.distributed.get_rank()
    deadline = Deadline(limits[rank], interval)
    step = next((step for step in range(1, 50) if deadline.passed(step)), 50)
    deadline.close()
    return step


@pytest.mark.parametrize(("limits", "step"), [([0.0, 1000.0], 6), ([1000.0, 0.0], 6), ([1000.0, 1000.0], 50)])
def test_all_ranks_stop_at_the_same_step(worlds: Worlds, limits: list[float | None], step: int) -> None:
    assert worlds.run(2, stopped_after, limits, 3) == [step, step]


def test_no_time_limit_needs_no_process_group() -> None:
    assert not any(Deadline(None, interval=1).passed(step) for step in range(5))


def config_file(folder: Path, **changes: Any) -> str:
    content = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "vpipe": {"sync_mode": "asp", "partition": [4, 5]},
        **changes,
    }
    path = folder / "ds_config.json"
    path.write_text(json.dumps(content))
    return str(path)


def run_main(arguments: list[str]) -> int:
    torch.manual_seed(0)
    return main(arguments)


def test_two_stages_train_on_own_text_and_report(worlds: Worlds, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    words = ["the", "a", "stage", "batch", "layer", "rank", "sends", "waits", "for", "gradients", "weights", "losses"]
    generator = torch.Generator().manual_seed(0)
    sentences = []
    for _ in range(3000):
        chosen = torch.randint(len(words), (8,), generator=generator).tolist()
        sentences.append(" ".join(words[index] for index in chosen).capitalize() + ".")
    text.write_text(" ".join(sentences))
    output = tmp_path / "output"
    arguments = ["--deepspeed_config", config_file(tmp_path), "--text", str(text), "--vocab-size", "256"]
    arguments += ["--seq-length", "16", "--steps", "6", "--validate-every", "4", "--output", str(output)]
    assert worlds.run(2, run_with_cache, str(tmp_path / "cache"), arguments) == [0, 0]
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [2, 4, 6]
    stages = [[stage["versions"] for stage in record["stages"]] for record in records if "loss" in record]
    assert stages == [[2, 1]] * 3
    assert [record["step"] for record in records if "validation_masked_lm_loss" in record] == [4, 6]
    assert all(0 < value < 10 for record in records for key, value in record.items() if "loss" in key)
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")


def run_with_cache(cache: str, arguments: list[str]) -> int:
    os.environ["DS_VPIPE_CACHE"] = cache
    return run_main(arguments)


def test_the_script_starts_without_installation_and_reports_a_mistake_in_one_line(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK")}
    environment["MASTER_PORT"] = str(free_port())
    command = [sys.executable, str(ROOT / "models/bert/train.py"), "--deepspeed_config", config_file(tmp_path)]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("[Rank 0] error: RANK is not set")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--deepspeed_config is missing"),
        ([*CONFIG, "--step", "3"], "unrecognized arguments: --step"),
        ([*CONFIG, "--steps", "0"], "0 must be at least 1"),
        ([*CONFIG, "--text", "a", "--synthetic"], "exclude each other"),
        ([*CONFIG, "--seq-length", "7"], "--seq-length 7: must be at least 8"),
        ([*CONFIG, "--max-predictions", "62"], "--max-predictions 62: at most --seq-length - 3 = 61"),
        ([*CONFIG, "--max-seconds", "-1"], "--max-seconds -1.0: must be greater than 0"),
        ([*CONFIG, "--seed", "-1"], "--seed -1: must not be negative"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: list[str], says: str) -> None:
    with pytest.raises(VPipeConfigError, match=re.escape(says)) as caught:
        parse_arguments(arguments)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("content", "says"), [("{,", "not JSON"), ("[1]", "must hold a JSON object, not a list")])
def test_a_wrong_config_file_is_named(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content)
    with pytest.raises(VPipeConfigError, match=rf"wrong\.json: {says}"):
        read_ds_config(str(path))
    with pytest.raises(VPipeConfigError, match=r"absent\.json: No such file"):
        read_ds_config(str(tmp_path / "absent.json"))


def test_log_lines_hold_the_mean_since_the_last_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path / "new" / "folder", total_steps=4, samples_per_step=8, every=2)
    for step, loss in enumerate([8.0, 9.0, 7.0, 6.0], start=1):
        report.step(step, step // 4, torch.tensor(loss), learning_rate=0.1)
    report.close(unigram_entropy=5.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(", ")[:3] for line in lines] == [
        ["Epoch 0", "Iteration 2", "Loss: 8.5000"],
        ["Epoch 1", "Iteration 4", "Loss: 6.5000"],
    ]
    assert all(re.search(r"\d samples/s$", line) for line in lines)


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(None, total_steps=2, samples_per_step=8, every=1)
    report.step(1, 0, torch.tensor(1.0), 0.1)
    report.validation(1, 1.0)
    report.line("nothing")
    report.close(5.0)
    assert capsys.readouterr().out == ""
