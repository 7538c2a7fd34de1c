"""BERT's pipeline layers against Hugging Face's BertForPreTraining, and their initial weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForPreTraining

from ds_vpipe.models.bert.layers import (
    AttentionLayer,
    EmbeddingAttentionLayer,
    FeedForwardLayer,
    HeadsLayer,
    bert_layers,
)
from ds_vpipe.models.bert.model import SIZE_NAMES, bert_config

BATCH, LENGTH, SLOTS = 3, 12, 4


def small_config(attention: str = "sdpa", layers: int = 3) -> BertConfig:
    config = bert_config("tiny", vocab_size=80, attention=attention)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 32, 64, layers
    return config


def inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 80, (BATCH, LENGTH), generator=generator)
    lengths = torch.tensor([LENGTH, 7, 9])
    padding_mask = torch.arange(LENGTH) < lengths[:, None]
    types = (torch.arange(LENGTH) > 4).long().expand(BATCH, -1).contiguous()
    positions = torch.tensor([[1, 5, 11, 0], [2, 6, 0, 0], [1, 2, 3, 8]])
    return ids * padding_mask, types, padding_mask, positions


def untied(attention: str = "sdpa", layers: int = 3) -> BertConfig:
    config = small_config(attention, layers)
    config.tie_word_embeddings = False
    return config


def copy_weights(source: Any, layers: list[Any]) -> None:
    encoder = source.bert.encoder.layer
    for index, layer in enumerate(layers):
        if isinstance(layer, EmbeddingAttentionLayer):
            layer.embeddings.load_state_dict(source.bert.embeddings.state_dict())
            layer.attention.load_state_dict(encoder[0].attention.state_dict())
        elif isinstance(layer, AttentionLayer):
            layer.attention.load_state_dict(encoder[index // 2].attention.state_dict())
        elif isinstance(layer, FeedForwardLayer):
            layer.intermediate.load_state_dict(encoder[index // 2].intermediate.state_dict())
            layer.output.load_state_dict(encoder[index // 2].output.state_dict())
        elif isinstance(layer, HeadsLayer):
            predictions = source.cls.predictions
            layer.transform.load_state_dict(predictions.transform.state_dict())
            layer.decoder.load_state_dict(predictions.decoder.state_dict())
            layer.pooler.load_state_dict(source.bert.pooler.state_dict())
            layer.seq_relationship.load_state_dict(source.cls.seq_relationship.state_dict())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_compute_what_hugging_face_computes(attention: str) -> None:
    config = untied(attention)
    torch.manual_seed(0)
    reference = BertForPreTraining._from_config(config, attn_implementation=attention).eval()
    for parameter in reference.parameters():  # no zero biases, no unit scales: every weight must arrive
        nn.init.normal_(parameter, std=0.2)
    model = nn.Sequential(*[spec.build() for spec in bert_layers(config)]).eval()
    copy_weights(reference, list(model))

    ids, types, padding_mask, positions = inputs()
    with torch.no_grad():
        masked_lm, next_sentence = model((ids, types, padding_mask, positions))
        expected = reference(ids, attention_mask=padding_mask.long(), token_type_ids=types)
    at_positions = expected.prediction_logits[torch.arange(BATCH)[:, None], positions]
    assert masked_lm.shape == (BATCH, SLOTS, config.vocab_size)
    torch.testing.assert_close(masked_lm, at_positions, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(next_sentence, expected.seq_relationship_logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_padding_does_not_reach_the_outputs(attention: str) -> None:
    model = nn.Sequential(*[spec.build() for spec in bert_layers(small_config(attention))]).eval()
    ids, types, padding_mask, positions = inputs()
    changed = torch.where(padding_mask, ids, torch.full_like(ids, 42))
    with torch.no_grad():
        before, after = model((ids, types, padding_mask, positions)), model((changed, types, padding_mask, positions))
        unmasked = model((changed, types, torch.ones_like(padding_mask), positions))
    torch.testing.assert_close(after, before)
    assert not torch.allclose(unmasked[0][1], before[0][1])


@pytest.mark.parametrize("config", [small_config(), untied()], ids=["tied", "untied"])
def test_every_parameter_gets_a_gradient(config: BertConfig) -> None:
    model = nn.Sequential(*[spec.build() for spec in bert_layers(config)])
    masked_lm, next_sentence = model(inputs())
    (masked_lm.square().mean() + next_sentence.square().mean()).backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


@pytest.mark.parametrize(("name", "count"), [("tiny", 9), ("mini", 9), ("base", 25), ("large", 49), ("large-48l", 97)])
def test_two_layers_per_encoder_layer_and_the_heads(name: str, count: int) -> None:
    config = bert_config(name)
    types = [spec.typename for spec in bert_layers(config)]
    assert len(types) == count
    assert types == [
        EmbeddingAttentionLayer,
        *[FeedForwardLayer, AttentionLayer] * ((count - 3) // 2),
        FeedForwardLayer,
        HeadsLayer,
    ]
    assert name in SIZE_NAMES


def test_a_decoder_of_its_own_only_where_nothing_is_tied() -> None:
    heads = [bert_layers(config)[-1].build() for config in (small_config(), untied())]
    assert [hasattr(layer, "decoder") for layer in heads] == [False, True]


def test_initial_weights_depend_on_seed_and_place_alone() -> None:
    specs = bert_layers(small_config(), seed=5)
    torch.manual_seed(1)
    in_order = [spec.build().state_dict() for spec in specs]
    torch.manual_seed(2)
    backwards = [spec.build().state_dict() for spec in reversed(specs)][::-1]
    torch.testing.assert_close(in_order, backwards, rtol=0, atol=0)
    assert not torch.equal(in_order[2]["attention.self.query.weight"], in_order[4]["attention.self.query.weight"])
    other = bert_layers(small_config(), seed=100)[2].build().state_dict()
    assert not torch.equal(in_order[2]["attention.self.query.weight"], other["attention.self.query.weight"])


def test_building_a_layer_leaves_the_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    bert_layers(small_config())[0].build()
    torch.testing.assert_close(torch.rand(4), expected, rtol=0, atol=0)


def test_initial_weights_follow_the_configuration() -> None:
    config = untied()
    config.initializer_range = 0.5
    first, heads = bert_layers(config)[0].build(), bert_layers(config)[-1].build()
    assert first.embeddings.word_embeddings.weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert first.embeddings.word_embeddings.weight[config.pad_token_id].abs().sum() == 0
    assert heads.decoder.weight.std().item() == pytest.approx(0.5, rel=0.1)
    assert heads.decoder.bias.abs().sum() == 0
    assert torch.equal(first.embeddings.LayerNorm.weight, torch.ones(config.hidden_size))
