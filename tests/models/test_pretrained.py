"""Weights from Hugging Face folders, in BERT's pipeline layers and back, against the Hugging Face models."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import hugging_face as hf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    BertForMaskedLM,
    BertForPreTraining,
    BertModel,
    GenerationConfig,
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    GPT2Model,
)

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.layers import bert_layers
from ds_vpipe.models.bert.model import pretrained
from ds_vpipe.models.export import main
from ds_vpipe.models.hugging_face import StoredWeights, from_pretrained, model_state
from ds_vpipe.splitting.meta_tensor import SplitError
from ds_vpipe.splitting.split import split_in_process

TIED = pytest.mark.parametrize("tied", [True, False])


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def replace(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@TIED
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_compute_what_hugging_face_computes(tied: bool, attention: str, tmp_path: Path) -> None:
    model = hf.save("bert", tied, tmp_path)
    found = pretrained(tmp_path, attention=attention)
    assert found.description == f"{tmp_path}: bert, 5 pipeline layers"
    hf.assert_equal(hf.run(hf.layers(found.layers), hf.bert_inputs()), hf.wanted(model))


@TIED
def test_and_back(tied: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    built = hf.layers(bert_layers(config := hf.config("bert", tied), 3))
    for parameter in (parameter for module in built for parameter in module.parameters()):
        torch.nn.init.normal_(parameter, std=0.2)
    hf.save_checkpoint(built, tmp_path / "checkpoint", config)
    assert main([str(tmp_path / "checkpoint"), str(tmp_path / "out")]) == 0
    model, info = BertForPreTraining.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert {name: len(found) for name, found in info.items()} == dict.fromkeys(info, 0)
    assert model.config.tie_word_embeddings == tied
    assert model.config.architectures == ["BertForPreTraining"]
    assert ("cls.predictions.decoder.weight" in tensors_in(tmp_path / "out")) != tied
    hf.assert_equal(hf.wanted(model.eval()), hf.run(built, hf.bert_inputs()))
    assert "out: float32" in capsys.readouterr().out


def test_weights_go_back_in_the_dtype_that_is_asked_for(tmp_path: Path) -> None:
    config = hf.config("bert", True)
    hf.save_checkpoint(hf.layers(bert_layers(config)), tmp_path / "checkpoint", config)
    assert main([str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    assert {tensor.dtype for tensor in tensors_in(tmp_path / "out").values()} == {torch.bfloat16}
    assert BertForMaskedLM.from_pretrained(tmp_path / "out").dtype == torch.bfloat16


def test_shards_and_half_precision(tmp_path: Path) -> None:
    model = hf.save("bert", True, tmp_path / "whole").to(torch.bfloat16)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    found = hf.layers(pretrained(tmp_path / "shards").layers)
    assert {p.dtype for module in found for p in module.parameters()} == {torch.float32}
    hf.assert_equal(hf.run(found, hf.bert_inputs()), hf.wanted(model.float()))


def test_a_decoder_of_its_own_begins_as_a_copy_of_the_tied_one(tmp_path: Path) -> None:
    model = hf.save("bert", True, tmp_path)
    found = pretrained(tmp_path, tied=False)
    assert not found.config.tie_word_embeddings
    assert hasattr(found.layers[-1].build(), "decoder")
    hf.assert_equal(hf.run(hf.layers(found.layers), hf.bert_inputs()), hf.wanted(model))


def test_a_masked_lm_lacks_pooler_and_next_sentence_which_are_initialised(tmp_path: Path) -> None:
    model = hf.save("bert", False, tmp_path, BertForMaskedLM)
    found = pretrained(tmp_path, seed=7)
    assert found.description.endswith("; initialised, not in the folder: bert.pooler.dense.weight and 3 more")
    built = hf.layers(found.layers)
    hf.assert_equal(hf.run(built, hf.bert_inputs()), hf.wanted(model))
    fresh: Any = bert_layers(found.config, 7)[-1].build()
    heads: Any = built[-1]
    assert torch.equal(heads.pooler.dense.weight, fresh.pooler.dense.weight)
    assert torch.equal(heads.seq_relationship.weight, fresh.seq_relationship.weight)


class Tagger(nn.Module):
    """A head of a script's own on blocks that it takes out of the model that was read."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.words, self.blocks, self.head = model.transformer.wte, model.transformer.h, nn.Linear(16, 3)

    def forward(self, input_ids: Tensor) -> Any:
        hidden = self.words(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden).logsumexp(-1).sum()


