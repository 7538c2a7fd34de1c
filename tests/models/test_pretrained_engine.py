"""Hugging Face weights on ranks: each reads its own, they train, and go back to Hugging Face."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cases
import hugging_face as hf
import pytest
import torch
from safetensors.torch import load_file
from test_exactness import OPTIMIZERS
from transformers import AutoModelForSequenceClassification, BertForMaskedLM, BertForSequenceClassification
from worlds import Worlds

from ds_vpipe.models.export import main

pytestmark = pytest.mark.mp


@contextlib.contextmanager
def counted_reads() -> Iterator[list[str]]:
    """Names of the tensors that this process reads from safetensors files."""
    from ds_vpipe.models import hugging_face

    reads: list[str] = []
    real = hugging_face.safe_open

    class Counting:
        def __init__(self, file: Any, framework: str) -> None:
            self.file = real(file, framework=framework)

        def __enter__(self) -> Any:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_tensor(self, name: str) -> Any:
            reads.append(name)
            return self.file.get_tensor(name)

    hugging_face.safe_open = Counting  # type: ignore[misc,assignment]
    try:
        yield reads
    finally:
        hugging_face.safe_open = real


def fine_tune(kind: str, folder: str, rounds: int, output: str, own: bool) -> dict[str, Any]:
    """Train by the weights that each rank reads for itself, or by those that transformers reads on every rank."""
    import ds_vpipe
    from ds_vpipe.models.hugging_face import from_pretrained, model_state

    torch.manual_seed(0)
    with counted_reads() as reads:
        model = from_pretrained(folder) if own else hf.MODELS[kind][0].from_pretrained(folder)
        model.train()
        ds_config = cases.config(1, OPTIMIZERS["AdamW"][0], {"partition": [2, 2]})
        engine = ds_vpipe.initialize(model=model, config=ds_config, model_parameters=model.parameters())[0]
    losses = []
    for _ in range(rounds):
        output_of_round = engine(**hf.call(kind))
        engine.backward(output_of_round.loss)
        engine.step()
        losses.append(float(output_of_round.loss))
    model.save_pretrained(f"{output}/saved")
    engine.save_checkpoint(f"{output}/checkpoint", client_state=model_state(model))
    engine.destroy()
    return {"reads": reads, "losses": losses}


@pytest.mark.parametrize(("kind", "tied"), [("gpt2", True), ("gpt2", False), ("bert", True), ("roberta", True)])
def test_ranks_read_their_own_layers_train_and_give_them_back(
    worlds: Worlds, tmp_path: Path, kind: str, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = hf.save(kind, tied, tmp_path / "in")
    ranks = worlds.run(2, fine_tune, kind, str(tmp_path / "in"), 4, str(tmp_path / "own"), True)
    whole = worlds.run(2, fine_tune, kind, str(tmp_path / "in"), 4, str(tmp_path / "whole"), False)

    stored = set(load_file(tmp_path / "in" / "model.safetensors"))
    first, last = (rank["reads"] for rank in ranks)
    assert set(first) | set(last) == stored
    assert len(set(first)) in range(len(stored) // 3, 2 * len(stored) // 3)
    words = {name for name in stored if name.endswith(("wte.weight", "word_embeddings.weight"))}
    assert set(first) & set(last) == (words if tied else set())
    assert [rank["losses"] for rank in ranks] == [rank["losses"] for rank in whole]
    assert ranks[-1]["losses"][-1] < ranks[-1]["losses"][0]

    found, wanted = (load_file(tmp_path / name / "saved" / "model.safetensors") for name in ("own", "whole"))
    assert {name: tensor.shape for name, tensor in found.items()} == {n: tensor.shape for n, tensor in wanted.items()}
    assert all(torch.equal(found[name], wanted[name]) for name in found)
    assert not torch.equal(found[min(words)], model.state_dict()[min(words)])

    config = tmp_path / "own" / "saved"  # with the name of the class, which save_pretrained() writes down
    fewer = json.loads((config / "config.json").read_text()) | {"n_layer" if kind == "gpt2" else "num_hidden_layers": 1}
    (tmp_path / "fewer.json").write_text(json.dumps(fewer))
    command = [str(tmp_path / "own" / "checkpoint"), str(tmp_path / "out"), "--config"]
    assert main([*command, str(tmp_path / "fewer.json")]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r'got ".*\.1\..*"; the model has no such weight; .*correct --config', line)
    generation = config / "generation_config.json"
    if kind == "gpt2":
        generation.write_text(json.dumps(json.loads(generation.read_text()) | {"max_new_tokens": 5}))
    assert main([*command, str(config / "config.json")]) == 0
    if kind == "gpt2":
        assert json.loads((tmp_path / "out" / generation.name).read_text())["max_new_tokens"] == 5
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == found.keys()
    assert all(torch.equal(exported[name], found[name]) for name in found)


def classify(folder: str, output: str) -> list[str]:
    """A new head on pretrained weights."""
    import ds_vpipe
    from ds_vpipe.models.hugging_face import from_pretrained

    model = from_pretrained(folder, AutoModelForSequenceClassification.from_config, num_labels=5)
    engine = ds_vpipe.initialize(model=model, config=cases.config(1, OPTIMIZERS["AdamW"][0], {"partition": [2, 2]}))[0]
    model.save_pretrained(output)
    engine.destroy()
    return [type(model).__name__]


def test_a_new_head_is_initialised(worlds: Worlds, tmp_path: Path) -> None:
    before = hf.save("bert", True, tmp_path / "in").state_dict()
    assert (
        worlds.run(2, classify, str(tmp_path / "in"), str(tmp_path / "out")) == [["BertForSequenceClassification"]] * 2
    )
    found = BertForSequenceClassification.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in found.items() if name.startswith("bert."))
    assert found["classifier.weight"].shape == (5, 32)
    assert 0.01 < found["classifier.weight"].std() < 0.03
    assert not found["classifier.bias"].any()


def pretrain(arguments: list[str]) -> tuple[int, str, list[str]]:
    """The exit code of BERT's training script, what it has printed, and what the rank has read."""
    from ds_vpipe.models.bert.training import main as script

    out, sys.stdout = sys.stdout, io.StringIO()
    try:
        with counted_reads() as reads:
            return script(arguments), sys.stdout.getvalue(), reads
    finally:
        sys.stdout = out


