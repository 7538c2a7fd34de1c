"""GPT-2's layers, text, blocks and training script."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import hugging_face as hf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import GPT2LMHeadModel
from worlds import Worlds

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.export import main as export
from ds_vpipe.models.gpt2.blocks import TextBlocks
from ds_vpipe.models.gpt2.layers import gpt2_layers
from ds_vpipe.models.gpt2.loss import IGNORED_LABEL, causal_lm_loss
from ds_vpipe.models.gpt2.sizes import gpt2_config
from ds_vpipe.models.gpt2.text import END_OF_TEXT, encode, read_tokenizer, train_tokenizer
from ds_vpipe.models.gpt2.training import main, parse_arguments

TEXTS = ["A stage sends what the next stage waits for.", "Grüße: 10 µs — naïve café, 漢字 & <tags>."]


def test_loss_is_hugging_faces() -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(hf.config("gpt2", True)).eval()
    ids = hf.inputs("gpt2")
    labels = ids.clone()
    labels[:, 3:5] = IGNORED_LABEL
    with torch.no_grad():
        out = model(ids, labels=labels)
    torch.testing.assert_close(causal_lm_loss(out.logits, labels), out.loss)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_no_token_sees_the_next_one(tied: bool, attention: str) -> None:
    config = hf.config("gpt2", tied)
    config._attn_implementation = attention
    built = hf.layers(gpt2_layers(config))
    ids = hf.inputs("gpt2")
    changed = ids.clone()
    changed[:, 7:] = 1
    before, _ = hf.run(built, ids)
    after, _ = hf.run(built, changed)
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert not torch.allclose(after[:, 7], before[:, 7])


@pytest.mark.parametrize("tied", [True, False])
def test_initial_weights_depend_on_seed_and_place_alone_and_have_hugging_faces_deviations(tied: bool) -> None:
    config = hf.config("gpt2", tied)
    config.n_embd, config.n_inner = 64, 256
    specs = gpt2_layers(config, seed=5)
    torch.manual_seed(1)
    in_order = [spec.build().state_dict() for spec in specs]
    torch.manual_seed(2)
    backwards = [spec.build().state_dict() for spec in reversed(specs)][::-1]
    torch.testing.assert_close(in_order, backwards, rtol=0, atol=0)
    torch.manual_seed(0)
    theirs = dict(GPT2LMHeadModel(config).named_parameters())
    for index in range(2):
        block: nn.Module = specs[index + 1 + tied].build()
        for name, parameter in block.named_parameters():
            wanted = theirs[f"transformer.h.{index}.{name.removeprefix('block.')}"]
            assert parameter.std().item() == pytest.approx(wanted.std().item(), rel=0.1, abs=1e-9), name
            assert parameter.mean().item() == pytest.approx(wanted.mean().item(), abs=0.01), name


def test_tokens_are_the_bytes_of_the_text() -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    tokens = encode(TEXTS, tokenizer)
    assert (tokens == 0).sum() == 2
    assert tokens[-1] == 0
    assert tokenizer.decode(tokens[: np.flatnonzero(tokens == 0)[0]].tolist()) == TEXTS[0]
    assert tokenizer.decode(encode(["Ω"], tokenizer).tolist()) == "Ω"
    with pytest.raises(VPipeConfigError, match="vocab_size: got 256; allowed: at least 257"):
        train_tokenizer(TEXTS, 256)


def test_an_epoch_has_every_block_once_and_replicas_do_not_overlap() -> None:
    tokens = np.arange(8 * 5 + 3, dtype=np.int32)
    seen = []
    for replica in (0, 1):
        blocks = TextBlocks(tokens, length=5, size=2, replica=replica, replicas=2)
        batches = blocks.micro_batches(seed=3)
        epochs = [[next(batches) for _ in range(blocks.per_epoch)] for _ in range(2)]
        seen.append([[int(row[0]) for inputs, _ in epoch for row in inputs] for epoch in epochs])
        inputs, labels = epochs[0][0]
        assert inputs is labels
        assert (inputs.dtype, inputs.shape) == (torch.int64, (2, 5))
        assert torch.equal(inputs[0], inputs[0, 0] + torch.arange(5))
        later = blocks.micro_batches(seed=3, start=3)
        assert torch.equal(next(later)[0], epochs[1][1][0])
    for epoch in (0, 1):
        assert sorted(seen[0][epoch] + seen[1][epoch]) == list(range(0, 40, 5))
    assert seen[0][0] != seen[0][1]
    in_order = TextBlocks(tokens, 5, 2).micro_batches(None)
    assert next(in_order)[0][:, 0].tolist() == [0, 5]
    with pytest.raises(VPipeConfigError, match="text: got 43; allowed: at least 45 tokens"):
        TextBlocks(tokens, 5, 3, replicas=3)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "--deepspeed_config is missing: give a DeepSpeed JSON file"),
        (["--deepspeed_config", "CONFIG", "--step", "3"], "unrecognized arguments: --step"),
        (["--deepspeed_config", "CONFIG", "--steps", "0"], "--steps 0: must be at least 1"),
        (["--deepspeed_config", "CONFIG", "--seq-length", "1"], "--seq-length 1: must be at least 2"),
        (["--deepspeed_config", "CONFIG", "--seed", "-1"], "--seed -1: must be at least 0"),
        (["--deepspeed_config", "CONFIG", "--vocab-size", "-8"], "--vocab-size -8: must be at least 257"),
        (["--deepspeed_config", "CONFIG", "--seq-length", "300"], "--seq-length 300: the model has 256 positions"),
        (["--deepspeed_config", "CONFIG", "--gpt2-config", "huge"], '--gpt2-config: got "huge"; allowed: a size (tiny'),
        (["--deepspeed_config", "CONFIG"], "RANK is not set"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "config.json").write_text("{}")
    assert main([str(tmp_path / "config.json") if word == "CONFIG" else word for word in arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"[Rank 0] error: {says}")


def test_sizes(tmp_path: Path) -> None:
    parameters = sum(p.numel() for p in GPT2LMHeadModel(gpt2_config("tiny")).parameters())
    assert parameters == 2048 * 128 + 256 * 128 + 4 * (12 * 128 * 128 + 13 * 128) + 2 * 128
    small = gpt2_config("small")
    assert (small.n_embd, small.n_layer, small.n_head, small.vocab_size, small.n_positions) == (
        768,
        12,
        12,
        50257,
        1024,
    )
    path = tmp_path / "config.json"
    path.write_text(json.dumps(hf.config("gpt2", True).to_dict()))
    assert gpt2_config(str(path), vocab_size=99).vocab_size == 99
    assert gpt2_config(str(path)).n_layer == 2


def run(cache: str, arguments: list[str]) -> int:
    os.environ["DS_VPIPE_CACHE"] = cache
    return main(arguments)


@pytest.mark.mp
def test_the_script_trains_saves_and_goes_on_from_the_exported_weights(worlds: Worlds, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    words = ["stage", "batch", "layer", "rank", "sends", "waits", "for", "gradients", "weights", "and", "losses"]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(words), (900, 8), generator=generator).tolist()
    text.write_text(" ".join(" ".join(words[index] for index in row).capitalize() + "." for row in chosen))
    (tmp_path / "config.json").write_text(json.dumps(hf.config("gpt2", True).to_dict() | {"vocab_size": 300}))
    ds_config = {
        "train_micro_batch_size_per_gpu": 4,
        "steps_per_print": 100,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "vpipe": {"sync_mode": "asp"},
    }
    (tmp_path / "ds.json").write_text(json.dumps(ds_config))
    common = ["--deepspeed_config", str(tmp_path / "ds.json"), "--text", str(text), "--seq-length", "16"]
    first = [
        "--gpt2-config",
        str(tmp_path / "config.json"),
        "--steps",
        "6",
        "--checkpoint-dir",
        str(tmp_path / "saved"),
    ]
    cache = str(tmp_path / "cache")
    assert worlds.run(2, run, cache, common + first) == [0, 0]
    out = tmp_path / "out"
    assert export([str(tmp_path / "saved"), str(out)]) == 0
    assert GPT2LMHeadModel.from_pretrained(out).config.n_layer == 2
    again = [*common, "--model_name_or_path", str(out), "--steps", "2"]
    assert worlds.run(2, run, cache, again) == [2, 2]  # without a tokenizer its numbers mean nothing
    with pytest.raises(VPipeConfigError, match=r"allowed: a folder with tokenizer\.json; save the model's tokenizer"):
        read_tokenizer(out)
    train_tokenizer(TEXTS, 280).save(str(out / "tokenizer.json"))
    assert isinstance(read_tokenizer(out), Tokenizer)
    assert worlds.run(2, run, cache, again) == [0, 0]


def test_weights_and_vocabulary_size_exclude_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ds.json").write_text("{}")
    command = ["--deepspeed_config", str(tmp_path / "ds.json"), "--model_name_or_path", str(tmp_path)]
    command += ["--vocab-size", "300"]
    assert parse_arguments(command).model_name_or_path == tmp_path
    assert main(command) == 2
    assert re.search("--vocab_size 300 with --model_name_or_path", capsys.readouterr().err)