class Decoding(nn.Module):
    """A decoder of a script's own, before the words whose weight it has."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.decoder = nn.Linear(16, 50, bias=False)
        self.inner = model.transformer
        self.decoder.weight = self.inner.wte.weight

    def forward(self, input_ids: Tensor) -> Any:
        return self.decoder(self.inner(input_ids, use_cache=False)[0]).logsumexp(-1).sum()


class Taken(nn.LayerNorm):
    """A class that a script puts in the place of another."""


def replaced(model: Any) -> Any:
    """The model with norms of a class of the script's own, which have the same weights."""
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if type(norm) is nn.LayerNorm:
                taken = Taken(norm.normalized_shape, norm.eps)
                taken.weight, taken.bias = norm.weight, norm.bias
                setattr(module, name, taken)
    return model


def tied(model: Any) -> Any:
    """The model whose head gets the words' weight although the folder has one of its own."""
    model.lm_head.weight = model.transformer.wte.weight
    return model


@pytest.mark.parametrize(
    "put", [lambda model: model, copy.deepcopy, lambda model: model.transformer, Tagger, Decoding, replaced, tied]
)
def test_modules_read_their_weights_wherever_they_are(put: Any, tmp_path: Path) -> None:
    config = GPT2Config(
        n_layer=2, n_embd=16, n_head=2, vocab_size=50, n_positions=8, tie_word_embeddings=put is not tied
    )
    model = GPT2LMHeadModel(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    wanted = put(GPT2LMHeadModel.from_pretrained(tmp_path)).state_dict()
    model = put(from_pretrained(tmp_path))
    split = split_in_process(model, 1)
    split.keep(range(4), lambda piece: 0)
    split.release()
    found = model.state_dict()
    assert found.keys() == wanted.keys()
    assert all(
        torch.equal(found[name], wanted[name]) for name in wanted if "head.b" not in name and name != "head.weight"
    )


def test_stages_read_a_weight_of_two_names_by_the_first(tmp_path: Path) -> None:
    config = GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50, tie_word_embeddings=False)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    model = tied(from_pretrained(tmp_path))
    split = split_in_process(model, 2)
    split.keep(range(2, 4), lambda piece: int(piece > 1))
    split.release()
    assert torch.equal(model.lm_head.weight, tensors_in(tmp_path)["transformer.wte.weight"])


def test_a_script_keeps_what_it_has_put_there(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50)).save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    model.transformer.ln_f.weight = nn.Parameter(torch.full((16,), 2.0))
    split = split_in_process(model, 1)
    split.keep(range(4), lambda piece: 0)
    split.release()
    assert (model.transformer.ln_f.weight == 2).all()


def test_buffers_that_no_file_has_are_not_zeros(tmp_path: Path) -> None:
    """A part of a model whose buffers its own initialiser would make."""
    hf.save("bert", True, tmp_path)

    class Head(nn.Module):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.words, self.blocks = model.bert.embeddings, model.bert.encoder.layer

        def forward(self, input_ids: Tensor) -> Any:
            hidden = self.words(input_ids)
            for block in self.blocks:
                hidden = block(hidden)
            return hidden.sum()

    with pytest.raises(SplitError, match=r"words\.position_ids: is on the meta device"):
        split_in_process(Head(from_pretrained(tmp_path)), 1)


def test_embeddings_to_be_read_keep_their_size(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=50)).save_pretrained(tmp_path)
    model = from_pretrained(tmp_path)
    assert model.resize_token_embeddings(50) is model.get_input_embeddings()
    with pytest.raises(VPipeConfigError, match=r"resize_token_embeddings.*got 49; allowed: 50, as many tokens as"):
        model.resize_token_embeddings(49)
    with pytest.raises(VPipeConfigError, match="got 64; allowed: 50"):
        model.transformer.resize_token_embeddings(pad_to_multiple_of=64)


