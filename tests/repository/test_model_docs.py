"""Files and commands of docs/, as a reader copies them."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from forked import Forked
from launches import launched
from peft import PeftModel
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
)

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w*)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> tuple[dict[str, str], dict[str, str]]:
    """Blocks with a file's name after the language, and the others by language."""
    found = BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    return {name: text for _, name, text in found if name}, {kind: text for kind, name, text in found if not name}


def commands(page: str) -> list[str]:
    """Lines of the blocks that are meant for a shell, in order."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    lines = (line for _, _, block in BLOCK.findall(text) for line in block.splitlines())
    return [line for line in lines if line.split(" ")[0] in ("mkdir", "python", "deepspeed")]


def run(command: str, folder: Path, forked: Forked) -> str:
    """What a command prints, without a start of the launcher or of Python, which other tests have."""
    program, *words = shlex.split(command)
    cache = {"DS_VPIPE_CACHE": str(folder / "cache")}
    if program == "deepspeed":
        return launched(folder, words, **cache)
    if words[0] == "-m":
        (done,) = forked.run(folder, [(words, cache)], timeout_s=900)
    else:  # for the shell
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path}
        done = subprocess.run(
            command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
        )
    assert done.returncode == 0, done.stdout[-3000:] + (done.stderr or "")[-3000:]
    return str(done.stdout)


@pytest.mark.mp
def test_a_new_model(forked: Forked, tmp_path: Path) -> None:
    files, others = blocks("new_model.md")
    assert set(files) == {"char_model.py", "ds_config.json", "train.py"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    commands = others["bash"].splitlines()
    assert [command.split()[0] for command in commands] == ["python"] * 3 + ["deepspeed"] * 2 + ["python"]
    _, plan, shown, first, second, _ = (run(command, tmp_path, forked) for command in commands)
    assert re.search(r"pace [\d.]+ ms", plan)
    assert "stage 1" in shown
    said = re.findall(r"after (\d+) updates: ([\d.]+) nats", first + second)
    assert [int(step) for step, _ in said] == [20, 40, 60, 80]
    assert float(said[-1][1]) < float(said[0][1]) < 4.85  # ln 128
    names = load_file(tmp_path / "chars.safetensors")
    assert names["tied_modules.characters.table.weight"].shape == (128, 64)
    assert {name.split(".")[0] for name in names} == {"tied_modules", "1", "2", "3", "4", "5"}


@pytest.mark.mp
def test_hugging_face(forked: Forked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("models", "ds_configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "prose.txt").write_text(" ".join(f"Sentence number {n} is about stages." for n in range(3000)))
    words = {
        word: number for number, word in enumerate(["[PAD]", "[UNK]", "<|endoftext|>", "stages", "tensor", "array"])
    }
    tokenizer = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    small = {"vocab_size": 16, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    models = {
        "my-gpt2": GPT2LMHeadModel(GPT2Config(**small, n_positions=64, bos_token_id=2, eos_token_id=2)),
        "my-bert": BertForMaskedLM(BertConfig(**small, intermediate_size=64)),
    }
    for folder, model in models.items():
        model.save_pretrained(tmp_path / folder)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(
            tmp_path / folder
        )
    _, others = blocks("hugging_face.md")
    train, tune = others["bash"].splitlines()
    assert re.search(r"after 20 updates: validation loss [\d.]+ nats", run(train, tmp_path, forked))
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "tuned-gpt2").config.n_layer == 4
    assert re.search(r"accuracy: [\d.]+ of 400 lines of 4 packages", run(tune, tmp_path, forked))
    assert BertForSequenceClassification.from_pretrained(tmp_path / "tuned-bert").config.num_labels == 4

    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(others["python"], found)
    assert type(found["model"]) is BertForMaskedLM
    assert all(parameter.is_meta for parameter in found["model"].parameters())


@pytest.mark.mp
def test_fine_tuning(forked: Forked, tmp_path: Path) -> None:
    """Adapters for a model that the first command has made; both lines with fewer updates."""
    for folder in ("models", "ds_configs", "docs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    train, adapt = commands("fine_tuning.md")
    for line, name in ((train, "base"), (adapt, "adapter")):
        assert line.endswith(f"00 --output_dir runs/{name}")
        fewer = re.sub(r"--max_steps \d+", "--max_steps 4", line)
        assert re.search(r"after 4 updates: validation loss [\d.]+ nats", run(fewer, tmp_path, forked))
    base = GPT2LMHeadModel.from_pretrained(tmp_path / "runs/base")
    adapted = PeftModel.from_pretrained(base, tmp_path / "runs/adapter")
    trained = {name: value for name, value in adapted.state_dict().items() if "lora_B" in name}
    assert len(trained) == 4
    assert all(value.shape == (384, 8) and value.any() for value in trained.values())


@pytest.mark.mp
def test_bert(forked: Forked, tmp_path: Path) -> None:
    """From text to the second phase, with a part of the text and fewer updates."""
    for folder in ("models", "ds_configs"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    written = commands("bert.md")
    assert [line.split()[0] for line in written] == [
        "mkdir",
        *["python"] * 2,
        *["deepspeed"] * 2,
        "python",
        "deepspeed",
    ]
    said = []
    for line in written:
        fewer = re.sub(r"(max|eval)_steps (\d+)0", r"\1_steps \2", line)
        said.append(run(fewer, tmp_path, forked))
        if line.endswith("> runs/text.txt"):
            text = (tmp_path / "runs/text.txt").read_text(encoding="utf-8")
            assert len(text) > 400_000
            (tmp_path / "runs/text.txt").write_text(text[:150_000], encoding="utf-8")
    _, _, prepared, first, resumed, again, second = said
    for text, updates in ((first, 2), (resumed, 1), (second, 4)):
        assert f"Finished {updates} updates" in text
    assert "Resumed after update 2" in resumed
    assert "masked LM" in first
    log = (tmp_path / "runs" / "phase1" / "run" / "commands.log").read_text(encoding="utf-8")
    assert "train.py" in log
    assert "bert_tiny_cpu.json" in log
    outputs = {path.name for path in (tmp_path / "runs" / "phase1").iterdir()}
    assert outputs == {"checkpoints", "loss.png", "metrics.jsonl", "run"}
    assert prepared
    assert again
