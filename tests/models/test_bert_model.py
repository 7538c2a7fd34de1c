"""BertConfig from names and files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.model import bert_config


def test_large_is_the_published_model() -> None:
    config = bert_config("large")
    assert (config.hidden_size, config.num_hidden_layers, config.num_attention_heads) == (1024, 24, 16)
    assert (config.intermediate_size, config.vocab_size) == (4096, 30528)
    assert bert_config("large-48l").num_hidden_layers == 48


@pytest.mark.parametrize(("size", "padded"), [(30522, 30528), (2048, 2048), (1, 8)])
def test_vocabulary_is_padded_to_a_multiple_of_eight(size: int, padded: int) -> None:
    assert bert_config("tiny", vocab_size=size).vocab_size == padded


def test_a_file_and_a_vocabulary_size(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        json.dumps({"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "vocab_size": 100})
    )
    config = bert_config(str(path), attention="eager")
    assert (config.hidden_size, config.num_hidden_layers, config.vocab_size) == (64, 5, 104)
    assert config._attn_implementation == "eager"
    assert bert_config(str(path), vocab_size=1001).vocab_size == 1008


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "it is not JSON"),
        ("[]", "it holds no object"),
        ("{}", "it has no hidden_size"),
        ('{"hidden_size": 10, "num_attention_heads": 3}', "multiple of the number of attention heads"),
        ('{"hidden_size": 768, "num_attention_heads": 0}', "ZeroDivisionError: .*a configuration from which"),
        ('{"hidden_size": 768, "num_attention_heads": -2}', "num_attention_heads in .*: got -2; allowed: at least 1"),
        ('{"hidden_size": 768, "hidden_act": "foo"}', "KeyError: 'foo'; allowed: a configuration from which"),
        ('{"hidden_size": 768, "vocab_size": -5}', "negative dimension -5: .*a configuration from which"),
        ('{"hidden_size": "wide"}', "hidden_size.*a configuration from which the model can be built"),
        ('{"hidden_size": 768, "is_decoder": true}', "is_decoder"),
    ],
)
def test_wrong_files_are_refused_in_one_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(VPipeConfigError, match=says) as caught:
        bert_config(str(path))
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(VPipeConfigError, match=r'"huge"; the file cannot be read: No such.*a size: .*large-48l'):
        bert_config("huge")
