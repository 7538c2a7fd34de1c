"""BERT with LayerNorm before every sub-layer in place of after it, as ``2L + 1`` pipeline layers.

It is the form in which DeepSpeed and Megatron train BERT (Xiong et al., On Layer Normalization in the Transformer
Architecture, ICML 2020): gradients reach the first layers through the residual connections alone, which lets a
deep model start at larger learning rates. Sub-layers are Hugging Face's RoBERTa-PreLayerNorm; one more LayerNorm comes
before the heads. Shapes are those of :mod:`ds_vpipe.models.bert.layers`.
"""

from __future__ import annotations

from deepspeed.pipe import LayerSpec
from torch import nn
from transformers.models.roberta_prelayernorm.modeling_roberta_prelayernorm import (
    RobertaPreLayerNormAttention,
    RobertaPreLayerNormIntermediate,
    RobertaPreLayerNormOutput,
)

from ds_vpipe.models.attention import choose_attention
from ds_vpipe.models.bert.layers import (
    AttentionLayer,
    Boundary,
    EmbeddingAttentionLayer,
    EncoderConfig,
    FeedForwardLayer,
    HeadsLayer,
    ModelOutput,
)


class PreNormEmbeddingAttentionLayer(EmbeddingAttentionLayer):
    """Pipeline layer 0: embeddings and the first attention sub-layer."""

    attention_type = RobertaPreLayerNormAttention


class PreNormAttentionLayer(AttentionLayer):
    """Pipeline layers 2, 4, ...: normalise, attend and add."""

    attention_type = RobertaPreLayerNormAttention


class PreNormFeedForwardLayer(FeedForwardLayer):
    """Pipeline layers 1, 3, ...: normalise, feed forward and add."""

    intermediate_type = RobertaPreLayerNormIntermediate
    output_type = RobertaPreLayerNormOutput


class PreNormHeadsLayer(HeadsLayer):
    """Last pipeline layer: normalise, and both heads."""

    def __init__(self, config: EncoderConfig, seed: int) -> None:
        super().__init__(config, seed)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

    def forward(self, inputs: Boundary) -> ModelOutput:
        """Both heads: boundary to model output."""
        hidden, *others = inputs
        return super().forward((self.LayerNorm(hidden), *others))


def pre_layer_norm_bert_layers(config: EncoderConfig, seed: int = 0) -> list[LayerSpec]:
    """The ``2L + 1`` layer specifications; layer i is initialised from ``seed + i`` alone."""
    choose_attention(config)
    last = 2 * config.num_hidden_layers
    between = [PreNormAttentionLayer, PreNormFeedForwardLayer]
    kinds = [PreNormEmbeddingAttentionLayer, *(between[index % 2] for index in range(1, last)), PreNormHeadsLayer]
    return [LayerSpec(kind, config, seed + index) for index, kind in enumerate(kinds)]
