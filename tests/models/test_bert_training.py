"""The training script's parts that talk to a process group, on one and two ranks, and its command line."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import Worlds, free_port

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.arguments import parse_arguments
from ds_vpipe.models.bert.metrics import Metrics
from ds_vpipe.models.bert.model import model_of
from ds_vpipe.models.bert.training import main, take_steps_per_record

ROOT = Path(__file__).parents[2]
CONFIG = ["--deepspeed_config", "config.json"]


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
    text.write_text("\n\n".join(" ".join(sentences[start : start + 60]) for start in range(0, 3000, 60)))
    output = tmp_path / "output"
    arguments = ["--deepspeed_config", config_file(tmp_path), "--train_file", str(text), "--vocab_size", "256"]
    arguments += ["--max_seq_length", "16", "--max_steps", "6", "--eval_steps", "4", "--output_dir", str(output)]
    printed = worlds.run(2, printed_with_cache, str(tmp_path / "cache"), arguments)
    validations = [line for line in printed[0].splitlines() if "validation" in line]
    ends = [line.split(",")[0].split(":")[0] for line in validations]
    assert ends == ["Iteration 4", "Iteration 6", "unigram entropy of the corpus"]
    assert "validation" not in printed[1]
    records = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [2, 4, 6]
    stages = [[stage["versions"] for stage in record["stages"]] for record in records if "loss" in record]
    assert stages == [[2, 1]] * 3
    assert [record["step"] for record in records if "validation_masked_lm_loss" in record] == [4, 6]
    assert all(0 < value < 10 for record in records for key, value in record.items() if "loss" in key)
    accuracies = [value for record in records for key, value in record.items() if "accuracy" in key]
    assert len(accuracies) == 4
    assert all(0 <= value <= 1 for value in accuracies)
    assert (output / "loss.png").read_bytes().startswith(b"\x89PNG")


def printed_with_cache(cache: str, arguments: list[str]) -> str:
    os.environ["DS_VPIPE_CACHE"] = cache
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert run_main(arguments) == 0
    return printed.getvalue()


def test_the_script_starts_without_installation_and_reports_a_mistake_in_one_line(tmp_path: Path) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "RANK")}
    environment["MASTER_PORT"] = str(free_port())
    command = [sys.executable, str(ROOT / "models/bert/train.py"), "--deepspeed_config", config_file(tmp_path)]
    result = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("[Rank 0] error: RANK is not set")
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--deepspeed_config is missing"),
        ([*CONFIG, "--step", "3"], "unrecognized arguments: --step"),
        ([*CONFIG, "--max_steps", "0"], '--max_steps: got "0"; allowed: a whole number >= 1'),
        ([*CONFIG, "--train_file", "a", "--synthetic"], "--train_file and --synthetic exclude each other"),
        ([*CONFIG, "--data_dir", "a", "--synthetic"], "--data_dir and --synthetic exclude each other"),
        ([*CONFIG, "--data_dir", "a", "--tokenizer_name", "v"], "--tokenizer_name is for text: leave it out with"),
        ([*CONFIG, "--data_dir", "a", "--mlm_probability", "0.2"], "--mlm_probability is for text: leave it out with"),
        (
            [*CONFIG, "--synthetic", "--whole_word_masking"],
            "--whole_word_masking is for text: leave it out",
        ),
        (
            [*CONFIG, "--mlm_probability", "1"],
            '--mlm_probability: got "1"; allowed: a number greater than 0 and less than 1',
        ),
        ([*CONFIG, "--validation_file", "a"], "--validation_file is for own text: give --train_file too"),
        ([*CONFIG, "--keep_order"], "--keep_order is for shards"),
        ([*CONFIG, "--save_strategy", "often"], "argument --save_strategy: invalid choice: 'often'"),
        (
            [*CONFIG, "--learning-rate", "1e-4"],
            "--learning_rate: belongs to the DeepSpeed JSON; set optimizer.params.lr",
        ),
        ([*CONFIG, "--fp16"], "--fp16: belongs to the DeepSpeed JSON; set fp16.enabled there"),
        (
            [*CONFIG, "--model_name_or_path", "/"],
            "--model_name_or_path /: it has no tokenizer.json or vocab.txt, and a vocabulary",
        ),
        ([*CONFIG, "--max_seq_length", "7"], "--max_seq_length 7: must be at least 8"),
        (
            [*CONFIG, "--max_predictions_per_seq", "62"],
            "--max_predictions_per_seq 62: at most --max_seq_length - 3 = 61",
        ),
        ([*CONFIG, "--seed", "-1"], '--seed: got "-1"; allowed: a whole number >= 0'),
        ([*CONFIG, "--seed", str(2**32)], '--seed: got "4294967296"; allowed: a whole number >= 0 and less than 2^32'),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(arguments: list[str], says: str) -> None:
    with pytest.raises(VPipeConfigError, match=re.escape(says)) as caught:
        parse_arguments(arguments)
    assert "\n" not in str(caught.value)


def test_a_folder_that_is_not_there_is_refused_with_the_model(tmp_path: Path) -> None:
    arguments = parse_arguments([*CONFIG, "--model_name_or_path", str(tmp_path / "nowhere")])
    with pytest.raises(VPipeConfigError, match=r"model: got .*nowhere.*correct the path"):
        model_of(arguments)


def test_words_of_names_are_joined_by_dashes_or_underscores(tmp_path: Path) -> None:
    for max_steps, resume in (
        ("--max_steps=7", "--resume_from_checkpoint"),
        ("--max-steps=7", "--resume-from-checkpoint"),
    ):
        parsed = parse_arguments([*CONFIG, max_steps, resume, "--output-dir", "a-b_c"])
        assert (parsed.max_steps, parsed.output_dir) == (7, Path("a-b_c"))
        assert parsed.resume_from_checkpoint == Path("a-b_c/checkpoints")


def test_a_checkpoint_is_told_from_a_folder_of_weights(tmp_path: Path) -> None:
    (tmp_path / "latest").touch()
    parsed = parse_arguments([*CONFIG, "--synthetic", "--model_name_or_path", str(tmp_path)])
    assert (parsed.initial_checkpoint, parsed.model_name_or_path) == (tmp_path, None)
    weights = [*CONFIG, "--synthetic", "--model_name_or_path", str(tmp_path)]
    with pytest.raises(VPipeConfigError, match="exclude each other: the one"):
        parse_arguments([*weights, "--resume_from_checkpoint", str(tmp_path / "other")])
    for own in ([], [str(Path("runs/bert/checkpoints").resolve())]):
        parsed = parse_arguments([*weights, "--resume_from_checkpoint", *own])
        assert parsed.initial_checkpoint == tmp_path
        assert parsed.resume_from_checkpoint == Path("runs/bert/checkpoints")


def test_text_for_weights_is_read_with_their_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").touch()
    weights = [*CONFIG, "--model_name_or_path", str(tmp_path)]
    assert parse_arguments(weights).tokenizer_name == tmp_path
    assert parse_arguments([*weights, "--tokenizer_name", "other.txt"]).tokenizer_name == Path("other.txt")
    assert parse_arguments([*weights, "--synthetic"]).tokenizer_name is None


@pytest.mark.parametrize(("content", "says"), [("{,", "it is not JSON"), ("[1]", "it holds no object")])
def test_a_wrong_config_file_is_named(
    tmp_path: Path, content: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(content)
    for name, line in (("wrong.json", says), ("absent.json", "the file cannot be read: No such file")):
        assert main(["--deepspeed_config", str(tmp_path / name)]) == 2
        assert re.search(rf'--deepspeed_config: got ".*{name}"; {line}', capsys.readouterr().err)


RESULT = {
    "masked_lm_loss": 3.0,
    "next_sentence_loss": 0.5,
    "masked_lm_accuracy": 0.25,
    "next_sentence_accuracy": 0.75,
}


def test_the_model_says_whose_weights_it_takes(tmp_path: Path) -> None:
    (tmp_path / "latest").touch()
    assert model_of(parse_arguments(CONFIG)).description == "new bert, 9 pipeline layers"
    taken = model_of(parse_arguments([*CONFIG, "--model_name_or_path", str(tmp_path)]))
    assert taken.description == f"bert with the weights of {tmp_path}, 9 pipeline layers"


@pytest.mark.parametrize(("more", "left"), [({}, False), ({"wall_clock_breakdown": True}, True)])
def test_deepspeeds_timers_keep_their_interval(more: dict[str, Any], left: bool) -> None:
    ds_config = {"steps_per_print": 2, **more}
    assert take_steps_per_record(ds_config, "ds.json") == 2
    assert ("steps_per_print" in ds_config) == left
    with pytest.raises(VPipeConfigError, match=r"steps_per_print in ds\.json: 0 must be a positive integer"):
        take_steps_per_record({"steps_per_print": 0}, "ds.json")


def test_log_lines_hold_the_mean_since_the_last_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Metrics(tmp_path / "new" / "folder", total_steps=5, samples_per_step=8, every=2)
    for step, loss in enumerate([8.0, 9.0, 7.0, 6.0, 5.0], start=1):
        report.step(step, step // 4, torch.tensor(loss), learning_rate=0.1)
        with report.pause():
            report.validation(step, RESULT)
    report.close(unigram_entropy=None)
    lines = [line for line in capsys.readouterr().out.splitlines() if "validation" not in line]
    assert [line.split(", ")[:3] for line in lines] == [
        ["Epoch 0", "Iteration 2", "Loss: 8.5000"],
        ["Epoch 1", "Iteration 4", "Loss: 6.5000"],
        ["Epoch 1", "Iteration 5", "Loss: 5.0000"],
    ]
    assert all(re.search(r"\d samples/s$", line) for line in lines)


def test_about_ten_lines_are_printed_of_any_run_and_pauses_do_not_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begin = time.monotonic()
    report = Metrics(tmp_path, total_steps=400, samples_per_step=8, every=2)
    for step in range(1, 401):
        report.step(step, 0, torch.tensor(1.0), learning_rate=0.1)
        if step == 200:
            with report.pause():
                time.sleep(0.2)
                report.validation(step, RESULT)
    elapsed = time.monotonic() - begin
    report.close(unigram_entropy=None)
    printed = [line for line in capsys.readouterr().out.splitlines() if "Loss" in line]
    assert [line.split(", ")[1] for line in printed] == [f"Iteration {step}" for step in range(40, 401, 40)]
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 201
    seconds = [record["seconds"] for record in records]
    assert seconds == sorted(seconds)
    assert seconds[-1] < elapsed - 0.2


def test_a_resumed_report_keeps_what_was_before(tmp_path: Path) -> None:
    def write(steps: range, done: int) -> list[tuple[int, str]]:
        report = Metrics(tmp_path, total_steps=9, samples_per_step=8, every=1, done=done, kept=done)
        for step in steps:
            report.step(step, 0, torch.tensor(float(step)), learning_rate=0.1)
            report.validation(step, RESULT)
        report.close(None)
        records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        return [(record["step"], "loss" if "loss" in record else "validation") for record in records]

    written = [(step, kind) for step in range(1, 8) for kind in ("loss", "validation")]
    assert write(range(1, 6), done=0) == written[:10]
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # a run that is killed while it writes
    assert write(range(4, 8), done=3) == written
    assert write(range(1, 3), done=0) == written[:4]


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    report = Metrics(None, total_steps=2, samples_per_step=8, every=1)
    report.step(1, 0, torch.tensor(1.0), 0.1)
    report.validation(1, RESULT)
    report.line("nothing")
    report.close(5.0)
    assert capsys.readouterr().out == ""