@pytest.mark.parametrize(
    ("kind", "base", "whole", "heads"), [("bert", BertModel, BertForPreTraining, "cls."), ("gpt2", GPT2Model, None, "")]
)
def test_a_model_without_heads_has_names_without_prefix(
    kind: str, base: type[Any], whole: type[Any] | None, heads: str, tmp_path: Path
) -> None:
    hf.save(kind, True, tmp_path, base)
    model = from_pretrained(tmp_path, whole or GPT2LMHeadModel)
    assert all(parameter.is_meta for parameter in model.parameters())
    found = StoredWeights(tmp_path, model)
    assert found.unused == ()
    assert all(name.startswith(heads) for name in found.initialised)
    assert bool(found.initialised) == bool(heads)


def test_settings_of_generation_come_with_the_weights(tmp_path: Path) -> None:
    model = hf.save("gpt2", True, tmp_path)
    model.generation_config = GenerationConfig(eos_token_id=[0, 7], do_sample=True, temperature=0.6)
    model.save_pretrained(tmp_path)
    assert from_pretrained(tmp_path).generation_config.to_dict() == model.generation_config.to_dict()
    assert not from_pretrained(tmp_path, GPT2ForSequenceClassification).can_generate()
    (tmp_path / "generation_config.json").write_text("{")
    with mock.patch("ds_vpipe.models.hugging_face.logger.warning") as said:
        assert from_pretrained(tmp_path).can_generate()
    assert "generation_config.json: no settings of generation, it cannot be read" in said.call_args.args[0]


@pytest.mark.parametrize("make", [None, AutoModelForSequenceClassification.from_config])
def test_checkpoints_name_the_class_that_was_trained(make: Any, tmp_path: Path) -> None:
    new = hf.MODELS["gpt2"][0](hf.config("gpt2", True))
    assert model_state(new)["model_config"]["architectures"] == ["GPT2LMHeadModel"]
    new.save_pretrained(tmp_path)
    model = from_pretrained(tmp_path, make)
    assert model_state(model)["model_config"]["architectures"] == [type(model).__name__]


def test_unknown_fields_of_the_configuration_are_refused(tmp_path: Path) -> None:
    hf.save("bert", True, tmp_path)
    assert from_pretrained(tmp_path, num_labels=4, attn_implementation="eager").config.num_labels == 4
    says = r'num_lables for .*: got 4; allowed: a field of BertConfig, did you mean "num_labels"\?; correct the name'
    with pytest.raises(VPipeConfigError, match=says):
        from_pretrained(tmp_path, num_lables=4)


def test_no_file_stays_open(tmp_path: Path) -> None:
    hf.save("bert", True, tmp_path)
    weights = StoredWeights(tmp_path, BertForPreTraining(hf.config("bert", True)))
    target = torch.zeros(hf.config("bert", True).hidden_size)
    assert weights.fill("bert.embeddings.LayerNorm.weight", target)
    assert target.any()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


def test_names_of_older_checkpoints(tmp_path: Path) -> None:
    model = hf.save("bert", True, tmp_path)
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): tensor
        for name, tensor in tensors_in(tmp_path).items()
    }
    tensors["cls.predictions.decoder.weight"] = tensors.pop("bert.embeddings.word_embeddings.weight")
    tensors["bert.embeddings.position_ids"] = torch.arange(16)
    replace(tmp_path, tensors)
    found = pretrained(tmp_path)
    assert found.description.endswith("pipeline layers; not used: bert.embeddings.position_ids")
    hf.assert_equal(hf.run(hf.layers(found.layers), hf.bert_inputs()), hf.wanted(model))


