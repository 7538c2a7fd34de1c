"""The example scripts of plain models: GPT-2, and a classifier."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from launches import launched
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.trainers import WordLevelTrainer
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForPreTraining,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)
from worlds import free_port

ROOT = Path(__file__).parents[next(n for n, folder in enumerate(Path(__file__).parents) if folder.name == "tests") + 1]
pytestmark = pytest.mark.mp


def launch(script: str, arguments: list[str]) -> str:
    """Run a script on two ranks by the ``deepspeed`` launcher; returns the output."""
    tools = Path(sys.executable).parent
    command = [str(tools / "deepspeed"), "--num_accelerators", "2", "--master_port", str(free_port())]
    command += ["--module", "ds_vpipe.run", str(ROOT / script), *arguments]
    with tempfile.TemporaryDirectory() as temporary:
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu",
            "PATH": f"{tools}:{os.environ['PATH']}", "TMPDIR": temporary,
        }  # fmt: skip
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
        assert not list(Path(temporary).glob("pymp-*")), "sockets of the workers of data loaders"
    return done.stdout


def launch_in_a_world(script: str, arguments: list[str]) -> str:
    return launched(ROOT, ["--num_accelerators", "2", "--module", "ds_vpipe.run", script, *arguments])


def write_config(folder: Path, lr: float, partition: list[int]) -> list[str]:
    ds_config = {
        "train_micro_batch_size_per_gpu": 16,
        "steps_per_print": 100,
        "optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}},
        "vpipe": {"sync_mode": "asp", "partition": partition},
    }
    (folder / "ds.json").write_text(json.dumps(ds_config))
    return ["--deepspeed_config", str(folder / "ds.json")]


def test_gpt2_trains_saves_and_goes_on_from_its_folder(tmp_path: Path) -> None:
    words = ["stage", "batch", "layer", "rank", "sends", "waits", "for", "gradients", "weights", "and", "losses"]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(words), (400, 8), generator=generator).tolist()
    text = tmp_path / "text.txt"
    text.write_text(" ".join(" ".join(words[index] for index in row).capitalize() + "." for row in chosen))
    short = tmp_path / "short.txt"  # fewer blocks than one for every held-out share
    short.write_text(text.read_text()[:1000])
    common = [*write_config(tmp_path, 1e-3, [2, 2]), "--block_size", "16"]
    sizes = ["--config_overrides", "n_layer=2,n_embd=32,vocab_size=300", "--train_file", str(text)]
    losses = []
    again = ["--model_name_or_path", str(tmp_path / "one"), "--train_file", str(short)]
    for steps, before, after in ((50, sizes, "one"), (2, again, "two")):
        line = [*common, *before, "--max_steps", str(steps), "--output_dir", str(tmp_path / after)]
        said = launch_in_a_world("models/gpt2/train.py", line)
        (found,) = re.findall(rf"after {steps} updates: validation loss ([\d.]+) nats", said)
        losses.append(float(found))
        assert GPT2LMHeadModel.from_pretrained(tmp_path / after).config.n_layer == 2
    assert losses[0] < 5.0  # ln 300 = 5.7
    assert losses[1] < losses[0] + 0.1
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "two")
    assert tokenizer.decode(tokenizer("A stage sends gradients.").input_ids) == "A stage sends gradients."


def script() -> Any:
    """``finetune.py`` as a module."""
    spec: Any = importlib.util.spec_from_file_location("finetune", ROOT / "models/bert/finetune.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_classifier_is_fine_tuned_and_read_back(tmp_path: Path) -> None:
    finetune = script()
    lines = finetune.samples(0)
    tokenizer = Tokenizer(WordLevel(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    trainer = WordLevelTrainer(vocab_size=1000, special_tokens=["[PAD]", "[UNK]"], show_progress=False)
    tokenizer.train_from_iterator([line for line, _ in lines], trainer)
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    words.save_pretrained(tmp_path / "in")
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    BertForPreTraining(BertConfig(vocab_size=1000, **sizes)).save_pretrained(tmp_path / "in")

    line = [*write_config(tmp_path, 1e-3, [2, 2]), "--model_name_or_path", str(tmp_path / "in"), "--max_steps", "150"]
    said = launch("models/bert/finetune.py", [*line, "--output_dir", str(tmp_path / "out")])
    (accuracy,) = re.findall(r"accuracy: ([\d.]+) of 400 lines of 4 packages", said)
    assert float(accuracy) > 0.4  # chance is a quarter
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    assert model.config.id2label == dict(enumerate(finetune.PACKAGES))
    held_out = finetune.tokenised(lines[: finetune.HELD_OUT], AutoTokenizer.from_pretrained(tmp_path / "out"), 32)[:]
    with torch.no_grad():
        logits = model(held_out["input_ids"], attention_mask=held_out["attention_mask"]).logits
    again = (logits.argmax(-1) == held_out["labels"]).float().mean().item()
    assert again == pytest.approx(float(accuracy), abs=0.01)
