"""Whole pre-training runs: resumed, on shards and on text, in two phases, validated, on broken data."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from pathlib import Path
from typing import Any
from unittest import mock

import h5py
import pytest
import torch
from transformers import BertForPreTraining
from worlds import Worlds

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.lr_policies import LRPolicy
from ds_vpipe.models.bert import corpus, prepare
from ds_vpipe.models.bert.samples import Masking, RandomSamples, Vocabulary
from ds_vpipe.models.bert.shards import write_shard
from ds_vpipe.models.bert.training import main
from ds_vpipe.models.export import main as export

pytestmark = pytest.mark.mp

Metrics = dict[tuple[int, str], float]

MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 600,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}


class Folder:
    """A folder with configurations, in which runs are made."""

    def __init__(self, path: Path, **changes: Any) -> None:
        self.path = path
        (path / "model.json").write_text(json.dumps(MODEL))
        self.configure(**changes)

    def configure(self, **changes: Any) -> None:
        content = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "steps_per_print": 1,
            "optimizer": {"type": "Lamb", "params": {"lr": 0.01}},
            "scheduler": {"type": "PolyWarmupLR", "params": {"total_num_steps": 20, "warmup_num_steps": 3}},
            "vpipe": {"sync_mode": "asp", "peer_timeout_s": 60},
            **changes,
        }
        content = {key: value for key, value in content.items() if value is not None}
        (self.path / "ds.json").write_text(json.dumps(content))

    def arguments(self, output: str, *others: str) -> list[str]:
        files = ["--deepspeed_config", str(self.path / "ds.json"), "--config_name", str(self.path / "model.json")]
        return [*files, "--output_dir", str(self.path / output), *others]

    def run(self, worlds: Worlds, ranks: int, output: str, *others: str) -> Metrics:
        """Losses and accuracies by step and name."""
        assert worlds.run(ranks, main, self.arguments(output, *others)) == [0] * ranks
        return self.metrics(output)

    def metrics(self, output: str) -> Metrics:
        records = [json.loads(line) for line in (self.path / output / "metrics.jsonl").read_text().splitlines()]
        names = (
            "loss",
            "learning_rate",
            "validation_masked_lm_loss",
            "validation_masked_lm_accuracy",
            "validation_next_sentence_accuracy",
        )
        return {(record["step"], name): record[name] for record in records for name in names if name in record}


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def shards_in(path: Path, length: int = 16, count: int = 40) -> str:
    path.mkdir()
    for number, name in enumerate(("0_training", "1_training", "validation")):
        write_random(path / f"{name}.hdf5", length, count, number)
    return str(path)


def write_random(path: Path, length: int, count: int, seed: int) -> None:
    source = RandomSamples(count, Masking(Vocabulary.numbered(MODEL["vocab_size"]), length, 3), seed)
    write_shard(path, [source.sample(index, 0) for index in range(count)])


def test_a_resumed_run_is_the_uninterrupted_one(worlds: Worlds, folder: Folder) -> None:
    data = shards_in(folder.path / "data", count=20)
    folder.configure(gradient_accumulation_steps=2)
    common = ["--data_dir", data, "--max_steps", "7", "--eval_steps", "2"]
    common += ["--save_strategy", "steps", "--save_steps", "3"]
    whole = folder.run(worlds, 2, "whole", *common)
    assert sorted(step for step, name in whole if name == "loss") == [1, 2, 3, 4, 5, 6, 7]
    assert len({value for (_, name), value in whole.items() if name == "loss"}) == 7
    policy = LRPolicy("PolyWarmupLR", total_num_steps=20, warmup_num_steps=3)
    rates = [whole[step, "learning_rate"] for step in range(1, 8)]
    assert rates == [0.01 * policy.factor(step + 1) for step in range(1, 8)]  # of the next update
    saved = folder.path / "whole" / "checkpoints"
    assert sorted(path.name for path in saved.glob("global_step*")) == ["global_step3", "global_step6", "global_step7"]
    for step in (3, 6):
        (saved / "latest").write_text(f"global_step{step}")
        # The second time the folder has records of another run.
        resumed = folder.run(worlds, 2, "resumed", *common, "--resume_from_checkpoint", str(saved))
        assert resumed == {key: value for key, value in whole.items() if key[0] > step}


def test_epochs_count_samples_whatever_the_size_of_a_batch(worlds: Worlds, folder: Folder) -> None:
    saved = ["--data_dir", shards_in(folder.path / "data", count=20), "--save_strategy", "epoch"]
    metrics = folder.run(worlds, 2, "out", *saved, "--num_train_epochs", "1")
    assert max(step for step, _ in metrics) == 10
    folder.configure(train_micro_batch_size_per_gpu=8)
    metrics = folder.run(worlds, 2, "out", *saved, "--num_train_epochs", "2", "--resume_from_checkpoint")
    assert max(step for step, _ in metrics) == 15


def test_dropout_is_drawn_from_the_seed_and_not_by_validation(worlds: Worlds, folder: Folder) -> None:
    common = ["--data_dir", shards_in(folder.path / "data"), "--max_steps", "4", "--keep_order"]
    one = folder.run(worlds, 2, "one", *common, "--seed", "3")
    two = folder.run(worlds, 2, "two", *common, "--seed", "3", "--eval_steps", "1")
    assert {key: value for key, value in two.items() if key in one} == one
    assert len(two) == len(one) + 9  # validation in between changes nothing
    (folder.path / "model.json").write_text(json.dumps(MODEL | {"hidden_dropout_prob": 0.0}))
    assert folder.run(worlds, 2, "three", *common, "--seed", "3")[1, "loss"] != one[1, "loss"]


def small_documents() -> list[list[str]]:
    """The docstrings of a part of torch alone."""
    return corpus._distinct(corpus._docstrings(Path(torch.__file__).parent / "nn" / "modules"))


def with_small_corpus(cache: str, arguments: list[str], run: Any) -> Any:
    from ds_vpipe.models.bert import corpus, text

    with (
        mock.patch.object(corpus, "docstring_documents", small_documents),
        mock.patch.object(text, "docstring_key", return_value="small"),
    ):
        return run([*arguments, "--cache_dir", cache])


def test_shards_of_the_docstrings_train_to_the_losses_of_streaming_them(worlds: Worlds, folder: Folder) -> None:
    cache, data = str(folder.path / "cache"), str(folder.path / "data")
    shape = ["--max_seq_length", "32", "--vocab_size", "600", "--seed", "1"]
    making = [
        *shape,
        "--output_dir",
        data,
        "--shard_size",
        "50",
        "--preprocessing_num_workers",
        "1",
        "--dupe_factor",
        "1",
    ]
    assert with_small_corpus(cache, making, prepare.main) == 0
    assert len(list(Path(data).glob("*_training.hdf5"))) > 3
    steps = ["--seed", "1", "--max_steps", "30"]
    results = []
    for output, source in (("stream", shape[:2]), ("shards", ["--data_dir", data, "--keep_order"])):
        arguments = folder.arguments(output, *source, *steps)
        assert worlds.run(2, with_small_corpus, cache, arguments, main) == [0, 0]
        results.append(folder.metrics(output))
    assert results[0] == results[1]
    assert len(results[0]) == 63
    assert folder.run(worlds, 2, "shuffled", "--data_dir", data, *steps)[1, "loss"] != results[0][1, "loss"]


def weights_in(path: Path) -> dict[str, torch.Tensor]:
    files = sorted(path.glob("layer_*-model_states.pt"))
    assert len(files) == 3
    states = {file.name: torch.load(file, weights_only=False) for file in files}
    return {f"{file} {name}": value for file, state in states.items() for name, value in state.items()}


def restarted(attempt: int, run: Any, arguments: list[str]) -> Any:
    with mock.patch.dict(os.environ, DS_VPIPE_RESTART=str(attempt)):
        return run(arguments)


def test_the_second_phase_begins_with_the_weights_of_the_first(worlds: Worlds, folder: Folder) -> None:
    first, second = folder.path / "1" / "checkpoints", folder.path / "2" / "checkpoints"
    short, long = shards_in(folder.path / "short"), shards_in(folder.path / "long", length=48)
    folder.run(worlds, 2, "1", "--data_dir", short, "--max_steps", "3", "--seed", "5", "--save_strategy", "epoch")
    folder.configure(scheduler=None, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    onwards = ["--data_dir", long, "--max_steps", "1", "--save_strategy", "epoch", "--model_name_or_path", str(first)]
    folder.run(worlds, 2, "2", *onwards)
    before, after = weights_in(first / "global_step3"), weights_in(second / "global_step1")
    assert before.keys() == after.keys()
    assert all(torch.equal(value, after[name]) for name, value in before.items())

    own = folder.arguments("3", *onwards, "--resume_from_checkpoint")
    assert worlds.run(2, restarted, 0, main, own) == [0, 0]  # nothing has been saved yet
    after = weights_in(folder.path / "3" / "checkpoints" / "global_step1")
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert worlds.run(2, restarted, 1, main, [*own, "--max_steps", "2"]) == [0, 0]
    assert {step for step, name in folder.metrics("3") if name == "loss"} == {1, 2}
    for given in ([], ["--resume_from_checkpoint", str(first)]):
        arguments = folder.arguments("4", "--synthetic", "--save_strategy", "epoch", *given)
        for code, line in worlds.run(2, restarted, 0, failing, arguments):
            assert code == 2
            assert "error: --resume_from_checkpoint: got " in line
            assert f"allowed: {folder.path / '4' / 'checkpoints'} with --restarts" in line


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_deepspeeds_own_engine_validates_alike(worlds: Worlds, folder: Folder, micro_batches: int) -> None:
    data = shards_in(folder.path / "data")
    results = []
    for output, block in (("theirs", None), ("ours", {"sync_mode": "bsp"})):
        adam = {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}}
        # DeepSpeed's own engine clips by the norm of the first stage alone.
        folder.configure(vpipe=block, gradient_accumulation_steps=micro_batches, optimizer=adam, gradient_clipping=0.0)
        arguments = ["--num_stages", "2", "--data_dir", data, "--max_steps", "3", "--eval_steps", "2"]
        results.append(folder.run(worlds, 4, output, *arguments))
    assert results[0] == results[1]
    assert sum("accuracy" in name for _, name in results[0]) == 4


def opened_files(arguments: list[str]) -> tuple[int, set[str]]:
    opened = set()
    original = h5py.File

    def opening(path: Any, mode: str) -> Any:
        opened.add(Path(path).name)
        return original(path, mode)

    h5py.File = opening
    try:
        return main(arguments), opened
    finally:
        h5py.File = original


def test_only_the_first_and_the_last_stage_open_files_and_all_of_them(worlds: Worlds, folder: Folder) -> None:
    data = shards_in(folder.path / "data")
    outcomes = worlds.run(3, opened_files, folder.arguments("out", "--data_dir", data, "--num_train_epochs", "1"))
    everything = {"0_training.hdf5", "1_training.hdf5", "validation.hdf5"}
    assert outcomes == [(0, everything), (0, set()), (0, everything)]
    assert max(step for step, _ in folder.metrics("out")) == 20


def failing(arguments: list[str]) -> tuple[int, str]:
    import io

    with contextlib.redirect_stderr(io.StringIO()) as stream:
        code = main(arguments)
    return code, stream.getvalue().strip().splitlines()[-1]


def test_a_broken_row_ends_all_ranks_with_its_name(worlds: Worlds, folder: Folder) -> None:
    data = shards_in(folder.path / "data")
    with h5py.File(Path(data) / "1_training.hdf5", "a") as file:
        file["masked_lm_ids"][33, 1] = 9999
    outcomes = worlds.run(3, failing, folder.arguments("out", "--data_dir", data, "--num_train_epochs", "1"))
    assert [code for code, _ in outcomes] in ([2, 1, 1], [2, 1, 2])  # the last stage reads it, too
    for rank in (0, 2):
        assert "1_training.hdf5: masked_lm_ids, row 33: got 9999; allowed: 0 to 599" in outcomes[rank][1]


def test_a_truncated_file_ends_all_ranks_before_training(worlds: Worlds, folder: Folder) -> None:
    data = Path(shards_in(folder.path / "data"))
    content = (data / "1_training.hdf5").read_bytes()
    (data / "1_training.hdf5").write_bytes(content[:1000])
    outcomes = worlds.run(3, failing, folder.arguments("out", "--data_dir", str(data)))
    for rank, (code, line) in enumerate(outcomes):
        assert code == 2
        assert line.startswith(f"[Rank {rank}] error: ")
        assert "1_training.hdf5: got" in line
        assert "truncated?" in line


def failing_on_own_data(folders: list[str], arguments: list[str]) -> tuple[int, str]:
    return failing([*arguments, "--data_dir", folders[int(os.environ["RANK"])]])


def test_ranks_with_different_data_end_before_training(worlds: Worlds, folder: Folder) -> None:
    one, other = shards_in(folder.path / "one"), shards_in(folder.path / "other")
    (Path(other) / "1_training.hdf5").rename(Path(other) / "2_training.hdf5")
    for code, line in worlds.run(2, failing_on_own_data, [one, other], folder.arguments("out", "--max_steps", "1")):
        assert code == 2
        assert "error: ranks have different data (rank 0: " in line


def test_an_output_that_cannot_be_written_ends_all_ranks_in_one_line(worlds: Worlds, folder: Folder) -> None:
    (folder.path / "out").write_text("a file, where a folder should be")
    outcomes = worlds.run(2, failing, folder.arguments("out", "--synthetic", "--max_steps", "1"))
    assert [code for code, _ in outcomes] == [2, 2]
    for (_, line), begin in zip(outcomes, ("[Rank 0] error: ", "[Rank 1] error: rank 0: "), strict=True):
        assert line.startswith(f"{begin}--output_dir {folder.path / 'out'}: ")


def test_a_run_on_other_samples_is_not_resumed(worlds: Worlds, folder: Folder) -> None:
    saved = str(folder.path / "one" / "checkpoints")
    folder.run(worlds, 2, "one", "--synthetic", "--max_steps", "2", "--save_strategy", "epoch")
    assert export([saved, str(folder.path / "exported")]) == 0  # which says itself what model it is of
    assert BertForPreTraining.from_pretrained(folder.path / "exported").config.hidden_size == MODEL["hidden_size"]
    again = folder.arguments("two", "--synthetic", "--max_steps", "4", "--resume_from_checkpoint", saved, "--seed", "1")
    for code, line in worlds.run(2, failing, again):
        assert code == 2
        assert f"--resume_from_checkpoint: the run in {saved} had seed 0, now it is 1" in line
    absent = folder.arguments("two", "--synthetic", "--resume_from_checkpoint", saved + "x")
    for code, line in worlds.run(2, failing, absent):
        assert code == 2
        assert f"--resume_from_checkpoint: there is no checkpoint in {saved}x" in line


def test_too_few_held_out_samples_are_left_out(worlds: Worlds, folder: Folder) -> None:
    data = Path(shards_in(folder.path / "data"))
    write_random(data / "validation.hdf5", length=16, count=3, seed=0)
    for _ in range(2):
        metrics = folder.run(worlds, 2, "out", "--data_dir", str(data), "--max_steps", "2", "--eval_steps", "1")
        assert {name for _, name in metrics} == {"loss", "learning_rate"}
        (data / "validation.hdf5").unlink(missing_ok=True)


def test_too_few_samples_for_a_micro_batch_are_refused(worlds: Worlds, folder: Folder) -> None:
    data = shards_in(folder.path / "data", count=1)
    for _, line in worlds.run(2, failing, folder.arguments("out", "--data_dir", data, "--max_steps", "1")):
        assert "error: 2 samples are too few for 1 replica of micro-batch size 4: give more text or lower" in line


def failing_with_cache(cache: str, arguments: list[str]) -> Any:
    return with_small_corpus(cache, arguments, failing)


def test_nobody_waits_for_a_corpus_that_cannot_be_built(worlds: Worlds, folder: Folder) -> None:
    cache = folder.path / "cache"
    cache.write_text("a file, where a folder should be")
    outcomes = worlds.run(3, failing_with_cache, str(cache), folder.arguments("out"))
    assert [code for code, _ in outcomes] == [2, 2, 2]
    for rank, (_, line) in enumerate(outcomes):
        assert line.startswith(
            f"[Rank {rank}] error: {'' if rank == 0 else 'rank 0: '}cache folder {cache} is not writ"
        )


def with_a_full_disk(arguments: list[str]) -> tuple[int, str]:
    from ds_vpipe.models.bert import data

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    prepare = full if os.environ["RANK"] == "1" else data.prepare
    with mock.patch.object(data, "prepare", prepare):
        return failing(arguments)


def test_an_error_of_any_kind_on_one_rank_ends_all(worlds: Worlds, folder: Folder) -> None:
    first, full = worlds.run(2, with_a_full_disk, folder.arguments("out", "--synthetic", "--max_steps", "1"))
    line = "failed to prepare their data: OSError: [Errno 28] No space left on device"
    assert (first[0], full[0]) == (2, 2)
    assert first[1].endswith(f"error: rank 1: {line}")
    assert full[1].endswith(f"error: {line}")


def waiting_for_a_slow_rank(arguments: list[str]) -> tuple[int, str]:
    from ds_vpipe.models import start
    from ds_vpipe.models.bert import data

    def slow(*_: object) -> None:
        time.sleep(8)
        raise VPipeConfigError("too late")

    prepare = slow if os.environ["RANK"] == "1" else data.prepare
    with mock.patch.object(start, "START_LIMIT_S", 2.0), mock.patch.object(data, "prepare", prepare):
        return failing(arguments)


def test_ranks_wait_for_data_with_a_limit_and_say_for_whom(worlds: Worlds, folder: Folder) -> None:
    first, slow = worlds.run(2, waiting_for_a_slow_rank, folder.arguments("out", "--synthetic", "--max_steps", "1"))
    assert (first[0], slow[0]) == (2, 2)
    assert "waited up to 2 s for all ranks to prepare their data" in first[1]
    assert re.search(r"[Rr]anks? .*1", first[1])