def broken(what: str, folder: Path) -> None:
    tensors = tensors_in(folder)
    config = json.loads((folder / "config.json").read_text())
    match what:
        case "shape":
            config["vocab_size"] = 88
        case "missing":
            del tensors["bert.encoder.layer.1.output.dense.bias"]
        case "other model":
            config["model_type"] = "roberta"
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
         " shape [88, 32] that config.json gives bert.embeddings.word_embeddings.weight"),
        ("missing", '.*: got "bert.encoder.layer.1.output.dense.bias"; no file has this tensor; allowed: all weights'),
        ("other model", 'model_type in .*config.json: got "roberta"; allowed: "bert"; train others as plain models'),
        ("decoder", "is_decoder in .*: got true; allowed: false"),
        ("fields", 'model: got .*config.json.*num_hidden_layers.*allowed: the config.json of a model that'),
        ("heads", "model: got .*hidden size (32) is not a multiple of the number of attention heads (5)"),
        ("pickle", "model: got .*pytorch_model.bin.*convert it once: load the folder with transformers'"),
        ("no weights", "model: got .*allowed: a folder with model.safetensors or model.safetensors.index"),
        ("truncated", "model: got .*model.safetensors.*allowed: a safetensors file; copy it again"),
        ("no config", "model: got .*hf download NAME --local-dir DIR"),
        ("no shard", "model: got .*model-1.safetensors.*copy the missing file"),
        ("index", 'model: got .*index.j.*allowed: a JSON object with a "weight_map"'),
        ("index of numbers", 'model: got .*index.j.*allowed: a JSON object with a "weight_map"'),
        ("no layers", "num_hidden_layers in .*config.json: got 0; allowed: at least 1"),
        ("below zero", "model: got .*-16.*allowed: a configuration from which the model can be built"),
        ("type", 'model: got .*config.json.*allowed: the config.json of a model that transformers knows'),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_in_one_line(what: str, says: str, tmp_path: Path) -> None:
    hf.save("bert", True, tmp_path)
    broken(what, tmp_path)
    with pytest.raises(VPipeConfigError, match=re.escape(says).replace(r"\.\*", ".*")) as caught:
        pretrained(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_model_that_is_not_tied_is_not_tied_by_force(tmp_path: Path) -> None:
    hf.save("bert", False, tmp_path)
    with pytest.raises(VPipeConfigError, match=r"tie_word_embeddings with .*: got true; allowed: a decoder of its own"):
        pretrained(tmp_path, tied=True)


def test_weights_of_nothing_known_are_refused(tmp_path: Path) -> None:
    hf.save("bert", True, tmp_path)
    replace(tmp_path, {"something": torch.zeros(1)})
    with pytest.raises(VPipeConfigError, match=r"no file has this tensor"):
        pretrained(tmp_path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_hidden_layers": 3}, "got 5 layers, allowed are the 7 layers of a bert with num_hidden_layers 3"),
        ({"vocab_size": 90}, "tensor bert.embeddings.word_embeddings.weight in checkpoint"),
        (
            {"model_type": "gpt2"},
            'got "layers of a gpt2"; allowed: layers of models/bert/train.py, or of a plain model',
        ),
    ],
)
def test_export_refuses_another_configuration_in_one_line(
    change: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = hf.config("bert", True)
    hf.save_checkpoint(hf.layers(bert_layers(config)), tmp_path / "checkpoint", config)
    (tmp_path / "config.json").write_text(json.dumps({**config.to_dict(), **change}))
    command = [str(tmp_path / "checkpoint"), str(tmp_path / "out"), "--config", str(tmp_path / "config.json")]
    assert main(command) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert not (tmp_path / "out").exists()


def test_export_needs_a_new_folder_and_a_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = hf.config("bert", True)
    checkpoint = tmp_path / "checkpoint"
    hf.save_checkpoint(hf.layers(bert_layers(config)), checkpoint, config)
    assert main([str(checkpoint), str(tmp_path)]) == 2
    torch.save({"optimizer": None}, checkpoint / "mp_rank_00_model_states.pt")
    assert main([str(checkpoint), str(tmp_path / "out")]) == 2
    torch.save({"optimizer": None, "model_config": {"model_type": "mine"}}, checkpoint / "mp_rank_00_model_states.pt")
    assert main([str(checkpoint), str(tmp_path / "out")]) == 2
    torch.save(["no dict"], checkpoint / "mp_rank_00_model_states.pt")
    assert main([str(checkpoint), str(tmp_path / "out")]) == 2
    first, second, wrong, third = capsys.readouterr().err.splitlines()
    assert '--config: got null; "Unrecognized model identifier: mine.' in wrong
    assert "allowed: the model's configuration, which this checkpoint lacks; give the model's config.json" in wrong
    assert "allowed: a new folder" in first
    assert "--config: got null; allowed: the model's configuration, which this checkpoint lacks" in second
    assert "got contents that no pipeline writes" in third
