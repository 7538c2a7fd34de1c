"""BERT as ``2L + 1`` pipeline layers, built from Hugging Face's own modules.

Layer 0 is the embeddings and the first attention sub-layer, then feed-forward and attention sub-layers alternate, and
the last layer holds both heads. Every layer ends at a residual addition (but for the heads), so one hidden-state
tensor crosses each boundary. The cut is that of the published vPipe, PipeDream and GPipe splits for BERT-Large
(49 layers) and the 48-layer BERT (97 layers).

What travels, with B sequences per micro-batch, sequence length S, P prediction slots, hidden size H, vocabulary V:

=============  ====================================================================================================
into layer 0   ``input_ids`` int64 [B, S], ``token_type_ids`` int64 [B, S], ``padding_mask`` bool [B, S] (true =
               token), ``masked_positions`` int64 [B, P] (unused slots: 0)
boundary       ``hidden`` float [B, S, H], ``padding_mask`` bool [B, S], ``masked_positions`` int64 [B, P]
out of last    ``masked_lm_logits`` float [B, P, V], ``next_sentence_logits`` float [B, 2]
=============  ====================================================================================================

Computing logits at the P masked positions only, instead of all S, makes the last stage S / P times cheaper in both
memory and time. The decoder is not tied to the word embeddings, which live on the other end of the pipeline;
:mod:`ds_vpipe.models.bert.tied_layers` has the model where it is.
"""

from typing import Any

import torch
from deepspeed.pipe import LayerSpec
from torch import Tensor, nn
from transformers import BertConfig, RobertaConfig
from transformers.masking_utils import create_bidirectional_mask
from transformers.models.bert.modeling_bert import (
    BertAttention,
    BertEmbeddings,
    BertIntermediate,
    BertOutput,
    BertPooler,
    BertPredictionHeadTransform,
)

from ds_vpipe.models.attention import choose_attention
from ds_vpipe.models.seeds import seeded

EncoderConfig = BertConfig | RobertaConfig  # the same encoder; see :mod:`ds_vpipe.models.roberta.layers`
ModelInput = tuple[Tensor, Tensor, Tensor, Tensor]
Boundary = tuple[Tensor, Tensor, Tensor]
ModelOutput = tuple[Tensor, Tensor]


