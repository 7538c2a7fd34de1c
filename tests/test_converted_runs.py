"""The three runs of a vPipe user with four GPUs, converted, started by their launch.sh, trained on four CPU ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from vpipe_runs import FOUR_GPUS, write_run
from worlds import free_port

from ds_vpipe.__main__ import main

ROOT = Path(__file__).parents[1]
# As many layers as BERT-Large, which the published splits are for, and next to no width.
TINY = {
    "hidden_size": 16,
    "num_hidden_layers": 24,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 32,
}


@pytest.mark.mp
@pytest.mark.parametrize("variant", FOUR_GPUS)
def test_a_converted_run_trains(
    variant: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ds_vpipe.lr_policies")
    monkeypatch.chdir(tmp_path)
    Path("tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    assert main(["convert", str(write_run(Path(), variant)), "-o", "out", "--synthetic"]) == 0
    capsys.readouterr()
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "DS_ACCELERATOR": "cpu",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
    }
    # Later arguments outweigh those of the file: the model and the length of the run, nothing of how it is trained.
    command = ["out/launch.sh", "--bert-config", "tiny.json", "--steps", "3", "--seq-length", "16"]
    text = Path("out/launch.sh").read_text(encoding="utf-8")
    port = f"deepspeed --master_port {environment['MASTER_PORT']} --num_accelerators 4"
    Path("out/launch.sh").write_text(text.replace("deepspeed --num_accelerators 4", port), encoding="utf-8")
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    sync_mode, batch_size, _, _ = FOUR_GPUS[variant]
    samples = batch_size * {"asp": 1, "bsp": 32}[sync_mode]
    assert f"3 updates of {samples} samples, 4 stages" in run.stdout
    assert "Finished 3 updates" in run.stdout
    assert (Path("bert/output") / f"bert_4{variant}" / "metrics.jsonl").is_file()