def test_the_training_script_begins_with_the_weights_of_a_folder(worlds: Worlds, tmp_path: Path) -> None:
    model = hf.save("bert", True, tmp_path / "bert", BertForMaskedLM)
    torch.nn.init.normal_(model.cls.predictions.bias, std=8.0)
    model.save_pretrained(tmp_path / "bert")
    hf.save("roberta", True, tmp_path / "roberta")
    ds_config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
        "vpipe": {"sync_mode": "asp"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(ds_config))
    common = ["--deepspeed_config", str(tmp_path / "ds.json"), "--synthetic", "--max_steps", "2"]
    common += ["--output_dir", str(tmp_path / "output"), "--max_seq_length", "12"]
    bert = [*common, "--model_name_or_path", str(tmp_path / "bert")]
    ranks = worlds.run(2, pretrain, bert)
    assert [code for code, *_ in ranks] == [0, 0]
    said = [line for line in ranks[0][1].splitlines() if line.startswith("Model: ")]
    assert said == [
        f"Model: {tmp_path / 'bert'}: bert, 5 pipeline layers; initialised, not in the folder: bert.pooler.dense.weight"
        " and 3 more"
    ]
    assert "Model: " not in ranks[1][1]
    first, last = (set(reads) for *_, reads in ranks)
    assert first & last == {"bert.embeddings.word_embeddings.weight"}
    assert first | last == set(load_file(tmp_path / "bert" / "model.safetensors"))
    # The bias makes it certain of the wrong words: a new model would begin at about ln(83) + ln(2) = 5.1.
    losses = [json.loads(line) for line in (tmp_path / "output" / "metrics.jsonl").read_text().splitlines()]
    assert next(record["loss"] for record in losses if "loss" in record) > 10
    assert [code for code, *_ in worlds.run(2, pretrain, [*bert, "--no-tie_word_embeddings"])] == [0, 0]
    roberta = [*common, "--model_name_or_path", str(tmp_path / "roberta")]
    assert [code for code, *_ in worlds.run(2, pretrain, roberta)] == [2, 2]
