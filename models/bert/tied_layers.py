"""BERT with the decoder tied to the word embeddings, as ``2L + 4`` pipeline layers.

DeepSpeed ties whole layers, so that the word embeddings are one by themselves at both ends of the pipeline:

======================  ==========================================================================================
0                       word embeddings, tied
1                       the other embeddings and the first attention sub-layer
2 .. 2L                 feed-forward and attention sub-layers, as in :mod:`ds_vpipe.models.bert.layers`
2L + 1                  the heads but for the decoder
2L + 2                  decoder: the word embeddings once more, tied
2L + 3                  the decoder's bias
======================  ==========================================================================================

Inputs, boundaries between sub-layers and outputs are those of :mod:`ds_vpipe.models.bert.layers`.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import nn

from ds_vpipe.models.bert.layers import (
    Boundary,
    EmbeddingAttentionLayer,
    EncoderConfig,
    HeadsLayer,
    ModelInput,
    ModelOutput,
    bert_layers,
    initialise,
)
from ds_vpipe.models.seeds import seeded


class WordEmbeddings(nn.Module):
    """The tied layer."""

    def __init__(self, config: EncoderConfig, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=config.pad_token_id)
            initialise(self, config)

    def forward(self, inputs: ModelInput) -> ModelInput:
        """Model input with word vectors [B, S, H] in place of ``input_ids``."""
        input_ids, *others = inputs
        return self.word_embeddings(input_ids), *others


class VectorAttentionLayer(EmbeddingAttentionLayer):
    """The other embeddings and the first attention sub-layer."""

    def __init__(self, config: EncoderConfig, seed: int) -> None:
        super().__init__(config, seed)
        del self.embeddings.word_embeddings

    def forward(self, inputs: ModelInput) -> Boundary:
        """Word vectors and the rest of the model input to boundary."""
        vectors, token_type_ids, padding_mask, masked_positions = inputs
        hidden = self.embed(padding_mask, token_type_ids, inputs_embeds=vectors)
        return self.attend(hidden, padding_mask, masked_positions)


class TransformLayer(HeadsLayer):
    """Both heads but for the decoder."""

    def __init__(self, config: EncoderConfig, seed: int) -> None:
        super().__init__(config, seed)
        del self.decoder

    def forward(self, inputs: Boundary) -> ModelOutput:
        """Boundary to vectors at the masked positions [B, P, H] and ``next_sentence_logits``."""
        hidden, _, masked_positions = inputs
        return self.transform(self.gather(hidden, masked_positions)), self.seq_relationship(self.pooler(hidden))


class DecoderBias(nn.Module):
    """What the decoder does not share with the word embeddings."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))

    def forward(self, inputs: ModelOutput) -> ModelOutput:
        """Add the bias: model output."""
        masked_lm_logits, next_sentence_logits = inputs
        return masked_lm_logits + self.bias, next_sentence_logits


def decode(layer: WordEmbeddings, inputs: ModelOutput) -> ModelOutput:
    """Vectors at the masked positions to logits, by the word embeddings."""
    vectors, next_sentence_logits = inputs
    return nn.functional.linear(vectors, layer.word_embeddings.weight), next_sentence_logits


def tied_bert_layers(config: EncoderConfig, seed: int = 0) -> list[Any]:
    """The ``2L + 4`` layer specifications; each is initialised from a seed of its own."""
    weight = "word_embeddings.weight"
    last = 2 * config.num_hidden_layers
    return [
        TiedLayerSpec("words", WordEmbeddings, config, seed, tied_weight_attr=weight),
        LayerSpec(VectorAttentionLayer, config, seed),
        *bert_layers(config, seed)[1:last],
        LayerSpec(TransformLayer, config, seed + last),
        TiedLayerSpec("words", WordEmbeddings, config, seed, forward_fn=decode, tied_weight_attr=weight),
        LayerSpec(DecoderBias, config),
    ]
