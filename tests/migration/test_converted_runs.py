"""The three runs of a vPipe user with four GPUs, converted, trained on four CPU ranks as their launch.sh says."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import h5py
import numpy as np
import pytest
from launches import launched
from vpipe_runs import FOUR_GPUS, write_run

from ds_vpipe.__main__ import main

# As many layers as BERT-Large, which the published splits are for, and next to no width.
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 24,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


def write_shard(path: Path, samples: int) -> None:
    """NVIDIA's layout, as vPipe reads it, with two predictions in each sequence of eight tokens."""
    generator = np.random.default_rng(0)
    path.parent.mkdir(parents=True)
    columns = {
        "input_ids": generator.integers(5, TINY["vocab_size"], (samples, 8), dtype="i4"),
        "input_mask": np.ones((samples, 8), "i1"),
        "segment_ids": np.zeros((samples, 8), "i1"),
        "masked_lm_positions": np.tile(np.array([2, 5], "i4"), (samples, 1)),
        "masked_lm_ids": generator.integers(5, TINY["vocab_size"], (samples, 2), dtype="i4"),
        "next_sentence_labels": generator.integers(0, 2, samples, dtype="i1"),
    }
    with h5py.File(path, "w") as shard:
        for name, column in columns.items():
            shard.create_dataset(name, data=column, compression="gzip")


@pytest.mark.mp
@pytest.mark.parametrize("variant", FOUR_GPUS)
def test_a_converted_run_trains(
    variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    options = ["--synthetic"]
    if variant == "pipedream":  # one of them on shards, where its YAML says
        write_shard(Path("bert/data/hdf5/bookscorpus/books_training_0.hdf5"), samples=400)
        options = []
    assert main(["convert", str(write_run(Path(), variant)), "-o", "out", *options]) == 0
    capsys.readouterr()
    sync_mode, batch_size, _, _ = FOUR_GPUS[variant]
    updates, micro_batches = {"asp": (3, 1), "bsp": (1, 32)}[sync_mode]
    # Later arguments outweigh those of the file: the model and the length of the run, nothing of how it is trained.
    command = ["out/launch.sh", "--config_name", "tiny.json", "--max_steps", str(updates), "--max_seq_length", "8"]
    Path("bin").mkdir()
    Path("bin/deepspeed").write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n', encoding="utf-8")
    Path("bin/deepspeed").chmod(0o755)
    run = subprocess.run(
        command, env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    said = launched(tmp_path, run.stdout.split("\0")[:-1])
    assert f"{updates} updates of {batch_size * micro_batches} samples, 4 stages" in said
    assert f"Finished {updates} updates" in said
    assert (Path("bert/output") / f"bert_4{variant}" / "metrics.jsonl").is_file()
