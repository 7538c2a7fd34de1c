"""BERT with LayerNorm before the sub-layers, against Hugging Face's encoder of that form."""

from __future__ import annotations

import pytest
import torch
from test_bert_layers import BATCH, SLOTS, inputs, small_config
from torch import nn
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.roberta_prelayernorm.modeling_roberta_prelayernorm import RobertaPreLayerNormEncoder

from ds_vpipe.models.bert.layers import AttentionLayer, EmbeddingAttentionLayer, FeedForwardLayer, HeadsLayer
from ds_vpipe.models.bert.pre_layer_norm import pre_layer_norm_bert_layers
from ds_vpipe.models.bert.sizes import num_pipeline_layers


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_layers_compute_what_hugging_face_computes(attention: str) -> None:
    config = small_config(attention)
    torch.manual_seed(0)
    layers = [spec.build().eval() for spec in pre_layer_norm_bert_layers(config)]
    encoder = RobertaPreLayerNormEncoder(config).eval()
    for parameter in (p for module in (*layers, encoder) for p in module.parameters()):
        nn.init.normal_(parameter, std=0.2)
    for index, layer in enumerate(layers[:-1]):
        theirs = encoder.layer[index // 2]
        if isinstance(layer, FeedForwardLayer):
            theirs.intermediate.load_state_dict(layer.intermediate.state_dict())
            theirs.output.load_state_dict(layer.output.state_dict())
        else:
            theirs.attention.load_state_dict(layer.attention.state_dict())

    ids, types, padding_mask, positions = inputs()
    with torch.no_grad():
        masked_lm, next_sentence = nn.Sequential(*layers)((ids, types, padding_mask, positions))
        embedded = layers[0].embeddings(input_ids=ids, token_type_ids=types)
        mask = create_bidirectional_mask(config=config, inputs_embeds=embedded, attention_mask=padding_mask)
        heads = layers[-1]
        hidden = heads.LayerNorm(encoder(embedded, mask).last_hidden_state)
        logits = heads.decoder(heads.transform(hidden))
    assert masked_lm.shape == (BATCH, SLOTS, config.vocab_size)
    torch.testing.assert_close(masked_lm, logits[torch.arange(BATCH)[:, None], positions], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(next_sentence, heads.seq_relationship(heads.pooler(hidden)), atol=1e-5, rtol=1e-5)


def test_the_layers_are_those_of_bert() -> None:
    config = small_config()
    specs = pre_layer_norm_bert_layers(config)
    assert len(specs) == num_pipeline_layers(config)
    kinds = [EmbeddingAttentionLayer, *[FeedForwardLayer, AttentionLayer] * 2, FeedForwardLayer, HeadsLayer]
    assert all(issubclass(spec.typename, kind) for spec, kind in zip(specs, kinds, strict=True))
    model = nn.Sequential(*[spec.build() for spec in specs])
    masked_lm, next_sentence = model(inputs())
    (masked_lm.square().mean() + next_sentence.square().mean()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