class EmbeddingAttentionLayer(nn.Module):
    """Pipeline layer 0: embeddings and the first attention sub-layer."""

    embeddings_type: type[nn.Module] = BertEmbeddings
    attention_type: type[nn.Module] = BertAttention

    def __init__(self, config: EncoderConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        with seeded(seed):
            self.embeddings = self.embeddings_type(config)
            self.attention = self.attention_type(config)
            initialise(self, config)

    def forward(self, inputs: ModelInput) -> Boundary:
        """Embed the tokens and attend: model input to boundary (shapes in the module docstring)."""
        input_ids, token_type_ids, padding_mask, masked_positions = inputs
        hidden = self.embed(padding_mask, token_type_ids, input_ids=input_ids)
        return self.attend(hidden, padding_mask, masked_positions)

    def embed(self, padding_mask: Tensor, token_type_ids: Tensor, **words: Tensor) -> Tensor:
        """Words (``input_ids`` [B, S] or ``inputs_embeds`` [B, S, H]) to embedded tokens [B, S, H]."""
        return self.embeddings(token_type_ids=token_type_ids, **words)

    def attend(self, hidden: Tensor, padding_mask: Tensor, masked_positions: Tensor) -> Boundary:
        """Attend, add and normalise: embedded tokens to boundary."""
        hidden, _ = self.attention(hidden, _attention_mask(self.config, hidden, padding_mask))
        return hidden, padding_mask, masked_positions


class AttentionLayer(nn.Module):
    """Pipeline layers 2, 4, ...: the attention sub-layer of one encoder layer."""

    attention_type: type[nn.Module] = BertAttention

    def __init__(self, config: EncoderConfig, seed: int) -> None:
        super().__init__()
        self.config = config
        with seeded(seed):
            self.attention = self.attention_type(config)
            initialise(self, config)

    def forward(self, inputs: Boundary) -> Boundary:
        """Attend, add and normalise: boundary to boundary."""
        hidden, padding_mask, masked_positions = inputs
        hidden, _ = self.attention(hidden, _attention_mask(self.config, hidden, padding_mask))
        return hidden, padding_mask, masked_positions


class FeedForwardLayer(nn.Module):
    """Pipeline layers 1, 3, ...: the feed-forward sub-layer of one encoder layer."""

    intermediate_type: type[nn.Module] = BertIntermediate
    output_type: type[nn.Module] = BertOutput

    def __init__(self, config: EncoderConfig, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.intermediate = self.intermediate_type(config)
            self.output = self.output_type(config)
            initialise(self, config)

    def forward(self, inputs: Boundary) -> Boundary:
        """Feed forward, add and normalise: boundary to boundary."""
        hidden, padding_mask, masked_positions = inputs
        return self.output(self.intermediate(hidden), hidden), padding_mask, masked_positions


class HeadsLayer(nn.Module):
    """Last pipeline layer: masked-LM logits at the masked positions and next-sentence logits from the first token."""

    def __init__(self, config: EncoderConfig, seed: int) -> None:
        super().__init__()
        with seeded(seed):
            self.transform = BertPredictionHeadTransform(config)
            self.decoder = nn.Linear(config.hidden_size, config.vocab_size)
            self.pooler = BertPooler(config)
            self.seq_relationship = nn.Linear(config.hidden_size, 2)
            initialise(self, config)

    def forward(self, inputs: Boundary) -> ModelOutput:
        """Both heads: boundary to model output."""
        hidden, _, masked_positions = inputs
        masked_lm_logits = self.decoder(self.transform(self.gather(hidden, masked_positions)))
        return masked_lm_logits, self.seq_relationship(self.pooler(hidden))

    @staticmethod
    def gather(hidden: Tensor, masked_positions: Tensor) -> Tensor:
        """Hidden states at the masked positions: [B, P, H]."""
        return hidden.gather(1, masked_positions.unsqueeze(-1).expand(-1, -1, hidden.size(-1)))


def bert_layers(config: EncoderConfig, seed: int = 0) -> list[LayerSpec]:
    """The ``2L + 1`` layer specifications of a BERT for pre-training.

    Layer i is initialised from ``seed + i`` alone, so the initial weights depend neither on the partition nor on the
    number of stages, and no rank builds more than its own layers.
    """
    choose_attention(config)
    specs = [LayerSpec(EmbeddingAttentionLayer, config, seed)]
    for index in range(1, 2 * config.num_hidden_layers):
        specs.append(LayerSpec(FeedForwardLayer if index % 2 else AttentionLayer, config, seed + index))
    specs.append(LayerSpec(HeadsLayer, config, seed + 2 * config.num_hidden_layers))
    return specs


def _attention_mask(config: EncoderConfig, hidden: Tensor, padding_mask: Tensor) -> Any:
    # Only [B, S] booleans cross stage boundaries; each attention layer expands them in the form its implementation
    # wants. Leaving the mask out where nothing is padded would need a device-to-host sync per layer: never skip it.
    return create_bidirectional_mask(
        config=config, inputs_embeds=hidden, attention_mask=padding_mask, allow_is_bidirectional_skip=False
    )


@torch.no_grad()
def initialise(layer: nn.Module, config: EncoderConfig) -> None:
    """BERT's initialisation: normal weights of deviation ``initializer_range``, zero biases, unit LayerNorm scales."""
    for module in layer.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=config.initializer_range)
            module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(std=config.initializer_range)
            if module.padding_idx is not None:
                module.weight[module.padding_idx].zero_()
