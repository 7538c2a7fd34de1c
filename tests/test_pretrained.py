"""Weights from Hugging Face folders in pipeline layers and back, against the Hugging Face models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import hugging_face as hf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BertForMaskedLM, BertModel, GPT2Model

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.loss import PretrainingLoss
from ds_vpipe.models.export import ARCHITECTURES, main
from ds_vpipe.models.pretrained import PretrainedModel, from_pretrained

EVERY = pytest.mark.parametrize(("kind", "tied"), [(kind, tied) for kind in hf.MODELS for tied in (True, False)])
ATTENTION = pytest.mark.parametrize("attention", ["sdpa", "eager"])


def load(folder: Path, **options: Any) -> PretrainedModel:
    return from_pretrained(folder, ARCHITECTURES, **options)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def replace(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@EVERY
@ATTENTION
def test_layers_compute_what_hugging_face_computes(kind: str, tied: bool, attention: str, tmp_path: Path) -> None:
    model = hf.save(kind, tied, tmp_path)
    found = load(tmp_path, attention=attention)
    second_bias = () if tied else tuple(hf.MODELS[kind][0].same.values())  # which the decoder does not add
    assert (found.initialised, found.unused) == ((), second_bias)
    hf.assert_equal(hf.run(hf.layers(found.layers), hf.inputs(kind)), hf.wanted(kind, model))


@EVERY
def test_and_back(kind: str, tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs = hf.MODELS[kind][0].layers(config := hf.config(kind, tied), 3, tied)
    built = hf.layers(specs)
    for parameter in (p for module, _ in built for p in module.parameters()):
        torch.nn.init.normal_(parameter, std=0.2)
    hf.save_checkpoint(built, tmp_path / "checkpoint", config)
    assert main([str(tmp_path / "checkpoint"), str(tmp_path / "out")]) == 0
    architecture = hf.MODELS[kind][0]
    model, info = architecture.model.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {name: len(found) for name, found in info.items()} == dict.fromkeys(info, 0)
    assert model.config.tie_word_embeddings == tied
    assert model.config.architectures == [architecture.model.__name__]
    names = tensors_in(tmp_path / "out")
    assert not tied or not set(architecture.tied) & set(names)
    hf.assert_equal(hf.wanted(kind, model.eval()), hf.run(built, hf.inputs(kind)))
    assert "out: float32" in capsys.readouterr().out


def test_weights_go_back_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    config = hf.config("bert", True)
    built = hf.layers(hf.MODELS["bert"][0].layers(config, 0, True))
    hf.save_checkpoint(built, tmp_path / "checkpoint", config)
    assert main([str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "out").values()} == {torch.bfloat16}
    assert BertForMaskedLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


@pytest.mark.parametrize("kind", hf.MODELS)
def test_shards_and_half_precision(kind: str, tmp_path: Path) -> None:
    model = hf.save(kind, True, tmp_path / "whole").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    found = hf.layers(load(tmp_path / "shards").layers)
    assert {p.dtype for module, _ in found for p in module.parameters()} == {torch.float32}
    hf.assert_equal(hf.run(found, hf.inputs(kind)), hf.wanted(kind, model.float()))


@pytest.mark.parametrize("kind", hf.MODELS)
def test_a_decoder_of_its_own_begins_as_a_copy_of_the_tied_one(kind: str, tmp_path: Path) -> None:
    model = hf.save(kind, True, tmp_path)
    found = load(tmp_path, tied=False)
    assert not found.config.tie_word_embeddings
    assert len(found.layers) == len(hf.MODELS[kind][0].names(found.config, False))
    hf.assert_equal(hf.run(hf.layers(found.layers), hf.inputs(kind)), hf.wanted(kind, model))


def test_a_masked_lm_lacks_pooler_and_next_sentence_which_are_initialised(tmp_path: Path) -> None:
    model = hf.save("bert", False, tmp_path, BertForMaskedLM)
    found = load(tmp_path, seed=7)
    lacking = {"bert.pooler.dense.weight", "bert.pooler.dense.bias", "cls.seq_relationship.weight",
               "cls.seq_relationship.bias"}  # fmt: skip
    assert set(found.initialised) == lacking
    line = "initialised, not in the folder: bert.pooler.dense.weight and 3 more"
    assert line in str(found)
    assert "\n" not in str(found)
    built = hf.layers(found.layers)
    hf.assert_equal(hf.run(built, hf.inputs("bert")), hf.wanted("bert", model))
    fresh: Any = hf.MODELS["bert"][0].layers(found.config, 7, False)[-1].build()
    heads: Any = built[-1][0]
    assert torch.equal(heads.pooler.dense.weight, fresh.pooler.dense.weight)
    assert torch.equal(heads.seq_relationship.weight, fresh.seq_relationship.weight)


@pytest.mark.parametrize(("kind", "base"), [("bert", BertModel), ("gpt2", GPT2Model)])
def test_a_model_without_heads_has_names_without_prefix(kind: str, base: type[Any], tmp_path: Path) -> None:
    model = hf.save(kind, True, tmp_path, base)
    assert not any(name.startswith(hf.MODELS[kind][0].base) for name in tensors_in(tmp_path))
    found = load(tmp_path)
    assert all(name.startswith("cls.") for name in found.initialised)
    built = hf.layers(found.layers)
    if kind == "gpt2":
        logits, _ = hf.run(built, hf.inputs(kind))
        with torch.no_grad():
            wanted = model(hf.inputs(kind)).last_hidden_state @ model.wte.weight.T
        torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)


def test_names_of_older_checkpoints(tmp_path: Path) -> None:
    model = hf.save("bert", True, tmp_path)
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors_in(tmp_path).items()
    }
    tensors["cls.predictions.decoder.weight"] = tensors.pop("bert.embeddings.word_embeddings.weight")
    tensors["bert.embeddings.position_ids"] = torch.arange(16)
    replace(tmp_path, tensors)
    found = load(tmp_path)
    assert found.unused == ("bert.embeddings.position_ids",)
    hf.assert_equal(hf.run(hf.layers(found.layers), hf.inputs("bert")), hf.wanted("bert", model))


def test_roberta_trains_on_masked_tokens_alone_and_counts_its_positions(tmp_path: Path) -> None:
    hf.save("roberta", True, tmp_path)
    ids, types, mask, positions = hf.inputs("roberta")
    built = hf.layers(load(tmp_path).layers)
    logits, nothing = hf.run(built, (ids, types, mask, positions))
    assert nothing is None
    labels = (torch.randint(hf.VOCABULARY, (3, 4)), torch.zeros(3, dtype=torch.long))
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[0].flatten())
    torch.testing.assert_close(PretrainingLoss()((logits, None), labels), wanted)
    longer = [torch.cat([tensor, tensor[:, :1]], 1) for tensor in (ids, types, mask)]
    with pytest.raises(VPipeConfigError, match="sequences of 13 tokens: allowed are at most 12"):
        hf.run(built, (*longer, positions))


def broken(what: str, folder: Path) -> None:
    tensors = tensors_in(folder)
    config = json.loads((folder / "config.json").read_text())
    match what:
        case "shape":
            config["vocab_size"] = 88
        case "missing":
            del tensors["bert.encoder.layer.1.output.dense.bias"]
        case "other model":
            config["model_type"] = "t5"
        case "decoder":
            config["is_decoder"] = True
        case "heads":
            config["num_attention_heads"] = 5
        case "fields":
            config["num_hidden_layers"] = "two"
        case "no layers":
            config["num_hidden_layers"] = 0
        case "below zero":
            config["hidden_size"] = -16
        case "type":
            config["model_type"] = ["bert"]
    (folder / "config.json").write_text(json.dumps(config))
    replace(folder, tensors)
    weights = folder / "model.safetensors"
    match what:
        case "pickle":
            weights.rename(folder / "pytorch_model.bin")
        case "no weights":
            weights.unlink()
        case "truncated":
            weights.write_bytes(weights.read_bytes()[:1000])
        case "no config":
            (folder / "config.json").unlink()
        case "no shard":
            weights.unlink()
            (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
        case "index":
            weights.unlink()
            (folder / "model.safetensors.index.json").write_text("{}")
        case "index of numbers":
            weights.unlink()
            (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": 3, "b": ["c"]}}')


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("shape", "tensor bert.embeddings.word_embeddings.weight in .*model.safetensors: got [83, 32]; allowed: the"
         " shape [88, 32] that config.json gives layer 0"),
        ("missing", '.*: got "bert.encoder.layer.1.output.dense.bias"; no file has this tensor; allowed: all weights'),
        ("other model", '.*config.json: got "t5"; allowed: model_type "bert" or "roberta" or "gpt2"'),
        ("decoder", "is_decoder in .*: got true; allowed: false"),
        ("fields", '.*config.json: got "bert"; .*num_hidden_layers.*allowed: fields of BertConfig'),
        ("heads", "from_pretrained: got .*(32) is not a multiple of .*allowed: a configuration from which layer 1 can"),
        ("pickle", "from_pretrained: got .*pytorch_model.bin.*convert it once: load the folder with transformers'"),
        ("no weights", "from_pretrained: got .*allowed: a folder with model.safetensors or model.safetensors.index"),
        ("truncated", "from_pretrained: got .*model.safetensors.*allowed: a safetensors file; copy it again"),
        ("no config", "from_pretrained: got .*hf download NAME --local-dir DIR"),
        ("no shard", "from_pretrained: got .*model-1.safetensors.*copy the missing file"),
        ("index", 'from_pretrained: got .*index.j.*allowed: a JSON object with a "weight_map"'),
        ("index of numbers", 'from_pretrained: got .*index.j.*allowed: a JSON object with a "weight_map"'),
        ("no layers", "num_hidden_layers in .*config.json: got 0; allowed: at least 1"),
        ("below zero", "hidden_size in .*config.json: got -16; allowed: at least 1"),
        ("type", 'model_type in .*config.json: got ["bert"]; allowed: model_type "bert"'),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_in_one_line(what: str, says: str, tmp_path: Path) -> None:
    hf.save("bert", True, tmp_path)
    broken(what, tmp_path)
    with pytest.raises(VPipeConfigError, match=re.escape(says).replace(r"\.\*", ".*")) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_that_is_not_tied_is_not_tied_by_force(tmp_path: Path) -> None:
    hf.save("bert", False, tmp_path)
    with pytest.raises(VPipeConfigError, match=r"tie_word_embeddings with .*: got true; allowed: a decoder of its own"):
        load(tmp_path, tied=True)


def test_weights_of_nothing_known_are_refused(tmp_path: Path) -> None:
    hf.save("bert", True, tmp_path)
    replace(tmp_path, {"something": torch.zeros(1)})
    with pytest.raises(VPipeConfigError, match=r"no file has this tensor"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 3}, "not those of a bert with num_hidden_layers 3"),
        ({"vocab_size": 90}, "tensor bert.embeddings.word_embeddings.weight in checkpoint"),
        ({"model_type": "gpt2"}, "not those of a gpt2"),
    ],
)
def test_export_refuses_another_configuration_in_one_line(
    change: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = hf.config("bert", True)
    hf.save_checkpoint(hf.layers(hf.MODELS["bert"][0].layers(config, 0, True)), tmp_path / "checkpoint", config)
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), **change}))
    command = [str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--config", str(tmp_path / "config.json")]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not (tmp_path / "out").exists()


def test_export_needs_a_new_folder_and_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = hf.config("bert", True)
    checkpoint = tmp_path / "checkpoint"
    hf.save_checkpoint(hf.layers(hf.MODELS["bert"][0].layers(config, 0, True)), checkpoint, config)
    assert main([str(checkpoint), str(tmp_path)]) == 2
    torch.save({"optimizer": None}, checkpoint / "mp_rank_00_model_states.pt")
    assert main([str(checkpoint), str(tmp_path / "out")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert "allowed: a new folder" in first
    assert "--config: got null; allowed: the model's configuration, which this checkpoint lacks" in second
