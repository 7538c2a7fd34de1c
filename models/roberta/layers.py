"""What RoBERTa does differently from BERT: positions count from ``pad_token_id + 1``, and there is no next sentence.

Cuts, inputs and boundaries are those of :mod:`ds_vpipe.models.bert.layers` and
:mod:`ds_vpipe.models.bert.tied_layers`, so that BERT's data train it; ``next_sentence_logits`` is None, and
``token_type_ids`` are ignored where the configuration has one type of tokens.
"""

from typing import Any

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn
from torch.nn.functional import gelu
from transformers import RobertaConfig
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings

from ds_vpipe.errors import VPipeConfigError
from ds_vpipe.models.bert.layers import (
    Boundary,
    EmbeddingAttentionLayer,
    EncoderConfig,
    HeadsLayer,
    bert_layers,
    initialise,
)
from ds_vpipe.models.bert.tied_layers import DecoderBias, VectorAttentionLayer, WordEmbeddings, decode
from ds_vpipe.models.seeds import seeded

MaskedLMOutput = tuple[Tensor, None]


class _Positions(nn.Module):
    """Embeds a token at its place among the sequence's tokens, and padding at ``pad_token_id``."""

    embeddings_type: type[nn.Module] = RobertaEmbeddings
    embeddings: Any
    config: EncoderConfig

    def embed(self, padding_mask: Tensor, token_type_ids: Tensor, **words: Tensor) -> Tensor:
        """As BERT's; positions follow from ``padding_mask``, which also the stage without ``input_ids`` has.

        Raises:
            VPipeConfigError: the sequences are longer than the model has positions.
        """
        padding, length = self.embeddings.padding_idx, padding_mask.size(1)
        longest = self.config.max_position_embeddings - padding - 1
        if length > longest:
            raise VPipeConfigError(
                f"sequences of {length} tokens: allowed are at most {longest}, max_position_embeddings less the"
                f" {padding + 1} that padding takes; shorten them (--seq-length)"
            )
        positions = padding_mask.cumsum(1) * padding_mask + padding
        if self.config.type_vocab_size == 1:
            token_type_ids = torch.zeros_like(token_type_ids)
        return self.embeddings(position_ids=positions, token_type_ids=token_type_ids, **words)


class RobertaEmbeddingAttentionLayer(_Positions, EmbeddingAttentionLayer):
    """Pipeline layer 0: embeddings and the first attention sub-layer."""


class RobertaVectorAttentionLayer(_Positions, VectorAttentionLayer):
    """The other embeddings and the first attention sub-layer, behind tied word embeddings."""


class RobertaTransformLayer(nn.Module):
    """The masked-LM head but for the decoder."""

    def __init__(self, config: RobertaConfig, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.dense = nn.Linear(config.hidden_size, config.hidden_size)
            self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
            initialise(self, config)

    def forward(self, inputs: Boundary) -> MaskedLMOutput:
        """Boundary to vectors at the masked positions [B, P, H]."""
        hidden, _, masked_positions = inputs
        return self.layer_norm(gelu(self.dense(HeadsLayer.gather(hidden, masked_positions)))), None


class RobertaHeadsLayer(RobertaTransformLayer):
    """Last pipeline layer: masked-LM logits at the masked positions."""

    def __init__(self, config: RobertaConfig, seed: int) -> None:
        super().__init__(config, seed)
        with seeded(seed):
            self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
            initialise(self.decoder, config)

    def forward(self, inputs: Boundary) -> MaskedLMOutput:
        """Boundary to logits [B, P, V]."""
        vectors, _ = super().forward(inputs)
        return self.decoder(vectors), None


def roberta_layers(config: RobertaConfig, seed: int = 0) -> list[LayerSpec]:
    """The ``2L + 1`` layer specifications of a RoBERTa; see :func:`ds_vpipe.models.bert.layers.bert_layers`."""
    last = 2 * config.num_hidden_layers
    return [
        LayerSpec(RobertaEmbeddingAttentionLayer, config, seed),
        *bert_layers(config, seed)[1:last],
        LayerSpec(RobertaHeadsLayer, config, seed + last),
    ]


def tied_roberta_layers(config: RobertaConfig, seed: int = 0) -> list[Any]:
    """The ``2L + 4`` layer specifications with the decoder tied to the word embeddings."""
    weight = "word_embeddings.weight"
    last = 2 * config.num_hidden_layers
    return [
        TiedLayerSpec("words", WordEmbeddings, config, seed, tied_weight_attr=weight),
        LayerSpec(RobertaVectorAttentionLayer, config, seed),
        *bert_layers(config, seed)[1:last],
        LayerSpec(RobertaTransformLayer, config, seed + last),
        TiedLayerSpec("words", WordEmbeddings, config, seed, forward_fn=decode, tied_weight_attr=weight),
        LayerSpec(DecoderBias, config),
    ]
